"""A search space as arrays: every parameter is one column of units in 0..1, whatever its kind.

A number with a step owns an equal slice of 0..1 for each of its levels, so uniform units are fair; a
logarithmic one is uniform in the logarithm; a nominal one (categories without order) holds the index of its
choice in the same way.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Box:
    """Columns (d,): inclusive bounds, step (0 = continuous), log scale, nominal (values are indices).

    pinned: units (d,) that snapped rows have in any case, NaN where they are free; None: all are.
    """

    low: Floats
    high: Floats
    step: Floats
    log: npt.NDArray[np.bool_]
    nominal: npt.NDArray[np.bool_]
    pinned: Floats | None = None

    def __post_init__(self) -> None:
        if not np.all(self.low <= self.high):
            raise ValueError(f"low must be at most high, got {self.low} and {self.high}")
        if np.any(self.log & (self.low - self.step / 2 <= 0)):
            raise ValueError(f"low must be above step / 2 where log is true, got {self.low[self.log]}")

    @property
    def dimension(self) -> int:
        """Number of columns d."""
        return len(self.low)

    @cached_property
    def levels(self) -> Floats:
        """Number of distinct values a column (d,), infinite where continuous, 1 where pinned."""
        span = self.high - self.low
        safe = np.where(self.step > 0, self.step, 1.0)
        levels = np.where(self.step > 0, np.round(span / safe) + 1, np.where(span > 0, np.inf, 1.0))
        return levels if self.pinned is None else np.where(np.isnan(self.pinned), levels, 1.0)

    @property
    def size(self) -> float:
        """Number of distinct configurations, possibly infinite."""
        return float(np.prod(self.levels))

    @cached_property
    def _range(self) -> tuple[Floats, Floats]:
        """Ends (d,) of the scale on which units are uniform: half a step beyond the bounds, in logarithms."""
        low, high = self.low - self.step / 2, self.high + self.step / 2
        low, high = np.where(self.log, np.log(np.where(self.log, low, 1.0)), low), high
        return low, np.where(self.log, np.log(np.where(self.log, high, 1.0)), high)

    def values(self, units: Floats) -> Floats:
        """Values (n, d) of units (n, d) in 0..1, on the steps and inside the bounds."""
        low, high = self._range
        raw = low + np.clip(units, 0.0, 1.0) * (high - low)
        raw = np.where(self.log, np.exp(np.where(self.log, raw, 0.0)), raw)
        safe = np.where(self.step > 0, self.step, 1.0)
        # floor(x + 0.5) and not round, which rounds halves to even and would be unfair at the slices' edges
        stepped = self.low + self.step * np.floor((raw - self.low) / safe + 0.5)
        return np.clip(np.where(self.step > 0, stepped, raw), self.low, self.high)

    def units(self, values: Floats) -> Floats:
        """Inverse of `values`: the middle of each value's slice (0.5 in a column of one value)."""
        low, high = self._range
        scale = np.where(self.log, np.log(np.where(self.log, values, 1.0)), values)
        width = np.where(high > low, high - low, 1.0)
        return np.where(high > low, (scale - low) / width, 0.5)

    def snap(self, units: Floats) -> Floats:
        """Units (n, d) moved to the middle of the slice in which they lie, and to where they are pinned."""
        snapped = self.units(self.values(units))
        return snapped if self.pinned is None else np.where(np.isnan(self.pinned), snapped, self.pinned)

    def features(self, units: Floats) -> Floats:
        """Snapped units (n, k) with every nominal column replaced by one column a choice."""
        columns = [units[:, ~self.nominal]]
        for j in np.flatnonzero(self.nominal):
            choices = np.arange(self.high[j] + 1)
            columns.append((self.values(units)[:, j, None] == choices).astype(float))
        return np.concatenate(columns, axis=1)

    def sample(self, count: int, rng: np.random.Generator) -> Floats:
        """Snapped units (count, d), uniform and independent."""
        return self.snap(rng.random((count, self.dimension)))

    def latin_hypercube(self, count: int, rng: np.random.Generator) -> Floats:
        """Snapped units (count, d) that fall evenly over each column."""
        cells = rng.permuted(np.tile(np.arange(count), (self.dimension, 1)), axis=1).T
        return self.snap((cells + rng.random((count, self.dimension))) / count)

    def grid(self) -> Floats:
        """Snapped units (size, d) of every configuration; the size must be finite."""
        counts = self.levels.astype(np.int64)
        index = np.stack(np.unravel_index(np.arange(int(self.size)), counts), axis=1)
        return self.snap((index + 0.5) / counts)

    def mutate(self, parents: Floats, rng: np.random.Generator, *, width: float = 0.2) -> Floats:
        """Snapped copies of parents (n, d), a few columns of each changed.

        Numbers move by normal steps of at least about one level, half of the time balanced (what one column
        gains, another loses); nominal columns draw any choice.
        """
        n, d = parents.shape
        rate = np.minimum(rng.geometric(0.4, size=(n, 1)) + 1, d) / d
        chosen = rng.random((n, d)) < rate
        chosen[np.arange(n), rng.integers(d, size=n)] = True
        size = np.maximum(width * rng.random((n, 1)) * 2, 0.8 / np.minimum(self.levels, 1e6))
        move = np.where(chosen, rng.normal(size=(n, d)) * size, 0.0)
        balanced = (rng.random((n, 1)) < 0.5) & (chosen.sum(axis=1, keepdims=True) > 1)
        move -= np.where(balanced & chosen, (move.sum(axis=1) / chosen.sum(axis=1))[:, None], 0.0)
        moved = np.clip(parents + move, 0.0, 1.0)
        return self.snap(np.where(self.nominal & chosen, rng.random((n, d)), moved))
