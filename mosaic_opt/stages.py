"""The four stages: search, select, rescale, refine; then the test measurements that are reported.

Everything a stage finds is stored in the study database before the next begins, so a run that was killed
goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import optuna
from optuna.samplers import BaseSampler, RandomSampler
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial

from mosaic_opt import allocation as allocations
from mosaic_opt.allocation import Allocation
from mosaic_opt.claims import orderly
from mosaic_opt.design import initial_design, refinement_design
from mosaic_opt.evaluator import Evaluator, Measurement
from mosaic_opt.eviction import EvictionMethod, kv_shape, require_skip
from mosaic_opt.model import ModelSource, require_fit
from mosaic_opt.objective import LevelObjective, Measure, Objective, WeightObjective, by_score, measured
from mosaic_opt.paired import shrunk
from mosaic_opt.ranked import evaluable_layers, ranked_fingerprint
from mosaic_opt.samplers.pareto import hypervolume_2d
from mosaic_opt.study import (
    Measured,
    Plan,
    Watch,
    begin_plan,
    decided,
    feasible,
    front_of,
    open_study,
    record_plan,
    run_trials,
)
from mosaic_opt.tasks import Example, Task

GRID = 32  # tokens between the uniform allocations of the cache ratio's curve
SEED_SHAPES = 12  # front shapes that seed a refinement
FINALISTS = 16  # refined candidates measured on the selection split

Sampler = Callable[..., BaseSampler]
Floats = npt.NDArray[np.float64]


class Bench:
    """Model, examples and evaluators of one setting, made when they are first needed.

    Args:
        model: where the model comes from.
        task, method: what is measured, under which eviction.
        prefill_for: further methods whose rankings the same prefill stores.
        counts: examples per split.
        ranked: folder for ranked caches; None keeps them in memory only.
        cap: largest layer budget (tokens); None means the longest prompt.
        batch_size: examples decoded together.
        device_bytes, host_bytes: where ranked caches are held (see `Evaluator`).
        watch: told about progress.
    """

    def __init__(
        self,
        *,
        model: ModelSource,
        task: Task,
        method: EvictionMethod,
        counts: dict[str, int],
        prefill_for: Sequence[EvictionMethod] = (),
        ranked: Path | None = None,
        cap: int | None = None,
        batch_size: int = 16,
        device_bytes: int = 8 * 2**30,
        host_bytes: int = 8 * 2**30,
        watch: Watch | None = None,
    ) -> None:
        self.source, self.task, self.method, self.counts = model, task, method, counts
        self.ranked, self.batch_size, self.watch = ranked, batch_size, watch or Watch()
        self.prefill_for, self._cap = list(prefill_for), cap
        self._limits = {"device_bytes": device_bytes, "host_bytes": host_bytes}
        self._evaluators: dict[str, Evaluator] = {}

    @cached_property
    def examples(self) -> dict[str, list[Example]]:
        """Examples of each split.

        Raises:
            ValueError: if two splits share one and the task does not allow it, or one exceeds the model's context.
        """
        tokenizer = self.source.tokenizer
        made = {split: self.task.examples(tokenizer, split, count) for split, count in self.counts.items()}
        ids = [example.id for examples in made.values() for example in examples]
        if len(set(ids)) != len(ids) and not self.task.allow_overlap:
            raise ValueError("splits must not share examples; the task gave the same one twice")
        for examples in made.values():
            for example in examples:
                require_fit(self.source.config, example.length, example.new_tokens)
        return made

    @property
    def truncated(self) -> dict[str, int]:
        """Examples of each split whose prompt was longer and is cut."""
        return {split: sum(example.truncated for example in own) for split, own in self.examples.items()}

    @cached_property
    def layers(self) -> int:
        """Number of evictable layers, from the model's configuration alone.

        Raises:
            ValueError: for a model that cannot be evaluated, or a method that does not fit it.
        """
        layers, _ = evaluable_layers(self.source.config)
        require_skip(self.method, layers)
        return len(layers)

    @cached_property
    def cap(self) -> int:
        """Largest layer budget that makes sense: the longest prompt, or less if so configured."""
        longest = max(len(example.tokens) for examples in self.examples.values() for example in examples)
        if self._cap is not None and self._cap < longest and self.method.skip:
            raise ValueError(f"cap must be null where skip keeps layers whole; got {self._cap}")
        return min(self._cap or longest, longest)

    def about(self) -> dict[str, Any]:
        """What allocation files say of all that is found here (see `allocation.schema.json`)."""
        model = {
            "id": self.source.name,
            "fingerprint": self.source.fingerprint,
            "element_bytes": self.source.element_bytes,
            **kv_shape(self.source.config),
        }
        return {
            "model": model,
            "eviction": self.method.describe(),
            "floor": self.method.floor,
            "cap": self.cap,
            "task": self.task.name,
            "metric": self.task.metric,
            "protocol": self.task.protocol,
        }

    def example_hashes(self) -> dict[str, str]:
        """One hash of the example ids per split, for the fingerprint."""
        return {
            split: hashlib.sha256(",".join(example.id for example in examples).encode()).hexdigest()[:16]
            for split, examples in self.examples.items()
        }

    @cached_property
    def _model(self) -> Any:
        if not self.source.is_loaded:
            self.watch.say(f"loading {self.source.name}")
        return self.source.loaded

    def evaluator(self, split: str) -> Evaluator:
        """The split's evaluator, prefilled on first use."""
        if split not in self._evaluators:
            examples, model = self.examples[split], self._model
            if self.truncated[split]:
                self.watch.say(
                    f"{self.truncated[split]} of {len(examples)} {split} prompts are cut to {self.task.tokens} tokens"
                )
            folder = None
            if self.ranked is not None:
                folder = self.ranked / ranked_fingerprint(f"{self.source.fingerprint}:{model.dtype}")
            with self.watch.bar(f"prefill {split}", len(examples)) as advance:
                self._evaluators[split] = Evaluator(
                    model=model,
                    tokenizer=self.source.tokenizer,
                    task=self.task,
                    examples=examples,
                    method=self.method,
                    prefill_for=self.prefill_for,
                    cap=self.cap,
                    batch_size=self.batch_size,
                    store=folder,
                    **self._limits,
                    progress=lambda done, total: advance(done, str),
                    say=self.watch.say,
                )
        return self._evaluators[split]

    def measure(self, split: str) -> Measure:
        """Measure allocations on a split (see `Evaluator.evaluate`); the evaluator is made at the first call."""

        def measured(allocation: Allocation, **options: Any) -> Measurement:
            return self.evaluator(split).evaluate(allocation, **{"complete": False, **options})

        return measured

    def release(self, *splits: str) -> None:
        """Free the ranked caches of these splits."""
        for split in splits:
            self._evaluators.pop(split, None)


