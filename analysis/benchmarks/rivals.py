"""pymoo's NSGA-II behind Optuna's sampler interface, so that every proposer runs the same loop."""

from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.search_space import intersection_search_space
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState
from pymoo.algorithms.moo.nsga2 import NSGA2
from pymoo.core.problem import Problem
from pymoo.operators.crossover.sbx import SBX
from pymoo.operators.mutation.pm import PM
from pymoo.operators.repair.rounding import RoundingRepair

from mosaic_opt.samplers.pareto import losses


class PymooSampler(BaseSampler):
    """NSGA-II of pymoo on integers: population 20, SBX and polynomial mutation rounded, duplicates dropped.

    What is complete before the first proposal (the enqueued design) is its first population. It keeps state and wants
    its proposals evaluated one after the other.
    """

    def __init__(self, *, seed: int, population: int = 20) -> None:
        self._seed, self._population = seed, population
        self._algorithm: NSGA2 | None = None
        self._asked: Any = None
        self._next = 0

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return intersection_search_space(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)))

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        names = sorted(search_space)
        if not names:
            return {}
        values = _losses(study, names)
        if self._algorithm is None:
            self._algorithm = self._started(np.array(list(values)), [search_space[name] for name in names])
            self._asked = self._algorithm.ask()
            self._next = len(self._asked)
        while self._next == len(self._asked):
            self._asked.set("F", np.array([values[tuple(row)] for row in self._asked.get("X").astype(int).tolist()]))
            self._algorithm.tell(infills=self._asked)
            self._asked, self._next = self._algorithm.ask(), 0
        row = self._asked[self._next].X.astype(int).tolist()
        self._next += 1
        return dict(zip(names, row, strict=True))

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return RandomSampler(seed=self._seed).sample_independent(study, trial, param_name, param_distribution)

    def _started(self, first: np.ndarray, distributions: list[Any]) -> NSGA2:
        repair = RoundingRepair()
        algorithm = NSGA2(
            pop_size=self._population,
            sampling=first,
            crossover=SBX(vtype=float, repair=repair),
            mutation=PM(vtype=float, repair=repair),
            seed=self._seed,
        )
        low, high = zip(*((d.low, d.high) for d in distributions), strict=True)
        problem = Problem(n_var=len(low), n_obj=2, xl=np.array(low), xu=np.array(high), vtype=int)
        return algorithm.setup(problem, termination=("n_gen", 10**6), verbose=False)


def _losses(study: Study, names: list[str]) -> dict[tuple[int, ...], np.ndarray]:
    """Losses of each complete trial, by its parameters."""
    trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    points = losses([trial.values for trial in trials], [direction.name.lower() for direction in study.directions])
    return {tuple(trial.params[name] for name in names): row for trial, row in zip(trials, points, strict=True)}
