"""One attention function for every architecture.

Registered with transformers under names of its own (one a backend), it sees the rotated queries, keys and values
of each layer, asks the `ForwardPass` for that layer's mask, lets the model's own backend attend, and then tells
the pass. The pass travels as a keyword argument of the model's forward, so there is no global state. Layers
that cannot be evicted go straight to the backend with the mask it would have had.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mosaic_opt.eviction.base import PromptStates

NAME = "mosaic"
BACKENDS = ("sdpa", "eager")


class UnsupportedModel(ValueError):
    """A model whose layers, or whose attention, eviction cannot work with."""


class ForwardPass:
    """What one forward of the model needs to know: a mask per layer, and what to do after each layer.

    Args:
        layers: indices of the model's evictable layers; the others are left to the backend.
    """

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.index = {layer: index for index, layer in enumerate(layers)}

    def mask(self, index: int, queries: int, keys: int, present: torch.Tensor | None) -> torch.Tensor | None:
        """The mask of the evictable layer `index`: bool, (B or 1, 1 or G, queries, keys), True where allowed.

        None means no mask for a single query and the causal mask for a whole prompt.

        Args:
            present: (B, tokens seen) bool, False at padding; None if there is no padding.
        """
        raise NotImplementedError

    def attended(self, index: int, states: PromptStates, present: torch.Tensor | None) -> None:
        """Called after the layer's attention with the states it saw (`padding` not filled in)."""


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    backend: str,
    scaling: float,
    mosaic_pass: ForwardPass | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention function: mask of this layer, the backend's attention, then the pass's own work."""
    if mosaic_pass is None:
        raise UnsupportedModel(
            f"{type(module).__name__} cannot be evicted: the model's layers do not pass keyword arguments on to it"
        )
    kwargs = {**kwargs, "scaling": scaling, "softcap": softcap, "s_aux": s_aux}
    layer: int = module.layer_idx  # type: ignore[assignment]
    index = mosaic_pass.index.get(layer)
    if index is None:
        return _backend(backend, module)(module, query, key, value, attention_mask, **kwargs)
    mask = mosaic_pass.mask(index, query.shape[2], key.shape[2], attention_mask)
    if backend == "eager":
        output, weights = _attend_eagerly(module, query, key, value, mask, **kwargs)
    elif mask is not None and query.shape[2] <= query.shape[3]:
        output, weights = _attend_grouped(query, key, value, mask, **kwargs)
    else:
        output, weights = _backend(backend, module)(module, query, key, value, _per_query_head(mask, query), **kwargs)
    states = PromptStates(query, key, value, scaling, softcap=softcap, sinks=s_aux)
    mosaic_pass.attended(index, states, attention_mask)
    return output, weights


def _backend(name: str, module: torch.nn.Module) -> Callable[..., Any]:
    """transformers' attention function of that name; eager ones are the model's own."""
    if name == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[name]


def _attend_eagerly(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The model's own eager function, which takes an additive mask per query head and knows no causality."""
    bias = None
    if mask is None and query.shape[2] > 1:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=key.device).tril()[None, None]
    mask = _per_query_head(mask, query)
    if mask is not None:
        bias = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
    return _backend("eager", module)(module, query, key, value, bias, **kwargs)


