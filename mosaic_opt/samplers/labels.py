"""Which observations are good: the classifier's labels (BORE, arXiv 2102.09009; MBORE, arXiv 2203.16912)."""

import numpy as np
import numpy.typing as npt

from .pareto import contributions_2d, ideal_volumes, shells

NOISE = 1e-12
BEYOND = 0.1  # how far beyond the finite losses an infinite one is taken to lie, in ranges of these

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def good(losses: Floats, violation: Floats | None = None, *, share: float = 1 / 3) -> Bools:
    """The best `share` of losses (n, m), all minimised; ties at the border are all good.

    One objective: the best quantile. More: shell by shell, and inside the shell that does not fit whole the
    points with the largest hypervolume first (exclusive area in two objectives, the point's own volume in
    more). Points that violate a constraint (violation (n,) above 0) come after all others, see `ranks`.
    """
    if not 0 < share < 1:
        raise ValueError(f"share must lie between 0 and 1 (exclusive), got {share}")
    ranked = ranks(losses, np.zeros(len(losses)) if violation is None else violation)
    count = max(1, int(np.ceil(share * len(losses))))
    border = np.sort(ranked)[count - 1]
    labels = ranked < border
    shell = np.flatnonzero(ranked == border)
    volumes = np.zeros(len(shell)) if losses.shape[1] == 1 else _volumes(losses, shell)
    labels[shell] = volumes >= np.sort(volumes)[::-1][count - labels.sum() - 1]
    return labels


def ranks(losses: Floats, violation: Floats) -> Ints:
    """Rank (n,) of losses (n, m) under constraints: shells of the feasible, then the others by their violation.

    violation (n,): 0 = feasible (Deb's rule, NSGA-II).
    """
    feasible = violation <= 0
    ranked = np.empty(len(losses), dtype=np.int64)
    ranked[feasible] = shells(losses[feasible])
    ranked[~feasible] = ranked[feasible].max(initial=-1) + 1 + np.unique(violation[~feasible], return_inverse=True)[1]
    return ranked


def _volumes(losses: Floats, shell: Ints) -> Floats:
    """Hypervolume (k,) that tells a shell's points (k,) apart, objectives scaled to 0..1, reference 1.1."""
    span = np.ptp(losses, axis=0)
    scaled = (losses[shell] - losses.min(axis=0)) / np.where(span > 0, span, 1.0)
    reference = [1.1] * losses.shape[1]
    return contributions_2d(scaled, reference) if losses.shape[1] == 2 else ideal_volumes(scaled, reference)


def bounded(losses: Floats) -> Floats:
    """Losses (n, m) whose infinities lie just beyond the finite values of their objective."""
    values = losses.copy()
    for column in values.T:
        finite = column[np.isfinite(column)]
        low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 0.0)
        with np.errstate(over="ignore"):
            margin = BEYOND * (high - low) or 1.0
            column[np.isinf(column)] = np.nan_to_num(np.clip(column, low - margin, high + margin))[np.isinf(column)]
    return values


def break_ties(score: Floats, signal: Floats) -> Floats:
    """Score losses (n,) made strictly finer by a signal (n,), higher = better.

    Equal scores then differ by less than any gap between unequal ones. Scores closer than NOISE of their span count
    as equal: sums of the same numbers in another order. A NaN in the signal counts as the worst of its tie.
    """
    distinct = np.unique(score)
    gaps = np.diff(distinct)
    gap = gaps[gaps > NOISE * np.ptp(score)].min(initial=1.0)
    _, rank = np.unique(-np.where(np.isnan(signal), -np.inf, signal), return_inverse=True)
    return score + gap * 0.5 * rank.reshape(-1) / len(score)
