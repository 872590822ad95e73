"""Allocations: one layer budget per evictable decoder layer.

A layer budget is the number of KV pairs kept per KV head once the prompt is processed, observation window
included. This module is pure arithmetic: validation, mean, bytes, the exact-mean decode, rescaling and the
heuristic shapes; and the allocation file, which says besides the budgets what they are for
(`allocation.schema.json`). It imports neither torch nor anything else of the project.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

LARGEST = 10**9  # tokens a budget may have
MOST = 10_000  # layers, heads of a layer, or elements of a head that a model may have
FORMAT, VERSION = "mosaic_opt/allocation", 1  # of allocation files
FILE_BYTES = 2**22  # more no allocation file may have
UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


@dataclass(frozen=True)
class Allocation:
    """Layer budgets in tokens, bottom layer first.

    Attributes:
        budgets: one per evictable layer.
        about: what an allocation file says besides (`model`, `eviction`, `floor`, `cap`, `task`, `scores` ...; see
            `allocation.schema.json`); empty where nothing is known. Allocations of equal budgets are equal.

    Raises ValueError unless there is at least one budget and every budget is a whole number from 1 to LARGEST.
    """

    budgets: tuple[int, ...]
    about: Mapping[str, Any] = field(compare=False, repr=False)

    def __init__(self, budgets: Sequence[int], about: Mapping[str, Any] | None = None) -> None:
        object.__setattr__(self, "budgets", _whole_budgets(budgets))
        object.__setattr__(self, "about", dict(about or {}))

    def __len__(self) -> int:
        return len(self.budgets)

    @property
    def mean(self) -> float:
        """Mean layer budget in tokens: the memory objective."""
        return sum(self.budgets) / len(self.budgets)

    def realised(self, prompt_tokens: int) -> Allocation:
        """The lengths this allocation really gives to a prompt of `prompt_tokens` tokens."""
        return Allocation([min(budget, prompt_tokens) for budget in self.budgets])

    def kv_bytes(
        self,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        element_bytes: int | None = None,
        context: int | None = None,
        batch: int = 1,
    ) -> int:
        """Bytes of the kept keys and values of the evictable layers, over all KV heads.

        Args:
            kv_heads, head_dim, element_bytes: of the model; None takes what the allocation file says.
            context: tokens of the prompt, of which a layer cannot keep more than there are; None: enough.
            batch: prompts in memory at once.

        Raises:
            ValueError: if something of the model is neither given nor known.
        """
        kept = self if context is None else self.realised(context)
        pair = self._pair_bytes(kv_heads=kv_heads, head_dim=head_dim, element_bytes=element_bytes)
        return batch * sum(kept.budgets) * pair

    def rescale(
        self, mean: float, *, window: int | None = None, floor: int | None = None, cap: int | None = None
    ) -> Allocation:
        """The same shape at another mean budget, met exactly (to a whole number of tokens over all layers).

        The window is taken off before and added after, so that it is the evictable part that is scaled.

        Args:
            mean: target mean budget in tokens.
            window: the eviction method's observation window in tokens.
            floor: smallest allowed layer budget.
            cap: largest allowed layer budget. Each is what the allocation file says where it is not given.

        Raises:
            ValueError: if no allocation within floor and cap has this mean, or one of them is not known.
        """
        floor = self._known("floor", floor, self.about.get("floor"))
        cap = self._known("cap", cap, self.about.get("cap"))
        method = self.about.get("eviction")
        base = min(self._known("window", window, method and method.get("window", 0)), floor)
        weights = [max(0, budget - base) for budget in self.budgets]
        return self._derived(from_weights(weights, mean, floor=floor, cap=cap, base=base), cap=cap)

    def fit(self, *, memory: str | int, context: int, batch: int = 1) -> Allocation:
        """The same shape at the largest mean budget whose KV pairs fit into so much memory.

        Layers with a sliding window count with what they hold. Tokens generated after the prompt are not counted.

        Args:
            memory: bytes, or text such as `2GiB` or `500MB`.
            context: tokens of a prompt; no layer gets more.
            batch: prompts in memory at once.

        Raises:
            ValueError: if the memory is too small for the smallest budgets (says what is needed), or the allocation
                does not know its model, floor or window.
        """
        require_range("context", context, 1, LARGEST)
        require_range("batch", batch, 1, LARGEST)
        room, pair_bytes = parse_bytes(memory), batch * self._pair_bytes()
        floor = min(self._known("floor", None, self.about.get("floor")), context)
        held = window_pairs(self.about["model"].get("windows", []), context)
        pairs, least = room // pair_bytes - held, len(self) * floor
        if pairs < least:
            raise ValueError(
                f"memory must be at least {(least + held) * pair_bytes} bytes for {batch} x {context} tokens at the "
                f"smallest budget of {floor}; got {room}"
            )
        return self.rescale(min(pairs / len(self), context), floor=floor, cap=context)

    def distance(self, other: Allocation) -> float:
        """Between two shapes: the share of the pairs that would have to move to other layers (total variation).

        Returns:
            0 (one is the other at another mean budget) to below 1.

        Raises:
            ValueError: if they have not the same number of layers.
        """
        other.require_layers(len(self))
        shares, others = (np.array(each.budgets) / sum(each.budgets) for each in (self, other))
        return float(np.abs(shares - others).sum() / 2)

    def round_to(self, block: int) -> Allocation:
        """The nearest allocation in whole blocks (of a paged cache), its total rounded down.

        None gets less than its floor needs, or one block.

        Raises:
            ValueError: for a block below 1.
        """
        require_range("block", block, 1, LARGEST)
        least = math.ceil(self.about.get("floor", 1) / block)
        real = np.maximum(np.array(self.budgets) / block, least)
        total = max(sum(self.budgets) // block, least * len(self))
        blocks = _round_to_total(real, total, least, LARGEST)
        return self._derived(Allocation([count * block for count in blocks]))

    def save(self, path: str | Path) -> None:
        """Write an allocation file, whole or not at all.

        Raises:
            ValueError: if what is said `about` it does not fit the file's schema.
        """
        text = self.to_json()
        _checked_content(json.loads(text), str(path))
        part = Path(path).with_name(f"{Path(path).name}.{os.getpid()}.part")
        part.write_text(text, encoding="utf-8")
        part.replace(path)

    def to_json(self) -> str:
        """The content of an allocation file."""
        content = {"format": FORMAT, "version": VERSION, **self.about, "budgets": self.budgets, "mean": self.mean}
        return json.dumps(content, indent=2, allow_nan=False)

    @classmethod
    def load(cls, path: str | Path) -> Allocation:
        """Read an allocation file (`save` writes them).

        Raises:
            ValueError: for a file that is not one, or a newer one, or is larger than FILE_BYTES.
        """
        return _from_content(_json_of(Path(path)), str(path))

    def _pair_bytes(self, **given: int | None) -> int:
        """Bytes of one key and value in all KV heads of a layer."""
        model = self.about.get("model", {})
        names = ("kv_heads", "head_dim", "element_bytes")
        return 2 * math.prod(self._known(name, given.get(name), model.get(name)) for name in names)

    def _known(self, name: str, given: int | None, known: int | None) -> int:
        value = known if given is None else given
        if value is None:
            raise ValueError(f"{name} must be given, as this allocation does not say it; got None")
        return value

    def _derived(self, made: Allocation, **about: Any) -> Allocation:
        """Other budgets made from these, with what is still true of them: what was measured is not."""
        if not self.about:
            return made
        kept = {key: value for key, value in self.about.items() if key != "scores"}
        provenance = {"derived_from_mean": self.mean, **self.about.get("provenance", {})}
        return Allocation(made.budgets, {**kept, **about, "provenance": provenance})

    def require_layers(self, layers: int) -> None:
        """Raise ValueError unless there is one budget for each of `layers` evictable layers."""
        if len(self.budgets) != layers:
            raise ValueError(
                f"allocation must have {layers} budgets, one per evictable layer; got {len(self.budgets)}"
            )


def window_pairs(windows: Sequence[int], context: int) -> int:
    """Pairs that layers with sliding windows of so many tokens hold of one prompt."""
    return sum(min(window, context) for window in windows)


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
        text: a list of budgets, `uniform:256`, or the path of a JSON file: an allocation file, a `result.json` (its
            winner is taken), a list, or an object with `budgets`.
        layers: number of evictable layers.

    Raises:
        ValueError: if it is none of these, or of the wrong length.
    """
    allocation = _read(text, layers)
    allocation.require_layers(layers)
    return allocation


