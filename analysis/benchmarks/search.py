"""Proposers compared at equal cost: hypervolume of the front they find, from one enqueued initial design.

    python analysis/benchmarks/search.py [--quick] [--problems synthetic real] [--samplers mosaic tpe ...]
        [--seeds 0 1 2] [--trials 200] [--results analysis/results/search.jsonl]

Synthetic problems (additive and conjunctive, see synthetic.py): hypervolume of the true values of the observed
front. Real ones (the embedded model; two needle tasks, SnapKV and H2O; 16 calibration and 48 test examples):
hypervolume of the calibration front's scores on test examples. `--problems` takes words that a problem's name begins
with, or "real" or "synthetic". A run is one line of the results file: that hypervolume after 50, 100 and 200 trials
(synthetic: every 10), the one of the observed values after every 10, and the median seconds of a proposal. Runs that
are there are not made again. search_report.py makes tables and a figure of the file.
"""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler
from rivals import PymooSampler
from search_report import CHECKS, volumes_table
from synthetic import LAYERS, LEVELS, UNIT, Synthetic, hypervolume, initial_design

from mosaic_opt import design, stages
from mosaic_opt.allocation import Allocation
from mosaic_opt.evaluator import Evaluator
from mosaic_opt.eviction import H2O, SnapKV
from mosaic_opt.model import ModelSource
from mosaic_opt.objective import LevelObjective
from mosaic_opt.samplers import MosaicSampler, PaperSampler
from mosaic_opt.samplers.pareto import shells
from mosaic_opt.study import completed
from mosaic_opt.tasks import Needle

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
    "pymoo_nsga2": lambda seed, known: PymooSampler(seed=seed),
    "nsga2": lambda seed, known: NSGAIISampler(seed=seed, population_size=20),
    "gp": lambda seed, known: GPSampler(seed=seed),
    "random": lambda seed, known: RandomSampler(seed=seed),
}


class SyntheticRun:
    """One synthetic problem, as Optuna sees it."""

    checks = range(20, 2001, 10)  # numbers of trials after which the hypervolume is taken

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
        """Of the true values of the observed front."""
        rank = shells([trial.values for trial in trials], ["minimize", "maximize"])
        front = [trial for trial, shell in zip(trials, rank, strict=True) if shell == 0]
        points = [self.problem.true([trial.params[name] for name in self.names])[:2] for trial in front]
        return hypervolume(points, UNIT, UNIT * LEVELS)

    def observed(self, trials: list[optuna.trial.FrozenTrial]) -> float:
        return hypervolume([trial.values for trial in trials], UNIT, UNIT * LEVELS)


class RealRun:
    """The embedded model on one needle task under one method, as Optuna sees it; every allocation measured once."""

    checks = CHECKS

    def __init__(self, task: str, method: str) -> None:
        self.calibration = cache(partial(evaluator(task, method, "calibration", 16).evaluate, complete=False))
        self.test = cache(partial(evaluator(task, method, "test", 48).evaluate, complete=False))
        self.level = LevelObjective(levels=REAL_LEVELS, measure=self.calibration, layers=30)

    def known(self) -> dict[str, Any]:
        return {"decode": self.level.decode, "known_objective": self.level.mean_budget}

    def design(self, seed: int) -> list[dict[str, Any]]:
        return [params for _, params in design.initial_design(self.level, trials=200, seed=seed)]

    def objective(self, seed: int) -> LevelObjective:
        return self.level

    def hypervolume(self, trials: list[optuna.trial.FrozenTrial]) -> float:
        """Of the calibration front's scores on the test examples."""
        front = [Allocation(trial.user_attrs["budgets"]) for trial in stages.front_of(trials)]
        points = [(allocation.mean, self.test(allocation).score) for allocation in front]
        return hypervolume(points, REAL_LEVELS[0], REAL_LEVELS[-1])

    def observed(self, trials: list[optuna.trial.FrozenTrial]) -> float:
        return hypervolume([trial.values for trial in trials], REAL_LEVELS[0], REAL_LEVELS[-1])


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


def run(
    problem: SyntheticRun | RealRun, sampler: str, seed: int, trials: int, checks: list[int] | None = None
) -> dict[str, Any]:
    study = optuna.create_study(directions=["minimize", "maximize"], sampler=SAMPLERS[sampler](seed, problem.known()))
    for params in problem.design(seed):
        study.enqueue_trial(params)
    enqueued = len(study.get_trials(deepcopy=False))
    objective, found, observed, seconds = problem.objective(seed), {}, {}, []
    for count in range(1, trials + 1):
        trial = study.ask()
        start = time.perf_counter()
        if count > enqueued:
            bool(trial.relative_params)  # Optuna makes the proposal when it is first looked at
            seconds.append(time.perf_counter() - start)
        study.tell(trial, objective(trial))
        done = completed(study)
        if count in (checks or problem.checks):
            found[count] = round(problem.hypervolume(done), 4)
        if count % 10 == 0:
            observed[count] = round(problem.observed(done), 4)
    return {"hypervolume": found, "observed": observed, "proposal_seconds": round(statistics.median(seconds), 4)}


def problems() -> dict[str, Callable[[], SyntheticRun | RealRun]]:
    """Every problem by its name."""
    synthetic = {
        f"{form} {seed}": partial(SyntheticRun, seed, conjunctive=form == "conjunctive")
        for seed in range(6)
        for form in ("additive", "conjunctive")
    }
    return synthetic | {f"{task} {method}": partial(RealRun, task, method) for task in TASKS for method in METHODS}


def wanted(words: list[str], quick: bool) -> list[str]:
    """Names of the problems that `--problems` asks for."""
    kinds = {"synthetic": ["additive", "conjunctive"], "real": list(TASKS)}
    starts = tuple(start for word in words for start in kinds.get(word, [word]))
    names = [name for name in problems() if name.startswith(starts)]
    if not names:
        raise SystemExit(
            f"--problems must be real, synthetic or the beginning of {', '.join(problems())}; got {words}"
        )
    return [name for name in names if not quick or name.endswith((" 0", "snapkv"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one problem of each form, one seed, no slow proposer")
    parser.add_argument("--problems", nargs="+", default=["synthetic"])
    parser.add_argument("--samplers", nargs="+", choices=list(SAMPLERS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--checks", nargs="+", type=int, help="take the hypervolume after so many trials only")
    parser.add_argument("--results", type=Path, default=Path("analysis/results/search.jsonl"))
    options = parser.parse_args()
    samplers = options.samplers or [s for s in SAMPLERS if s != "gp" and not (options.quick and s == "mosaic_paper")]
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    rows = [json.loads(line) for line in options.results.read_text().splitlines()] if options.results.exists() else []
    done = {(row["problem"], row["sampler"], row["seed"], row["trials"]) for row in rows}
    for name in wanted(options.problems, options.quick):
        problem = None
        for seed in options.seeds[: 1 if options.quick else None]:
            for sampler in samplers:
                if (name, sampler, seed, options.trials) in done:
                    continue
                problem = problem or problems()[name]()
                found = run(problem, sampler, seed, options.trials, options.checks)
                run_of = {"problem": name, "sampler": sampler, "seed": seed, "trials": options.trials}
                line = json.dumps({**run_of, **found})
                with options.results.open("a") as file:
                    file.write(line + "\n")
                rows.append(json.loads(line))
                print(line, flush=True)
    print("\n".join(["", *volumes_table(rows)]))


if __name__ == "__main__":
    main()
