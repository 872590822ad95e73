"""Optuna studies that are opened or resumed: storage, fingerprint, interrupted trials, stored measurements."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from optuna import Trial
from optuna.distributions import IntDistribution
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from mosaic_opt.allocation import Allocation
from mosaic_opt.claims import Claims, Need, alive, orderly, orderly_by_name, waiting_trial
from mosaic_opt.objective import Direction, Measure, Objective, attributes, by_score, is_measured, parameter_names
from mosaic_opt.samplers.pareto import shells

DECIDED = (TrialState.COMPLETE, TrialState.PRUNED)
_PART = r"-(selection|test|refine-\d+-[0-9a-f]{6})"  # what follows a search's name in its further studies' names
_PLAN = "plan:"  # followed by a plan's key: the attribute that holds its record
_PLANNED = {"trials", "refine_trials", "budgets", "winner"}  # settings that a plan's record is read for
WINNER_RULES = ("shape", "paper")
VERSIONED = ("mosaic-opt", "torch", "transformers", "optuna", "numpy", "scikit-learn")


@dataclass(frozen=True)
class Plan:
    """What a search does, in plain numbers; checked on creation.

    Args:
        levels: budgets a layer can take in stage 1 (tokens), rising.
        budgets: mean budgets of stages 3 and 4 (tokens).
        ladder: mean budgets at which stage 2 judges a shape (tokens).
        trials, refine_trials: completed trials of stage 1, and of stage 4 for each budget.
        calibration, selection, test: numbers of examples.
        winner: `shape` or `paper` (see `select`).
        seed: of the initial design.
        race: stop hopeless measurements early (see `Objective`).

    Raises:
        ValueError: naming the argument, what is allowed and the value.
    """

    levels: tuple[int, ...]
    budgets: tuple[int, ...]
    ladder: tuple[int, ...]
    trials: int
    refine_trials: int
    calibration: int
    selection: int
    test: int
    winner: str
    seed: int
    race: bool = False

    def __post_init__(self) -> None:
        for name, least in [
            ("trials", 1), ("refine_trials", 0), ("calibration", 1), ("selection", 1), ("test", 1), ("seed", 0),
        ]:  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}; got {value!r}")
        for name in ("levels", "budgets", "ladder"):
            object.__setattr__(self, name, _rising(name, getattr(self, name)))
        if not isinstance(self.race, bool):
            raise ValueError(f"race must be true or false; got {self.race!r}")
        if self.winner not in WINNER_RULES:
            raise ValueError(f"winner must be one of {', '.join(WINNER_RULES)}; got {self.winner!r}")

    def check_range(self, *, floor: int, prompt: int) -> None:
        """Raise ValueError unless levels and budgets lie between the floor and the prompt length."""
        for name in ("levels", "budgets", "ladder"):
            for value in getattr(self, name):
                if not floor <= value <= prompt:
                    raise ValueError(
                        f"{name} must be between {floor} and {prompt} tokens (the eviction method's window "
                        f"and the prompt length); got {value}"
                    )

    @property
    def counts(self) -> dict[str, int]:
        """Examples per split."""
        return {split: getattr(self, split) for split in ("calibration", "selection", "test")}

    @property
    def key(self) -> str:
        """What decides whether a finished study already has this plan's result."""
        parts = [self.trials, self.refine_trials, self.budgets, self.ladder, self.winner, self.race]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


class FingerprintMismatch(ValueError):
    """A stored study was made from something else than what is asked for now."""


class Watch:
    """What the stages tell whoever looks on; this one stays silent."""

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[Callable[[int, Callable[[], str]], None]]:
        """A progress bar; call it with what is done so far and what makes a short note, if one is shown."""
        yield lambda done, note: None

    def say(self, text: str) -> None:
        """One line for people."""

    def trial_done(self) -> None:
        """A trial of stage 1 or 4 has ended."""


def versions() -> dict[str, str]:
    """Installed versions of what decides a result, without importing any of it."""
    return {name: importlib.metadata.version(name) for name in VERSIONED}


def _rising(name: str, values: Any) -> tuple[int, ...]:
    whole = isinstance(values, list | tuple) and all(
        isinstance(value, int) and not isinstance(value, bool) and value >= 1 for value in values
    )
    if not whole or not values or list(values) != sorted(set(values)):
        raise ValueError(f"{name} must be a rising list of whole numbers >= 1; got {values!r}")
    return tuple(values)


def load_study(storage: BaseStorage, name: str) -> optuna.Study:
    """The study of this name, to be read.

    Raises:
        KeyError: if it is not there.
    """
    return optuna.load_study(study_name=name, storage=storage, sampler=optuna.samplers.RandomSampler())


