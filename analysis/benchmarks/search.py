"""Proposers compared at equal cost: hypervolume of the front they find, from one enqueued initial design.

    python analysis/benchmarks/search.py [--quick] [--problems synthetic real] [--samplers mosaic tpe ...]
        [--seeds 3] [--trials 200] [--results analysis/results/search.jsonl]

Synthetic problems (additive and conjunctive, see synthetic.py): hypervolume of the true values of the observed front.
Real ones (the embedded model; two needle tasks, SnapKV and H2O): hypervolume of the calibration front's scores on
test examples. A run is one line of the results file, with the hypervolume after 50, 100 and 200 trials and the
median seconds of a proposal; runs that are there are not made again. Prints the mean over seeds of every problem and
sampler.
"""

import argparse
import json
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler
from synthetic import LAYERS, LEVELS, UNIT, Synthetic, hypervolume, initial_design

from mosaic_opt import stages
from mosaic_opt.allocation import Allocation
from mosaic_opt.evaluator import Evaluator
from mosaic_opt.eviction import H2O, SnapKV
from mosaic_opt.model import ModelSource
from mosaic_opt.objective import LevelObjective
from mosaic_opt.samplers import MosaicSampler, PaperSampler
from mosaic_opt.samplers.pareto import shells
from mosaic_opt.tasks import Needle

CHECKS = (50, 100, 200)
REAL_LEVELS = (32, 64, 128, 192, 256, 384, 512)
TASKS = {"niah_single_2": ("essay", 1), "niah_multikey_1": ("essay", 4)}
METHODS = {"snapkv": SnapKV, "h2o": H2O}
STORE = Path("storage/ranked/benchmark")

SAMPLERS: dict[str, Callable[..., BaseSampler]] = {
    "mosaic": lambda seed, known: MosaicSampler(seed=seed, **known, signal="log_likelihood"),
    "mosaic_score": lambda seed, known: MosaicSampler(seed=seed, **known),
    "classifier": lambda seed, known: MosaicSampler(seed=seed, **known, signal="log_likelihood", structured=0.0),
    "mosaic_paper": lambda seed, known: PaperSampler(seed=seed),
    "tpe": lambda seed, known: TPESampler(seed=seed, multivariate=True),
    "nsga2": lambda seed, known: NSGAIISampler(seed=seed, population_size=20),
    "gp": lambda seed, known: GPSampler(seed=seed),
    "random": lambda seed, known: RandomSampler(seed=seed),
}


class SyntheticRun:
    """One synthetic problem, as Optuna sees it."""

    def __init__(self, seed: int, *, conjunctive: bool) -> None:
        self.problem = Synthetic(seed, conjunctive=conjunctive)
        self.names = [f"layer_{layer:02d}" for layer in range(LAYERS)]

    def known(self) -> dict[str, Any]:
        return {"decode": self.decode, "known_objective": lambda params: float(np.mean(self.decode(params)))}

    def decode(self, params: dict[str, int]) -> list[int]:
        return [UNIT * params[name] for name in self.names]

    def design(self, seed: int) -> list[dict[str, int]]:
        return [dict(zip(self.names, map(int, point), strict=True)) for point in initial_design(seed)]

    def objective(self, seed: int) -> Callable[[optuna.Trial], tuple[float, float]]:
        rng = np.random.default_rng(seed)

        def measured(trial: optuna.Trial) -> tuple[float, float]:
            units = [trial.suggest_int(name, 1, LEVELS) for name in self.names]
            mean, score, likelihood = self.problem.observe(units, rng)
            trial.set_user_attr("log_likelihood", float(likelihood))
            return mean, float(score)

        return measured

    def hypervolume(self, trials: list[optuna.trial.FrozenTrial]) -> float:
        rank = shells([trial.values for trial in trials], ["minimize", "maximize"])
        front = [trial for trial, shell in zip(trials, rank, strict=True) if shell == 0]
        points = [self.problem.true([trial.params[name] for name in self.names])[:2] for trial in front]
        return hypervolume(points, UNIT, UNIT * LEVELS)


class RealRun:
    """The embedded model on one needle task under one method, as Optuna sees it."""

    def __init__(self, task: str, method: str) -> None:
        self.calibration = evaluator(task, method, "calibration", 16)
        self.test = evaluator(task, method, "test", 32)
        self.level = LevelObjective(
            levels=REAL_LEVELS, measure=partial(self.calibration.evaluate, complete=False), layers=30
        )

    def known(self) -> dict[str, Any]:
        return {"decode": self.level.decode, "known_objective": self.level.mean_budget}

    def design(self, seed: int) -> list[dict[str, Any]]:
        return [params for _, params in stages.initial_design(self.level, trials=200, seed=seed)]

    def objective(self, seed: int) -> LevelObjective:
        return self.level

    def hypervolume(self, trials: list[optuna.trial.FrozenTrial]) -> float:
        front = stages.front_of(trials)
        budgets = [Allocation(trial.user_attrs["budgets"]) for trial in front]
        points = [(kept.mean, self.test.evaluate(kept, complete=False).score) for kept in budgets]
        return hypervolume(points, REAL_LEVELS[0], REAL_LEVELS[-1])


