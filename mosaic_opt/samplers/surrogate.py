"""A structured surrogate: each parameter adds a rising, saturating term to the signal, and the score follows it.

Where a study stores a smooth signal beside its score (the log-likelihood of the reference answers, say), effects
of single parameters add up in the signal even where the score needs several of them at once. Where it stores none,
the score itself is the signal, on the scale on which its effects add up best.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls
from sklearn.isotonic import IsotonicRegression

Floats = npt.NDArray[np.float64]

SCALES = (0.06, 0.2, 0.6)  # where terms saturate, in shares of the largest number
RIDGE = 1e-3  # penalty, relative to the mean column's weight
PRIOR = (0.1, 3.0)  # mean of the random prior, as shares of the signal's range spread evenly over the terms
CEILINGS = (0.03, 0.1, 0.3, 1.0)  # how far above the best score, in ranges of the score, it may saturate


class Surrogate:
    """signal(x) = constant + sum over j, k of w_jk (1 - exp(-x_j / tau_k)), w >= 0; score = rising f(signal).

    Non-negative least squares, twice: as they are, then drawn towards random small weights with a strength that
    falls with the size of the first fit's. What the observations determine stays; a parameter that they say little
    about gets a random share, so that it is tried now and then instead of staying at its least number for ever
    (Thompson sampling with random prior functions, arXiv 1806.03335). How large the random weights are is itself
    drawn: now bold, now cautious. Random weights of the observations add a
    bootstrap.

    Args:
        numbers: (n, d) what the parameters stand for, >= 0.
        signal: (n,) higher is better; None: the score, either as it is or as the negative logarithm of its distance
            to a ceiling, whichever the terms fit best (profile likelihood; Box and Cox 1964).
        score: (n,) higher is better.
        rng: of the observations' weights and the random prior; None: equal weights and no prior.
    """

    def __init__(
        self, numbers: Floats, signal: Floats | None, score: Floats, rng: np.random.Generator | None = None
    ) -> None:
        self._largest = max(float(numbers.max()), 1e-300)
        terms = self._terms(numbers)
        weights = np.ones(len(numbers)) if rng is None else rng.exponential(size=len(numbers))
        weights = weights / weights.sum()
        self._middle = weights @ terms
        root = np.sqrt(weights)
        design = root[:, None] * (terms - self._middle)
        gram = design.T @ design
        ridge = np.full(len(gram), RIDGE * gram.diagonal().mean() + 1e-12)
        best = -np.inf
        for target, log_slope in _scales(score) if signal is None else [(signal, np.zeros(1))]:
            centre = float(weights @ target)
            product = design.T @ (root * (target - centre))
            found = _nonnegative(gram, product, ridge)
            residual = float(((root * (target - centre) - design @ found) ** 2).sum())
            likelihood = float((weights * log_slope).sum()) - 0.5 * np.log(residual + 1e-300)
            if likelihood > best:
                best, self._constant, self._weights = likelihood, centre, found
                chosen, noise, share = product, residual / len(target), float(np.ptp(target)) / len(gram)
        if rng is not None:
            usual = share * np.exp(rng.uniform(*np.log(PRIOR)))
            strength = noise / np.maximum(usual**2 + self._weights**2, 1e-100) + 1e-12
            prior = rng.exponential(usual, size=len(gram))
            self._weights = _nonnegative(gram, chosen + strength * prior, strength)
        self._score = IsotonicRegression(out_of_bounds="clip").fit(self.signal(numbers), score, sample_weight=weights)

    def signal(self, numbers: Floats) -> Floats:
        """Predicted signal (n,) of numbers (n, d)."""
        return self._constant + (self._terms(numbers) - self._middle) @ self._weights

    def score(self, numbers: Floats) -> Floats:
        """Predicted score (n,) of numbers (n, d)."""
        return np.asarray(self._score.predict(self.signal(numbers))) if len(numbers) else np.empty(0)

    def gains(self, table: Floats) -> Floats:
        """What each parameter adds at each of its numbers: (d, levels) of a table (d, levels)."""
        return (self._saturation(table) * self._weights.reshape(len(table), 1, len(SCALES))).sum(axis=2)

    def _terms(self, numbers: Floats) -> Floats:
        """One row an observation, the terms of all parameters in it."""
        return self._saturation(numbers).reshape(len(numbers), numbers.shape[1] * len(SCALES))

    def _saturation(self, numbers: Floats) -> Floats:
        """How far each number is served on each scale, 0 to 1: one axis more, the scales."""
        return 1 - np.exp(-numbers[..., None] / (self._largest * np.array(SCALES)))


def _nonnegative(gram: Floats, product: Floats, ridge: Floats) -> Floats:
    """w >= 0 that minimises w' (gram + diag(ridge)) w / 2 - product' w."""
    lower = np.linalg.cholesky(gram + np.diag(ridge))
    return np.asarray(nnls(lower.T, np.linalg.solve(lower, product))[0])


def _scales(score: Floats) -> Iterator[tuple[Floats, Floats]]:
    """The score on several scales, and the logarithm of each scale's slope at each score (n,)."""
    yield score, np.zeros(len(score))
    span = np.ptp(score)
    for ceiling in CEILINGS if span > 0 else ():
        distance = score.max() + ceiling * span - score
        yield -np.log(distance), -np.log(distance)


def knapsack_path(gains: Floats, costs: Floats) -> npt.NDArray[np.int64]:
    """Level indices (p, d) from all lowest to all highest, the step of most gain a cost first (greedy knapsack).

    A step may go up several levels of one parameter at once where that gains more a cost.

    Args:
        gains, costs: (d, levels), both rising along a row.
    """
    d = len(gains)
    current = np.zeros(d, dtype=np.int64)
    path = [current.copy()]
    steps = [_steepest(gains[row], costs[row], 0) for row in range(d)]
    while True:
        row = max(range(d), key=lambda row: steps[row][0])
        level = steps[row][1]
        if level == 0:  # all are at the top
            return np.array(path)
        current[row] = level
        path.append(current.copy())
        steps[row] = _steepest(gains[row], costs[row], level)


def _steepest(gains: Floats, costs: Floats, level: int) -> tuple[float, int]:
    """The step up from a level that gains most a cost: how much, and to which level; (-inf, 0) at the top."""
    if level == len(gains) - 1:
        return -np.inf, 0
    rates = (gains[level + 1 :] - gains[level]) / (costs[level + 1 :] - costs[level])
    best = int(rates.argmax())
    return float(rates[best]), level + 1 + best
