"""KV memory of a model, from its configuration alone: what a budget costs, what fits.

A model is what allocation files say of one: `layers` (indices of the evictable layers), `windows` (of the
sliding-window layers, which hold their window whatever the budget), `kv_heads`, `head_dim`, `element_bytes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mosaic_opt.allocation import LARGEST, window_pairs


def kv_bytes(model: Mapping[str, Any], *, context: int, batch: int, mean: float | None = None) -> int:
    """Bytes of the keys and values of so many prompts.

    Args:
        context: tokens of each prompt.
        mean: mean layer budget; None: the full cache.
    """
    each = context if mean is None else min(mean, context)
    return batch * _pair_bytes(model) * (round(len(model["layers"]) * each) + window_pairs(model["windows"], context))


def memory_plan(
    model: Mapping[str, Any],
    *,
    context: int,
    batch: int,
    mean: float | None = None,
    memory: int | None = None,
    floor: int = 1,
) -> dict[str, Any]:
    """What the full cache and a budget need, and what fits into so many bytes.

    Returns:
        `full_bytes`; with `mean` also `budget_bytes` and `share` of the full cache; with `memory` `fitting_mean` (the
        largest mean budget for this context and batch), `full_batch` and `full_context` (the largest that fit with
        the full cache, 0 where none does) and, with `mean`, `budget_batch`.

    Raises:
        ValueError: for a memory in which not even budgets of `floor` fit (says what is needed).
    """
    layers, pair = len(model["layers"]), _pair_bytes(model)
    full = kv_bytes(model, context=context, batch=batch)
    found: dict[str, Any] = {"full_bytes": full}
    if mean is not None:
        needed = kv_bytes(model, context=context, batch=batch, mean=mean)
        found |= {"budget_bytes": needed, "share": needed / full}
    if memory is None:
        return found
    least = kv_bytes(model, context=context, batch=batch, mean=floor)
    if memory < least:
        raise ValueError(
            f"memory must be at least {least} bytes for {batch} x {context} tokens at the smallest budget of "
            f"{floor}; got {memory}"
        )
    pairs = memory // (batch * pair) - window_pairs(model["windows"], context)
    found["fitting_mean"] = min(pairs / layers, context)
    found["full_batch"] = memory // kv_bytes(model, context=context, batch=1)
    found["full_context"] = _largest_context(model, batch, memory)
    if mean is not None:
        found["budget_batch"] = memory // kv_bytes(model, context=context, batch=1, mean=mean)
    return found


def expected_score(rows: Sequence[Mapping[str, Any]], mean: float) -> dict[str, Any] | None:
    """The score to be expected of refined allocations at a mean budget, linear between those that were measured.

    Args:
        rows: of a result (`result.json`).

    Returns:
        `score` (0 to 1) and `interval` (95 %); None outside the budgets that were measured.

    Raises:
        ValueError: for rows that are not a result's.
    """
    try:
        known = sorted(_point(row) for row in rows if row["allocation"] == "refined")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"result rows must have allocation, mean_budget, score and score_interval; got {error!r}"
        ) from error
    if not known or not known[0][0] <= mean <= known[-1][0]:
        return None
    means, *values = np.array(known).T
    score, low, high = (float(np.interp(mean, means, value)) for value in values)
    return {"score": score, "interval": [low, high]}


def _point(row: Mapping[str, Any]) -> tuple[float, float, float, float]:
    """Mean budget, score and the ends of its interval."""
    low, high = row["score_interval"]
    return float(row["mean_budget"]), float(row["score"]), float(low), float(high)


def _pair_bytes(model: Mapping[str, Any]) -> int:
    """Bytes of one key and value in all KV heads of a layer."""
    return int(2 * model["kv_heads"] * model["head_dim"] * model["element_bytes"])


def _largest_context(model: Mapping[str, Any], batch: int, memory: int) -> int:
    """The longest prompts whose full caches fit; 0 where not even one token does."""
    low, high = 0, LARGEST
    while low < high:
        middle = (low + high + 1) // 2
        if kv_bytes(model, context=middle, batch=batch) <= memory:
            low = middle
        else:
            high = middle - 1
    return low