def _per_query_head(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """A mask per KV head, (B, G, q, k), as one per query head; masks of all heads as they are."""
    if mask is None or mask.shape[1] == 1:
        return mask
    return mask.repeat_interleave(query.shape[1] // mask.shape[1], dim=1)


class _Ungrouped(torch.nn.Module):
    """Stands for an attention module whose query heads are already grouped by KV head."""


_UNGROUPED = _Ungrouped()


def _attend_grouped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """sdpa with a mask, the query heads of a KV head stacked along the queries.

    transformers' own function repeats K and V for every query head as soon as there is a mask; stacked, only the
    mask is repeated, which is less for few queries.

    Args:
        query: (B, H, q, d). key, value: (B, G, k, d). mask: (B or 1, 1 or G, q, k) bool.

    Returns:
        (B, q, H, d), None.
    """
    B, H, q, d = query.shape
    G = key.shape[1]
    stacked = query.reshape(B, G, H // G * q, d)
    mask = mask.repeat(1, 1, H // G, 1)
    output, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](_UNGROUPED, stacked, key, value, mask, **kwargs)
    return output.view(B, H // G, q, G, -1).permute(0, 2, 3, 1, 4).reshape(B, q, H, -1), None


def _mask(
    *,
    backend: str,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Mask registration: the 2-D padding mask for full attention, the backend's own mask for local attention.

    Raises:
        ValueError: for a mask that is more than causal and padding (images, packed sequences ...).
    """
    if local_size is not None:
        own = ALL_MASK_ATTENTION_FUNCTIONS[backend]
        return own(
            attention_mask=attention_mask, local_size=local_size, allow_is_causal_skip=allow_is_causal_skip, **kwargs
        )
    if not allow_is_causal_skip:
        raise ValueError("eviction needs plain causal attention; this forward asks for another mask")
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask


@contextmanager
def attention_switched(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Route the attention of the model's decoder through this module; restores on leaving.

    Inside, every forward must be given `mosaic_pass=` (a `ForwardPass`).

    Yields:
        The decoder: what holds the layers.

    Raises:
        ValueError: if the model is attached already, in training mode, or uses a backend that is not
            supported; `UnsupportedModel` if its attention cannot be exchanged.
    """
    decoder = model.get_decoder()
    if not isinstance(decoder, PreTrainedModel):
        raise UnsupportedModel(f"{model.config.model_type}: no decoder with attention layers of its own was found")
    own = decoder.config._attn_implementation
    if own.startswith(NAME):
        raise ValueError("model is attached already: leave the first context before entering another")
    if own not in BACKENDS:
        raise ValueError(
            f"attention implementation must be one of {', '.join(BACKENDS)}; this model uses {own!r} "
            f"(load it with attn_implementation='{BACKENDS[0]}')"
        )
    if model.training:
        raise ValueError("model is in training mode: call model.eval() before evicting")
    name = f"{NAME}_{own}"
    AttentionInterface.register(name, partial(_attention, backend=own))
    AttentionMaskInterface.register(name, partial(_mask, backend=own))
    try:
        decoder.set_attn_implementation(name)
        if decoder.config._attn_implementation != name:
            raise UnsupportedModel(
                f"{decoder.config.model_type}: the attention of this model cannot be exchanged; no eviction"
            )
        yield decoder
    finally:
        decoder.set_attn_implementation(own)


def evictable_layers(config: PreTrainedConfig) -> tuple[int, ...]:
    """Indices of the decoder layers whose pairs can be evicted: those with full attention over K and V heads.

    Raises:
        UnsupportedModel: if there is none, naming the layers and what they are.
    """
    config = config.get_text_config(decoder=True)
    kinds = [type(layer) for layer in DynamicCache(config=config).layers]
    evictable = tuple(index for index, kind in enumerate(kinds) if kind is DynamicLayer)
    if evictable and getattr(config, "kv_lora_rank", None):
        raise UnsupportedModel(
            f"{config.model_type}: layers {list(evictable)} cache latents shared by all heads (MLA), not keys and "
            "values per head; they cannot be evicted"
        )
    shared = getattr(config, "num_kv_shared_layers", None)
    if shared:
        raise UnsupportedModel(
            f"{config.model_type}: the last {shared} layers read the keys and values of layers before them; layers "
            f"{list(evictable)} cannot be evicted"
        )
    if not evictable:
        found = sorted({kind.__name__.removeprefix("Dynamic") for kind in kinds})
        raise UnsupportedModel(
            f"{config.model_type}: no layer can be evicted; layers {list(range(len(kinds)))} are {', '.join(found)}"
        )
    return evictable


def sliding_windows(config: PreTrainedConfig) -> dict[int, int]:
    """Index and window (tokens) of the decoder layers with sliding-window attention; they cannot be evicted."""
    config = config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None)
    layers: list[Any] = DynamicCache(config=config).layers
    return {
        index: layer.sliding_window
        for index, layer in enumerate(layers)
        if type(layer) is DynamicSlidingWindowLayer and (kinds is None or kinds[index] == "sliding_attention")
    }


def causal_mask(
    queries: int,
    prefix: torch.Tensor | None,
    suffix: torch.Tensor | None,
    *,
    kept: int,
    after: int,
    device: torch.device,
) -> torch.Tensor | None:
    """Mask over a prefix of `kept` slots and the `after` slots behind it, the queries being the last of those.

    Args:
        queries: number of query tokens, <= after.
        prefix: (B, 1 or G, kept) bool, which prefix slots are real; None if all are.
        suffix: (B, after) bool, False at padding; None without padding.

    Returns:
        (B or 1, 1 or G, queries, kept + after) bool, or None where the backend needs no mask.
    """
    if prefix is None and suffix is None and (queries == 1 or (kept == 0 and queries == after)):
        return None
    causal = torch.ones(queries, after, dtype=torch.bool, device=device).tril(after - queries)
    if suffix is not None:  # a padding query still sees itself, so that no row is empty
        own = torch.zeros_like(causal)
        own.diagonal(after - queries).fill_(True)
        causal = causal & (suffix[:, None, :] | own)
    behind = causal.view(-1, 1, queries, after)
    before = torch.ones(1, 1, 1, kept, dtype=torch.bool, device=device) if prefix is None else prefix[:, :, None]
    rows, heads = max(behind.shape[0], before.shape[0]), before.shape[1]
    return torch.cat([before.expand(rows, heads, queries, kept), behind.expand(rows, heads, queries, after)], dim=-1)