def parse_several(texts: Sequence[Any]) -> list[Allocation]:
    """Read allocations of one model, each as `parse` does; those that are not uniform say how many layers it has.

    Raises:
        ValueError: if they do not have the same number of layers, or all are uniform.
    """
    layers = next((len(_read(text, 0)) for text in texts if not _is_uniform(text)), None)
    if layers is None:
        raise ValueError(f"allocations must hold one that says how many layers there are; got {list(texts)}")
    read = [_read(text, layers) for text in texts]
    for text, allocation in zip(texts, read, strict=True):
        if len(allocation) != layers:
            raise ValueError(f"allocations must all be of {layers} layers; {text!r} is of {len(allocation)}")
    return read


def _is_uniform(text: Any) -> bool:
    return isinstance(text, str) and text.startswith("uniform:")


def _read(text: Any, layers: int) -> Allocation:
    if not isinstance(text, str):
        return Allocation(text)
    if _is_uniform(text):
        value = text.removeprefix("uniform:")
        if not value.isdigit():
            raise ValueError(f"allocation uniform:N takes a whole number of at least 1; got {text!r}")
        return uniform(layers, int(value))
    if not Path(text).is_file():
        raise ValueError(f"allocation must be a list of budgets, uniform:N or a JSON file; there is no file {text!r}")
    content = _json_of(Path(text))
    if isinstance(content, dict) and "format" in content:
        return _from_content(content, text)
    if isinstance(content, dict) and "winner" in content and "about" in content:
        return winner_of(content, text)
    return Allocation(_budgets_in(content, text))


