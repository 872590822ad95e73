"""The next configuration from the observations so far: classifier, then evolution (pure arrays)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy.spatial.distance import cdist

from .box import Box
from .classifier import Classifier
from .evolution import maximise
from .labels import good, ranks
from .pareto import shells
from .surrogate import Surrogate, knapsack_path

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# width of the gaps beyond a front's ends, as a share of the first loss's range
REACH = 0.1
# most levels a parameter may have for a knapsack path
PATH_LEVELS = 64
# configurations whose units differ by less, on average over the columns, are nearly the same
NEAR = 0.02


@dataclass(frozen=True)
class Description:
    """What n configurations stand for: features (n, k), keys (equal = the same), known first loss (n,)."""

    features: Floats
    keys: list[bytes]
    known: Floats | None

    def take(self, index: Sequence[int] | Ints) -> "Description":
        """The configurations of these indices."""
        known = None if self.known is None else self.known[index]
        return Description(self.features[index], [self.keys[i] for i in index], known)


Describe = Callable[[Floats], Description]


@dataclass(frozen=True)
class Observations:
    """Finished trials in canonical order: units (n, d), features (n, k), losses (n, m), all minimised.

    signal (n,), higher is better, stands beside the last loss (None: there is none); violation (n,) of the
    constraints, 0 = feasible.
    """

    units: Floats
    features: Floats
    losses: Floats
    signal: Floats | None
    violation: Floats

    def take(self, index: Ints) -> "Observations":
        """The observations of these indices."""
        signal = None if self.signal is None else self.signal[index]
        return Observations(
            self.units[index], self.features[index], self.losses[index], signal, self.violation[index]
        )

    @cached_property
    def ranks(self) -> Ints:
        """Rank (n,): 0 = the front, those that violate a constraint last."""
        return ranks(self.losses, self.violation)

    @property
    def front(self) -> Ints:
        """Indices of the front."""
        return np.flatnonzero(self.ranks == 0)


@dataclass(frozen=True)
class Taken:
    """What shall not be proposed: keys of stored configurations, neighbourhoods of the pending ones.

    pending: snapped units (p, d) of what is under evaluation or waits for it; description: of the same.
    """

    keys: frozenset[bytes]
    pending: Floats
    description: Description

    @classmethod
    def of(cls, units: Floats, description: Description) -> "Taken":
        """Nothing stored, all of these pending."""
        return cls(frozenset(description.keys), units, description)

    def free(self, units: Floats, keys: Sequence[bytes]) -> Bools:
        """Which of units (n, d) with these keys are neither stored nor nearly pending."""
        untried = np.array([key not in self.keys for key in keys], dtype=bool)
        apart = cdist(units, self.pending, "cityblock") / units.shape[1]
        return untried & (apart >= NEAR).all(axis=1)


@dataclass(frozen=True)
class Target:
    """Where the next proposal shall lie: parents (p,) to mutate, interval of the first loss or None."""

    parents: Ints
    interval: tuple[float, float] | None


class Proposer:
    """The settings of the algorithm; every call of `propose` stands for itself."""

    def __init__(
        self,
        *,
        exploration: float = 0.05,
        structured: float = 0.75,
        n_candidates: int = 64,
        n_generations: int = 12,
        n_observations: int = 600,
    ) -> None:
        for name, share in (("exploration", exploration), ("structured", structured)):
            if not 0 <= share <= 1:
                raise ValueError(f"{name} must lie between 0 and 1, got {share}")
        if n_candidates < 16:
            raise ValueError(f"n_candidates must be at least 16, got {n_candidates}")
        if n_generations < 0:
            raise ValueError(f"n_generations must be at least 0, got {n_generations}")
        if n_observations < 16:
            raise ValueError(f"n_observations must be at least 16, got {n_observations}")
        self._exploration, self._structured = exploration, structured
        self._n_candidates = n_candidates
        self._n_generations = n_generations
        self._n_observations = n_observations

    def propose(
        self,
        observations: Observations,
        describe: Describe,
        taken: Taken,
        box: Box,
        rng: np.random.Generator,
        *,
        explore: bool = False,
    ) -> tuple[Floats, str]:
        """Snapped units (d,) of the next configuration and its origin: "surrogate", "classifier" or "random".

        explore: random in any case.
        """
        if rng.random() >= self._exploration and not explore:
            if rng.random() < self._structured:
                row = _by_surrogate(observations, describe, taken, box, rng)
                if row is not None:
                    return row, "surrogate"
            row = self._guided(observations, describe, taken, box, rng)
            if row is not None:
                return row, "classifier"
        mutated = rng.random() < 0.5
        parents = observations.units[rng.choice(observations.front, 16)] if mutated else np.empty((0, box.dimension))
        return self.untried(describe, taken, box, rng, parents), "random"

    def untried(
        self,
        describe: Describe,
        taken: Taken,
        box: Box,
        rng: np.random.Generator,
        parents: Floats | None = None,
    ) -> Floats:
        """An untried mutation of parents (p, d), else an untried random row, else (all tried) any row."""
        fresh = box.grid()[rng.permutation(int(box.size))] if box.size <= 1024 else box.sample(256, rng)
        if parents is not None and len(parents):
            fresh = np.concatenate([box.mutate(parents, rng), fresh])
        row = _first_untried(fresh, describe, taken)
        return fresh[-1] if row is None else row

    def _guided(
        self,
        observations: Observations,
        describe: Describe,
        taken: Taken,
        box: Box,
        rng: np.random.Generator,
    ) -> Floats | None:
        """The untried configuration of the highest P(good) that the evolution met, or None."""
        learned, labels = _training_set(observations, self._n_observations)
        features = np.concatenate([learned.features, taken.description.features])
        labels = np.append(labels, np.zeros(len(taken.pending), dtype=bool))
        classifier = Classifier(seed=int(rng.integers(2**31))).fit(features, labels)
        target = _target(observations.losses, observations.front, _bounds(observations, describe, box), rng)

        def probability(units: Floats) -> Floats:
            description = describe(units)
            return classifier.predict_proba(description.features) - _distance(description.known, target.interval)

        count = self._n_candidates - self._n_candidates // 8
        parents = observations.units[target.parents[rng.integers(len(target.parents), size=count)]]
        initial = np.concatenate([box.mutate(parents, rng), box.sample(self._n_candidates // 8, rng)])
        points, _ = maximise(probability, box, initial, rng, generations=self._n_generations)
        return _first_untried(points, describe, taken)


def _by_surrogate(
    observations: Observations,
    describe: Describe,
    taken: Taken,
    box: Box,
    rng: np.random.Generator,
) -> Floats | None:
    """The untried point of a surrogate's knapsack path that would add most hypervolume to the front.

    None where the numbers are not one for each parameter, or there are not two objectives with the first known.
    """
    table = _table(observations, describe, box)
    if table is None:
        return None
    d = box.dimension
    surrogate = Surrogate(observations.features[:, :d], observations.signal, -observations.losses[:, 1], rng)
    units = (knapsack_path(surrogate.gains(table), table) + 0.5) / box.levels
    units = box.snap(units)
    description = describe(units)
    free = taken.free(units, description.keys)
    feasible = observations.violation <= 0
    if not feasible.all():
        judge = Classifier(seed=int(rng.integers(2**31))).fit(observations.features, feasible)
        free &= judge.predict_proba(description.features) >= 0.5
    fresh = np.flatnonzero(free)
    if not len(fresh):
        return None

    def believed(rows: Description) -> Floats:
        assert rows.known is not None
        return np.column_stack([rows.known, -surrogate.score(rows.features[:, :d])])

    gained = _gain(
        np.concatenate([observations.losses[observations.front], believed(taken.description)]),
        believed(description.take(fresh)),
        (_bounds(observations, describe, box)[1], float(observations.losses[:, 1].max())),
    )
    # equal gains (often none): the likeliest to raise the score above what it is there
    order = np.lexsort((surrogate.signal(description.features[fresh, :d]), gained))
    return np.asarray(units[fresh[order[-1]]])


def _table(observations: Observations, describe: Describe, box: Box) -> Floats | None:
    """The number (d, levels) that each parameter stands for at each of its levels; None where it has no such."""
    d, levels = box.dimension, box.levels
    if observations.losses.shape[1] != 2 or levels[0] > PATH_LEVELS or (levels != levels[0]).any():
        return None
    every = np.repeat((np.arange(levels[0])[:, None] + 0.5) / levels[0], d, axis=1)
    description = describe(box.snap(every))
    if description.known is None or description.features.shape[1] != d + 1:
        return None
    table = description.features[:, :d].T
    at = np.minimum((observations.units * levels).astype(np.int64), levels.astype(np.int64) - 1)
    separable = np.array_equal(table[np.arange(d), at], observations.features[:, :d])
    return table if separable and (np.diff(table, axis=1) > 0).all() and (table >= 0).all() else None


def _gain(front: Floats, points: Floats, reference: tuple[float, float]) -> Floats:
    """Hypervolume (k,) that each of points (k, 2) would add to other points (n, 2), up to a reference."""
    front = np.unique(front[shells(front) == 0], axis=0)
    first, second = front.T
    left = np.concatenate([[-np.inf], first])
    right = np.concatenate([first, [reference[0]]])
    height = np.concatenate([[reference[1]], second])
    width = np.clip(right - np.maximum(left, points[:, :1]), 0.0, None)
    return (width * np.clip(height - points[:, 1:], 0.0, None)).sum(axis=1)


def _training_set(observations: Observations, limit: int) -> tuple[Observations, npt.NDArray[np.bool_]]:
    """At most `limit` observations, their labels: the best third of the limit, the rest evenly by shell."""
    count = len(observations.losses)
    if count <= limit:
        return observations, good(observations.losses, observations.violation)
    labels = good(observations.losses, observations.violation, share=limit / 3 / count)
    positive = np.flatnonzero(labels)[: limit // 2]
    rest = np.flatnonzero(~labels)
    rest = rest[np.argsort(observations.ranks[rest], kind="stable")]
    rest = rest[np.linspace(0, len(rest) - 1, min(len(rest), limit - len(positive))).astype(int)]
    kept = np.sort(np.concatenate([positive, rest]))
    return observations.take(kept), labels[kept]


def _target(losses: Floats, front: Ints, bounds: tuple[float, float], rng: np.random.Generator) -> Target:
    """A gap of a two-objective front, drawn by the area a point inside could gain at most; else the front.

    The first objective is known before the evaluation, so a proposal can be asked to fall into the gap:
    proposals spread along the front instead of crowding where the classifier is surest. One more gap lies
    beyond each end: REACH of the first loss's range wide, but inside its bounds, so none where
    the front ends at the box's own end. To the left a point gains up to the worst second loss, to the right
    at most what the front's last step gained.
    """
    order = front[np.lexsort(losses[front].T[::-1])]
    if losses.shape[1] != 2:
        return Target(order, None)
    order = order[shells(losses[order]) == 0]  # the least violating of a study without feasible points are no front
    first, second = losses[order].T
    reach = REACH * (bounds[1] - bounds[0])
    step = (second[-2] if len(order) > 1 else losses[:, 1].max()) - second[-1]
    left, right = max(bounds[0], first[0] - reach), min(bounds[1], first[-1] + reach)
    first = np.concatenate([[left], first, [right]])
    second = np.concatenate([[losses[:, 1].max()], second, [second[-1] - step]])
    with np.errstate(over="ignore", invalid="ignore"):  # penalties as large as floats go
        areas = np.diff(first) * -np.diff(second)
        total = areas.sum()
    if not 0 < total < np.inf:
        return Target(order, None)
    gap = int(rng.choice(len(areas), p=areas / total))
    return Target(order[max(0, gap - 2) : gap + 2], (first[gap], first[gap + 1]))


def _bounds(observations: Observations, describe: Describe, box: Box) -> tuple[float, float]:
    """Least and largest first loss observed or, where it is known, found at two opposite corners of the box.

    These are its true bounds if it is monotone.
    """
    first = observations.losses[:, 0]
    known = describe(box.snap(np.stack([np.zeros(box.dimension), np.ones(box.dimension)]))).known
    first = first if known is None else np.append(first, known)
    return float(first.min()), float(first.max())


def _distance(known: Floats | None, interval: tuple[float, float] | None) -> Floats | float:
    """How far outside the interval each known first loss (n,) lies, in lengths of the interval."""
    if known is None or interval is None:
        return 0.0
    low, high = interval
    return np.maximum(0.0, np.maximum(low - known, known - high)) / (high - low)


def _first_untried(units: Floats, describe: Describe, taken: Taken) -> Floats | None:
    """First free row of units (n, d), else the first that is untried; described in blocks, as decoding costs."""
    untried: Floats | None = None
    for start in range(0, len(units), 64):
        block = units[start : start + 64]
        keys = describe(block).keys
        free = np.flatnonzero(taken.free(block, keys))
        if len(free):
            return block[free[0]]
        if untried is None:
            untried = next((row for row, key in zip(block, keys, strict=True) if key not in taken.keys), None)
    return untried
