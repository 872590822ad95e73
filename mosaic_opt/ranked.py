"""Ranked caches: an example's pairs and their ranking for every method asked for, in memory and on disk.

On disk an example is one file with its pairs in position order, and one small file a method with their ranking, so
that methods share the pairs. In memory a batch's pairs lie where they fit: in keep order on the device, in keep
order in (pinned) host memory, or memory-mapped from the files.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedConfig

from mosaic_opt.eviction.attention import UnsupportedModel, evictable_layers, sliding_windows
from mosaic_opt.eviction.base import EvictionMethod, Ranking
from mosaic_opt.tasks import Example

RANKED_VERSION = 3


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


def read_ranked(
    store: Path, example: Example, methods: Sequence[EvictionMethod], windows: Iterable[int]
) -> tuple[Prompt, list[Order]] | None:
    """A stored example; None unless all of it is there and whole (what is not is then made again).

    Args:
        windows: the model's sliding-window layers.
    """
    pairs = _load(_pairs_file(store, example), example)
    orders = [_load(_order_file(store, example, method), example) for method in methods]
    if pairs is None or any(order is None for order in orders):
        return None
    local = [(pairs[f"local_keys_{layer}"], pairs[f"local_values_{layer}"]) for layer in windows]
    prompt = Prompt(pairs["keys"], pairs["values"], pairs["draft"].tolist(), local)
    return prompt, [Order(order["order"], order["heads"]) for order in orders if order is not None]


def write_ranked(
    store: Path,
    example: Example,
    methods: Sequence[EvictionMethod],
    windows: Sequence[int],
    made: tuple[Prompt, list[Order]],
) -> tuple[Prompt, list[Order]]:
    """Store an example and give back what was stored, mapped from the files.

    Raises:
        OSError: if it cannot be written, or not be read back.
    """
    prompt, orders = made
    content = {"keys": prompt.keys, "values": prompt.values, "draft": torch.tensor(prompt.draft)}
    for layer, (keys, values) in zip(windows, prompt.local, strict=True):
        content |= {f"local_keys_{layer}": keys, f"local_values_{layer}": values}
    _save(_pairs_file(store, example), content, example)
    for method, order in zip(methods, orders, strict=True):
        _save(_order_file(store, example, method), {"order": order.order, "heads": order.heads}, example)
    stored = read_ranked(store, example, methods, windows)
    if stored is None:
        raise OSError(f"{_pairs_file(store, example)} cannot be read back after it was written")
    return stored


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
