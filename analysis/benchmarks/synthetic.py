"""A synthetic allocation problem with a known truth, for comparing proposers.

30 layers take whole budgets of 1 to 16 units of 32 tokens. A layer with budget b is served to 1 - exp(-b / tau); what
is served adds up by weight (five middle layers weigh most), with 18 pairwise terms; the score saturates in that sum.
In the conjunctive form the score is also multiplied by how well each of the four heaviest layers is served, so that
one starved layer ruins it, while the log-likelihood adds up as before.
"""

import numpy as np
import numpy.typing as npt

from mosaic_opt.samplers.pareto import hypervolume_2d

LAYERS, LEVELS, UNIT = 30, 16, 32
NOISE = 0.004  # standard deviation of an observed score


class Synthetic:
    """Problem `seed`; `true` and `observe` take whole units (30,)."""

    def __init__(self, seed: int, *, conjunctive: bool = False) -> None:
        rng = np.random.default_rng(1234 + seed)
        self.conjunctive = conjunctive
        weight = rng.lognormal(-0.2, 0.9, LAYERS)
        middle = rng.choice(np.arange(9, 21), 5, replace=False)
        weight[middle] *= rng.uniform(5, 10, 5)
        self.weight = weight / weight.sum()
        self.tau = rng.uniform(40, 260, LAYERS)
        self.pairs = []
        for _ in range(14):
            i, j = rng.choice(LAYERS, 2, replace=False)
            self.pairs.append((i, j, rng.normal(0, 0.02)))
        for k in range(4):
            self.pairs.append((middle[k], middle[k + 1], rng.choice([-1, 1]) * rng.uniform(0.03, 0.08)))
        self.heavy = np.argsort(-self.weight)[:4]

    def true(self, units: npt.ArrayLike) -> tuple[float, float, float]:
        """Mean budget in tokens, score, log-likelihood, all without noise."""
        budget = np.asarray(units, float) * UNIT
        served = 1 - np.exp(-budget / self.tau)
        z = served @ self.weight + sum(c * served[i] * served[j] for i, j, c in self.pairs)
        score, likelihood = 1 - np.exp(-2.2 * max(z, 0.0)), 12 * (z - 1)
        if self.conjunctive:
            score *= np.prod(served[self.heavy])
            likelihood += 2 * np.log(served[self.heavy]).sum()
        return float(budget.mean()), float(score), float(likelihood)

    def observe(self, units: npt.ArrayLike, rng: np.random.Generator) -> tuple[float, float, float]:
        """The same with noise on score and log-likelihood."""
        mean, score, likelihood = self.true(units)
        return mean, score + rng.normal(0, NOISE), likelihood + rng.normal(0, 0.1)


def initial_design(seed: int) -> list[npt.NDArray[np.int64]]:
    """20 points: eight uniform ones, and log-normal ones over a range of means."""
    rng = np.random.default_rng(seed)
    ladder = np.unique(np.round(np.geomspace(1, LEVELS, 8)).astype(int))
    design = [np.full(LAYERS, level) for level in ladder]
    while len(design) < 20:
        mean = np.exp(rng.uniform(np.log(1.5), np.log(LEVELS * 0.8)))
        shape = rng.lognormal(0, rng.uniform(0.2, 0.9), LAYERS)
        design.append(np.clip(np.round(shape / shape.mean() * mean), 1, LEVELS).astype(int))
    return design


def hypervolume(points: list[tuple[float, float]], smallest: float, largest: float) -> float:
    """Of (mean budget, score); budgets scaled to 0..1 between two uniform ones, reference (1, 0)."""
    return hypervolume_2d([((mean - smallest) / (largest - smallest), -score) for mean, score in points], (1.0, 0.0))
