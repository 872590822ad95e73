"""Ranked caches: prefill an example once, rank its pairs for every method asked for, keep it in memory and on disk.

On disk an example is one file with its pairs in position order, and one small file a method with their ranking, so
that methods share the pairs. In memory a batch's pairs lie where they fit: in keep order on the device, in keep
order in (pinned) host memory, or memory-mapped from the files.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache

from mosaic_opt.eviction.attention import (
    ForwardPass,
    UnsupportedModel,
    attention_switched,
    causal_mask,
    evictable_layers,
    sliding_windows,
)
from mosaic_opt.eviction.base import EvictionMethod, PromptStates, Ranking
from mosaic_opt.tasks import Example

RANKED_VERSION = 3
TURN_SECONDS = 0.2  # between two looks for prompts that other processes are prefilling
PREFILL_TOKENS = 2048  # prompts of one length are prefilled together up to so many tokens

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Prompt:
    """A prefilled prompt.

    Attributes:
        keys, values: (L, G, n, d) over the evictable layers, in position order.
        draft: the greedy output with the full cache.
        local: for each sliding-window layer, keys and values (G, up to window - 1, d) of the last positions.
    """

    keys: torch.Tensor
    values: torch.Tensor
    draft: list[int]
    local: list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Order:
    """One method's ranking of a prompt (see `Ranking`).

    Attributes:
        order: (L, G, n) int32.
        heads: (L, S) uint8; S is 0 for methods whose heads all keep equally many.
    """

    order: torch.Tensor
    heads: torch.Tensor


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

    def load(
        self, examples: Sequence[Example], store: Path | None, progress: Progress
    ) -> list[tuple[Prompt, list[Order]]]:
        """Prompt and orders of every example, from the store where they are there, else prefilled.

        Processes that use one store at the same time share the work.
        """
        indices = list(range(len(examples)))
        found = {} if store is None else self._stored(store, examples, indices)
        progress(len(found), len(examples))
        chunks = equal_lengths([index for index in indices if index not in found], examples)
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

    def _stored(
        self, store: Path, examples: Sequence[Example], indices: Sequence[int]
    ) -> dict[int, tuple[Prompt, list[Order]]]:
        """Those of the examples that are in the store, by their index."""
        store.mkdir(parents=True, exist_ok=True)
        read = {index: self._read(store, examples[index]) for index in indices}
        return {index: stored for index, stored in read.items() if stored is not None}

    def _made(
        self, store: Path | None, examples: Sequence[Example], chunk: Sequence[int]
    ) -> dict[int, tuple[Prompt, list[Order]]]:
        """Examples of one length, prefilled unless another process has stored them meanwhile."""
        found = {} if store is None else self._stored(store, examples, chunk)
        left = [index for index in chunk if index not in found]
        if left:
            for index, made in zip(left, self._fitting([examples[i] for i in left]), strict=True):
                found[index] = made if store is None else self._write(store, examples[index], *made)
        return found

    def _fitting(self, examples: Sequence[Example]) -> list[tuple[Prompt, list[Order]]]:
        """As `prefill`, fewer together where the device's memory is too small for all."""
        try:
            return self.prefill(examples)
        except torch.OutOfMemoryError as error:
            require_smaller(len(examples), error)
        torch.cuda.empty_cache()
        middle = len(examples) // 2
        return [*self._fitting(examples[:middle]), *self._fitting(examples[middle:])]

    @torch.inference_mode()
    def prefill(self, examples: Sequence[Example]) -> list[tuple[Prompt, list[Order]]]:
        """Prefill prompts of one length together (and questions of one length): their pairs, every method's order,
        the full-cache draft."""
        prompts = torch.tensor([example.tokens for example in examples], device=self.model.device)
        cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        with attention_switched(self.model):
            ranking = RankingPass(self.layers, self.model.device, self.methods)
            logits = self.model(prompts, cache=cache, mosaic_pass=ranking, logits_to_keep=1).logits
            local = [self._local(cache.layers[layer]) for layer in self.windows]
            drafts = self._drafts(examples, logits, cache)
        n = prompts.shape[1]
        keys, values = (
            torch.stack([getattr(cache.layers[layer], name)[:, :, :n].cpu() for layer in self.layers], dim=1)
            for name in ("keys", "values")
        )
        orders = [ranking.orders(method) for method in range(len(self.methods))]
        made = []
        for row in range(len(examples)):
            near = [(layer_keys[row], layer_values[row]) for layer_keys, layer_values in local]
            prompt = Prompt(keys[row], values[row], drafts[row], near)
            made.append((prompt, [Order(order[row], heads[row]) for order, heads in orders]))
        return made

    def _local(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """What a sliding-window layer holds at the prompt's end, copied: the draft moves the window on."""
        return layer.keys.to("cpu", copy=True), layer.values.to("cpu", copy=True)

    def _drafts(self, examples: Sequence[Example], logits: torch.Tensor, cache: Any) -> list[list[int]]:
        """Greedy continuations with the full cache, each up to its limit or its first stop token."""
        plain = PlainPass(self.layers, self.model.device)
        if examples[0].question:
            questions = torch.tensor([example.question for example in examples], device=self.model.device)
            logits = self.model(questions, cache=cache, mosaic_pass=plain).logits
        stops = [self.stops(example) for example in examples]
        for row, example in enumerate(examples):
            logits[row, -1, list(barred(example, stops[row]))] = float("-inf")
        limits, drafts = [example.new_tokens for example in examples], [list[int]() for _ in examples]
        while True:
            step = logits[:, -1].argmax(-1)
            for draft, limit, stop, token in zip(drafts, limits, stops, step.tolist(), strict=True):
                if not closed(draft, limit, stop):
                    draft.append(token)
            if all(closed(*ends) for ends in zip(drafts, limits, stops, strict=True)):
                return drafts
            logits = self.model(step[:, None], cache=cache, mosaic_pass=plain).logits

    def stops(self, example: Example) -> frozenset[int]:
        """Token ids that end an example's output."""
        return self.stop_tokens | frozenset(example.stop_tokens)

    def _read(self, store: Path, example: Example) -> tuple[Prompt, list[Order]] | None:
        """A stored example; None unless all of it is there and whole (what is not is then made again)."""
        pairs = _load(_pairs_file(store, example), example)
        orders = [_load(_order_file(store, example, method), example) for method in self.methods]
        if pairs is None or any(order is None for order in orders):
            return None
        local = [(pairs[f"local_keys_{layer}"], pairs[f"local_values_{layer}"]) for layer in self.windows]
        prompt = Prompt(pairs["keys"], pairs["values"], pairs["draft"].tolist(), local)
        return prompt, [Order(order["order"], order["heads"]) for order in orders if order is not None]

    def _write(
        self, store: Path, example: Example, prompt: Prompt, orders: list[Order]
    ) -> tuple[Prompt, list[Order]]:
        """Store an example and give back what was stored, mapped from the files."""
        content = {"keys": prompt.keys, "values": prompt.values, "draft": torch.tensor(prompt.draft)}
        for layer, (keys, values) in zip(self.windows, prompt.local, strict=True):
            content |= {f"local_keys_{layer}": keys, f"local_values_{layer}": values}
        _save(_pairs_file(store, example), content, example)
        for method, order in zip(self.methods, orders, strict=True):
            _save(_order_file(store, example, method), {"order": order.order, "heads": order.heads}, example)
        stored = self._read(store, example)
        if stored is None:
            raise OSError(f"{_pairs_file(store, example)} cannot be read back after it was written")
        return stored


def require_smaller(count: int, error: torch.OutOfMemoryError) -> None:
    """Raise MemoryError for one example that the device's memory is too small for: less is not to be had."""
    if count == 1:
        raise MemoryError(
            f"one prompt alone does not fit the device's memory: {str(error).splitlines()[0]}"
        ) from None


def barred(example: Example, stops: frozenset[int]) -> tuple[int, ...]:
    """Token ids that an output does not begin with: none, but all that end it where the example has its own.

    So LongBench does for the task that stops at a newline (its `min_length`).
    """
    return tuple(sorted(stops)) if example.stop_tokens else ()


def closed(output: Sequence[int], limit: int, stops: frozenset[int]) -> bool:
    """Whether an output is at its end: it has so many tokens, or the last one ends it."""
    return len(output) >= limit or (len(output) > 0 and output[-1] in stops)


class PlainPass(ForwardPass):
    """The full cache: every query sees what came before it.

    Args:
        layers: see `ForwardPass`.
        device: the model's.
    """

    def __init__(self, layers: tuple[int, ...], device: torch.device) -> None:
        super().__init__(layers)
        self.device = device

    def mask(self, index: int, queries: int, keys: int, present: torch.Tensor | None) -> torch.Tensor | None:
        return causal_mask(queries, None, None, kept=0, after=keys, device=self.device)


class RankingPass(PlainPass):
    """A prefill of whole prompts that ranks each layer's pairs for several methods."""

    def __init__(self, layers: tuple[int, ...], device: torch.device, methods: Sequence[EvictionMethod]) -> None:
        super().__init__(layers, device)
        self.methods = methods
        self.rankings: list[list[Ranking]] = []  # [layer][method]

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


class RankedPairs(ABC):
    """The pairs of a batch, to be had in keep order.

    Args:
        prompts: of each example of the batch.
        device: where they are used.
    """

    def __init__(self, prompts: Sequence[Prompt], device: torch.device) -> None:
        self.device = device
        self._like = [(s.shape[1], s.shape[3], s.dtype) for s in (prompts[0].keys, prompts[0].values)]
        self._rows = len(prompts)

    def buffers(self, slots: int) -> list[torch.Tensor]:
        """Empty keys and values (B, G, slots, d)."""
        shapes = [(self._rows, heads, slots, size) for heads, size, _ in self._like]
        return [
            torch.empty(shape, dtype=like[2], device=self.device)
            for shape, like in zip(shapes, self._like, strict=True)
        ]

    @abstractmethod
    def fill(self, layer: int, count: int, buffers: Sequence[torch.Tensor]) -> None:
        """Copy a layer's first `count` pairs to the front of the buffers; zeros where a prompt has fewer."""

    @abstractmethod
    def part(self, rows: slice) -> RankedPairs:
        """Those of some examples."""


class MappedPairs(RankedPairs):
    """Gathered anew each time from the prompts as they are stored."""

    def __init__(self, prompts: Sequence[Prompt], orders: Sequence[Order], device: torch.device) -> None:
        super().__init__(prompts, device)
        self.prompts, self.orders = prompts, orders

    def fill(self, layer: int, count: int, buffers: Sequence[torch.Tensor]) -> None:
        for row, (prompt, order) in enumerate(zip(self.prompts, self.orders, strict=True)):
            positions = order.order[layer, :, :count].long()[..., None]
            kept = positions.shape[1]
            for buffer, states in zip(buffers, (prompt.keys[layer], prompt.values[layer]), strict=True):
                buffer[row, :, :kept] = states.gather(1, positions.expand(-1, -1, states.shape[-1])).to(buffer.device)
                buffer[row, :, kept:count] = 0

    def part(self, rows: slice) -> MappedPairs:
        return MappedPairs(self.prompts[rows], self.orders[rows], self.device)


class HeldPairs(RankedPairs):
    """Held in keep order, cut at what the largest budget needs.

    Args:
        limits: pairs held per layer and KV head.
        on_device: hold them on the device; otherwise in host memory, pinned where the device is a GPU.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        orders: Sequence[Order],
        limits: Sequence[int],
        device: torch.device,
        *,
        on_device: bool,
    ) -> None:
        super().__init__(prompts, torch.device("cpu"))
        mapped = MappedPairs(prompts, orders, self.device)
        self.held: list[list[torch.Tensor]] = []  # [layer][keys, values]
        for layer, limit in enumerate(limits):
            buffers = self.buffers(limit)
            mapped.fill(layer, limit, buffers)
            pinned = device.type == "cuda" and not on_device
            self.held.append([b.pin_memory() if pinned else b.to(device if on_device else "cpu") for b in buffers])
        self.device = device

    def fill(self, layer: int, count: int, buffers: Sequence[torch.Tensor]) -> None:
        for buffer, held in zip(buffers, self.held[layer], strict=True):
            buffer[:, :, :count].copy_(held[:, :, :count], non_blocking=True)

    def part(self, rows: slice) -> HeldPairs:
        part = copy(self)
        part.held = [[states[rows] for states in layer] for layer in self.held]
        part._rows = part.held[0][0].shape[0]
        return part


def batch_rankings(orders: Sequence[Order], window: int) -> list[Ranking]:
    """One `Ranking` per layer for prompts decoded together, padded where a prompt is shorter."""
    longest = max(order.order.shape[2] for order in orders)
    slots = max(order.heads.shape[1] for order in orders)
    layers, kv_heads, _ = orders[0].order.shape
    order = torch.zeros(layers, len(orders), kv_heads, longest, dtype=torch.int32)
    heads = torch.full((layers, len(orders), slots), -1, dtype=torch.int16)
    for row, one in enumerate(orders):
        order[:, row, :, : one.order.shape[2]] = one.order
        heads[:, row, : one.heads.shape[1]] = one.heads
    tokens = torch.tensor([[one.order.shape[2]] for one in orders])
    return [Ranking(order[layer], tokens, window, heads[layer] if slots else None) for layer in range(layers)]


def place(total: int, device: torch.device, *, device_bytes: int, host_bytes: int) -> str:
    """Where so many bytes of pairs are held: `device`, `host`, or `mapped` (read from the store each time)."""
    if device.type != "cpu" and total <= device_bytes:
        return "device"
    return "host" if total <= host_bytes else "mapped"


def ranked_fingerprint(model: str) -> str:
    """Folder name for ranked caches: everything but example and method that decides what they hold."""
    parts = [RANKED_VERSION, model]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def evaluable_layers(config: PreTrainedConfig) -> tuple[tuple[int, ...], dict[int, int]]:
    """The evictable layers of a model, and the windows of its sliding-window layers.

    Raises:
        UnsupportedModel: for a model with other layers, naming them.
    """
    config = config.get_text_config(decoder=True)
    layers, windows = evictable_layers(config), sliding_windows(config)
    others = sorted(set(range(config.num_hidden_layers)) - set(layers) - set(windows))
    if others:
        raise UnsupportedModel(
            f"{config.model_type}: layers {others} have neither full nor sliding-window attention; such models can "
            "be used live (attach), but not evaluated or searched"
        )
    return layers, windows


def equal_lengths(indices: list[int], examples: Sequence[Example]) -> list[list[int]]:
    """Groups of prompts of one length and questions of one length, at most PREFILL_TOKENS a group (or one prompt)."""

    def lengths(index: int) -> tuple[int, int]:
        return len(examples[index].tokens), len(examples[index].question)

    groups: list[list[int]] = []
    for index in sorted(indices, key=lengths):
        group = groups[-1] if groups else []
        room = (len(group) + 1) * lengths(index)[0] <= PREFILL_TOKENS
        if group and lengths(group[0]) == lengths(index) and room:
            group.append(index)
        else:
            groups.append([index])
    return groups


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


def _pairs_file(store: Path, example: Example) -> Path:
    return store / f"{example.id}.safetensors"


def _order_file(store: Path, example: Example, method: EvictionMethod) -> Path:
    described = json.dumps(method.describe(), sort_keys=True).encode()
    return store / f"{example.id}.{hashlib.sha256(described).hexdigest()[:12]}.safetensors"


def _load(path: Path, example: Example) -> dict[str, torch.Tensor] | None:
    """A stored file, memory-mapped; None if it is not there, damaged, or another example's."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            content = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
    except (SafetensorError, OSError):
        return None
    return content if metadata == _metadata(content, example) else None


def _save(path: Path, content: dict[str, torch.Tensor], example: Example) -> None:
    """Write atomically: a file is whole or not there.

    Raises:
        OSError: if it cannot be written.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    content = {name: tensor.contiguous() for name, tensor in content.items()}
    try:
        save_file(content, temporary, metadata=_metadata(content, example))
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
    except SafetensorError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(f"{path} cannot be written: {error}") from error
    os.replace(temporary, path)


def _metadata(content: dict[str, torch.Tensor], example: Example) -> dict[str, str]:
    """What a file must say of itself: whose it is, and a checksum of all that it holds."""
    checksum = 0
    for name in sorted(content):
        tensor = content[name]
        checksum = zlib.crc32(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode(), checksum)
        data: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
        checksum = zlib.crc32(data, checksum)
    return {"example": example.id, "tokens": str(len(example.tokens)), "checksum": f"{checksum:08x}"}
