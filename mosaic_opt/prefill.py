"""Prefill once: a prompt's pairs, every method's ranking of them, and the full-cache draft.

Prompts of one length go through the model together; drafts are decoded together whatever the lengths, from the pairs
as any allocation is, with a budget that keeps all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from mosaic_opt.allocation import uniform
from mosaic_opt.decoding import Batch, Decoding, Turn
from mosaic_opt.eviction.attention import ForwardPass, attention_switched, causal_mask
from mosaic_opt.eviction.base import EvictionMethod, PromptStates, Ranking
from mosaic_opt.ranked import (
    MappedPairs,
    Order,
    Prompt,
    batch_rankings,
    evaluable_layers,
    read_ranked,
    write_ranked,
)
from mosaic_opt.tasks import Example

TURN_SECONDS = 0.2  # between two looks for prompts that other processes are prefilling
PREFILL_TOKENS = 2048  # prompts of one length are prefilled together up to so many tokens
DRAFT_TOKENS, DRAFT_ROWS = 16384, 8  # drafts are decoded together up to so many prompt tokens, and examples

Progress = Callable[[int, int], None]
Made = tuple[Prompt, list[Order]]


class Prefiller:
    """Makes the prompts and orders of examples.

    Args:
        model: decoder-only model in eval mode, sdpa or eager attention; its layers have full attention (these are
            evicted) or a sliding window.
        methods: rank the pairs, all in the same pass.
        stop_tokens: a draft ends with the first of these, or of its example's own.

    Raises:
        UnsupportedModel: for a model with other layers, naming them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        methods: Sequence[EvictionMethod],
        *,
        stop_tokens: frozenset[int],
    ) -> None:
        self.model, self.methods, self.stop_tokens = model, list(methods), stop_tokens
        self.layers, self.windows = evaluable_layers(model.config)

    def load(self, examples: Sequence[Example], store: Path | None, progress: Progress) -> list[Made]:
        """Prompt and orders of every example, from the store where they are there, else made.

        Processes that use one store at the same time share the work.
        """
        indices = list(range(len(examples)))
        found = {} if store is None else self._stored(store, examples, indices)
        progress(len(found), len(examples))
        chunks = together([index for index in indices if index not in found], examples)
        while chunks:
            held = []  # by other processes
            for chunk in chunks:
                with _turn(store, examples[chunk[0]]) as mine:
                    if mine:
                        found |= self._made(store, examples, chunk)
                        progress(len(found), len(examples))
                    else:
                        held.append(chunk)
            if len(held) == len(chunks):
                time.sleep(TURN_SECONDS)
            chunks = held
        return [found[index] for index in indices]

    def _stored(self, store: Path, examples: Sequence[Example], indices: Sequence[int]) -> dict[int, Made]:
        """Those of the examples that are in the store, by their index."""
        store.mkdir(parents=True, exist_ok=True)
        read = {index: read_ranked(store, examples[index], self.methods, self.windows) for index in indices}
        return {index: stored for index, stored in read.items() if stored is not None}

    def _made(self, store: Path | None, examples: Sequence[Example], chunk: Sequence[int]) -> dict[int, Made]:
        """Examples whose drafts go together, made unless another process has stored them meanwhile."""
        found = {} if store is None else self._stored(store, examples, chunk)
        left = [index for index in chunk if index not in found]
        made: dict[int, Made] = {}
        for group in equal_lengths(left, examples):
            made |= zip(group, _halving(self.prefill, [examples[index] for index in group]), strict=True)
        drafts = _halving(self.drafts, [(examples[index], made[index]) for index in left])
        for index, draft in zip(left, drafts, strict=True):
            prompt, orders = made.pop(index)
            whole = replace(prompt, draft=draft), orders
            stored = store and write_ranked(store, examples[index], self.methods, list(self.windows), whole)
            found[index] = stored or whole
        return found

    @torch.inference_mode()
    def prefill(self, examples: Sequence[Example]) -> list[Made]:
        """Prefill prompts of one length together: their pairs and every method's order.

        Their drafts are the first token where no question follows, and else empty.
        """
        prompts = torch.tensor([example.tokens for example in examples], device=self.model.device)
        cache: Any = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        with attention_switched(self.model):
            ranking = RankingPass(self.layers, self.model.device, self.methods)
            logits = self.model(prompts, cache=cache, mosaic_pass=ranking, logits_to_keep=1).logits
        keys, values = (
            torch.stack([getattr(cache.layers[layer], name).cpu() for layer in self.layers], dim=1)
            for name in ("keys", "values")
        )
        local = [(cache.layers[layer].keys.cpu(), cache.layers[layer].values.cpu()) for layer in self.windows]
        orders = [ranking.orders(method) for method in range(len(self.methods))]
        made = []
        for row, example in enumerate(examples):
            logits[row, -1, list(self._turn(example, []).barred)] = float("-inf")
            first = [] if example.question else [int(logits[row, -1].argmax())]
            near = [(layer_keys[row], layer_values[row]) for layer_keys, layer_values in local]
            prompt = Prompt(keys[row], values[row], first, near)
            made.append((prompt, [Order(order[row], heads[row]) for order, heads in orders]))
        return made

    @torch.inference_mode()
    def drafts(self, begun: Sequence[tuple[Example, Made]]) -> list[list[int]]:
        """Greedy continuations with the full cache, each up to its limit or its first stop token."""
        prompts, orders = [prompt for _, (prompt, _) in begun], [orders[0] for _, (_, orders) in begun]
        batch = Batch.of(
            prompts,
            MappedPairs(prompts, orders, self.model.device),
            indices=list(range(len(begun))),
            layers=self.layers,
            windows=self.windows,
            rankings=batch_rankings(orders, self.methods[0].window),
            turns=[self._turn(example, prompt.draft) for example, (prompt, _) in begun],
        )
        whole = uniform(len(self.layers), int(batch.lengths.max()))
        with attention_switched(self.model):
            return Decoding(self.model, batch, whole).run()[0]

    def _turn(self, example: Example, draft: list[int]) -> Turn:
        return Turn.of(example, draft, stop_tokens=self.stop_tokens)