def winner_of(result: Mapping[str, Any], source: str) -> Allocation:
    """The winner of what a `result.json` holds, with what it says it is about.

    Args:
        source: where the result is from, for messages.

    Raises:
        ValueError: if it has no winner, or what it is about does not fit an allocation file's schema.
    """
    about = result["about"] if isinstance(result["about"], dict) else {}
    budgets = _budgets_in(result, source)
    return _from_content({"format": FORMAT, "version": VERSION, **about, "budgets": budgets}, source)


def _json_of(path: Path) -> Any:
    """What a JSON file holds. Raises ValueError for another file, numbers that are not finite, or a huge file."""
    if not path.is_file():
        raise ValueError(f"allocation file must be there; got {str(path)!r}")
    try:
        with path.open("rb") as file:
            text = file.read(FILE_BYTES + 1)
        if len(text) > FILE_BYTES:
            raise ValueError(f"it has more than {FILE_BYTES} bytes")
        return json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"allocation file {str(path)!r} is not readable JSON: {_short(str(error))}") from error


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"numbers must be finite; got {_short(text)}")
    return float(text)


def _from_content(content: Any, source: str) -> Allocation:
    content = _checked_content(content, source)
    about = {key: value for key, value in content.items() if key not in ("format", "version", "budgets", "mean")}
    return Allocation(content["budgets"], about)


def _checked_content(content: Any, source: str) -> dict[str, Any]:
    """The content of an allocation file. Raises ValueError where it does not fit the schema or itself."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    name = f"allocation file {source!r}"
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{name} must be an object whose format is {FORMAT!r}; got {_short(repr(content))}")
    version = content.get("version")
    if isinstance(version, int) and version > VERSION:
        raise ValueError(
            f"{name} must have a version up to {VERSION} (a newer one needs a newer mosaic_opt); "
            f"got {_short(str(version))}"
        )
    error = best_match(Draft202012Validator(schema()).iter_errors(content))
    if error is not None:
        where = ".".join(str(part) for part in error.absolute_path)
        raise ValueError(f"{name} does not fit its schema{where and ' at ' + where}: {_short(error.message)}")
    budgets, layers = _whole_budgets(content["budgets"]), content.get("model", {}).get("layers")
    mean, floor, cap = content.get("mean"), content.get("floor", 1), content.get("cap", LARGEST)
    if mean is not None and abs(mean * len(budgets) - sum(budgets)) > 1e-6 * sum(budgets):
        raise ValueError(f"{name} must have the mean of its budgets, {sum(budgets) / len(budgets):g}; got {mean:g}")
    if not floor <= min(budgets) <= max(budgets) <= cap:
        raise ValueError(
            f"{name} must have budgets from floor={floor} to cap={cap}; got {min(budgets)} to {max(budgets)}"
        )
    if layers is not None and len(layers) != len(budgets):
        raise ValueError(f"{name} must have a budget for each of {len(layers)} model.layers; got {len(budgets)}")
    return content


def schema() -> dict[str, Any]:
    """The JSON Schema of allocation files."""
    text = (resources.files("mosaic_opt") / "allocation.schema.json").read_text(encoding="utf-8")
    read: dict[str, Any] = json.loads(text)
    return read


def parse_bytes(text: str | int) -> int:
    """Bytes of text such as `2GiB`, `1.5 GB`, `4096`. Raises ValueError for anything else, or below one byte."""
    found = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([a-z]*)\s*", str(text).lower())
    count = float(found[1]) * UNITS.get(found[2], 0) if found else 0
    if count < 1:
        raise ValueError(f"memory must be bytes or text such as 2GiB or 500MB; got {text!r}")
    return int(count)


def require_range(name: str, value: Any, least: int, most: int) -> None:
    """Raise ValueError unless a value is a whole number of this range."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} must be a whole number between {least} and {most}; got {value!r}")


def _short(text: str) -> str:
    return text if len(text) <= 160 else f"{text[:100]} ... {text[-50:]}"


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
