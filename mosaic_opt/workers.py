"""Further processes on this machine that work on the same study: started, watched, and ended with this one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from mosaic_opt.urls import URL_VARIABLE, hidden

ENDING_SECONDS = 10  # that a worker has to put its trial back, each time it is asked to end
ATTEMPTS = 3
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@contextmanager
def workers(
    count: int, settings: Sequence[str], *, url: str, logs: Path, say: Callable[[str], None]
) -> Iterator[None]:
    """Inside, `count - 1` processes `mosaic worker` help this one; on leaving they end, or are ended by an exception.

    Each has its share of the cores (unless OMP_NUM_THREADS says how many it may use) and, in turn, one of the GPUs;
    this one is on the first.

    Args:
        settings: of `mosaic worker`, but for the storage's URL, which goes by the environment.
        logs: folder of their logs, `worker-1.log` and so on.
    """
    if count == 1:
        yield
        return
    import torch

    helpers = {}
    share, gpus = threads(count), torch.cuda.device_count()
    if share:
        torch.set_num_threads(int(share["OMP_NUM_THREADS"]))
    try:
        for number in range(1, count):
            log = logs / f"worker-{number}.log"
            environment = {**os.environ, **share, **_gpu(number, gpus), URL_VARIABLE: url}
            command = [sys.executable, "-m", "mosaic_opt", "worker", "storage=postgresql", *settings]
            with log.open("wb") as file:
                helpers[log] = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=file
                )
        yield
        for log, helper in helpers.items():
            if helper.wait():
                say(f"a worker ended with exit code {helper.returncode}: {_last_line(log)} ({log})")
    finally:
        _end(list(helpers.values()))


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask processes to end, and again (an interrupt can get lost in a library); kill those that do not."""
    for _ in range(ATTEMPTS):
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + ENDING_SECONDS
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.1)
    for process in processes:
        process.kill()
        process.wait()


def threads(count: int) -> dict[str, str]:
    """Environment that gives each of `count` processes its share of the cores; empty where the user has said so."""
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return dict.fromkeys(_THREADS, str(max(1, cores // count)))


def _gpu(number: int, gpus: int) -> Mapping[str, str]:
    if gpus < 2:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[number % gpus]}


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return hidden(lines[-1]) if lines else "it said nothing"
