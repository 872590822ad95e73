"""A structured surrogate: each parameter adds a rising, saturating term to the signal, and the score follows it.

Where a study stores a smooth signal beside its score (the log-likelihood of the reference answers, say), effects
of single parameters add up in the signal even where the score needs several of them at once.
"""

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls
from sklearn.isotonic import IsotonicRegression

Floats = npt.NDArray[np.float64]

SCALES = (0.06, 0.2, 0.6)  # where terms saturate, in shares of the largest number
RIDGE = 1e-3  # penalty, relative to the mean column's weight


class Surrogate:
    """signal(x) = constant + sum over j, k of w_jk (1 - exp(-x_j / tau_k)), w >= 0; score = rising f(signal).

    Fitted by non-negative least squares with a weight for each observation (random weights give a bootstrap).

    Args:
        numbers: (n, d) what the parameters stand for, >= 0.
        signal: (n,) higher is better.
        score: (n,) higher is better.
        weights: (n,) >= 0, of the observations.
    """

    def __init__(self, numbers: Floats, signal: Floats, score: Floats, weights: Floats) -> None:
        self._largest = max(float(numbers.max()), 1e-300)
        terms = self._terms(numbers)
        weights = weights / weights.sum()
        self._middle = weights @ terms
        centre = float(weights @ signal)
        root = np.sqrt(weights)[:, None]
        design = root * (terms - self._middle)
        gram = design.T @ design
        gram[np.diag_indices_from(gram)] += RIDGE * gram.diagonal().mean() + 1e-12
        lower = np.linalg.cholesky(gram)
        target = np.linalg.solve(lower, design.T @ (root[:, 0] * (signal - centre)))
        self._weights, _ = nnls(lower.T, target)
        self._constant = centre
        self._score = IsotonicRegression(out_of_bounds="clip").fit(self.signal(numbers), score, sample_weight=weights)

    def signal(self, numbers: Floats) -> Floats:
        """Predicted signal (n,) of numbers (n, d)."""
        return self._constant + (self._terms(numbers) - self._middle) @ self._weights

    def score(self, numbers: Floats) -> Floats:
        """Predicted score (n,) of numbers (n, d)."""
        return np.asarray(self._score.predict(self.signal(numbers)))

    def gains(self, table: Floats) -> Floats:
        """What each parameter adds at each of its numbers: (d, levels) of a table (d, levels)."""
        return (self._saturation(table) * self._weights.reshape(len(table), 1, len(SCALES))).sum(axis=2)

    def _terms(self, numbers: Floats) -> Floats:
        """One row an observation, the terms of all parameters in it."""
        return self._saturation(numbers).reshape(len(numbers), -1)

    def _saturation(self, numbers: Floats) -> Floats:
        """How far each number is served on each scale, 0 to 1: one axis more, the scales."""
        return 1 - np.exp(-numbers[..., None] / (self._largest * np.array(SCALES)))


def knapsack_path(gains: Floats, costs: Floats) -> npt.NDArray[np.int64]:
    """Level indices (p, d) from all lowest to all highest, the step of most gain a cost first (greedy knapsack).

    A step may go up several levels of one parameter at once where that gains more a cost.

    Args:
        gains, costs: (d, levels), both rising along a row.
    """
    d, levels = gains.shape
    current = np.zeros(d, dtype=np.int64)
    path = [current.copy()]
    rows = np.arange(d)
    while (current < levels - 1).any():
        gained = gains - gains[rows, current][:, None]
        spent = costs - costs[rows, current][:, None]
        higher = np.arange(levels) > current[:, None]
        rate = np.where(higher, gained / np.where(higher, spent, 1.0), -np.inf)
        layer, level = np.unravel_index(int(rate.argmax()), rate.shape)
        current[layer] = level
        path.append(current.copy())
    return np.array(path)