def require_smaller(count: int, error: torch.OutOfMemoryError) -> None:
    """Raise MemoryError for one example that the device's memory is too small for: less is not to be had."""
    if count == 1:
        raise MemoryError(
            f"one prompt alone does not fit the device's memory: {str(error).splitlines()[0]}"
        ) from None


class RankingPass(ForwardPass):
    """A prefill of whole prompts that ranks each layer's pairs for several methods.

    Args:
        layers: see `ForwardPass`.
        device: the model's.
        methods: that rank.
    """

    def __init__(self, layers: tuple[int, ...], device: torch.device, methods: Sequence[EvictionMethod]) -> None:
        super().__init__(layers)
        self.device, self.methods = device, methods
        self.rankings: list[list[Ranking]] = []  # [layer][method]

    def mask(self, index: int, queries: int, keys: int, present: torch.Tensor | None) -> torch.Tensor | None:
        return causal_mask(queries, None, None, kept=0, after=keys, device=self.device)

    def attended(self, index: int, states: PromptStates, present: torch.Tensor | None) -> None:
        self.rankings.append([method.rank(states) for method in self.methods])

    def orders(self, method: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A method's order (B, L, G, n) int32 and heads (B, L, S) uint8, on the CPU."""
        rankings = [layer[method] for layer in self.rankings]
        order = torch.stack([ranking.order.to("cpu", torch.int32) for ranking in rankings], dim=1)
        if rankings[0].heads is None:
            return order, torch.zeros(*order.shape[:2], 0, dtype=torch.uint8)
        heads = [ranking.heads.to("cpu", torch.uint8) for ranking in rankings if ranking.heads is not None]
        return order, torch.stack(heads, dim=1)


def together(indices: Sequence[int], examples: Sequence[Example]) -> list[list[int]]:
    """Groups of examples of about one length, whose drafts are decoded together."""

    def fits(group: list[int], index: int) -> bool:
        rows = len(group) + 1
        return rows <= DRAFT_ROWS and rows * len(examples[index].tokens) <= DRAFT_TOKENS

    return _grouped(indices, examples, fits)


def equal_lengths(indices: Sequence[int], examples: Sequence[Example]) -> list[list[int]]:
    """Groups of prompts of one length, at most PREFILL_TOKENS a group (or one prompt)."""

    def fits(group: list[int], index: int) -> bool:
        length = len(examples[index].tokens)
        return length == len(examples[group[0]].tokens) and (len(group) + 1) * length <= PREFILL_TOKENS

    return _grouped(indices, examples, fits)


def _grouped(
    indices: Sequence[int], examples: Sequence[Example], fits: Callable[[list[int], int], bool]
) -> list[list[int]]:
    """The indices by rising prompt length, each in the last group if it fits there, else in a new one."""
    groups: list[list[int]] = []
    for index in sorted(indices, key=lambda index: len(examples[index].tokens)):
        if groups and fits(groups[-1], index):
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _halving(function: Callable[[Sequence[Any]], list[Any]], rows: Sequence[Any]) -> list[Any]:
    """What a function gives for these rows, fewer at a time where the device's memory is too small for all.

    Raises:
        MemoryError: if it is too small for one.
    """
    try:
        return function(rows) if rows else []
    except torch.OutOfMemoryError as error:
        require_smaller(len(rows), error)
    torch.cuda.empty_cache()
    middle = len(rows) // 2
    return [*_halving(function, rows[:middle]), *_halving(function, rows[middle:])]


@contextmanager
def _turn(store: Path | None, example: Example) -> Iterator[bool]:
    """Whether this process may fill the store with an example and those that go with it; another does so if not."""
    if store is None:
        yield True
        return
    locks = store.with_name(f"{store.name}.locks")
    locks.mkdir(exist_ok=True)
    lock = FileLock(locks / f"{example.id}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()
