"""Eviction on a live Hugging Face model; the only file that touches transformers' internals.

Three pieces, used by the live form (`attach`) and by the evaluator alike:

- one attention function for every architecture, registered under a name of its own. It sees the rotated
  queries, keys and values of each layer, asks the `ForwardPass` for that layer's mask, lets the model's own
  backend attend, and then tells the pass. The pass travels as a keyword argument of the model's forward, so
  there is no global state.
- `PrefixLayer`, a cache layer that knows how many prompt tokens it stands for, so that positions go on from
  the prompt's true end whatever was evicted.
- `attach`, which evicts after the prompt and restores everything on leaving.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mosaic_opt.allocation import Allocation
from mosaic_opt.eviction.base import EvictionMethod, gather_pairs

NAME = "mosaic"
BACKENDS = ("sdpa",)


class ForwardPass:
    """What one forward of the model needs to know: a mask per layer, and what to do after each layer.

    Args:
        backend: the model's own attention function.
    """

    def __init__(self, backend: Callable[..., Any]) -> None:
        self.backend = backend

    def mask(self, layer: int, queries: int, keys: int, present: torch.Tensor | None) -> torch.Tensor | None:
        """The layer's mask: bool, broadcastable to (B, H, queries, keys), True where attention is allowed.

        None means no mask for a single query and the causal mask for a whole prompt.

        Args:
            present: (B, tokens seen) bool, False at padding; None if there is no padding.
        """
        raise NotImplementedError

    def attended(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scaling: float,
        present: torch.Tensor | None,
    ) -> None:
        """Called after the layer's attention with the states it saw: (B, H, q, d), (B, G, k, d)."""


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    mosaic_pass: ForwardPass,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention function: mask of this layer, the backend's attention, then the pass's own work."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    mask = mosaic_pass.mask(layer, query.shape[2], key.shape[2], attention_mask)
    if mask is None:
        output = mosaic_pass.backend(module, query, key, value, None, scaling=scaling, **kwargs)
    else:
        output = _attend_grouped(query, key, value, mask, scaling=scaling, **kwargs)
    mosaic_pass.attended(layer, query, key, value, scaling=scaling, present=attention_mask)
    return output


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

    transformers' own function repeats K and V for every query head as soon as there is a mask; stacked,
    nothing is copied.

    Args:
        query: (B, H, q, d). key, value: (B, G, k, d). mask: (B or 1, 1, q, k) bool.

    Returns:
        (B, q, H, d), None.
    """
    B, H, q, d = query.shape
    G = key.shape[1]
    stacked = query.reshape(B, G, H // G * q, d)
    mask = mask.repeat(1, 1, H // G, 1)
    output, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](_UNGROUPED, stacked, key, value, mask, **kwargs)
    return output.view(B, H // G, q, G, -1).permute(0, 2, 3, 1, 4).reshape(B, q, H, -1), None


def _padding_only(*, attention_mask: torch.Tensor | None = None, **_: Any) -> torch.Tensor | None:
    """Mask registration: hand the 2-D padding mask on untouched; each layer builds its own from it."""
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask


@contextmanager
def attention_switched(model: PreTrainedModel) -> Iterator[Callable[..., Any]]:
    """Route the model's attention through this module; yields the backend; restores on leaving.

    Inside, every forward must be given `mosaic_pass=` (a `ForwardPass`).

    Raises:
        ValueError: if the model is attached already, in training mode, or uses a backend that is not
            supported.
    """
    own = model.config._attn_implementation
    if own == NAME:
        raise ValueError("model is attached already: leave the first context before entering another")
    if own not in BACKENDS:
        raise ValueError(
            f"attention implementation must be one of {', '.join(BACKENDS)}; this model uses {own!r} "
            "(load it with attn_implementation='sdpa')"
        )
    if model.training:
        raise ValueError("model is in training mode: call model.eval() before evicting")
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _padding_only)
    try:
        model.set_attn_implementation(NAME)
        yield ALL_ATTENTION_FUNCTIONS[own]
    finally:
        model.set_attn_implementation(own)


def evictable_layers(config: PreTrainedConfig) -> list[int]:
    """Indices of the decoder layers whose pairs can be evicted: those with full attention.

    Raises:
        ValueError: if a layer is not full attention (sliding window, linear attention ...), naming it.
    """
    layers = DynamicCache(config=config).layers
    others = [index for index, layer in enumerate(layers) if type(layer) is not DynamicLayer]
    if others or not layers:
        raise ValueError(
            f"{config.model_type}: only full-attention layers can be evicted so far; layers {others} are not"
        )
    return list(range(len(layers)))


class PrefixLayer(DynamicLayer):
    """Keys and values of one layer: a prefix that stands for the whole prompt, then one pair per token.

    Attributes:
        prompt_tokens: how many prompt tokens the prefix stands for; None before the prompt is complete.
        lengths: (B,) int64, how many prefix slots of each row are real (they lead); None if all are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.prompt_tokens: int | None = None
        self.kept = 0
        self.lengths: torch.Tensor | None = None

    def set_prefix(
        self, keys: torch.Tensor, values: torch.Tensor, prompt_tokens: int, lengths: torch.Tensor | None
    ) -> None:
        """Replace all pairs by (B, G, kept, d) that stand for a prompt of `prompt_tokens` tokens."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values
        self.prompt_tokens, self.kept, self.lengths = prompt_tokens, keys.shape[2], lengths

    def get_seq_length(self) -> int:
        """True number of tokens seen, evicted ones included: the next token's position."""
        held = super().get_seq_length()
        return held if self.prompt_tokens is None else held - self.kept + self.prompt_tokens

    def reset(self) -> None:
        super().reset()
        self.prompt_tokens, self.kept, self.lengths = None, 0, None

    def crop(self, tokens_to_remove: int) -> None:
        after = 0 if self.keys is None else self.keys.shape[2] - self.kept
        if self.prompt_tokens is not None and abs(tokens_to_remove) > after:
            raise ValueError(
                f"cannot remove {abs(tokens_to_remove)} tokens from a cache with {after} after an evicted prompt"
            )
        super().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        if self.lengths is not None:
            self.lengths = self.lengths.index_select(0, beam_idx.to(self.lengths.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.lengths is not None:
            self.lengths = self.lengths.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        if self.lengths is not None:
            self.lengths = self.lengths[indices]


def prefix_cache(layers: list[PrefixLayer]) -> Cache:
    """A transformers cache made of these layers."""
    return Cache(layers=list(layers))


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
        prefix: (B, kept) bool, which prefix slots are real; None if all are.
        suffix: (B, after) bool, False at padding; None without padding.

    Returns:
        (B or 1, 1, queries, kept + after) bool, or None where the backend needs no mask.
    """
    if prefix is None and suffix is None and (queries == 1 or (kept == 0 and queries == after)):
        return None
    causal = torch.ones(queries, after, dtype=torch.bool, device=device).tril(after - queries)
    rows = 1 if prefix is None and suffix is None else (prefix if prefix is not None else suffix).shape[0]  # type: ignore[union-attr]
    mask = torch.ones(rows, queries, kept + after, dtype=torch.bool, device=device)
    mask[..., kept:] = causal
    if prefix is not None:
        mask[..., :kept] = prefix[:, None, :]
    if suffix is not None:  # a padding query still sees itself, so that no row is empty
        own = torch.zeros_like(causal)
        own.diagonal(after - queries).fill_(True)
        mask[..., kept:] &= suffix[:, None, :] | own
    return mask[:, None]


class Eviction:
    """A live eviction: made by `attach`, it evicts each new cache once, at the end of its prompt.

    The prompt ends with the first forward of more than one token.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        method: EvictionMethod,
        allocation: Allocation,
        backend: Callable[..., Any],
    ) -> None:
        self.model, self.method, self.allocation, self.backend = model, method, allocation, backend
        self.cache: Any = None  # the transformers cache used last, its layers `PrefixLayer`s

    def lengths(self) -> list[int]:
        """Pairs held per KV head by each layer of the cache used last, tokens after the prompt included."""
        return [] if self.cache is None else [layer.keys.shape[2] for layer in self.cache.layers]

    def kv_bytes(self) -> int:
        """Resident bytes of the cache used last, read from its storages."""
        if self.cache is None:
            return 0
        tensors = [tensor for layer in self.cache.layers for tensor in (layer.keys, layer.values)]
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    def before_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Forward pre-hook: give the model a cache whose layers know their budget, and the pass."""
        bound = inspect.signature(module.forward).bind_partial(*args, **kwargs)
        arguments = {**bound.arguments, **bound.arguments.pop("kwargs", {})}
        cache = arguments.get("cache")
        use_cache = arguments.get("use_cache")
        if cache is None and (self.model.config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        if cache is None:
            raise ValueError("eviction needs a cache: do not pass use_cache=False inside attach")
        self._adopt(cache)
        self.cache = cache
        arguments.update(cache=cache, mosaic_pass=_LivePass(self, cache))
        return (), arguments

    def after_forward(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Forward hook: the realised length of each layer must be its budget; anything else raises."""
        mosaic_pass = kwargs["mosaic_pass"]
        if not mosaic_pass.evicted:
            return
        tokens = mosaic_pass.cache.get_seq_length()
        wanted = self.allocation.realised(tokens).budgets
        realised = tuple(layer.keys.shape[2] for layer in mosaic_pass.cache.layers)
        if realised != wanted:
            raise RuntimeError(f"realised lengths {realised} differ from the layer budgets {wanted}")

    def _adopt(self, cache: Cache) -> None:
        """Turn the layers of an empty cache into ours; refuse a cache that holds foreign tokens."""
        owner = getattr(cache, "mosaic_eviction", None)
        if owner is self:
            return
        if owner is not None or cache.get_seq_length() > 0:
            raise ValueError("the cache already holds tokens of another run: start with an empty cache")
        if not isinstance(cache, DynamicCache):
            raise ValueError(f"eviction needs a DynamicCache; got {type(cache).__name__}")
        cache.layers = [PrefixLayer() for _ in self.allocation.budgets]
        cache.layer_class_to_replicate = None
        cache.mosaic_eviction = self  # type: ignore[attr-defined]


class _LivePass(ForwardPass):
    """One forward of an attached model."""

    def __init__(self, eviction: Eviction, cache: Any) -> None:
        super().__init__(eviction.backend)
        self.eviction, self.cache = eviction, cache
        self.evicted = False

    def mask(self, layer: int, queries: int, keys: int, present: torch.Tensor | None) -> torch.Tensor | None:
        state = self.cache.layers[layer]
        prefix = None
        if state.lengths is not None:
            slots = torch.arange(state.kept, device=state.keys.device)
            prefix = slots < state.lengths[:, None]
        suffix = None if present is None else present[:, state.prompt_tokens or 0 :]
        if suffix is not None and bool(suffix.all()):
            suffix = None
        device = state.keys.device
        return causal_mask(queries, prefix, suffix, kept=state.kept, after=keys - state.kept, device=device)

    def attended(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scaling: float,
        present: torch.Tensor | None,
    ) -> None:
        state = self.cache.layers[layer]
        if state.prompt_tokens is not None or queries.shape[2] == 1:
            return
        self.evicted = True
        n, budget = keys.shape[2], self.eviction.allocation.budgets[layer]
        if n <= budget and present is None:
            state.set_prefix(keys, values, n, None)
            return
        padding = None if present is None else ~present
        order = self.eviction.method.keep_order(queries, keys, values, scaling=scaling, limit=budget, padding=padding)
        lengths = None if present is None else present.sum(dim=1).clamp(max=order.shape[2])
        state.set_prefix(gather_pairs(keys, order), gather_pairs(values, order), n, lengths)


@contextmanager
def attach(model: PreTrainedModel, method: EvictionMethod, allocation: Allocation) -> Iterator[Eviction]:
    """Evict while inside: every prompt's KV pairs are cut to the layer budgets once it is processed.

    Use the model as usual: `model.generate(...)`, or its forward with a cache of its own. The prompt ends with
    the first forward of more than one token: a prompt fed in chunks (`prefill_chunk_size`) is cut after its
    first chunk, and assisted decoding, which feeds candidates with the prompt, is not supported.

    Args:
        model: a decoder-only transformers model in eval mode with sdpa attention.
        method: which pairs are kept first.
        allocation: how many, one budget per evictable layer.

    Yields:
        The `Eviction`, with realised lengths and resident bytes of the last cache.

    Raises:
        ValueError: before anything is changed, for an allocation of the wrong length, a layer that cannot
            be evicted, a model that is attached already, in training mode, or on another backend.
    """
    if not isinstance(allocation, Allocation):
        raise ValueError(f"attach needs an Allocation; got {type(allocation).__name__}: write Allocation([...])")
    allocation.require_layers(len(evictable_layers(model.config.get_text_config(decoder=True))))
    with attention_switched(model) as backend:
        eviction = Eviction(model, method, allocation, backend)
        decoder = model.base_model
        handles = [
            decoder.register_forward_pre_hook(eviction.before_forward, with_kwargs=True),
            decoder.register_forward_hook(eviction.after_forward, with_kwargs=True),
        ]
        try:
            yield eviction
        finally:
            for handle in handles:
                handle.remove()
