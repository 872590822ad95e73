"""Whole searches in a database, all four stages, in a second or two: only the measurement is a formula."""

from __future__ import annotations

import random
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

from optuna.samplers import RandomSampler

from mosaic_opt.evaluator import Measurement
from mosaic_opt.eviction import SnapKV
from mosaic_opt.samplers import MosaicSampler
from mosaic_opt.stages import Search
from mosaic_opt.study import Plan, Watch

SPLITS = {"calibration": 8, "selection": 8, "test": 10}
SAMPLERS = {"mosaic": MosaicSampler, "random": RandomSampler}
HOSTILE = "<img src=x onerror=alert(1)> </script><script>alert(2)</script> [a](javascript:alert(3)) `code` $x$"


class Bench:
    """Stands where `stages.Bench` would: layers count the more the higher they are, examples need more or less.

    text: what every answer says.
    """

    def __init__(self, *, layers=6, cap=300, text="an answer", task="needle"):
        self.layers, self.cap, self.text, self.method = layers, cap, text, SnapKV(window=8)
        self.task = SimpleNamespace(name=task, metric="exact", protocol="question-aware", allow_overlap=False)
        self.examples = {
            split: [SimpleNamespace(id=f"{split}-{index}") for index in range(count)]
            for split, count in SPLITS.items()
        }
        self.truncated = dict.fromkeys(SPLITS, 0)

    def about(self):
        model = {"id": "tiny", "layers": list(range(self.layers)), "kv_heads": 2, "head_dim": 8, "element_bytes": 4}
        return {"model": model, "eviction": self.method.describe(), "floor": self.method.floor, "cap": self.cap}

    def example_hashes(self):
        return dict.fromkeys(SPLITS, "0")

    def evaluator(self, split):
        pass

    def release(self, *splits):
        pass

    def measure(self, split):
        return partial(self._measured, split)

    def _measured(self, split, allocation, complete=False, after_batch=None):
        served = sum((layer + 1) * min(budget, 200) ** 0.5 for layer, budget in enumerate(allocation.budgets))
        quality = served / sum((layer + 1) * 200**0.5 for layer in range(self.layers))
        draw = random.Random(split)
        scores = tuple(float(quality > 0.3 + 0.6 * draw.random()) for _ in self.examples[split])
        outputs = tuple(f"{self.text} {score}" for score in scores)
        return Measurement(
            scores, tuple(quality - 1 for _ in scores), outputs, allocation.mean, allocation.mean, 1 << 20, 0.01
        )


class Stop(Exception):
    """Ends a search where a test wants it to."""


class StopAfter(Watch):
    """Looks on until so many trials are done."""

    def __init__(self, trials):
        self.left = trials

    def trial_done(self):
        self.left -= 1
        if not self.left:
            raise Stop


def search(
    storage, name, *, trials=16, budgets=(48, 96), bench=None, stop=None, method="SnapKV", command="mosaic x",
    sampler="mosaic",
):  # fmt: skip
    """Run a search, or as many of its trials as `stop` says."""
    bench = bench or Bench()
    plan = Plan(
        levels=(16, 32, 64, 128, 256), budgets=budgets, ladder=budgets, trials=trials, refine_trials=6, **SPLITS,
        winner="shape", seed=0,
    )  # fmt: skip
    config = {
        "command": command, "trials": trials, "refine_trials": 6, "budgets": list(budgets), "winner": "shape",
        "model": {"name": "tiny"}, "task": {"name": bench.task.name}, "eviction": {"_target_": f"x.{method}"},
    }  # fmt: skip
    made = Search(
        name=name, plan=plan, bench=bench, sampler=partial(SAMPLERS[sampler], seed=0), storage=storage,
        fingerprint={"model": {"hash": "a"}}, config=config, watch=StopAfter(stop) if stop else Watch(),
    )  # fmt: skip
    with suppress(Stop):
        made.run()
    return made
