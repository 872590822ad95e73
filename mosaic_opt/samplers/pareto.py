"""Non-dominated sorting and hypervolume, pure numpy.

Conventions of the whole module: every objective is minimised (`losses` flips those to be maximised); a point
dominates another when it is no worse in every objective and better in one; equal points share a shell and
dominate nothing of each other; a point with a NaN compares with nothing and lies in one last shell of its
own; infinities compare as usual.
"""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def losses(points: npt.ArrayLike, directions: Sequence[str] | None = None) -> Floats:
    """Copy of points (n, m) with the objectives of direction "maximize" negated; None means minimise all."""
    values = np.array(points, dtype=float)
    if values.ndim != 2:
        raise ValueError(f"points must have two dimensions (points, objectives), got shape {values.shape}")
    if directions is None:
        return values
    if len(directions) != values.shape[1]:
        raise ValueError(f"directions must have length {values.shape[1]}, one an objective, got {len(directions)}")
    for direction in directions:
        if direction not in ("minimize", "maximize"):
            raise ValueError(f"directions must be 'minimize' or 'maximize', got {direction!r}")
    return values * np.where(np.array(list(directions)) == "maximize", -1.0, 1.0)


def shells(points: npt.ArrayLike, directions: Sequence[str] | None = None) -> Ints:
    """Rank (n,) of points (n, m): 0 = dominated by none, k = by none once shells 0..k-1 are removed.

    Two objectives take O(n log n) time; more take O(n^2) time and n^2 bytes.
    """
    values = losses(points, directions)
    comparable = ~np.isnan(values).any(axis=1)
    ranks = np.zeros(len(values), dtype=np.int64)
    if comparable.any():
        unique, inverse = np.unique(values[comparable], axis=0, return_inverse=True)
        ranks[comparable] = _unique_shells(unique)[inverse.reshape(-1)]
    ranks[~comparable] = ranks[comparable].max(initial=-1) + 1
    return ranks


def _unique_shells(points: Floats) -> Ints:
    """Shells of distinct points (n, m) in lexicographic order."""
    if points.shape[1] == 1:
        return np.arange(len(points))
    return _staircase_shells(points[:, 1]) if points.shape[1] == 2 else _peeled_shells(points)


def _staircase_shells(second: Floats) -> Ints:
    """Shells in two dimensions: the first objective never falls along the array, so only the second decides.

    The lowest second objective of each shell so far grows with the shell, hence the binary search.
    """
    lowest: list[float] = []
    ranks = np.empty(len(second), dtype=np.int64)
    for i, value in enumerate(second.tolist()):
        rank = bisect_right(lowest, value)
        lowest[rank : rank + 1] = [value]
        ranks[i] = rank
    return ranks


def _peeled_shells(points: Floats) -> Ints:
    """Shells in any dimension from the matrix of who dominates whom; the points are distinct."""
    dominates = np.ones((len(points), len(points)), dtype=bool)
    for column in points.T:
        dominates &= column[:, None] <= column[None, :]
    np.fill_diagonal(dominates, False)
    dominators = dominates.sum(axis=0)
    ranks = np.full(len(points), -1, dtype=np.int64)
    for rank in range(len(points)):
        shell = (dominators == 0) & (ranks < 0)
        if not shell.any():
            break
        ranks[shell] = rank
        dominators -= dominates[shell].sum(axis=0)
    return ranks


def hypervolume_2d(points: npt.ArrayLike, reference: Sequence[float]) -> float:
    """Area dominated by points (n, 2), both minimised, inside the corner `reference`.

    Points not strictly better than the reference in both objectives (also NaN) add nothing.
    """
    front = _front_2d(losses(points), np.asarray(reference, dtype=float))
    edges = np.append(front[1:, 0], reference[0])
    return float(np.sum((edges - front[:, 0]) * (reference[1] - front[:, 1])))


def contributions_2d(points: npt.ArrayLike, reference: Sequence[float]) -> Floats:
    """Area (n,) that would be lost without each of points (n, 2): zero for dominated and for equal points."""
    values = losses(points)
    front = _front_2d(values, np.asarray(reference, dtype=float))
    right = np.append(front[1:, 0], reference[0])
    above = np.append(reference[1], front[:-1, 1])
    place = {tuple(point): i for i, point in enumerate(front.tolist())}
    at = np.array([place.get(tuple(point), -1) for point in values.tolist()], dtype=np.int64)
    # what a point alone covers of its corner, less what dominated points would cover in its place
    areas = (right - front[:, 0]) * (above - front[:, 1])
    dominated = values[at < 0]
    if len(dominated):
        areas -= [hypervolume_2d(dominated, corner) for corner in zip(right, above, strict=True)]
    areas[np.bincount(at[at >= 0], minlength=len(front)) > 1] = 0.0
    return np.append(areas, 0.0)[at]


def _front_2d(values: Floats, reference: Floats) -> Floats:
    """Distinct non-dominated points strictly inside the reference; first objective rises, second falls."""
    if values.shape[1] != 2 or reference.shape != (2,):
        raise ValueError(f"points must be (n, 2) and reference (2,), got {values.shape} and {reference.shape}")
    inside = np.unique(values[(values < reference).all(axis=1)], axis=0)
    lower = np.minimum.accumulate(inside[:, 1])
    return inside[np.append(True, lower[1:] < lower[:-1])[: len(inside)]]


def ideal_volumes(points: npt.ArrayLike, reference: Sequence[float]) -> Floats:
    """Volume (n,) that each of points (n, m) dominates on its own inside the corner `reference`, any m."""
    return np.prod(np.maximum(np.asarray(reference, dtype=float) - losses(points), 0.0), axis=1)