class Search:
    """The four stages for one model, task and eviction method.

    Args:
        name: study name; the other studies' names derive from it.
        plan: the numbers.
        bench: model, examples, evaluators.
        sampler: makes the proposer; called with those of `decode`, `known_objective` and `signal` it takes.
        storage: study database.
        fingerprint: what the studies are made from; the examples' hashes are added here.
        config: the settings that stand for the plan, kept with what it finds (see `study.plan_record`).
        watch: told about progress.

    Raises:
        ValueError: if levels or budgets cannot be met, or the stored study was made from something else.
    """

    def __init__(
        self,
        *,
        name: str,
        plan: Plan,
        bench: Bench,
        sampler: Sampler,
        storage: BaseStorage,
        fingerprint: dict[str, Any],
        config: dict[str, Any],
        watch: Watch,
    ) -> None:
        plan.check_range(floor=bench.method.floor, prompt=bench.cap)
        if bench.method.skip:
            raise ValueError(
                f"skip={sorted(bench.method.skip)} keeps those layers whole; a search decides that by itself: skip=[]"
            )
        self.name, self.plan, self.bench, self.storage, self.watch = name, plan, bench, storage, watch
        self.sampler = sampler
        self._inside = 0.0  # seconds spent in phases inside the current one
        self.fingerprint = {**fingerprint, "examples": bench.example_hashes()}
        self._measured_by = {"measure": bench.measure("calibration"), "layers": bench.layers, "race": plan.race}
        self.objective = LevelObjective(levels=plan.levels, **self._measured_by)
        self.study = self._open(
            name,
            self.objective,
            stage="search",
            sampler=self._proposer(self.objective, known_objective=self.objective.mean_budget),
            user_attrs={"about": bench.about()},
        )
        begin_plan(self.study, plan.key, config)
        self.selection = self._measured("selection")
        self.test = self._measured("test")

    def run(self) -> None:
        """Run or resume every stage; afterwards the database holds the whole result."""
        with self._timed("search"):
            front = self.search()
        with self._timed("select"):
            winner = self.select(front)
        chosen: dict[str, dict[str, list[int]]] = {}
        for budget in self.plan.budgets:
            rescaled = self.rescale(winner, budget)
            with self._timed("refine"):
                refined = self.refine(budget, rescaled, front)
            chosen[str(budget)] = self._compared(budget, rescaled, refined)
        self._record(allocations=chosen)
        self.bench.release("calibration", "selection")
        with self._timed("test"):
            self.measure_test(winner, chosen)
        self._record(finished=True)

    # Stage 1 ------------------------------------------------------------------------------------------------

    def search(self) -> list[FrozenTrial]:
        """Stage 1: mean budget against score on the calibration examples; returns the front by mean budget."""
        design = initial_design(self.objective, trials=self.plan.trials, seed=self.plan.seed)
        self._run(self.study, self.objective, self.plan.trials, design, "search")
        return front_of(feasible(self.study))

    # Stage 2 ------------------------------------------------------------------------------------------------

    def select(self, front: Sequence[FrozenTrial]) -> Allocation:
        """Stage 2: choose the winner among the front's members on the selection examples.

        `shape`: the member whose shape, rescaled to each budget of the ladder, has the best mean score
        (ties: higher log-likelihood, then smaller mean). `paper`: the best score as it stands among those
        that are not uniform (ties: smaller mean). Both are stored; the plan's rule decides. The shape's measured
        gain over uniform is stored beside the one to be expected (`paired.shrunk`).
        """
        members = [Allocation(trial.user_attrs["budgets"]) for trial in front]
        ladder = self.plan.ladder
        shapes = [self.rescale(member, mean) for member in members for mean in ladder]
        uniforms = [allocations.uniform(self.bench.layers, mean) for mean in ladder]
        measurements = iter(self._measure("select", self.selection, [*shapes, *members, *uniforms]))
        rescaled = [list(islice(measurements, len(ladder))) for _ in members]
        own_scores = [(by_score(next(measurements))[0], -member.mean) for member in members]
        uniform = list(measurements)
        shape_scores = [
            (*_mean_result(trials), -member.mean) for trials, member in zip(rescaled, members, strict=True)
        ]
        best = max(range(len(members)), key=shape_scores.__getitem__)
        expected = shrunk([_example_means(trials) for trials in rescaled], _example_means(uniform))
        uneven = [index for index, member in enumerate(members) if len(set(member.budgets)) > 1]
        winners = {
            "shape": members[best],
            "paper": members[max(uneven or range(len(members)), key=own_scores.__getitem__)],
        }
        gain = shape_scores[best][0] - _mean_result(uniform)[0]
        self._record(
            winners={rule: list(won.budgets) for rule, won in winners.items()},
            winner_gain={"measured": gain, "expected": float(expected[best])},
        )
        return winners[self.plan.winner]

    # Stage 3 ------------------------------------------------------------------------------------------------

    def rescale(self, winner: Allocation, budget: float) -> Allocation:
        """Stage 3: the winner's shape at another mean budget; no search."""
        return winner.rescale(budget, **self._bounds)

    # Stage 4 ------------------------------------------------------------------------------------------------

    def refine(self, budget: int, rescaled: Allocation, front: Sequence[FrozenTrial]) -> Allocation:
        """Stage 4: search under "mean budget = budget"; the rescaled winner stays unless beaten on selection.

        The finalists and the rescaled winner are compared by their scores (ties: log-likelihood) there. The measured
        gain of the chosen one over the rescaled winner is stored beside the one to be expected (`paired.shrunk`).
        """
        if not self.plan.refine_trials:
            return rescaled
        objective = WeightObjective(
            budget=budget,
            floor=self.bench.method.floor,
            cap=self.bench.cap,
            **self._measured_by,
        )
        mark = hashlib.sha256(str(rescaled.budgets).encode()).hexdigest()[:6]
        study = self._open(
            f"{self.name}-refine-{budget}-{mark}",
            objective,
            stage="refine",
            sampler=self._proposer(objective),
            user_attrs={"budget": budget},
        )
        done = len(decided(study)) >= self.plan.refine_trials
        design = [] if done else self._refinement_design(objective, rescaled, front)
        self._run(study, objective, self.plan.refine_trials, design, f"refine {budget}")
        ranked = sorted(feasible(study), key=by_score, reverse=True)
        finalists = list(dict.fromkeys(Allocation(trial.user_attrs["budgets"]) for trial in ranked))
        candidates = [rescaled, *(finalist for finalist in finalists[:FINALISTS] if finalist != rescaled)]
        tried = self.selection(candidates)
        best = max(range(len(tried)), key=lambda index: (*by_score(tried[index]), -index))
        scores = np.array([measured(trial)["example_scores"] for trial in tried])
        expected = shrunk(scores, scores[0])
        gain = {"measured": float((scores[best] - scores[0]).mean()), "expected": float(expected[best] - expected[0])}
        self._record(refined_gain={str(budget): gain})
        return candidates[best]

    def _refinement_design(
        self, objective: WeightObjective, rescaled: Allocation, front: Sequence[FrozenTrial]
    ) -> list[tuple[str, dict[str, Any]]]:
        nearest = sorted(front, key=lambda trial: abs(trial.values[0] - objective.budget))[:SEED_SHAPES]
        return refinement_design(
            objective,
            rescaled=rescaled,
            shapes=[self.rescale(Allocation(trial.user_attrs["budgets"]), objective.budget) for trial in nearest],
            trials=feasible(self.study),
            window=self.bench.method.window,
            seed=self.plan.seed,
        )

    # Test ---------------------------------------------------------------------------------------------------

    def measure_test(self, winner: Allocation, chosen: dict[str, dict[str, list[int]]]) -> None:
        """Measure what is reported: every compared allocation, the winner, and uniform's whole curve."""
        layers, cap = self.bench.layers, self.bench.cap
        curve = [allocations.uniform(layers, mean) for mean in [*range(GRID, cap, GRID), cap]]
        compared = [Allocation(budgets) for row in chosen.values() for budgets in row.values()]
        self._measure("test", self.test, [*compared, winner, *curve], outputs=compared)

    def _compared(self, budget: int, rescaled: Allocation, refined: Allocation) -> dict[str, list[int]]:
        rows = {
            "full": allocations.uniform(self.bench.layers, self.bench.cap),
            "uniform": allocations.uniform(self.bench.layers, budget),
            "pyramid": allocations.pyramid(self.bench.layers, budget, **self._bounds),
            "rescaled": rescaled,
            "refined": refined,
        }
        return {name: list(row.budgets) for name, row in rows.items()}

    # Shared -------------------------------------------------------------------------------------------------

    @property
    def _bounds(self) -> dict[str, int]:
        method = self.bench.method
        return {"window": method.window, "floor": method.floor, "cap": self.bench.cap}

    def _proposer(self, objective: Objective, **known: Any) -> BaseSampler:
        """The configured sampler, given as much of what is known as its constructor takes."""
        offered = {"decode": objective.decode, "signal": "log_likelihood", **known}
        taken = inspect.signature(getattr(self.sampler, "func", self.sampler)).parameters
        try:
            return self.sampler(**{key: value for key, value in offered.items() if key in taken})
        except (TypeError, ValueError) as error:  # a setting of the sampler's that it does not know or cannot use
            raise ValueError(f"sampler cannot be made from its settings: {error}") from error

    def _open(
        self, name: str, objective: Any, *, stage: str, sampler: BaseSampler, user_attrs: dict[str, Any]
    ) -> optuna.Study:
        shared = {
            "stage": stage,
            "metric": self.bench.task.metric,
            "protocol": self.bench.task.protocol,
            "allow_overlap": self.bench.task.allow_overlap,
            "truncated": self.bench.truncated,
            "splits": {split: [e.id for e in examples] for split, examples in self.bench.examples.items()},
        }
        return open_study(
            self.storage,
            name,
            objective=objective,
            fingerprint={**self.fingerprint, "stage": stage},
            user_attrs={**shared, **user_attrs},
            sampler=sampler,
        )

    def _measured(self, split: str) -> Measured:
        study = self._open(
            f"{self.name}-{split}", Measured, stage=split, sampler=RandomSampler(seed=0), user_attrs={}
        )
        return Measured(study, self.bench.measure(split), layers=self.bench.layers, cap=self.bench.cap)

    def _run(
        self,
        study: optuna.Study,
        objective: Objective,
        total: int,
        design: Sequence[tuple[str, dict[str, Any]]],
        label: str,
    ) -> None:
        self._prefilled("calibration", len(decided(study)) < total)
        with self.watch.bar(label, total) as advance:

            def after(study: optuna.Study) -> None:
                advance(len(decided(study)), lambda: _note(feasible(study)))
                self.watch.trial_done()

            run_trials(study, objective, total=total, design=design, after=after)

    def _measure(
        self, label: str, split: Measured, wanted: Sequence[Allocation], outputs: Sequence[Allocation] = ()
    ) -> list[FrozenTrial]:
        """Measurements of all the wanted, with a progress bar."""
        self._prefilled("selection" if split is self.selection else "test", bool(split.missing(wanted)))
        with self.watch.bar(label, len(set(wanted))) as advance:

            def after(done: int, latest: FrozenTrial | None) -> None:
                advance(done, lambda: f"mean {latest.values[0]:.0f}: {latest.values[1]:.3f}" if latest else "")

            return split(wanted, outputs=outputs, after=after)

    def _record(self, **values: Any) -> None:
        record_plan(self.study, self.plan.key, **values)

    def _prefilled(self, split: str, needed: bool) -> None:
        """Make the split's evaluator before a stage's own progress bar starts, if it is needed."""
        if needed:
            with self._timed("prefill"):
                self.bench.evaluator(split)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Add the seconds of a phase, less those of phases inside it, to what the study records over all runs."""
        start, inside = time.perf_counter(), self._inside
        self._inside = 0.0
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            with orderly(self.study):
                seconds = self.study.user_attrs.get("seconds", {})
                seconds[phase] = round(seconds.get(phase, 0.0) + spent - self._inside, 3)
                self.study.set_user_attr("seconds", seconds)
            self._inside = inside + spent


def _mean_result(trials: Sequence[FrozenTrial]) -> tuple[float, float]:
    scores, likelihoods = zip(*(by_score(trial) for trial in trials), strict=True)
    return float(np.mean(scores)), float(np.mean(likelihoods))


def _example_means(trials: Sequence[FrozenTrial]) -> list[float]:
    """Mean score of each example over several measurements of the same examples."""
    return np.mean([measured(trial)["example_scores"] for trial in trials], axis=0).tolist()


def _note(trials: Sequence[FrozenTrial]) -> str:
    """How far a stage has come: the front's size and hypervolume, the best score, what was gained."""
    if not trials:
        return ""
    best = max(trials, key=by_score)
    score, mean = measured(best)["score"], measured(best)["mean_budget"]
    note = f"best {score:.3f} at {mean:.0f}"
    if len(best.values) == 1:  # stage 4, whose first trial is the rescaled winner
        return f"{note}, {score - measured(trials[0])['score']:+.3f}"
    front = front_of(trials)
    points = np.array([(measured(trial)["mean_budget"], measured(trial)["score"]) for trial in trials])
    uniform = sorted(point for point, trial in zip(points.tolist(), trials, strict=True) if _is_uniform(trial))
    note = f"front {len(front)}, hv {_hypervolume(points):.3f}, {note}"
    if not uniform:
        return note
    gains = points[:, 1] - np.interp(points[:, 0], *np.array(uniform).T)
    return f"{note}, gain {gains.max():.3f}"


def _is_uniform(trial: FrozenTrial) -> bool:
    return len(set(trial.user_attrs["budgets"])) == 1


def _hypervolume(points: Floats) -> float:
    """Share (0 to 1) of the rectangle of all means and scores that points (n, 2) of mean and score dominate."""
    low, high = points[:, 0].min(), points[:, 0].max()
    losses = np.column_stack([(points[:, 0] - low) / max(high - low, 1e-9), -points[:, 1]])
    return hypervolume_2d(losses, (1.0 + 1e-9, 0.0))
