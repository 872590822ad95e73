"""Cache layers that stand for more tokens than they hold.

A `PrefixLayer` is a transformers cache layer: first it grows like any other; once its prompt is evicted it is a
`Prefix` (what was kept) and the pairs of the tokens that followed. It knows how many tokens it stands for, so
positions go on from the true end whatever was evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from mosaic_opt.eviction.base import gather_pairs


@dataclass(frozen=True)
class Prefix:
    """The kept pairs of a prompt; heads and examples may keep different numbers.

    Attributes:
        keys, values: (B, G, k, d) where all keep k; else packed (P, d): the pairs of the first example's
            first head, then those of its second head, and so on; nothing is stored for what is not kept.
        lengths: (B, G) int64, pairs kept; on the CPU.
    """

    keys: torch.Tensor
    values: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def gather(cls, keys: torch.Tensor, values: torch.Tensor, kept: torch.Tensor) -> Prefix:
        """Copy the pairs at `kept` (B, G, k), -1 where there is none, from (B, G, n, d)."""
        real = kept >= 0
        lengths = real.sum(dim=2).cpu()
        if bool(real.all()):
            return cls(gather_pairs(keys, kept), gather_pairs(values, kept), lengths)
        example, head, slot = real.nonzero(as_tuple=True)
        chosen = example, head, kept[example, head, slot]
        return cls(keys[chosen], values[chosen], lengths)

    @classmethod
    def whole(cls, keys: torch.Tensor, values: torch.Tensor) -> Prefix:
        """All pairs (B, G, n, d), not copied."""
        return cls(keys, values, torch.full(keys.shape[:2], keys.shape[2]))

    @property
    def longest(self) -> int:
        """Most pairs that any head of any example keeps."""
        return int(self.lengths.max())

    @property
    def ragged(self) -> bool:
        return self.keys.dim() == 2

    def mask(self) -> torch.Tensor | None:
        """(B, G, longest) bool, True at pairs of `padded`; None where all are. Pairs stand at the right."""
        if not self.ragged:
            return None
        slots = torch.arange(self.longest)
        return (slots >= self.longest - self.lengths[..., None]).to(self.keys.device)

    def padded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (B, G, longest, d), zero where `mask` is False."""
        real = self.mask()
        if real is None:
            return self.keys, self.values
        shape = (*self.lengths.shape, self.longest, self.keys.shape[1])
        out = self.keys.new_zeros(shape), self.values.new_zeros(*shape[:3], self.values.shape[1])
        out[0][real], out[1][real] = self.keys, self.values
        return out

    def rows(self, choose: Callable[[torch.Tensor], torch.Tensor]) -> Prefix:
        """The prefix of other rows: `choose` maps (B, ...) tensors to those of the rows wanted."""
        if not self.ragged:
            return Prefix(choose(self.keys), choose(self.values), choose(self.lengths))
        B, G = self.lengths.shape
        ends = self.lengths.flatten().cumsum(0).tolist()
        starts = [0, *ends[:-1]]
        wanted = choose(torch.arange(B * G).view(B, G)).flatten().tolist()
        pieces = [slice(starts[index], ends[index]) for index in wanted]
        keys, values = (torch.cat([states[piece] for piece in pieces]) for states in (self.keys, self.values))
        return Prefix(keys, values, choose(self.lengths))


