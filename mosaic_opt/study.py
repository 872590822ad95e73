"""Optuna studies that are opened or resumed: storage, fingerprint, interrupted trials, stored measurements."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sqlite3
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
from filelock import FileLock
from optuna.distributions import IntDistribution
from optuna.samplers import BaseSampler
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from mosaic_opt.allocation import Allocation
from mosaic_opt.objective import Direction, Measure, Objective, attributes, parameter_names

BUSY_SECONDS = 60
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
    def bar(self, label: str, total: int) -> Iterator[Callable[[int, str], None]]:
        """A progress bar; call it with what is done so far and a short note."""
        yield lambda done, note: None

    def say(self, text: str) -> None:
        """One line for people."""


def open_storage(url: str) -> RDBStorage:
    """Open a study database; SQLite in WAL mode with a busy timeout, so that readers never block writers.

    Processes that open a new SQLite file at the same moment create its tables one after the other: Optuna looks
    for each table before it creates it, and the second to do so would fail.

    Raises:
        ValueError: if it cannot be opened or written.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        if not url.startswith("sqlite:///"):
            return RDBStorage(url)
        path = Path(url.removeprefix("sqlite:///"))
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=BUSY_SECONDS):
            _prepare_sqlite(path)
            storage = RDBStorage(url, engine_kwargs={"connect_args": {"timeout": BUSY_SECONDS}})
        sqlalchemy.event.listen(storage.engine, "connect", _fast_sync)
        storage.engine.dispose()  # connections made before the listener are not reused
        return storage
    except (OSError, sqlite3.Error, sqlalchemy.exc.SQLAlchemyError, ImportError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"storage {_without_password(url)} cannot be opened for writing: {reason}") from error


def _prepare_sqlite(path: Path) -> None:
    with sqlite3.connect(path, timeout=BUSY_SECONDS) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE IF NOT EXISTS mosaic_probe (x)")
        connection.execute("DROP TABLE mosaic_probe")
    connection.close()


def _fast_sync(connection: Any, record: Any) -> None:
    connection.execute("PRAGMA synchronous=NORMAL")


def _without_password(url: str) -> str:
    try:
        return sqlalchemy.make_url(url).render_as_string(hide_password=True)
    except sqlalchemy.exc.ArgumentError:
        return "URL"


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


def stored_study(storage: RDBStorage, name: str) -> optuna.Study | None:
    """The study of this name, or None; nothing is changed."""
    try:
        return optuna.load_study(study_name=name, storage=storage, sampler=optuna.samplers.RandomSampler())
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
    storage: RDBStorage,
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
    study = optuna.create_study(
        study_name=name,
        storage=storage,
        sampler=sampler,
        directions=list(objective.directions),
        load_if_exists=True,
    )
    check_fingerprint(study, fingerprint)
    wanted = {**user_attrs, "fingerprint": fingerprint, "versions": versions()}
    for key, value in wanted.items():
        if key not in study.user_attrs:
            study.set_user_attr(key, value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.set_metric_names(list(objective.metric_names))
    return study


def counts(trial: FrozenTrial) -> bool:
    """Whether a trial is part of the search's history: interrupted ones are evaluated again."""
    return not trial.user_attrs.get("interrupted")


def completed(study: optuna.Study) -> list[FrozenTrial]:
    """The completed trials, as stored (not copied)."""
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))


def decided(study: optuna.Study) -> list[FrozenTrial]:
    """The trials that count towards a target: completed, or raced and given up."""
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))


def clear_interrupted(study: optuna.Study) -> None:
    """Fail the trials that a dead process left running, and tag them as interrupted."""
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study._storage.set_trial_user_attr(trial._trial_id, "interrupted", True)
        study._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)


def enqueue_design(study: optuna.Study, design: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Enqueue the points of an initial design that are not in the study yet.

    Args:
        design: (origin, parameters of a whole vector).
    """
    there = {_key(trial) for trial in study.get_trials(deepcopy=False) if counts(trial)}
    for origin, params in design:
        key = tuple(sorted(params.items()))
        if key not in there:
            study.enqueue_trial(params, user_attrs={"origin": origin})
            there.add(key)


def _key(trial: FrozenTrial) -> tuple[tuple[str, Any], ...]:
    params = trial.params if trial.state == TrialState.COMPLETE else trial.system_attrs.get("fixed_params")
    return tuple(sorted((params or trial.params).items()))


def run_trials(
    study: optuna.Study,
    objective: Objective,
    *,
    total: int,
    design: Sequence[tuple[str, dict[str, Any]]],
    after: Callable[[optuna.Study], None],
) -> None:
    """Bring the study to `total` decided trials; one that has them is left untouched.

    Args:
        objective: evaluates a trial.
        total: trials completed or raced in the end, earlier runs included.
        design: points evaluated before the sampler proposes.
        after: called once before the first trial and after each.
    """
    clear_interrupted(study)
    missing = total - len(decided(study))
    after(study)
    if missing <= 0:
        return
    enqueue_design(study, design[:total])
    study.optimize(objective, n_trials=missing, callbacks=[lambda study, _: after(study)])


class Measured:
    """Measurements of given allocations on one split, each stored as a trial and never made twice.

    Args:
        study: two objectives, as stage 1.
        measure: measures an allocation that is not stored yet.
        cap: largest budget possible.
    """

    directions: tuple[Direction, ...] = ("minimize", "maximize")
    metric_names: tuple[str, ...] = ("mean budget", "score")

    def __init__(self, study: optuna.Study, measure: Measure, *, cap: int) -> None:
        self.study, self.measure, self.cap = study, measure, cap
        self.trials = {tuple(trial.user_attrs["budgets"]): trial for trial in completed(study)}

    def missing(self, wanted: Iterable[Allocation]) -> bool:
        """Whether any of these is not stored yet."""
        return any(allocation.budgets not in self.trials for allocation in wanted)

    def __call__(self, allocation: Allocation, *, outputs: bool = False) -> FrozenTrial:
        """The stored trial of this allocation, measured now if it is not there.

        Args:
            outputs: whether a measurement made now is to keep its whole output texts.
        """
        if allocation.budgets not in self.trials:
            measurement = self.measure(allocation, complete=outputs)
            names = parameter_names("budget", len(allocation))
            trial = create_trial(
                params=dict(zip(names, allocation.budgets, strict=True)),
                distributions={name: IntDistribution(1, self.cap) for name in names},
                values=[allocation.mean, measurement.score],
                user_attrs=attributes(allocation, measurement, outputs=outputs),
            )
            self.study.add_trial(trial)
            self.trials[allocation.budgets] = trial
        return self.trials[allocation.budgets]
