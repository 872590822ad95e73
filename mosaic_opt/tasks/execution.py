"""Runs a generated program in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

PASSED = 97  # exit status that neither an error nor an early exit gives by accident
MEMORY_BYTES = 2 * 2**30
FILE_BYTES = 2**20

_LIMITS = """\
try:
    import resource as _resource
except ImportError:  # not on Windows
    pass
else:
    for _name, _most in {limits!r}.items():
        try:
            _resource.setrlimit(getattr(_resource, _name), (_most, _most))
        except (AttributeError, OSError, ValueError):  # not on every system
            pass
"""
_END = f"\nimport os as _os\n_os._exit({PASSED})\n"


def passes(program: str, seconds: float) -> bool:
    """Whether a Python program runs to its end within a time limit, without an exception.

    It runs isolated (`python -I`) in a temporary folder, without this process's environment, input or output, with
    limits on processor time, memory, file size and (unless it runs as root) new processes; what it started in its
    session is killed afterwards. That stops accidents. It is no sandbox: files can be read and written, and the
    network used. Windows knows no such limits but the time.
    """
    limits = {
        "RLIMIT_CPU": int(seconds) + 1,
        "RLIMIT_AS": MEMORY_BYTES,
        "RLIMIT_FSIZE": FILE_BYTES,
        "RLIMIT_CORE": 0,
        "RLIMIT_NPROC": 0,
    }
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder, "program.py")
        path.write_text(_LIMITS.format(limits=limits) + program + _END, encoding="utf-8", errors="replace")
        process = subprocess.Popen(
            [sys.executable, "-I", str(path)],
            cwd=folder,
            env={},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(timeout=seconds) == PASSED
        except subprocess.TimeoutExpired:
            return False
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its session, and wait for it."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing of it is left
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()
