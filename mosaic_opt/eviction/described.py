"""Evictions as allocation files describe them: a method from its description, a file applied to a live model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from mosaic_opt.allocation import MOST, Allocation, require_range
from mosaic_opt.eviction.adakv import AdaKV
from mosaic_opt.eviction.attach import Eviction, attach, fitting_layers
from mosaic_opt.eviction.attention import evictable_layers, sliding_windows
from mosaic_opt.eviction.base import EvictionMethod
from mosaic_opt.eviction.expected_attention import ExpectedAttention
from mosaic_opt.eviction.h2o import H2O
from mosaic_opt.eviction.keydiff import KeyDiff
from mosaic_opt.eviction.l2norm import L2Norm
from mosaic_opt.eviction.snapkv import SnapKV
from mosaic_opt.eviction.streamingllm import StreamingLLM
from mosaic_opt.eviction.tova import TOVA

METHODS: dict[str, type[EvictionMethod]] = {
    method.__name__: method for method in (SnapKV, H2O, AdaKV, L2Norm, StreamingLLM, TOVA, KeyDiff, ExpectedAttention)
}


def method_of(described: Mapping[str, Any]) -> EvictionMethod:
    """The method that gives this description (see `EvictionMethod.describe`).

    Raises:
        ValueError: for an unknown name, or parameters or a version that the method does not have.
    """
    name = described.get("name")
    if not isinstance(name, str) or name not in METHODS:
        raise ValueError(f"eviction name must be one of {', '.join(METHODS)}; got {name!r}")
    parameters = {key: value for key, value in described.items() if key not in ("name", "version")}
    try:
        method = METHODS[name](**parameters)
    except TypeError as error:
        raise ValueError(f"eviction {name} must have parameters that it knows; got {parameters}") from error
    version = method.describe()["version"]
    if described.get("version", version) != version:
        raise ValueError(f"eviction {name} must be of version {version}; got {described['version']!r}")
    return method


def kv_shape(config: PreTrainedConfig) -> dict[str, Any]:
    """What a model caches, as allocation files say it: `layers`, `windows`, `kv_heads`, `head_dim`.

    Raises:
        ValueError: for a number of layers, heads or elements that no model has.
        UnsupportedModel: if no layer can be evicted.
    """
    text = config.get_text_config(decoder=True)
    for name in ("num_hidden_layers", "num_attention_heads"):
        require_range(name, getattr(text, name, None), 1, MOST)
    heads = text.num_attention_heads
    kv_heads, head_dim = (getattr(text, name, None) for name in ("num_key_value_heads", "head_dim"))
    kv_heads = heads if kv_heads is None else kv_heads
    head_dim = text.hidden_size // heads if head_dim is None else head_dim
    require_range("num_key_value_heads", kv_heads, 1, MOST)
    require_range("head_dim", head_dim, 1, MOST)
    return {
        "layers": list(evictable_layers(text)),
        "windows": list(sliding_windows(text).values()),
        "kv_heads": kv_heads,
        "head_dim": head_dim,
    }


@contextmanager
def apply(model: PreTrainedModel, allocation: Allocation | str | Path, **options: Any) -> Iterator[Eviction]:
    """Evict while inside, as an allocation file says: its budgets, its method, its parameters.

    Args:
        model: see `attach`.
        allocation: an allocation that was loaded, or its file.
        options: of `attach` (`prompt_ends_at`, `hold_budget`).

    Yields:
        The `Eviction` (see `attach`).

    Raises:
        ValueError: as `attach`; or if the file names no eviction method, or was made for another model.
    """
    loaded = allocation if isinstance(allocation, Allocation) else Allocation.load(allocation)
    if "eviction" not in loaded.about:
        raise ValueError("allocation must say which eviction method it is for; use attach(model, method, allocation)")
    method = method_of(loaded.about["eviction"])
    require_model(loaded, model.config, method)
    with attach(model, method, loaded, **options) as eviction:
        yield eviction


def require_model(allocation: Allocation, config: PreTrainedConfig, method: EvictionMethod) -> None:
    """Raise ValueError unless an allocation fits a model with this configuration, by all that its file says."""
    fitting_layers(config, method, allocation)
    meant, here = allocation.about.get("model", {}), kv_shape(config)
    for name, value in here.items():
        if meant.get(name, value) != value:
            raise ValueError(
                f"allocation must be for a model with {name}={value}; got one for {meant['id']!r} with {meant[name]}"
            )
