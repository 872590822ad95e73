"""Allocations: one layer budget per evictable decoder layer.

A layer budget is the number of KV pairs kept per KV head once the prompt is processed, observation window
included. This module is pure arithmetic: validation, mean, bytes, the exact-mean decode, rescaling and the
heuristic shapes. It imports neither torch nor anything else of the project.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

LARGEST = 10**9  # tokens a budget may have


@dataclass(frozen=True)
class Allocation:
    """Layer budgets in tokens, bottom layer first.

    Raises ValueError unless there is at least one budget and every budget is a whole number from 1 to LARGEST.
    """

    budgets: tuple[int, ...]

    def __init__(self, budgets: Sequence[int]) -> None:
        object.__setattr__(self, "budgets", _whole_budgets(budgets))

    def __len__(self) -> int:
        return len(self.budgets)

    @property
    def mean(self) -> float:
        """Mean layer budget in tokens: the memory objective."""
        return sum(self.budgets) / len(self.budgets)

    def realised(self, prompt_tokens: int) -> Allocation:
        """The lengths this allocation really gives to a prompt of `prompt_tokens` tokens."""
        return Allocation([min(budget, prompt_tokens) for budget in self.budgets])

    def kv_bytes(self, *, kv_heads: int, head_dim: int, element_bytes: int) -> int:
        """Bytes of the kept keys and values of one example, over all layers and KV heads."""
        return 2 * sum(self.budgets) * kv_heads * head_dim * element_bytes

    def rescale(self, mean: float, *, window: int, floor: int, cap: int) -> Allocation:
        """The same shape at another mean budget, met exactly (to a whole number of tokens over all layers).

        The window is taken off before and added after, so that it is the evictable part that is scaled.

        Args:
            mean: target mean budget in tokens.
            window: the eviction method's observation window in tokens.
            floor: smallest allowed layer budget.
            cap: largest allowed layer budget.

        Raises:
            ValueError: if no allocation within floor and cap has this mean.
        """
        base = min(window, floor)
        weights = [max(0, budget - base) for budget in self.budgets]
        return from_weights(weights, mean, floor=floor, cap=cap, base=base)

    def require_layers(self, layers: int) -> None:
        """Raise ValueError unless there is one budget for each of `layers` evictable layers."""
        if len(self.budgets) != layers:
            raise ValueError(
                f"allocation must have {layers} budgets, one per evictable layer; got {len(self.budgets)}"
            )


def uniform(layers: int, budget: int) -> Allocation:
    """The same budget for every layer."""
    return Allocation([budget] * layers)


def pyramid(layers: int, mean: float, *, window: int, floor: int, cap: int, beta: float = 20.0) -> Allocation:
    """PyramidKV's shape (arXiv 2406.02069): linear from a wide bottom layer to a narrow top layer.

    Beyond the window the top layer gets (B - W) / beta and the bottom layer what keeps the mean at B.
    """
    beyond = max(0.0, mean - window)
    narrow = beyond / beta
    weights = np.linspace(2 * beyond - narrow, narrow, layers)
    return from_weights(weights, mean, floor=floor, cap=cap, base=min(window, floor))


def from_weights(
    weights: Sequence[float] | npt.NDArray[Any], mean: float, *, floor: int, cap: int, base: int = 0
) -> Allocation:
    """Decode non-negative weights to the allocation proportional to them whose sum is exactly L * mean.

    Finds lambda with sum clip(base + lambda * w_i, floor, cap) = T, T = round(L * mean). What the positive
    weights cannot take is spread evenly over the layers of weight zero. Integers by largest remainder
    among the layers that are not at a bound, ties to the lower layer.

    Args:
        weights: (L,) finite and >= 0; all zero means uniform.
        mean: target mean budget in tokens.
        floor: smallest layer budget, >= 1.
        cap: largest layer budget, >= floor.
        base: tokens every layer gets before weights count (0 <= base <= floor).

    Raises:
        ValueError: for weights out of range or a mean outside [floor, cap] (the message names the range).
    """
    values = np.asarray(weights, dtype=np.float64)
    if values.ndim != 1 or values.size == 0 or not np.isfinite(values).all() or (values < 0).any():
        raise ValueError(f"weights must be a non-empty list of finite numbers >= 0; got {weights!r}")
    if not 1 <= floor <= cap:
        raise ValueError(f"floor and cap must satisfy 1 <= floor <= cap; got floor={floor}, cap={cap}")
    if not 0 <= base <= floor:
        raise ValueError(f"base must be between 0 and floor={floor}; got {base}")
    total = round(values.size * mean)
    if not values.size * floor <= total <= values.size * cap:
        raise ValueError(f"mean budget must be between {floor} and {cap} tokens; got {mean:g}")
    real = _proportional(values, total, floor, cap, base)
    return Allocation(_round_to_total(real, total, floor, cap))


def _proportional(values: npt.NDArray[Any], total: int, floor: int, cap: int, base: int) -> npt.NDArray[Any]:
    """Real-valued budgets clip(base + lambda * w, floor, cap) that sum to `total`."""
    positive = values > 0
    zeros = int((~positive).sum())
    most = int(positive.sum()) * cap + zeros * floor
    if total >= most:  # every positive weight is at its cap; the rest is shared evenly
        rest = (total - int(positive.sum()) * cap) / max(zeros, 1)
        return np.where(positive, float(cap), rest)
    # The sum is piecewise linear in lambda: it gains slope w_i where a layer leaves its floor and loses it
    # where the layer reaches its cap. Walk the sorted breakpoints to the segment that holds the total.
    slopes = values[positive] / values[positive].max()
    breakpoints = np.concatenate([(floor - base) / slopes, (cap - base) / slopes])
    order = np.argsort(breakpoints, kind="stable")
    at = breakpoints[order]
    slope = np.cumsum(np.concatenate([slopes, -slopes])[order])
    sums = values.size * floor + np.concatenate([[0.0], np.cumsum(slope[:-1] * np.diff(at))])
    segment = max(int(np.searchsorted(sums, total, side="right")) - 1, 0)
    scale = at[segment] + (max(total - sums[segment], 0.0) / slope[segment] if slope[segment] > 0 else 0.0)
    return np.clip(base + scale * values / values[positive].max(), floor, cap)


def _round_to_total(real: npt.NDArray[Any], total: int, floor: int, cap: int) -> list[int]:
    """Integers near `real` within the bounds whose sum is `total`: largest remainder, lower layer first."""
    down = np.floor(real + 1e-9).astype(np.int64)
    missing = total - int(down.sum())
    remainder = real - down
    while missing:  # more than one round only where a bound was reached
        step = 1 if missing > 0 else -1
        open_layers = np.flatnonzero(down < cap if step > 0 else down > floor)
        order = open_layers[np.argsort(-step * remainder[open_layers], kind="stable")]
        chosen = order[: abs(missing)]
        down[chosen] += step
        missing -= step * len(chosen)
    return [int(value) for value in down]


def parse(text: Any, *, layers: int) -> Allocation:
    """Read an allocation as a user writes it and check it has one budget per layer.

    Args:
        text: a list of budgets, `uniform:256`, or the path of a JSON file that holds a list, an object with
            `budgets`, or a `result.json` (its winner is taken).
        layers: number of evictable layers.

    Raises:
        ValueError: if it is none of these, or of the wrong length.
    """
    allocation = _read(text, layers)
    allocation.require_layers(layers)
    return allocation


def _read(text: Any, layers: int) -> Allocation:
    if not isinstance(text, str):
        return Allocation(text)
    kind, _, value = text.partition(":")
    if kind == "uniform" and value:
        if not value.isdigit():
            raise ValueError(f"allocation uniform:N takes a whole number of at least 1; got {text!r}")
        return uniform(layers, int(value))
    path = Path(text)
    if not path.is_file():
        raise ValueError(f"allocation must be a list of budgets, uniform:N or a JSON file; there is no file {text!r}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"allocation file {text!r} is not readable JSON: {error}") from error
    return Allocation(_budgets_in(content, text))


def _budgets_in(content: Any, source: str) -> Any:
    """The list of budgets in a parsed allocation file or result file."""
    if isinstance(content, dict) and isinstance(content.get("winner"), dict):
        content = content["winner"]
    if isinstance(content, dict):
        content = content.get("budgets")
    if not isinstance(content, list):
        raise ValueError(f"allocation file {source!r} must hold a list, or an object with 'budgets' or 'winner'")
    return content


def _whole_budgets(budgets: Any) -> tuple[int, ...]:
    if isinstance(budgets, str | bytes | dict) or not hasattr(budgets, "__iter__"):
        raise ValueError(f"allocation must be a list of whole numbers >= 1; got {budgets!r}")
    try:
        values = list(budgets)
    except TypeError:
        raise ValueError(f"allocation must be a list of whole numbers >= 1; got {budgets!r}") from None
    if not values:
        raise ValueError("allocation must have at least one budget; got an empty list")
    for layer, value in enumerate(values):
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if not whole or not 1 <= value <= LARGEST:
            raise ValueError(f"allocation budgets must be whole numbers from 1 to 10^9; layer {layer} has {value!r}")
    return tuple(int(value) for value in values)
