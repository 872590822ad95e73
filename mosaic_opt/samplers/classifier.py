"""The probability that a configuration is good: a perceptron that copes with few and lopsided labels."""

import warnings

import numpy as np
import numpy.typing as npt
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier
from threadpoolctl import threadpool_limits

Floats = npt.NDArray[np.float64]


class Classifier:
    """P(good) from features, by scikit-learn's MLPClassifier.

    Features are standardised (a constant one becomes zero), both classes get the same total weight, L-BFGS
    fits on the whole set (a few hundred rows: quicker and smoother than Adam), `alpha` is the L2 penalty.
    Where all labels agree, the prediction is that label everywhere.
    """

    def __init__(
        self, *, seed: int, hidden: tuple[int, ...] = (32, 32), alpha: float = 1.0, iterations: int = 40
    ) -> None:
        if seed < 0:
            raise ValueError(f"seed must be at least 0, got {seed}")
        if iterations < 1:
            raise ValueError(f"iterations must be at least 1, got {iterations}")
        self._network = MLPClassifier(
            hidden, solver="lbfgs", alpha=alpha, max_iter=iterations, random_state=seed % 2**32
        )
        self._constant: float | None = None

    def fit(self, features: Floats, labels: npt.NDArray[np.bool_], weights: Floats | None = None) -> "Classifier":
        """Fit on features (n, k) and labels (n,); weights (n,) > 0 matter within a class only."""
        if len(features) == 0 or len(features) != len(labels):
            raise ValueError(
                f"features and labels must have the same length >= 1, got {len(features)}, {len(labels)}"
            )
        if labels.all() or not labels.any():
            self._constant = float(labels[0])
            return self
        self._constant = None
        self._mean = features.mean(axis=0)
        deviation = features.std(axis=0)
        self._scale = np.where(deviation > 1e-12, deviation, np.inf)
        balanced = _balanced(labels, np.ones(len(labels)) if weights is None else weights)
        # matrices this small are slower, up to tenfold, with more than one thread
        with threadpool_limits(1, "blas"), warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            self._network.fit(self._standardised(features), labels.astype(int), sample_weight=balanced)
        return self

    def predict_proba(self, features: Floats) -> Floats:
        """P(good) (n,) of features (n, k), one call for all rows."""
        if self._constant is not None:
            return np.full(len(features), self._constant)
        return np.asarray(self._network.predict_proba(self._standardised(features))[:, 1])

    def _standardised(self, features: Floats) -> Floats:
        return (features - self._mean) / self._scale


def _balanced(labels: npt.NDArray[np.bool_], weights: Floats) -> Floats:
    """Weights (n,) of mean 1 whose sums over the two classes are equal."""
    half = len(labels) / 2
    return np.where(labels, weights * half / weights[labels].sum(), weights * half / weights[~labels].sum())
