"""What can be said of one search, read once from its studies."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial

from mosaic_opt.objective import by_score
from mosaic_opt.report.result import result
from mosaic_opt.samplers.surrogate import Surrogate
from mosaic_opt.study import feasible, front_of, latest_plan, load_study, parts_of, stage_of

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class View:
    """One search.

    name: of its study; plan: what that keeps of the plan begun last (see `study.plan_record`); attributes: of the
    study; trials: completed ones of stage 1; stage: see `study.stage_of`; states: trials of every study by state;
    tested: measurements on the test examples by budgets; result: as in `result.json`, None before the end.
    """

    name: str
    plan: dict[str, Any]
    attributes: dict[str, Any]
    trials: list[FrozenTrial]
    stage: str | None
    states: dict[str, dict[str, int]]
    tested: dict[tuple[int, ...], FrozenTrial]
    result: dict[str, Any] | None

    @classmethod
    def of(cls, storage: BaseStorage, name: str) -> View:
        """Read it.

        Raises:
            ValueError: if there is no study of this name that a search began, or it is not whole (any more).
        """
        try:
            return cls._read(storage, name)
        except KeyError as error:
            raise ValueError(f"study {name!r} is not there or not whole: {error} is missing") from error

    @classmethod
    def _read(cls, storage: BaseStorage, name: str) -> View:
        study = load_study(storage, name)
        plan = latest_plan(study)
        if not plan:
            raise ValueError(f"study must be one that `mosaic search` began; got {name!r}")
        others = [load_study(storage, part) for part in parts_of(storage, name)[1:]]
        by_stage = {other.user_attrs["stage"]: other for other in others}
        return cls(
            name=name,
            plan=plan,
            attributes=study.user_attrs,
            trials=feasible(study),
            stage=stage_of(study),
            states={
                other.study_name: dict(Counter(trial.state.name for trial in other.get_trials(deepcopy=False)))
                for other in (study, *others)
            },
            tested={tuple(budgets_of(t)): t for t in (feasible(by_stage["test"]) if "test" in by_stage else [])},
            result=result(storage, name) if plan.get("finished") else None,
        )

    @property
    def config(self) -> dict[str, Any]:
        """The settings of the plan."""
        return dict(self.plan["config"])

    @cached_property
    def front(self) -> list[FrozenTrial]:
        """Non-dominated trials of stage 1 by rising mean budget."""
        return front_of(self.trials)

    @cached_property
    def uniform(self) -> list[FrozenTrial]:
        """Stage 1's uniform allocations by rising budget."""
        return sorted((t for t in self.trials if len(set(budgets_of(t))) == 1), key=lambda t: budgets_of(t)[0])

    @property
    def winner(self) -> list[int] | None:
        """Budgets of the winner of stage 2, if it is known."""
        return self.plan.get("winners", {}).get(self.config["winner"])

    @cached_property
    def shares(self) -> Floats:
        """Each layer's budget over the mean of its allocation, averaged over the front: (layers,)."""
        budgets = np.array([budgets_of(trial) for trial in self.front], dtype=float)
        return np.asarray((budgets / budgets.mean(axis=1, keepdims=True)).mean(axis=0))

    @cached_property
    def starved(self) -> Floats:
        """Expected loss of score (layers,) where one layer alone of the best allocation is cut to the least budget.

        By the sampler's surrogate of the log-likelihood (see samplers/surrogate.py), fitted to stage 1's trials:
        nothing is measured for it.
        """
        budgets = np.array([budgets_of(trial) for trial in self.trials], dtype=float)
        score, likelihood = np.array([by_score(trial) for trial in self.trials], dtype=float).T
        usable = np.isfinite(score) & np.isfinite(likelihood)
        if usable.sum() < 2:
            return np.zeros(budgets.shape[1])
        budgets, likelihood, score = budgets[usable], likelihood[usable], score[usable]
        surrogate = Surrogate(budgets, likelihood, score)
        best = np.array(budgets_of(self.front[-1]), dtype=float)
        cut = np.tile(best, (len(best), 1))
        np.fill_diagonal(cut, budgets.min())
        return np.asarray(surrogate.score(best[None]) - surrogate.score(cut))


def budgets_of(trial: FrozenTrial) -> list[int]:
    """Layer budgets of a trial's allocation, in tokens."""
    return list(trial.user_attrs["budgets"])
