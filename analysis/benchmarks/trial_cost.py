"""What a trial costs against prefilling its examples again: both in one run, on the same machine.

    python analysis/benchmarks/trial_cost.py [--examples 16] [--tokens 650] [--trials 100] [--repeats 3]

Runs the first trials of a stage-1 search (initial design, then proposals) on the embedded model, and prefills
the same examples between them. Prints the median seconds of a prefill of all examples (ranking included, as
the evaluator does it), of a trial's evaluation, of a whole trial (proposal and evaluation), and the ratios.
"""

import argparse
import statistics
import time
from dataclasses import replace
from functools import partial

import optuna

from mosaic_opt.design import initial_design
from mosaic_opt.evaluator import Evaluator
from mosaic_opt.eviction import SnapKV
from mosaic_opt.model import ModelSource
from mosaic_opt.objective import LevelObjective, measured
from mosaic_opt.prefill import Prefiller, equal_lengths
from mosaic_opt.samplers import MosaicSampler
from mosaic_opt.study import completed
from mosaic_opt.tasks import Needle

LEVELS = (32, 64, 128, 192, 256, 384, 512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=650)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)

    source = ModelSource(name="embedded")
    task = Needle(name="niah_single_2", haystack="essay", keys=1, tokens=options.tokens)
    examples = task.examples(source.tokenizer, "calibration", options.examples)
    evaluator = Evaluator(
        model=source.load(), tokenizer=source.tokenizer, task=task, examples=examples, method=SnapKV()
    )
    objective = LevelObjective(
        levels=LEVELS, measure=partial(evaluator.evaluate, complete=False), layers=len(evaluator.layers)
    )
    study = new_study(objective, options.trials)
    prefills, walls = [], []
    for part in range(options.repeats):
        prefills.append(prefill_seconds(evaluator))
        while len(completed(study)) < options.trials * (part + 1) // options.repeats:
            start = time.perf_counter()
            study.optimize(objective, n_trials=1)
            walls.append(time.perf_counter() - start)
    prefill = statistics.median(prefills)
    seconds = [measured(trial)["seconds"] for trial in completed(study)]
    print(f"prefill of {options.examples} examples: {prefill:.2f} s (median of {len(prefills)})")
    for label, times in (("a trial's evaluation", seconds), ("a whole trial", walls)):
        middle = statistics.median(times)
        low, high = statistics.quantiles(times, n=10)[0], statistics.quantiles(times, n=10)[-1]
        print(f"{label}: {middle:.3f} s (median of {len(times)}; 10 to 90 %: {low:.3f} to {high:.3f})")
        print(f"  prefill / {label}: {prefill / middle:.1f}")


def new_study(objective: LevelObjective, trials: int) -> optuna.Study:
    """A stage-1 study in memory, its initial design enqueued."""
    sampler = MosaicSampler(
        seed=0, decode=objective.decode, known_objective=objective.mean_budget, signal="log_likelihood"
    )
    study = optuna.create_study(directions=list(objective.directions), sampler=sampler)
    for origin, params in initial_design(objective, trials=trials, seed=0):
        study.enqueue_trial(params, user_attrs={"origin": origin})
    return study


def prefill_seconds(evaluator: Evaluator) -> float:
    """Seconds to prefill and rank all examples, in the evaluator's own chunks, without making drafts."""
    prefiller = Prefiller(evaluator.model, [evaluator.method], stop_tokens=frozenset())
    examples = [replace(example, new_tokens=1) for example in evaluator.examples]
    start = time.perf_counter()
    for chunk in equal_lengths(list(range(len(examples))), examples):
        prefiller.prefill([examples[index] for index in chunk])
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
