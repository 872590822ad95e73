"""Ranked caches: prefill an example once, keep its pairs in keep order, in memory and on disk."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from mosaic_opt.eviction.attach import ForwardPass, attention_switched
from mosaic_opt.eviction.base import EvictionMethod, gather_pairs
from mosaic_opt.tasks import Example, Task

RANKED_VERSION = 1
PREFILL_TOKENS = 2048  # prompts of one length are prefilled together up to so many tokens

Ranked = tuple[torch.Tensor, torch.Tensor, list[int]]  # keys (L, G, k, d), values, draft
Progress = Callable[[int, int], None]


class Prefiller:
    """Makes the ranked caches and full-cache drafts of examples.

    Args:
        model: decoder-only model in eval mode, sdpa attention.
        method: ranks the pairs.
        cap: pairs kept per layer and KV head at most.
        new_tokens: length limit of a draft.
        stop_tokens: a draft ends with the first of these.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        method: EvictionMethod,
        *,
        cap: int,
        new_tokens: int,
        stop_tokens: frozenset[int],
    ) -> None:
        self.model, self.method, self.cap = model, method, cap
        self.new_tokens, self.stop_tokens = new_tokens, stop_tokens

    def ranked(self, examples: Sequence[Example], store: Path | None, progress: Progress) -> list[Ranked]:
        """Keys, values and draft of every example, from the store where they are there, else prefilled."""
        found: dict[int, Ranked] = {}
        if store is not None:
            store.mkdir(parents=True, exist_ok=True)
            for index, example in enumerate(examples):
                ranked = _read(store / f"{example.id}.safetensors")
                if ranked is not None:
                    found[index] = ranked
        missing = [index for index in range(len(examples)) if index not in found]
        progress(len(found), len(examples))
        for chunk in equal_lengths(missing, examples):
            for index, ranked in zip(chunk, self.prefill([examples[i] for i in chunk]), strict=True):
                found[index] = ranked
                if store is not None:
                    _write(store / f"{examples[index].id}.safetensors", ranked)
            progress(len(found), len(examples))
        return [found[index] for index in range(len(examples))]

    @torch.inference_mode()
    def prefill(self, examples: Sequence[Example]) -> list[Ranked]:
        """Prefill prompts of one length together; their pairs in keep order and the full-cache draft."""
        device = self.model.device
        prompts = torch.tensor([example.tokens for example in examples], device=device)
        cache = DynamicCache(config=self.model.config)
        with attention_switched(self.model) as backend:
            ranking = RankingPass(backend, self.method, self.cap)
            logits = self.model(prompts, cache=cache, mosaic_pass=ranking, logits_to_keep=1).logits
            drafts = self._draft(logits[:, -1].argmax(-1), cache, backend)
        keys, values = torch.stack(ranking.keys, dim=1), torch.stack(ranking.values, dim=1)
        return [(keys[row], values[row], drafts[row]) for row in range(len(examples))]

    def _draft(self, token: torch.Tensor, cache: Any, backend: Any) -> list[list[int]]:
        """Greedy continuation with the full cache, up to the generation limit or a stop token."""
        plain = PlainPass(backend)
        steps = [token]
        while len(steps) < self.new_tokens:
            logits = self.model(steps[-1][:, None], cache=cache, mosaic_pass=plain).logits
            steps.append(logits[:, -1].argmax(-1))
        return [self._cut(row) for row in torch.stack(steps, dim=1).tolist()]

    def _cut(self, tokens: list[int]) -> list[int]:
        """Tokens up to and including the first stop token."""
        for position, token in enumerate(tokens):
            if token in self.stop_tokens:
                return tokens[: position + 1]
        return tokens


class PlainPass(ForwardPass):
    """The full cache, whole prompts or single tokens: no mask of our own."""

    def mask(self, layer: int, queries: int, keys: int, present: torch.Tensor | None) -> None:
        return None


class RankingPass(PlainPass):
    """A prefill that leaves each layer's pairs in keep order, cut at `limit`."""

    def __init__(self, backend: Callable[..., Any], method: EvictionMethod, limit: int) -> None:
        super().__init__(backend)
        self.method, self.limit = method, limit
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

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
        order = self.method.keep_order(queries, keys, values, scaling=scaling, limit=self.limit)
        self.keys.append(gather_pairs(keys, order))
        self.values.append(gather_pairs(values, order))


def ranked_fingerprint(model: str, task: Task, method: EvictionMethod, cap: int | None) -> str:
    """Folder name for ranked caches: everything but the example that decides what they hold."""
    parts = [RANKED_VERSION, model, task.new_tokens, method.describe(), cap]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def equal_lengths(indices: list[int], examples: Sequence[Example]) -> list[list[int]]:
    """Groups of prompts of one length, at most PREFILL_TOKENS a group (or a single prompt)."""
    groups: list[list[int]] = []
    for index in sorted(indices, key=lambda i: len(examples[i].tokens)):
        n = len(examples[index].tokens)
        group = groups[-1] if groups else []
        if group and len(examples[group[0]].tokens) == n and (len(group) + 1) * n <= PREFILL_TOKENS:
            group.append(index)
        else:
            groups.append([index])
    return groups


def _read(path: Path) -> Ranked | None:
    """A stored ranked cache; None if it is not there or damaged (it is then made again)."""
    if not path.is_file():
        return None
    try:
        content = load_file(path)
        return content["keys"], content["values"], content["draft"].tolist()
    except (SafetensorError, KeyError, OSError):
        return None


def _write(path: Path, ranked: Ranked) -> None:
    """Write atomically: a file is whole or not there."""
    keys, values, draft = ranked
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    content = {"keys": keys.contiguous(), "values": values.contiguous(), "draft": torch.tensor(draft)}
    save_file({name: tensor.cpu() for name, tensor in content.items()}, temporary)
    os.replace(temporary, path)
