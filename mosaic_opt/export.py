"""Allocations in the forms that other tools take."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mosaic_opt.allocation import Allocation, require_range

# our method -> kvpress's class and its arguments for our parameters
PRESSES: dict[str, tuple[str, dict[str, str]]] = {
    "SnapKV": ("SnapKVPress", {"window": "window_size", "kernel": "kernel_size"}),
    "TOVA": ("TOVAPress", {}),
    "L2Norm": ("KnormPress", {}),
    "KeyDiff": ("KeyDiffPress", {}),
    "StreamingLLM": ("StreamingLLMPress", {"sinks": "n_sink"}),
    "ExpectedAttention": ("ExpectedAttentionPress", {"sinks": "n_sink"}),
    "H2O": ("ObservedAttentionPress", {}),
}


def exported(allocation: Allocation, form: str, *, prompt_tokens: int | None = None) -> bytes:
    """A file's content in one of FORMATS.

    Args:
        prompt_tokens: length of the prompts, for `kvpress` and `lukv`, which speak of shares.

    Raises:
        ValueError: for an unknown format, or where the allocation file or `prompt_tokens` lacks what it needs.
    """
    if form not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}; got {form!r}")
    if form in NEED_LENGTH:
        require_range("prompt_tokens", prompt_tokens, 1, 10**7)
    return FORMATS[form](allocation, prompt_tokens or 0)


def kvpress_ratios(budgets: Sequence[int], prompt_tokens: int) -> list[float]:
    """kvpress's compression ratio of each layer, the share of its pairs that go.

    kvpress keeps int(n * (1 - ratio)) of n pairs. The ratios aim at half a pair above the budget, so that neither
    truncation nor rounding moves the count: it is min(budget, n).
    """
    return [max(0.0, 1 - (budget + 0.5) / prompt_tokens) if budget < prompt_tokens else 0.0 for budget in budgets]


def lukv_curve(allocation: Allocation, prompt_tokens: int) -> npt.NDArray[np.float64]:
    """LU-KV's budget curve (arXiv 2602.08585): the allocation's shape at every mean.

    Returns:
        (99, L, G): share of a prompt's pairs that goes, for mean shares of 1 % to 99 %, per layer and KV head (all
        heads of a layer alike). The floor gives way where the mean is below it.
    """
    heads = _said(allocation, "model", "kv_heads")
    floor, window = allocation.about.get("floor", 1), allocation.about.get("eviction", {}).get("window", 0)
    kept = []
    for percent in range(99, 0, -1):
        mean = max(1.0, prompt_tokens * percent / 100)
        least = max(1, min(floor, int(mean)))
        kept.append(allocation.rescale(mean, window=window, floor=least, cap=prompt_tokens).budgets)
    pruned = 1 - np.array(kept, dtype=np.float64) / prompt_tokens
    return np.repeat(pruned[:, :, None], heads, axis=2)


def _json(allocation: Allocation, prompt_tokens: int) -> bytes:
    return allocation.to_json().encode()


def _kvpress(allocation: Allocation, prompt_tokens: int) -> bytes:
    method = dict(_said(allocation, "eviction"))
    if method["name"] not in PRESSES:
        raise ValueError(f"eviction must be one of kvpress's per layer, {', '.join(PRESSES)}; got {method['name']!r}")
    press, names = PRESSES[method["name"]]
    arguments = {theirs: method[ours] for ours, theirs in names.items() if ours in method}
    ratios = kvpress_ratios(_every_layer(allocation, prompt_tokens), prompt_tokens)
    return _text(
        {
            "press": press,
            "arguments": arguments,
            "compression_ratios": ratios,
            "prompt_tokens": prompt_tokens,
            "use": f"PerLayerCompressionPress({press}(**arguments), compression_ratios)",
        }
    )


def _lukv(allocation: Allocation, prompt_tokens: int) -> bytes:
    if allocation.about.get("model", {}).get("windows"):
        raise ValueError("format lukv must have a model without sliding windows; this allocation's has some")
    file = io.BytesIO()
    np.save(file, lukv_curve(allocation, prompt_tokens), allow_pickle=False)
    return file.getvalue()


def _tensorrt_llm(allocation: Allocation, prompt_tokens: int) -> bytes:
    """KvCacheConfig's max_attention_window: a layer sees its last tokens only, whatever the eviction method was."""
    note = "recency only: each layer keeps its last tokens, not those that the eviction method would keep"
    return _text({"kv_cache_config": {"max_attention_window": _every_layer(allocation)}, "note": note})


def _kvcache_factory(allocation: Allocation, prompt_tokens: int) -> bytes:
    """The list of every layer's `max_capacity_prompt` (observation window included)."""
    return _text(_every_layer(allocation))


def _csv(allocation: Allocation, prompt_tokens: int) -> bytes:
    layers = allocation.about.get("model", {}).get("layers", range(len(allocation)))
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["layer", "budget"])
    writer.writerows(zip(layers, allocation.budgets, strict=True))
    return file.getvalue().encode()


FORMATS: dict[str, Callable[[Allocation, int], bytes]] = {
    "json": _json,
    "kvpress": _kvpress,
    "lukv": _lukv,
    "tensorrt_llm": _tensorrt_llm,
    "kvcache_factory": _kvcache_factory,
    "csv": _csv,
}
NEED_LENGTH = ("kvpress", "lukv")


def _every_layer(allocation: Allocation, whole: int | None = None) -> list[int]:
    """What every layer of the model keeps: its budget; those that are not evicted their window, or `whole`."""
    model = allocation.about.get("model", {})
    windows, layers = list(model.get("windows", [])), model.get("layers", range(len(allocation)))
    budgets = dict(zip(layers, allocation.budgets, strict=True))
    if max(budgets) >= len(budgets) + len(windows):
        raise ValueError("allocation must be for a model whose layers all have full or sliding-window attention")
    return [
        budgets[layer] if layer in budgets else (windows.pop(0) if whole is None else whole)
        for layer in range(len(budgets) + len(windows))
    ]


def _said(allocation: Allocation, *names: str) -> Any:
    """What the allocation file says there. Raises ValueError if it does not."""
    value: Any = allocation.about
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    if value is None:
        raise ValueError(f"allocation must be a file that says {'.'.join(names)} for this format; it does not")
    return value


def _text(content: Any) -> bytes:
    return json.dumps(content, indent=2).encode()
