"""What ranking and cutting add to a prefill, in time and in memory: all in one run, on the same machine.

    python analysis/benchmarks/scoring_cost.py [--tokens 4096] [--repeats 3] [--lengths 1024 2048 4096 8192]

Time: the embedded model reads a text of the given length, plain and with each method attached (uniform budget,
an eighth of the prompt), in turn; prints the median seconds and the median of (with - plain) / plain over the
turns, and the seconds spent in scoring by the eviction's own clock.

Memory: H2O scores one layer's states of growing length in a fresh process each; prints by how much the process's
peak grew while it scored, and what one head's n x n attention would take.
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from mosaic_opt.allocation import uniform
from mosaic_opt.eviction import (
    H2O,
    TOVA,
    AdaKV,
    ExpectedAttention,
    KeyDiff,
    L2Norm,
    PromptStates,
    SnapKV,
    StreamingLLM,
    attach,
    evictable_layers,
)
from mosaic_opt.model import ModelSource
from mosaic_opt.tasks import Needle

METHODS = (SnapKV(), AdaKV(), L2Norm(), KeyDiff(), StreamingLLM(), TOVA(), ExpectedAttention(), H2O())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--peak-of", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak_of:
        print(peak_growth(options.peak_of))
        return
    print_seconds(options.tokens, options.repeats)
    for n in options.lengths:
        command = [sys.executable, __file__, "--peak-of", str(n)]
        grown = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        square = 4 * n * n / 2**20
        print(f"H2O scoring at {n:5} tokens: peak +{grown / 2**20:6.1f} MiB (one n x n head: {square:.0f} MiB)")


def print_seconds(tokens: int, repeats: int) -> None:
    source = ModelSource(name="embedded")
    model = source.load()
    task = Needle(name="niah_single_2", haystack="essay", keys=1, tokens=tokens)
    prompt = torch.tensor([task.examples(source.tokenizer, "test", 1)[0].tokens])
    allocation = uniform(len(evictable_layers(model.config)), tokens // 8)
    plain: list[float] = []
    added: dict[str, list[float]] = {type(method).__name__: [] for method in METHODS}
    scoring: dict[str, list[float]] = {name: [] for name in added}
    prefill(model, prompt)
    for _ in range(repeats):
        for method in METHODS:
            before = prefill(model, prompt)
            with attach(model, method, allocation) as eviction:
                seconds = prefill(model, prompt)
            plain.append(before)
            added[type(method).__name__].append(seconds / before - 1)
            scoring[type(method).__name__].append(eviction.report().scoring_seconds)
    middle = statistics.median(plain)
    print(f"plain prefill of {prompt.shape[1]} tokens: {middle:.2f} s (median of {len(plain)})")
    for name in added:
        own = statistics.median(scoring[name])
        print(
            f"{name:<18} adds {100 * statistics.median(added[name]):+6.1f} %  "
            f"(scoring {own:.3f} s, {100 * own / middle:.1f} % of a prefill)"
        )


@torch.inference_mode()
def prefill(model: torch.nn.Module, prompt: torch.Tensor) -> float:
    start = time.perf_counter()
    model(prompt, use_cache=True, logits_to_keep=1)
    return time.perf_counter() - start


@torch.inference_mode()
def peak_growth(n: int) -> int:
    """Bytes by which ranking raises this process's resident memory at its highest, for SmolLM2's heads (Linux)."""
    method = H2O()
    states = [torch.randn(1, heads, n, 64) for heads in (9, 3, 3)]
    method.rank(PromptStates(*(state[:, :, :256] for state in states), scaling=0.125))  # loads the libraries
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
    before = resident("VmHWM")
    method.rank(PromptStates(*states, scaling=0.125))
    return resident("VmHWM") - before


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


if __name__ == "__main__":
    main()
