"""PaperSampler: the published MOSAIC search, as a control for MosaicSampler."""

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState
from scipy.optimize import differential_evolution
from scipy.special import expit
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier

from .mosaic import earlier, other_trials
from .pareto import losses, shells
from .space import Space, shared_space

Floats = npt.NDArray[np.float64]


class PaperSampler(BaseSampler):
    """Proposes what a perceptron, refitted on all trials, takes for most probably non-dominated.

    Labels: non-dominated or not. Classifier: scikit-learn's MLPClassifier, two layers of 32. Proposal: SciPy's
    differential evolution (best1bin, popsize 15, at most 1,000 generations, polished) maximises the
    probability over the continuous box; the parameters are then rounded, and nothing is done about duplicates.
    Only two things differ from what was published: the network is asked for a whole generation at once, and
    the random numbers derive from the seed and the number of earlier trials.

    Args:
        seed: at least 0.
        n_startup_trials: random trials before the first fit (an enqueued design counts), at least 1.
    """

    def __init__(self, *, seed: int, n_startup_trials: int = 10) -> None:
        if seed < 0:
            raise ValueError(f"seed must be at least 0, got {seed}")
        if n_startup_trials < 1:
            raise ValueError(f"n_startup_trials must be at least 1, got {n_startup_trials}")
        self._seed, self._n_startup_trials = seed, n_startup_trials

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """What the complete trials share."""
        return shared_space(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)))

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Plain Python values for every parameter of the space; nothing while trials are too few."""
        trials = [
            t for t in other_trials(study, trial) if t.state == TrialState.COMPLETE and np.isfinite(t.values).all()
        ]
        if not search_space or len(trials) < self._n_startup_trials:
            return {}
        space = Space(search_space)
        units, kept = space.units([t.params for t in trials])
        if not kept:
            return {}
        values = losses([trials[i].values for i in kept], [d.name.lower() for d in study.directions])
        rng = np.random.default_rng([self._seed, earlier(other_trials(study, trial), trial)])
        return space.parameters(space.box.snap(_most_probable(units, shells(values) == 0, rng)[None]))[0]

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """A uniform value."""
        count = earlier(other_trials(study, trial), trial)
        seed = np.random.SeedSequence([self._seed, count, *param_name.encode()]).generate_state(1)[0]
        return RandomSampler(seed=int(seed)).sample_independent(study, trial, param_name, param_distribution)


def _most_probable(units: Floats, labels: npt.NDArray[np.bool_], rng: np.random.Generator) -> Floats:
    """The point (d,) of the unit box with the highest P(non-dominated); a random one where all labels agree."""
    if labels.all() or not labels.any():
        return np.asarray(rng.random(units.shape[1]))
    classifier = MLPClassifier((32, 32), random_state=int(rng.integers(2**31)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        classifier.fit(units, labels)

    def improbability(columns: Floats) -> Any:
        """Of one point (d,), as the polishing asks, or of points (d, n); `predict_proba` without its input checks."""
        values = columns.T.reshape(-1, units.shape[1])
        for weights, intercepts in zip(classifier.coefs_[:-1], classifier.intercepts_[:-1], strict=True):
            values = np.maximum(values @ weights + intercepts, 0.0)
        values = -expit(values @ classifier.coefs_[-1] + classifier.intercepts_[-1])[:, 0]
        return values if columns.ndim == 2 else float(values[0])

    found = differential_evolution(
        improbability,
        [(0.0, 1.0)] * units.shape[1],
        popsize=15,
        maxiter=1000,
        vectorized=True,
        updating="deferred",
        rng=rng,
    )
    return np.asarray(found.x)