def stored_study(storage: BaseStorage, name: str) -> optuna.Study | None:
    """As `load_study`, or None."""
    try:
        return load_study(storage, name)
    except KeyError:
        return None


def check_fingerprint(study: optuna.Study, fingerprint: dict[str, Any]) -> None:
    """Compare the parts given with those stored; parts stored but not given are left alone.

    Raises:
        FingerprintMismatch: naming every part that differs, with both values.
    """
    stored = study.user_attrs.get("fingerprint")
    if stored is None and not study.get_trials(deepcopy=False):
        return
    differences = list(_differences("", stored or {}, fingerprint))
    if differences:
        raise FingerprintMismatch(
            f"study {study.study_name!r} was made from something else: {'; '.join(differences)}. "
            "Choose another study=... or the settings it was made with"
        )


def _differences(where: str, stored: Any, wanted: Any) -> Iterable[str]:
    if isinstance(stored, dict) and isinstance(wanted, dict):
        for key in wanted:
            yield from _differences(f"{where}.{key}".lstrip("."), stored.get(key), wanted[key])
    elif stored != wanted:
        yield f"{where} is {wanted!r}, stored {stored!r}"


def open_study(
    storage: BaseStorage,
    name: str,
    *,
    objective: type[Measured] | Objective,
    fingerprint: dict[str, Any],
    user_attrs: dict[str, Any],
    sampler: BaseSampler,
) -> optuna.Study:
    """Create the study, or load it if its fingerprint is the same.

    Attributes are written only where they are missing, so a run killed in between is completed.

    Raises:
        FingerprintMismatch: if a study of this name was made from something else.
    """
    with orderly_by_name(storage, name):
        study = optuna.create_study(
            study_name=name,
            storage=storage,
            sampler=sampler,
            directions=list(objective.directions),
            load_if_exists=True,
        )
        directions = [direction.name.lower() for direction in study.directions]
        if directions != list(objective.directions):
            other = f"has directions {directions}, not {list(objective.directions)}"
            raise FingerprintMismatch(f"study {name!r} {other}: choose another study=...")
        check_fingerprint(study, fingerprint)
        wanted = {**user_attrs, "fingerprint": fingerprint, "versions": versions()}
        for key, value in wanted.items():
            if key not in study.user_attrs:
                study.set_user_attr(key, value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.set_metric_names(list(objective.metric_names))
    return study


def plan_record(study: optuna.Study, key: str) -> dict[str, Any]:
    """What a search's study keeps of one plan; empty if that was never begun.

    `config`, the settings it was begun with; what the stages found: `winners` by rule, `winner_gain`, `refined_gain`
    and `allocations` by budget; `finished`.
    """
    record = study.user_attrs.get(f"{_PLAN}{key}", {})
    return record if isinstance(record, dict) else {}


def latest_plan(study: optuna.Study) -> dict[str, Any]:
    """The record of the plan that was begun last; empty if the study is none of a search."""
    record = plan_record(study, str(study.user_attrs.get("plan")))
    config = record.get("config")
    return record if isinstance(config, dict) and config.keys() >= _PLANNED else {}


def stage_of(study: optuna.Study) -> str | None:
    """Where a search is with the plan begun last: search, selection, refine, test or finished; None if it is none."""
    plan = latest_plan(study)
    if not plan:
        return None
    if plan.get("finished"):
        return "finished"
    if len(decided(study)) < plan["config"]["trials"]:
        return "search"
    return "test" if "allocations" in plan else "refine" if "winners" in plan else "selection"


def begin_plan(study: optuna.Study, key: str, config: dict[str, Any]) -> None:
    """Make a plan the study's latest, and record its settings if it is new."""
    with orderly(study):
        if not plan_record(study, key):
            study.set_user_attr(f"{_PLAN}{key}", {"config": config})
        if study.user_attrs.get("plan") != key:
            study.set_user_attr("plan", key)


def record_plan(study: optuna.Study, key: str, **values: Any) -> None:
    """Put values into a plan's record; dictionaries are joined, as other processes find the same bit by bit."""
    with orderly(study):
        record = plan_record(study, key)
        for name, value in values.items():
            record[name] = {**record.get(name, {}), **value} if isinstance(value, dict) else value
        study.set_user_attr(f"{_PLAN}{key}", record)


def parts_of(storage: BaseStorage, name: str, names: Iterable[str] | None = None) -> list[str]:
    """The name of a search's study, then those of its further stages and splits: so named, and of that stage.

    Args:
        names: of all studies, where the caller has them already.
    """
    names = optuna.get_all_study_names(storage) if names is None else names
    others = {other: part_stage(name, other) for other in names}
    named = sorted(other for other, stage in others.items() if stage)
    return [name, *(other for other in named if load_study(storage, other).user_attrs.get("stage") == others[other])]


def part_stage(name: str, other: str) -> str | None:
    """The stage (selection, test or refine) of the search `name` that a study's other name stands for, if any."""
    match = re.fullmatch(_PART, other.removeprefix(name)) if other.startswith(name) else None
    return match[1].partition("-")[0] if match else None


def require_copyable(storage: BaseStorage, name: str, new: str) -> None:
    """Raise ValueError if a search's new name is taken or that of a part of it, or its trials are running.

    Those of a process of another machine count as running: whether it lives cannot be seen at once.
    """
    if part_stage(name, new):
        raise ValueError(f"to must not be the name of a part of {name!r}; got {new!r}")
    taken = set(optuna.get_all_study_names(storage))
    for part in parts_of(storage, name):
        if new + part.removeprefix(name) in taken:
            raise ValueError(f"to must be a name that no study has; got {new!r}")
        if any(map(alive, load_study(storage, part).get_trials(deepcopy=False, states=(TrialState.RUNNING,)))):
            raise ValueError(f"study must be one that no process works on; {name!r} has running trials")


def copy_search(storage: BaseStorage, name: str, new: str) -> None:
    """Copy a search's studies under a new name, its own last; raises as `require_copyable`."""
    require_copyable(storage, name, new)
    for part in reversed(parts_of(storage, name)):
        optuna.copy_study(
            from_study_name=part,
            from_storage=storage,
            to_storage=storage,
            to_study_name=new + part.removeprefix(name),
        )


def delete_search(storage: BaseStorage, name: str) -> None:
    """Delete a search's studies, its own last, so that what was begun can be done again."""
    study = load_study(storage, name)
    for key in study.user_attrs:
        if key.startswith(_PLAN):  # no longer finished, whenever this ends
            study.set_user_attr(key, {})
    for part in reversed(parts_of(storage, name)):
        optuna.delete_study(study_name=part, storage=storage)


def counts(trial: FrozenTrial) -> bool:
    """Whether a trial is part of the search's history: interrupted ones are evaluated again."""
    return not trial.user_attrs.get("interrupted")


def completed(study: optuna.Study) -> list[FrozenTrial]:
    """The completed trials, as stored (not copied)."""
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))


