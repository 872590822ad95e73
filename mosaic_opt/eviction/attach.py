"""Eviction on a live Hugging Face model: `with attach(model, method, allocation) as eviction: ...`"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from mosaic_opt.allocation import Allocation
from mosaic_opt.eviction.attention import (
    ForwardPass,
    UnsupportedModel,
    attention_switched,
    causal_mask,
    evictable_layers,
    sliding_windows,
)
from mosaic_opt.eviction.base import EvictionMethod, PromptStates
from mosaic_opt.eviction.cache import Prefix, PrefixLayer, cache_bytes, storage_bytes


@dataclass(frozen=True)
class Report:
    """What an eviction did to the cache used last.

    Attributes:
        layers: indices of the evictable layers, in the allocation's order.
        lengths: pairs held, [layer][example][KV head]; tokens after the prompt included.
        kv_bytes: resident bytes of those pairs, read from the storages; layers that cannot be evicted are
            left out.
        other_bytes: the same for the layers that cannot be evicted.
        peak_bytes: most bytes of pairs (evictable layers) alive at once, the copy while a layer is cut included.
        prompt_tokens: tokens, padding included, that the cut pairs stand for; None before the prompt's end.
        scoring_seconds: time spent in ranking and cutting, all prompts of this context together.
    """

    layers: tuple[int, ...]
    lengths: list[list[list[int]]]
    kv_bytes: int
    other_bytes: int
    peak_bytes: int
    prompt_tokens: int | None
    scoring_seconds: float


class Eviction:
    """A live eviction, made by `attach`: it cuts each new cache once, at the end of its prompt.

    Attributes:
        prompt_ends_at: see `attach`; may be set anew for the next prompt.
    """

    def __init__(
        self,
        decoder: PreTrainedModel,
        method: EvictionMethod,
        allocation: Allocation,
        layers: tuple[int, ...],
        *,
        prompt_ends_at: int | None,
        hold_budget: bool,
    ) -> None:
        self.method, self.allocation, self.layers = method, allocation, layers
        self.prompt_ends_at, self.hold_budget = prompt_ends_at, hold_budget
        self._decoder = decoder
        self._growing = (*layers, *sliding_windows(decoder.config))  # layers that count every token
        self._open = True
        self._cache: Any = None  # the cache used last; the evictable layers are `PrefixLayer`s
        self._peak_bytes = 0
        self._scoring_seconds = 0.0

    def report(self) -> Report:
        """Realised lengths, bytes and seconds of the cache used last."""
        held = [] if self._cache is None else [self._cache.layers[layer] for layer in self.layers]
        every = range(len(self._cache.layers)) if held else ()
        ended = [layer.prompt_tokens for layer in held if layer.prefix is not None]
        resident = cache_bytes(self._cache, self.layers) if held else 0
        return Report(
            layers=self.layers,
            lengths=[layer.held().tolist() for layer in held],
            kv_bytes=resident,
            other_bytes=cache_bytes(self._cache, set(every) - set(self.layers)) if held else 0,
            peak_bytes=max(self._peak_bytes, resident),
            prompt_tokens=ended[0] if ended else None,
            scoring_seconds=self._scoring_seconds,
        )

    def budget(self, index: int) -> int | None:
        """Pairs that the evictable layer `index` may keep per KV head; None where it is never evicted."""
        return None if self.layers[index] in self.method.skip else self.allocation.budgets[index]

    def before_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Forward pre-hook: give the model a cache whose layers know their budget, and the pass."""
        if module.training:
            raise ValueError("model is in training mode: call model.eval() before evicting")
        arguments = _named(module.forward, args, kwargs)
        cache, use_cache = arguments.get("cache"), arguments.get("use_cache")
        if cache is None and (self._decoder.config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache(config=self._decoder.config)
        if cache is None:
            raise ValueError("eviction needs a cache: do not pass use_cache=False inside attach")
        inputs = arguments["inputs_embeds"] if arguments.get("input_ids") is None else arguments["input_ids"]
        self._adopt(cache)
        evicts = self._evicts(cache, inputs.shape[1])
        self._cache = cache
        arguments.update(cache=cache, mosaic_pass=_LivePass(self, cache, evicts))
        return (), arguments

    def after_forward(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Forward hook: what each layer holds must be what its budget allows; anything else raises."""
        live = kwargs["mosaic_pass"]
        if live.evicts and len(live.cut) < len(self.layers):
            raise RuntimeError(
                f"layers {[layer for index, layer in enumerate(self.layers) if index not in live.cut]} were not "
                "evicted: their attention does not go through transformers' AttentionInterface"
            )
        for index, seen in live.cut.items():
            budget, held = self.budget(index), live.cache.layers[self.layers[index]].held()
            wanted = seen if budget is None else seen.clamp(max=budget * held.shape[1])
            if not torch.equal(held.sum(dim=1), wanted):
                raise RuntimeError(
                    f"layer {self.layers[index]} holds {held.tolist()} pairs per example and KV head; its budget "
                    f"{budget} allows {wanted.tolist()} per example"
                )

    def _evicts(self, cache: Cache, queries: int) -> bool:
        """Whether this forward evicts: it ends the prompt, or the prompt has ended and the budget is held."""
        state: Any = cache.layers[self.layers[0]]
        if state.prefix is not None:
            return self.hold_budget
        if self.prompt_ends_at is None:
            return queries > 1 or self.hold_budget
        before, end = state.get_seq_length(), self.prompt_ends_at
        if before < end < before + queries:
            raise ValueError(
                f"this forward takes tokens {before} to {before + queries} and crosses prompt_ends_at={end}: feed "
                "the prompt in chunks that end there"
            )
        return before + queries == end

    def _adopt(self, cache: Cache) -> None:
        """Turn the evictable layers of an empty cache into ours; refuse one that cannot be used."""
        if not isinstance(cache, Cache):
            raise ValueError(f"eviction needs a DynamicCache on the model's device; got {type(cache).__name__}")
        owner = getattr(cache, "mosaic_eviction", None)
        if owner is self:
            self._require_whole(cache)
            return
        if owner is not None or cache.get_seq_length() > 0:
            raise ValueError("the cache already holds tokens of another run: start with an empty cache")
        if not isinstance(cache, DynamicCache) or cache.offloading:
            kind = "an offloaded cache" if isinstance(cache, DynamicCache) else type(cache).__name__
            raise ValueError(f"eviction needs a DynamicCache on the model's device; got {kind}")
        if not cache.layers:
            cache.layers = DynamicCache(config=self._decoder.config).layers
            cache.layer_class_to_replicate = None
        for layer in self.layers:
            cache.layers[layer] = PrefixLayer(in_use=lambda: self._open)
        cache.mosaic_eviction = self  # type: ignore[attr-defined]
        self._peak_bytes = 0

    def _require_whole(self, cache: Cache) -> None:
        """Raise ValueError if a forward that was interrupted left layers with more tokens than others."""
        layers: list[Any] = cache.layers
        if len({layers[layer].get_seq_length() for layer in self._growing}) > 1:
            raise ValueError(
                "the cache is half filled by a forward that was interrupted: its layers have seen different numbers "
                "of tokens; start with an empty cache"
            )

    def cut(self, index: int, cache: Any, states: PromptStates) -> None:
        """Rank the layer's pairs and keep what its budget allows."""
        state: PrefixLayer = cache.layers[self.layers[index]]
        budget, n = self.budget(index), states.keys.shape[2]
        if (budget is None or n <= budget) and states.padding is None:
            prefix, copied = Prefix.whole(states.keys, states.values), 0
        else:
            kept = self.method.rank(states, state.observed).kept(n if budget is None else budget)
            prefix = Prefix.gather(states.keys, states.values, kept)
            copied = storage_bytes([prefix.keys, prefix.values])
            if self.hold_budget:
                state.observed = self.method.after_eviction(state.observed, kept)
        others = [layer for layer in self.layers if layer != self.layers[index]]
        alive = cache_bytes(cache, others) + storage_bytes([states.keys, states.values])
        self._peak_bytes = max(self._peak_bytes, alive + copied)
        if state.prompt_real is None:
            state.prompt_real = states.tokens[:, 0]
        else:  # a budget that is held: what followed was not padded
            state.prompt_real = state.prompt_real + state.keys.shape[2]
        state.set_prefix(prefix, state.get_seq_length())
        if not self.hold_budget:
            state.observed = None

    def timed(self, seconds: float) -> None:
        """Count time spent in scoring."""
        self._scoring_seconds += seconds

    def __deepcopy__(self, memo: dict[int, Any]) -> Eviction:
        """A copied cache belongs to the same eviction."""
        return self

    def close(self) -> None:
        """From now on the caches of this context refuse to be used."""
        self._open = False


class _LivePass(ForwardPass):
    """One forward of an attached model.

    Attributes:
        cut: for each evictable layer that was cut, (B,) pairs over all heads that it held before.
    """

    def __init__(self, eviction: Eviction, cache: Any, evicts: bool) -> None:
        super().__init__(eviction.layers)
        self.eviction, self.cache, self.evicts = eviction, cache, evicts
        self.cut: dict[int, torch.Tensor] = {}

    def mask(self, index: int, queries: int, keys: int, present: torch.Tensor | None) -> torch.Tensor | None:
        state = self._state(index)
        if keys != state.kept + state.keys.shape[2]:
            raise UnsupportedModel(
                f"layer {self.eviction.layers[index]} does not attend to what it caches; no eviction"
            )
        if present is not None and index == 0:
            _require_mask(present, state, ranked=state.prefix is None or self.eviction.hold_budget)
        return causal_mask(
            queries,
            state.prefix_mask(),
            None if present is None else present[:, state.prompt_tokens :],
            kept=state.kept,
            after=keys - state.kept,
            device=state.keys.device,
        )

    def attended(self, index: int, states: PromptStates, present: torch.Tensor | None) -> None:
        state = self._state(index)
        if states.keys.shape[1] != state.keys.shape[1] or states.keys.shape[3] != state.keys.shape[3]:
            raise UnsupportedModel(
                f"layer {self.eviction.layers[index]} does not cache keys per head as it attends to them; it cannot "
                "be evicted"
            )
        if state.prefix is not None and not self.eviction.hold_budget:
            return
        start = _now(states.keys)
        states = replace(states, padding=_padding(state, present))
        state.observed = self.eviction.method.observe(states, state.observed)
        if self.evicts:
            self.cut[index] = states.tokens.expand(states.keys.shape[:2]).sum(dim=1).cpu()
            self.eviction.cut(index, self.cache, states)
        self.eviction.timed(_now(states.values) - start)

    def _state(self, index: int) -> PrefixLayer:
        state: PrefixLayer = self.cache.layers[self.eviction.layers[index]]
        return state


def _padding(state: PrefixLayer, present: torch.Tensor | None) -> torch.Tensor | None:
    """(B, 1 or G, slots) bool: where what the layer's attention saw holds no token; None if there is no such."""
    prefix = state.prefix_mask()
    suffix = None if present is None else present[:, None, state.prompt_tokens :]
    if prefix is None and (suffix is None or bool(suffix.all())):
        return None
    B, _, after, _ = state.keys.shape
    if prefix is None:
        prefix = torch.ones(B, 1, state.kept, dtype=torch.bool, device=state.keys.device)
    if suffix is None:
        suffix = torch.ones(B, 1, after, dtype=torch.bool, device=state.keys.device)
    return ~torch.cat([prefix, suffix.expand(B, prefix.shape[1], after)], dim=2)


def _require_mask(present: torch.Tensor, state: PrefixLayer, *, ranked: bool) -> None:
    """Raise ValueError unless the mask covers what was seen and, where it will be ranked, pads at the left only."""
    seen = state.get_seq_length()
    if present.dim() != 2 or present.shape[1] != seen:
        raise ValueError(
            f"attention mask must be 2-D and cover the {seen} tokens seen, evicted ones included (1 token, 0 "
            f"padding); got shape {tuple(present.shape)}"
        )
    if state.prompt_real is not None and not torch.equal(
        present[:, : state.prompt_tokens].sum(dim=1), state.prompt_real.expand(len(present)).to(present.device)
    ):
        raise ValueError("attention mask must pad the prompt as it did when the prompt was cut; it differs")
    suffix = present[:, state.prompt_tokens :].bool()
    if ranked and bool((~suffix[:, 1:] & suffix[:, :-1]).any() if state.prefix is None else (~suffix).any()):
        raise ValueError("padding must be at the left of the prompt: tokenizer.padding_side = 'left'")


def _named(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of `forward` by name."""
    signature = inspect.signature(forward)
    arguments = dict(signature.bind_partial(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(name, {}))
    return arguments


def _now(states: torch.Tensor) -> float:
    if states.is_cuda:
        torch.cuda.synchronize(states.device)
    return time.perf_counter()


@contextmanager
def attach(
    model: PreTrainedModel,
    method: EvictionMethod,
    allocation: Allocation,
    *,
    prompt_ends_at: int | None = None,
    hold_budget: bool = False,
) -> Iterator[Eviction]:
    """Evict while inside: every prompt's KV pairs are cut to the layer budgets once it is processed.

    Use the model as usual: `model.generate(...)`, or its forward with a cache of its own. Assisted decoding and
    prompt lookup are refused: they take tokens back after the cut.

    Args:
        model: a decoder-only transformers model in eval mode with sdpa or eager attention.
        method: which pairs are kept first.
        allocation: how many, one budget per evictable layer (see `evictable_layers`).
        prompt_ends_at: number of tokens (padding included) after which the prompt is complete, for prompts fed in
            several forwards (`prefill_chunk_size`) and for contexts that are cut before a question follows.
            None: the first forward of more than one token is the whole prompt.
        hold_budget: cut again after every later forward, so that the cache never grows (H2O's original form).

    Yields:
        The `Eviction`, whose `report()` tells realised lengths, bytes and seconds.

    Raises:
        ValueError: before anything is changed, for an allocation of the wrong length, a model without evictable
            layers, attached already, in training mode, or on another backend, and for other bad arguments.
    """
    if not isinstance(allocation, Allocation):
        raise ValueError(f"attach needs an Allocation; got {type(allocation).__name__}: write Allocation([...])")
    if not isinstance(method, EvictionMethod):
        raise ValueError(f"attach needs an EvictionMethod such as SnapKV(); got {method!r}")
    if prompt_ends_at is not None and (isinstance(prompt_ends_at, bool) or not isinstance(prompt_ends_at, int)):
        raise ValueError(f"prompt_ends_at must be a whole number of at least 1; got {prompt_ends_at!r}")
    if prompt_ends_at is not None and prompt_ends_at < 1:
        raise ValueError(f"prompt_ends_at must be a whole number of at least 1; got {prompt_ends_at}")
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"attach needs a transformers model; got {type(model).__name__}")
    layers = fitting_layers(model.config, method, allocation)
    with attention_switched(model) as decoder:
        eviction = Eviction(
            decoder, method, allocation, layers, prompt_ends_at=prompt_ends_at, hold_budget=hold_budget
        )
        handles = [
            decoder.register_forward_pre_hook(eviction.before_forward, with_kwargs=True),
            decoder.register_forward_hook(eviction.after_forward, with_kwargs=True),
        ]
        try:
            yield eviction
        finally:
            eviction.close()
            for handle in handles:
                handle.remove()


def fitting_layers(config: PreTrainedConfig, method: EvictionMethod, allocation: Allocation) -> tuple[int, ...]:
    """The evictable layers of a model with this configuration.

    Raises:
        ValueError: unless method and allocation fit them; `UnsupportedModel` if there are none.
    """
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{config.model_type}: attach needs a decoder-only model")
    layers = evictable_layers(text)
    if len(allocation) != len(layers):
        others = sorted(set(range(text.num_hidden_layers)) - set(layers))
        kept = f"; layers {others} cannot be evicted and keep theirs" if others else ""
        raise ValueError(
            f"allocation must have {len(layers)} budgets, one per evictable layer; got {len(allocation)}{kept}"
        )
    require_skip(method, layers)
    return layers


def require_skip(method: EvictionMethod, layers: tuple[int, ...]) -> None:
    """Raise ValueError unless the layers that a method never evicts are among the evictable ones."""
    if method.skip - set(layers):
        raise ValueError(f"skip must name evictable layers, some of {list(layers)}; got {sorted(method.skip)}")