@cache
def loaded() -> tuple[ModelSource, Any]:
    source = ModelSource(name="embedded")
    return source, source.load()


def evaluator(task: str, method: str, split: str, count: int) -> Evaluator:
    source, model = loaded()
    haystack, keys = TASKS[task]
    needle = Needle(name=task, haystack=haystack, keys=keys, tokens=650)
    return Evaluator(
        model=model,
        tokenizer=source.tokenizer,
        task=needle,
        examples=needle.examples(source.tokenizer, split, count),
        method=METHODS[method](),
        prefill_for=[made() for made in METHODS.values()],
        cap=REAL_LEVELS[-1],
        store=STORE / task,
    )


def run(problem: SyntheticRun | RealRun, sampler: str, seed: int, trials: int) -> dict[str, Any]:
    study = optuna.create_study(directions=["minimize", "maximize"], sampler=SAMPLERS[sampler](seed, problem.known()))
    for params in problem.design(seed):
        study.enqueue_trial(params)
    enqueued = len(study.get_trials(deepcopy=False))
    objective, found, seconds = problem.objective(seed), {}, []
    for count in range(1, trials + 1):
        start = time.perf_counter()
        study.optimize(objective, n_trials=1)
        done = study.get_trials(deepcopy=False)
        spent = time.perf_counter() - start - done[-1].user_attrs.get("seconds", 0.0)
        seconds += [spent] if count > enqueued else []
        if count in CHECKS:
            found[str(count)] = round(problem.hypervolume(done), 4)
    return {"hypervolume": found, "proposal_seconds": round(statistics.median(seconds), 4)}


def wanted(options: argparse.Namespace) -> list[tuple[str, Callable[[], SyntheticRun | RealRun]]]:
    problems: list[tuple[str, Callable[[], SyntheticRun | RealRun]]] = []
    if "synthetic" in options.problems:
        for seed in range(1 if options.quick else 6):
            for conjunctive in (False, True):
                name = f"{'conjunctive' if conjunctive else 'additive'} {seed}"
                problems.append((name, partial(SyntheticRun, seed, conjunctive=conjunctive)))
    if "real" in options.problems:
        for task in TASKS:
            problems += [(f"{task} {method}", partial(RealRun, task, method)) for method in METHODS]
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one synthetic problem of each form, one seed")
    parser.add_argument("--problems", nargs="+", choices=["synthetic", "real"], default=["synthetic"])
    parser.add_argument("--samplers", nargs="+", choices=list(SAMPLERS), default=[s for s in SAMPLERS if s != "gp"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--results", type=Path, default=Path("analysis/results/search.jsonl"))
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    rows = [json.loads(line) for line in options.results.read_text().splitlines()] if options.results.exists() else []
    done = {(row["problem"], row["sampler"], row["seed"], row["trials"]) for row in rows}
    for name, made in wanted(options):
        problem = None
        for seed in range(1 if options.quick else options.seeds):
            for sampler in options.samplers:
                if (name, sampler, seed, options.trials) in done:
                    continue
                problem = problem or made()
                row = {"problem": name, "sampler": sampler, "seed": seed, "trials": options.trials}
                rows.append({**row, **run(problem, sampler, seed, options.trials)})
                with options.results.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
                print(json.dumps(rows[-1]), flush=True)
    print_means(rows)


def print_means(rows: list[dict[str, Any]]) -> None:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["problem"], row["sampler"]].append(row)
    print(
        f"\n{'problem':<26} {'sampler':<14} seeds  " + "  ".join(f"{check:>6}" for check in CHECKS) + "  s/proposal"
    )
    for (problem, sampler), several in sorted(groups.items()):
        means = [statistics.mean(r["hypervolume"].get(str(check), float("nan")) for r in several) for check in CHECKS]
        seconds = statistics.median(r["proposal_seconds"] for r in several)
        cells = "  ".join(f"{mean:6.4f}" for mean in means)
        print(f"{problem:<26} {sampler:<14} {len(several):>5}  {cells}  {seconds:.3f}")


if __name__ == "__main__":
    main()