def feasible(study: optuna.Study) -> list[FrozenTrial]:
    """The completed trials that were measured here and violate no constraint; an imported one may."""
    return [t for t in completed(study) if is_measured(t) and all(value <= 0 for value in t.constraints.values())]


def decided(study: optuna.Study) -> list[FrozenTrial]:
    """The trials that count towards a target: completed, or raced and given up."""
    return study.get_trials(deepcopy=False, states=DECIDED)


def front_of(trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
    """The non-dominated trials of a stage-1 study by rising mean budget, each allocation once.

    Equal scores are told apart by the log-likelihood, so that of two allocations with one score the better
    one stays.
    """
    distinct = list({tuple(trial.user_attrs["budgets"]): trial for trial in trials}.values())
    if not distinct:
        return []
    rank = {key: position for position, key in enumerate(sorted({by_score(trial) for trial in distinct}))}
    points = np.array([[trial.values[0], -rank[by_score(trial)]] for trial in distinct], dtype=float)
    front = [trial for trial, shell in zip(distinct, shells(points), strict=True) if shell == 0]
    return sorted(front, key=lambda trial: trial.values[0])


def enqueue_design(study: optuna.Study, objective: Objective, design: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Enqueue the points of an initial design that are not in the study yet.

    Args:
        objective: that evaluates them.
        design: (origin, parameters of a whole vector).
    """
    with orderly(study):
        there = {_key(trial.params) for trial in study.get_trials(deepcopy=False) if counts(trial)}
        for origin, params in design:
            if _key(params) not in there:
                study.add_trial(waiting_trial(objective.space, params, origin=origin, **objective.known(params)))
                there.add(_key(params))


def _key(params: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(params.items()))


def run_trials(
    study: optuna.Study,
    objective: Objective,
    *,
    total: int,
    design: Sequence[tuple[str, dict[str, Any]]],
    after: Callable[[optuna.Study], None],
) -> None:
    """Bring the study to `total` decided trials, together with other processes that do the same.

    Args:
        objective: evaluates a trial.
        total: trials completed or raced in the end, earlier runs and other processes included.
        design: points evaluated before the sampler proposes.
        after: called once before the first trial, after each, and while waiting for other processes.
    """
    claims = Claims(study, objective.space)
    claims.recover()
    after(study)

    def need(trials: Sequence[FrozenTrial]) -> Need:
        states = [trial.state for trial in trials]
        done = sum(state in DECIDED for state in states)
        if done >= total:
            return "done"
        return "begin" if done + states.count(TrialState.RUNNING) < total else "wait"

    if need(study.get_trials(deepcopy=False)) != "done":
        enqueue_design(study, objective, design[:total])
        fresh = lambda trials: _proposed(study, objective)  # noqa: E731
        claims.work(objective, need=need, fresh=fresh, after=lambda: after(study))


def _proposed(study: optuna.Study, objective: Objective) -> FrozenTrial:
    """The next trial; its parameters are left open where the sampler cannot propose them at once."""
    propose = getattr(study.sampler, "propose", None)
    if propose is None:
        return waiting_trial(objective.space)
    params, origin = propose(study, objective.space)
    return waiting_trial(objective.space, params, origin=origin, **objective.known(params))


class Measured:
    """Measurements of given allocations on one split, each stored as a trial and never made twice.

    Args:
        study: two objectives, as stage 1.
        measure: measures an allocation that is not stored yet.
        layers: number of evictable layers.
        cap: largest budget possible.
    """

    directions: tuple[Direction, ...] = ("minimize", "maximize")
    metric_names: tuple[str, ...] = ("mean budget", "score")

    def __init__(self, study: optuna.Study, measure: Measure, *, layers: int, cap: int) -> None:
        self.study, self.measure = study, measure
        self.space = dict.fromkeys(parameter_names("budget", layers), IntDistribution(1, cap))

    @property
    def trials(self) -> dict[tuple[int, ...], FrozenTrial]:
        """The stored measurements by their budgets."""
        return {tuple(trial.user_attrs["budgets"]): trial for trial in feasible(self.study)}

    def missing(self, wanted: Iterable[Allocation]) -> list[Allocation]:
        """Those of the allocations that are not stored yet, each once."""
        stored = self.trials
        return list(dict.fromkeys(allocation for allocation in wanted if allocation.budgets not in stored))

    def __call__(
        self,
        wanted: Iterable[Allocation],
        *,
        outputs: Container[Allocation] = (),
        after: Callable[[int, FrozenTrial | None], None] = lambda done, trial: None,
    ) -> list[FrozenTrial]:
        """The stored trials of these allocations, measured now (together with other processes) if they are not there.

        Args:
            outputs: allocations whose measurement, if made now, is to keep its whole output texts.
            after: called with the number of different allocations measured, and the latest measurement.
        """
        allocations = list(wanted)
        claims = Claims(self.study, self.space)
        claims.recover()
        missing = self.missing(allocations)
        total = len(set(allocations))

        def left(trials: Sequence[FrozenTrial], *states: TrialState) -> list[Allocation]:
            """The missing allocations that no trial of these states has."""
            taken = {
                tuple(trial.params.get(name) for name in self.space)
                for trial in trials
                if trial.state in states and counts(trial)
            }
            return [allocation for allocation in missing if allocation.budgets not in taken]

        def need(trials: Sequence[FrozenTrial]) -> Need:
            if not left(trials, TrialState.COMPLETE):
                return "done"
            return "begin" if left(trials, TrialState.COMPLETE, TrialState.RUNNING) else "wait"

        def fresh(trials: Sequence[FrozenTrial]) -> FrozenTrial:
            allocation = left(trials, TrialState.COMPLETE, TrialState.RUNNING)[0]
            params = dict(zip(self.space, allocation.budgets, strict=True))
            known = {"budgets": list(allocation.budgets), "complete": allocation in outputs}
            return waiting_trial(self.space, params, **known)

        def progress() -> None:
            stored = completed(self.study)
            after(total - len(left(stored, TrialState.COMPLETE)), stored[-1] if stored else None)

        if missing:
            claims.work(self._evaluate, need=need, fresh=fresh, after=progress)
        stored = self.trials
        return [stored[allocation.budgets] for allocation in allocations]

    def _evaluate(self, trial: Trial) -> tuple[float, float]:
        allocation = Allocation([trial.params[name] for name in self.space])
        complete = bool(trial.user_attrs.get("complete"))
        measurement = self.measure(allocation, complete=complete)
        for key, value in attributes(measurement, outputs=complete).items():
            trial.set_user_attr(key, value)
        return allocation.mean, measurement.score
