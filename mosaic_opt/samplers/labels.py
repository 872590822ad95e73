"""Which observations are good: the classifier's labels (BORE, arXiv 2102.09009; MBORE, arXiv 2203.16912)."""

import numpy as np
import numpy.typing as npt

from .pareto import contributions_2d, ideal_volumes, shells

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


def good(losses: Floats, *, share: float = 1 / 3) -> Bools:
    """The best `share` of losses (n, m), all minimised; ties at the border are all good.

    One objective: the best quantile. More: shell by shell, and inside the shell that does not fit whole the
    points with the largest hypervolume first (exclusive area in two objectives, the point's own volume in
    more).
    """
    if not 0 < share < 1:
        raise ValueError(f"share must lie between 0 and 1 (exclusive), got {share}")
    ranks = shells(losses)
    volumes = np.zeros(len(losses)) if losses.shape[1] == 1 else _volumes(losses, ranks)
    order = np.lexsort((-volumes, ranks))
    last = order[max(1, int(np.ceil(share * len(losses)))) - 1]
    return (ranks < ranks[last]) | ((ranks == ranks[last]) & (volumes >= volumes[last]))


def _volumes(losses: Floats, ranks: npt.NDArray[np.int64]) -> Floats:
    """Hypervolume (n,) that tells the points of one shell apart, objectives scaled to 0..1, reference 1.1."""
    span = np.ptp(losses, axis=0)
    scaled = (losses - losses.min(axis=0)) / np.where(span > 0, span, 1.0)
    reference = [1.1] * losses.shape[1]
    if losses.shape[1] > 2:
        return ideal_volumes(scaled, reference)
    volumes = np.zeros(len(losses))
    for rank in range(ranks.max() + 1):
        volumes[ranks == rank] = contributions_2d(scaled[ranks == rank], reference)
    return volumes


def break_ties(score: Floats, signal: Floats) -> Floats:
    """Score losses (n,) made strictly finer by a signal (n,), higher = better.

    Equal scores then differ by less than any gap between unequal ones. A NaN in the
    signal counts as the worst of its tie.
    """
    distinct = np.unique(score)
    gap = np.diff(distinct).min(initial=1.0)
    _, rank = np.unique(-np.where(np.isnan(signal), -np.inf, signal), return_inverse=True)
    return score + gap * 0.5 * rank.reshape(-1) / len(score)
