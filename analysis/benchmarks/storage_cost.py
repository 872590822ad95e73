"""What keeping trials in a database costs, against plain Optuna in the same run, and what several workers gain.

    python -m analysis.benchmarks.storage_cost [--trials 100] [--layers 30]

Three figures for SQLite (WAL) and PostgreSQL (a server of its own, on loopback):

- milliseconds of storage a trial, median: plain Optuna (ask, one suggest a layer, tell; nothing else stored) against
  a claimed trial of ours (claim under the lock, all parameters, every attribute of a measurement, tell), in turns;
- trials a second of 4 workers against 1 where the evaluation sleeps for 0.25 s;
- seconds until the first new trial begins in a study of 2,000 trials, in a new process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from types import SimpleNamespace

import optuna
from optuna.trial import TrialState, create_trial

from mosaic_opt.objective import LevelObjective, attributes
from mosaic_opt.storage import open_storage
from mosaic_opt.study import completed, run_trials
from tests.postgres import Server

LEVELS = (32, 64, 128, 192, 256, 384, 512)
EXAMPLES = 16
ROUNDS = 5
SLEEP_SECONDS = 0.25
WORKERS = 4
STORED = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--layers", type=int, default=30)
    options = parser.parse_args()
    server = Server()
    try:
        with tempfile.TemporaryDirectory() as folder:
            for kind in ("SQLite", "PostgreSQL"):

                def url(name: str, kind: str = kind) -> str:
                    return server.database(name) if kind == "PostgreSQL" else f"sqlite:///{folder}/{name}.db"

                plain, ours = overhead(url("overhead"), options.trials, options.layers)
                print(f"{kind}: plain Optuna {plain:.1f} ms a trial, claimed {ours:.1f} ms, ratio {ours / plain:.2f}")
                rates = {count: rate(url(f"rate{count}"), count, options.layers) for count in (1, WORKERS)}
                print(
                    f"{kind}: {rates[1]:.2f} trials/s with 1 worker, {rates[WORKERS]:.2f} with {WORKERS}, "
                    f"ratio {rates[WORKERS] / rates[1]:.2f}"
                )
                stored = url("stored")
                fill(stored, options.layers)
                print(f"{kind}: {resumption(stored, options.layers):.2f} s to the first new trial of {STORED}")
    finally:
        server.remove()


def objective_of(layers: int, seconds: float = 0.0) -> LevelObjective:
    """Stage 1's objective with a measurement of the usual size that only sleeps."""

    def measure(allocation, complete=False):
        time.sleep(seconds)
        draw = random.Random(str(allocation.budgets))
        scores = tuple(draw.random() for _ in range(EXAMPLES))
        return SimpleNamespace(
            scores=scores, log_likelihoods=scores, score=sum(scores) / EXAMPLES, log_likelihood=sum(scores),
            tasks=("x",) * EXAMPLES, mean_budget=allocation.mean, realised_mean=allocation.mean, kv_bytes=1 << 20,
            seconds=seconds, outputs=("",) * EXAMPLES,
        )  # fmt: skip

    return LevelObjective(levels=LEVELS, layers=layers, measure=measure)


class Proposer(optuna.samplers.RandomSampler):
    """Random points, proposed as our sampler does: what is measured is the storage."""

    def propose(self, study, space):
        draw = random.Random(len(study.get_trials(deepcopy=False)))
        return {name: draw.randint(one.low, one.high) for name, one in space.items()}, "random"


def overhead(url: str, trials: int, layers: int) -> tuple[float, float]:
    """Median milliseconds a trial of plain Optuna and of ours, in turns in one database."""
    storage, objective = open_storage(url), objective_of(layers)
    directions = list(objective.directions)
    plain_study = optuna.create_study(storage=storage.inner, directions=directions, sampler=Proposer())
    our_study = optuna.create_study(storage=storage, directions=directions, sampler=Proposer())
    times: dict[str, list[float]] = {"plain": [], "ours": []}
    for turn in range(1, ROUNDS + 1):
        for _ in range(trials // ROUNDS):
            start = time.perf_counter()
            trial = plain_study.ask()
            params = objective.suggest(trial)
            plain_study.tell(trial, (objective.mean_budget(params), 0.5))
            times["plain"].append(time.perf_counter() - start)
        marks = [time.perf_counter()]
        run_trials(
            our_study, objective, total=turn * (trials // ROUNDS), design=[],
            after=lambda _, marks=marks: marks.append(time.perf_counter()),
        )  # fmt: skip
        times["ours"] += [after - before for before, after in pairwise(marks[1:])]
    return tuple(1000 * statistics.median(values) for values in times.values())


def rate(url: str, count: int, layers: int) -> float:
    """Trials a second of `count` processes, from the end of the first third of their trials on."""
    total = 30 * count
    context = multiprocessing.get_context("spawn")
    study = optuna.create_study(
        study_name="s", storage=open_storage(url), directions=list(objective_of(layers).directions)
    )
    processes = [context.Process(target=work, args=(url, total, layers)) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    ends = sorted(trial.datetime_complete for trial in completed(study))
    first = total // 3  # by then all are at work
    return (total - 1 - first) / (ends[-1] - ends[first]).total_seconds()


def work(url: str, total: int, layers: int) -> None:
    """One worker."""
    study = optuna.load_study(study_name="s", storage=open_storage(url), sampler=Proposer())
    run_trials(study, objective_of(layers, SLEEP_SECONDS), total=total, design=[], after=lambda _: None)


def fill(url: str, layers: int) -> None:
    """Store trials as a search leaves them."""
    objective = objective_of(layers)
    study = optuna.create_study(study_name="s", storage=open_storage(url), directions=list(objective.directions))
    sampler = Proposer()
    for _ in range(STORED):
        params, origin = sampler.propose(study, objective.space)
        allocation = SimpleNamespace(budgets=objective.decode(params), mean=objective.mean_budget(params))
        measurement = objective.measure(allocation)
        stored = {"origin": origin, **objective.known(params), **attributes(measurement)}
        study.add_trial(
            create_trial(
                params=params, distributions=dict(objective.space), values=[allocation.mean, measurement.score],
                user_attrs=stored, state=TrialState.COMPLETE,
            )
        )  # fmt: skip


def resumption(url: str, layers: int) -> float:
    """Seconds from opening the database to the beginning of a new trial, in a process of its own."""
    code = f"from analysis.benchmarks.storage_cost import resume; resume({url!r}, {layers})"
    return json.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)


def resume(url: str, layers: int) -> None:
    """Print the seconds until an evaluation begins; imports are over, and the sampler only draws at random."""
    objective = objective_of(layers)
    measure, begun = objective.measure, []

    def timed(allocation):
        begun.append(time.perf_counter())
        return measure(allocation)

    objective.measure = timed
    start = time.perf_counter()
    study = optuna.load_study(study_name="s", storage=open_storage(url), sampler=Proposer())
    run_trials(study, objective, total=STORED + 1, design=[], after=lambda _: None)
    print(json.dumps(begun[0] - start))


if __name__ == "__main__":
    main()