class PrefixLayer(DynamicLayer):
    """Keys and values of one layer: a prefix that stands for the tokens seen so far, then one pair a token.

    Attributes:
        prefix: what was kept; None before the prompt is complete.
        prompt_tokens: how many tokens the prefix stands for; 0 without one.
        prompt_real: (B,) int64, how many of them are not padding; None before the prompt is complete.
        observed: what the eviction method gathered of the queries so far, rows first; None without.
        in_use: whether the layer may be used: asked at every update; None means always.
    """

    keys: Any  # a tensor once the layer is initialized
    values: Any

    def __init__(self, in_use: Callable[[], bool] | None = None) -> None:
        super().__init__()
        self.prefix: Prefix | None = None
        self.prompt_tokens = 0
        self.prompt_real: torch.Tensor | None = None
        self.observed: torch.Tensor | None = None
        self.in_use = in_use

    def set_prefix(self, prefix: Prefix, prompt_tokens: int) -> None:
        """Replace all pairs by a prefix that stands for `prompt_tokens` tokens."""
        self.prefix, self.prompt_tokens = prefix, prompt_tokens
        self.keys, self.values = (states[:, :, :0].clone() for states in (self.keys, self.values))

    @property
    def kept(self) -> int:
        """Slots of the prefix in what `update` returns."""
        return 0 if self.prefix is None else self.prefix.longest

    def prefix_mask(self) -> torch.Tensor | None:
        """(B, 1 or G, kept) bool, which prefix slots hold a pair; None if all do."""
        return None if self.prefix is None else self.prefix.mask()

    def held(self) -> torch.Tensor:
        """(B, G) int64, pairs held, tokens after the prompt included."""
        if self.prefix is not None:
            return self.prefix.lengths + self.keys.shape[2]
        if not self.is_initialized:
            return torch.zeros(0, 0, dtype=torch.int64)
        return torch.full(self.keys.shape[:2], self.keys.shape[2])

    def tensors(self) -> list[torch.Tensor]:
        """Everything that holds memory for pairs."""
        own = [self.keys, self.values] if self.is_initialized else []
        return own if self.prefix is None else [*own, self.prefix.keys, self.prefix.values]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.in_use is not None and not self.in_use():
            raise RuntimeError(
                "this cache was filled inside a context of attach that has ended: the model that is running "
                "does not know what was evicted; use the cache inside its context, or start a new one"
            )
        keys, values = super().update(key_states, value_states)
        if self.prefix is None:
            return keys, values
        padded = self.prefix.padded()
        return torch.cat([padded[0], keys], dim=2), torch.cat([padded[1], values], dim=2)

    def get_seq_length(self) -> int:
        """True number of tokens seen, evicted ones included: the next token's position."""
        return self.prompt_tokens + (self.keys.shape[2] if self.is_initialized else 0)

    def reset(self) -> None:
        super().reset()
        self.prefix, self.prompt_tokens, self.prompt_real, self.observed = None, 0, None, None

    def crop(self, tokens_to_remove: int) -> None:
        after = self.keys.shape[2] if self.is_initialized else 0
        if self.prefix is not None and (after == 0 or abs(tokens_to_remove) > after):
            raise ValueError(
                f"cannot remove {abs(tokens_to_remove)} tokens from a cache with {after} after an evicted "
                "prompt; assisted decoding and prompt lookup cannot be used with eviction"
            )
        super().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._choose_rows(lambda states: states.index_select(0, beam_idx.to(states.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._choose_rows(lambda states: states.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._choose_rows(lambda states: states[indices.to(states.device)])

    def _choose_rows(self, choose: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.is_initialized:
            self.keys, self.values = choose(self.keys), choose(self.values)
        if self.prefix is not None:
            self.prefix = self.prefix.rows(choose)
        for name in ("prompt_real", "observed"):
            if getattr(self, name) is not None:
                setattr(self, name, choose(getattr(self, name)))


def cache_bytes(cache: Cache, layers: Iterable[int] | None = None) -> int:
    """Resident bytes of a cache's layers (all by default), read from their storages, each counted once."""
    chosen = [cache.layers[index] for index in (range(len(cache.layers)) if layers is None else layers)]
    return storage_bytes(tensor for layer in chosen for tensor in _tensors(layer))


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages of these tensors, each counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _tensors(layer: Any) -> list[torch.Tensor]:
    if isinstance(layer, PrefixLayer):
        return layer.tensors()
    states = list(vars(layer).values())
    states += [inner for state in states if isinstance(state, dict) for inner in state.values()]
    return [state for state in states if isinstance(state, torch.Tensor)]
