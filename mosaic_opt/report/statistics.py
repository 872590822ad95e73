"""Paired comparisons over examples, and the cache that uniform allocation needs for a score."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESAMPLES = 10_000


def paired_gain(
    scores: Sequence[float], baseline: Sequence[float], *, seed: int = 0, level: float = 0.95
) -> tuple[float, float, float]:
    """Mean difference over the same examples, with its percentile bootstrap interval.

    Args:
        scores, baseline: (N,) scores of the same examples in the same order, N >= 1.
        seed: of the resampling.
        level: coverage of the interval, in (0, 1).

    Returns:
        (gain, lower bound, upper bound), in the unit of the scores.

    Raises:
        ValueError: if the two differ in length or are empty.
    """
    if len(scores) != len(baseline) or not scores:
        raise ValueError(f"paired scores must be as many as the baseline's, >= 1; got {len(scores)}, {len(baseline)}")
    differences = np.asarray(scores, dtype=float) - np.asarray(baseline, dtype=float)
    draws = np.random.default_rng(seed).integers(0, len(differences), size=(RESAMPLES, len(differences)))
    means = differences[draws].mean(axis=1)
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(differences.mean()), float(low), float(high)


def gain_text(gain: float, interval: Sequence[float]) -> str:
    """A gain and its interval as tables show them, in points."""
    low, high = interval
    return f"{100 * gain:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


def uniform_budget_for(score: float, curve: Sequence[tuple[float, float]]) -> float | None:
    """Smallest mean budget at which uniform allocation reaches `score`, linear between the curve's points.

    Args:
        score: what is to be reached.
        curve: (mean budget, score) of uniform allocations.

    Returns:
        Tokens; None if no point of the curve reaches the score.
    """
    points = sorted(curve)
    before: tuple[float, float] | None = None
    for budget, reached in points:
        if reached >= score:
            if before is None or reached == before[1]:
                return float(budget)
            share = (score - before[1]) / (reached - before[1])
            return float(before[0] + share * (budget - before[0]))
        before = (budget, reached)
    return None


def cache_ratio(
    score: float, mean: float, curve: Sequence[tuple[float, float]], full: float, *, least: float = 0.2
) -> float | None:
    """Uniform budget that reaches an allocation's score, divided by the allocation's mean budget.

    None where uniform never reaches the score, or where the score is zero or below `least` of the full
    cache's (there a ratio says nothing).
    """
    needed = uniform_budget_for(score, curve)
    if needed is None or score <= 0 or score < least * full:
        return None
    return needed / mean
