"""Prefill once, evict many: exact scores of any allocation from ranked caches.

Eviction happens after each layer's prefill attention, so a prompt's keys, values and scores do not depend on
the budgets. Every example is prefilled once and its pairs are stored in keep order; an allocation is then a
prefix slice per layer, and a trial costs a short decode. Decoding is verified against the full-cache draft:
one forward checks all its tokens, and goes on from the first that differs, so the tokens are those of greedy
decoding. The references ride in the same forward as further branches of a token tree and give the reference
log-likelihood.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache

from mosaic_opt.allocation import Allocation
from mosaic_opt.eviction.attach import ForwardPass, PrefixLayer, attention_switched, prefix_cache
from mosaic_opt.eviction.base import EvictionMethod, gather_pairs
from mosaic_opt.tasks import Example, Task

RANKED_VERSION = 1
PASS_TOKENS = 32  # tokens a pass after the first may hold: so few cost hardly more than one does
REFERENCE_TOKENS = 64  # longer references are cut for the log-likelihood

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Measurement:
    """One allocation on one set of examples.

    Attributes:
        scores: task score of each example, 0 to 1.
        log_likelihoods: log-probability of each example's best reference, summed over its tokens without
            the first (which comes from the prefill and no allocation changes).
        outputs: generated text of each example (cut where its score was settled, if so asked).
        mean_budget: nominal mean layer budget in tokens.
        realised_mean: the same, where no prompt keeps more pairs than it has tokens.
        kv_bytes: bytes of the kept prompt pairs of one example (mean over the examples).
        seconds: wall time.
    """

    scores: tuple[float, ...]
    log_likelihoods: tuple[float, ...]
    outputs: tuple[str, ...]
    mean_budget: float
    realised_mean: float
    kv_bytes: int
    seconds: float

    @property
    def score(self) -> float:
        return sum(self.scores) / len(self.scores)

    @property
    def log_likelihood(self) -> float:
        return sum(self.log_likelihoods) / len(self.log_likelihoods)


class Evaluator:
    """Ranked caches of a fixed set of examples, and the measurement of any allocation on them.

    Args:
        model: decoder-only model in eval mode, sdpa attention.
        tokenizer: decodes outputs.
        task: metric and generation limit.
        examples: at least one.
        method: eviction method that ranks the pairs.
        cap: largest layer budget that will be asked for (tokens); None keeps whole prompts.
        batch_size: examples decoded together.
        store: folder for ranked caches (one file an example); None keeps them in memory only.
        progress: called with (done, total) examples while prefilling.

    Raises:
        ValueError: without examples, or with a prompt longer than the model's context.
    """

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        task: Task,
        examples: Sequence[Example],
        method: EvictionMethod,
        cap: int | None = None,
        batch_size: int = 16,
        store: Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        if not examples:
            raise ValueError("evaluator needs at least one example")
        context = getattr(model.config, "max_position_embeddings", None)
        longest = max(len(example.tokens) for example in examples)
        if context is not None and longest + task.new_tokens > context:
            raise ValueError(
                f"prompt of {longest} tokens and {task.new_tokens} new ones exceed the model's context {context}"
            )
        self.model, self.tokenizer, self.task, self.method = model, tokenizer, task, method
        self.examples = list(examples)
        self.cap = min(cap or longest, longest)
        self.stop_tokens = _stop_tokens(model, tokenizer)
        self._pieces: dict[str, float] = {}
        ranked = self._ranked(store, progress or (lambda done, total: None))
        self.drafts = [tokens for _, _, tokens in ranked]
        order = sorted(range(len(examples)), key=lambda index: len(self.examples[index].tokens))
        self.batches = [
            self._batch(order[start : start + batch_size], ranked) for start in range(0, len(order), batch_size)
        ]

    @torch.inference_mode()
    def evaluate(self, allocation: Allocation, *, complete: bool = True) -> Measurement:
        """Score, outputs and reference log-likelihood of every example under this allocation.

        The tokens are those of `model.generate` with the eviction attached (greedy).

        Args:
            complete: decode every output to its end. Otherwise an output may end where the task says that
                its score is settled: scores and log-likelihoods are the same, texts are cut, and it is faster.

        Raises:
            ValueError: for an allocation of the wrong length, or one above the cap.
        """
        allocation.require_layers(len(self.batches[0].keys))
        longest = max(len(example.tokens) for example in self.examples)
        if self.cap < longest and max(allocation.budgets) > self.cap:
            raise ValueError(f"layer budgets must be at most {self.cap} here; got {max(allocation.budgets)}")
        start = time.perf_counter()
        tokens: list[list[int]] = [[] for _ in self.examples]
        likelihoods = [0.0] * len(self.examples)
        with attention_switched(self.model) as backend:
            for batch in self.batches:
                decoded, batch_likelihoods = _Decoding(self, batch, allocation, backend, complete).run()
                for row, index in enumerate(batch.indices):
                    tokens[index], likelihoods[index] = decoded[row], batch_likelihoods[row]
        return self._measurement(tokens, likelihoods, allocation, time.perf_counter() - start)

    def full_scores(self) -> tuple[float, ...]:
        """Task score of each example with the full cache."""
        return tuple(self._score(example, draft) for example, draft in zip(self.examples, self.drafts, strict=True))

    def text(self, tokens: Sequence[int]) -> str:
        """Generated text without the stop token."""
        kept = [token for token in tokens if token not in self.stop_tokens]
        return str(self.tokenizer.decode(kept, skip_special_tokens=True))

    def settled(self, example: Example, tokens: Sequence[int]) -> bool:
        """Whether the task says that nothing that may follow these tokens changes the example's score."""
        left = self.task.new_tokens - len(tokens)
        reach = [left * self._most_per_token(reference) for reference in example.references]
        return self.task.settled(self.text(tokens), example.references, reach)

    def _most_per_token(self, reference: str) -> float:
        """The most characters of a reference that one token can supply (case aside).

        That is the longest piece of the reference which a token's text contains. Infinite where a token's
        text alone does not tell: for anything but ASCII letters and digits.
        """
        if reference not in self._pieces:
            text = reference.lower()
            known = (
                n
                for n in range(len(text), 0, -1)
                if any(text[i : i + n] in self._token_texts for i in range(len(text) - n + 1))
            )
            plain = text.isascii() and text.isalnum()
            self._pieces[reference] = float(next(known, 0)) if plain else float("inf")
        return self._pieces[reference]

    @cached_property
    def _token_texts(self) -> str:
        """The texts of all tokens in lower case, separated by zero bytes."""
        texts = self.tokenizer.batch_decode([[token] for token in range(len(self.tokenizer))])
        return "\0".join(texts).lower()

    def _score(self, example: Example, tokens: Sequence[int]) -> float:
        return self.task.score(self.text(tokens), example.references)

    def _measurement(
        self, tokens: list[list[int]], likelihoods: list[float], allocation: Allocation, seconds: float
    ) -> Measurement:
        _, kv_heads, _, head_dim = self.batches[0].keys[0].shape
        element = self.batches[0].keys[0].element_size()
        realised = [allocation.realised(len(example.tokens)) for example in self.examples]
        sizes = [kept.kv_bytes(kv_heads=kv_heads, head_dim=head_dim, element_bytes=element) for kept in realised]
        pairs = zip(self.examples, tokens, strict=True)
        return Measurement(
            scores=tuple(self._score(example, output) for example, output in pairs),
            log_likelihoods=tuple(likelihoods),
            outputs=tuple(self.text(output) for output in tokens),
            mean_budget=allocation.mean,
            realised_mean=sum(kept.mean for kept in realised) / len(realised),
            kv_bytes=round(sum(sizes) / len(sizes)),
            seconds=seconds,
        )

    # Ranked caches -----------------------------------------------------------------------------------------

    def _ranked(self, store: Path | None, progress: Progress) -> list[_Ranked]:
        """Keys, values and draft of every example, from the store where they are there, else prefilled."""
        found: dict[int, _Ranked] = {}
        if store is not None:
            store.mkdir(parents=True, exist_ok=True)
            for index, example in enumerate(self.examples):
                ranked = _read_ranked(store / f"{example.id}.safetensors")
                if ranked is not None:
                    found[index] = ranked
        missing = [index for index in range(len(self.examples)) if index not in found]
        progress(len(found), len(self.examples))
        for chunk in _equal_lengths(missing, self.examples):
            for index, ranked in zip(chunk, self._prefill([self.examples[i] for i in chunk]), strict=True):
                found[index] = ranked
                if store is not None:
                    _write_ranked(store / f"{self.examples[index].id}.safetensors", ranked)
            progress(len(found), len(self.examples))
        return [found[index] for index in range(len(self.examples))]

    @torch.inference_mode()
    def _prefill(self, examples: list[Example]) -> list[_Ranked]:
        """Prefill prompts of one length together; their pairs in keep order and the full-cache draft."""
        device = self.model.device
        prompts = torch.tensor([example.tokens for example in examples], device=device)
        cache = DynamicCache(config=self.model.config)
        with attention_switched(self.model) as backend:
            ranking = _RankingPass(backend, self.method, self.cap)
            logits = self.model(prompts, cache=cache, mosaic_pass=ranking, logits_to_keep=1).logits
            drafts = self._draft(logits[:, -1].argmax(-1), cache, backend)
        keys, values = torch.stack(ranking.keys, dim=1), torch.stack(ranking.values, dim=1)
        return [(keys[row], values[row], drafts[row]) for row in range(len(examples))]

    def _draft(self, token: torch.Tensor, cache: Any, backend: Any) -> list[list[int]]:
        """Greedy continuation with the full cache, up to the generation limit or a stop token."""
        plain = _PlainPass(backend)
        steps = [token]
        while len(steps) < self.task.new_tokens:
            logits = self.model(steps[-1][:, None], cache=cache, mosaic_pass=plain).logits
            steps.append(logits[:, -1].argmax(-1))
        return [self._cut(row) for row in torch.stack(steps, dim=1).tolist()]

    def _cut(self, tokens: list[int]) -> list[int]:
        """Tokens up to and including the first stop token."""
        for position, token in enumerate(tokens):
            if token in self.stop_tokens:
                return tokens[: position + 1]
        return tokens

    def _batch(self, indices: list[int], ranked: list[_Ranked]) -> _Batch:
        examples = [self.examples[index] for index in indices]
        lengths = [len(example.tokens) for example in examples]
        drafts = [self.drafts[index] for index in indices]
        references = [[tokens[:REFERENCE_TOKENS] for tokens in example.answer_tokens] for example in examples]
        branches = [
            [draft[:-1], *(reference[:-1] for reference in row)]
            for draft, row in zip(drafts, references, strict=True)
        ]
        return _Batch(
            indices=indices,
            keys=_by_layer([ranked[index][0] for index in indices], self.model.device),
            values=_by_layer([ranked[index][1] for index in indices], self.model.device),
            lengths=torch.tensor(lengths, device=self.model.device),
            drafts=drafts,
            references=references,
            tree=TokenTree(branches),
        )


_Ranked = tuple[torch.Tensor, torch.Tensor, list[int]]  # keys (L, G, k, d), values, draft


@dataclass(frozen=True)
class _Batch:
    """Examples decoded together: per layer (B, G, k, d) in keep order, zero-padded where a prompt is shorter."""

    indices: list[int]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    lengths: torch.Tensor
    drafts: list[list[int]]
    references: list[list[tuple[int, ...]]]
    tree: TokenTree


class TokenTree:
    """Token sequences of each row merged into one prefix tree, so that a shared token is computed once.

    Args:
        rows: for each row the sequences that start at the row's next position.

    Attributes:
        children: per row, {(parent node or -1, token): node}; nodes are numbered in order of first use.
        tokens: (B, Q) int64, zero where a row has fewer nodes.
        depths: (B, Q) int64, distance from the row's next position.
        visible: (B, Q, Q) bool, a node sees its ancestors and itself.
    """

    def __init__(self, rows: Sequence[Iterable[Sequence[int]]]) -> None:
        self.children: list[dict[tuple[int, int], int]] = []
        parents: list[list[int]] = []
        for sequences in rows:
            children: dict[tuple[int, int], int] = {}
            parent_of: list[int] = []
            for sequence in sequences:
                node = -1
                for token in sequence:
                    if (node, token) not in children:
                        children[node, token] = len(parent_of)
                        parent_of.append(node)
                    node = children[node, token]
            self.children.append(children)
            parents.append(parent_of)
        width = max(1, *(len(parent_of) for parent_of in parents)) if parents else 1
        self.tokens = torch.zeros(len(rows), width, dtype=torch.long)
        self.depths = torch.zeros(len(rows), width, dtype=torch.long)
        self.visible = torch.eye(width, dtype=torch.bool).repeat(len(rows), 1, 1)
        for row, children in enumerate(self.children):
            for (parent, token), node in children.items():
                self.tokens[row, node] = token
                if parent >= 0:
                    self.depths[row, node] = self.depths[row, parent] + 1
                    self.visible[row, node] |= self.visible[row, parent]

    def path(self, row: int, tokens: Iterable[int]) -> list[int]:
        """Nodes along `tokens` from the root, as far as the tree goes."""
        nodes: list[int] = []
        node = -1
        for token in tokens:
            child = self.children[row].get((node, token))
            if child is None:
                break
            nodes.append(child)
            node = child
        return nodes


class _Decoding:
    """Greedy decoding of one batch under one allocation, verified against the drafts.

    Rows that are still open are decoded together; each pass feeds every row the token it has not been fed
    yet and a guess of what follows, and accepts what agrees.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        batch: _Batch,
        allocation: Allocation,
        backend: Callable[..., Any],
        complete: bool = True,
    ) -> None:
        self.evaluator, self.batch, self.backend, self.complete = evaluator, batch, backend, complete
        limit = evaluator.task.new_tokens
        room = limit + max(batch.tree.tokens.shape[1], PASS_TOKENS)
        self.layers = [
            _SliceLayer(keys, values, budget, batch.lengths, room)
            for keys, values, budget in zip(batch.keys, batch.values, allocation.budgets, strict=True)
        ]
        self.cache = prefix_cache(list(self.layers))
        self.outputs = [draft[:1] for draft in batch.drafts]
        self.rows = list(range(len(batch.drafts)))  # the open rows, in cache order
        self.fed = torch.zeros(len(self.rows), dtype=torch.long)  # tokens behind the prompt, per open row

    def run(self) -> tuple[list[list[int]], list[float]]:
        """Output tokens and reference log-likelihood of each row."""
        logits = self._forward(self.batch.tree)
        likelihoods = self._likelihoods(logits)
        self._accept(self.batch.tree, logits.argmax(-1).tolist())
        while self.rows:
            tree = TokenTree([[self._guess(row)] for row in self.rows])
            self._accept(tree, self._forward(tree).argmax(-1).tolist())
        return self.outputs, likelihoods

    def _guess(self, row: int) -> list[int]:
        """The token not yet fed, then the draft's tokens at the positions behind it."""
        done = len(self.outputs[row])
        last = min(done + max(0, PASS_TOKENS // len(self.rows) - 1), self.evaluator.task.new_tokens - 1)
        return [self.outputs[row][-1], *self.batch.drafts[row][done:last]]

    def _forward(self, tree: TokenTree) -> torch.Tensor:
        device = self.batch.lengths.device
        rows = torch.tensor(self.rows, device=device)
        fed = self.fed.to(device)
        width = tree.tokens.shape[1]
        past = torch.arange(int(self.fed.max()), device=device) < fed[:, None]
        suffix = torch.cat([past[:, None].expand(-1, width, -1), tree.visible.to(device)], dim=2)
        positions = self.batch.lengths[rows, None] + fed[:, None] + tree.depths.to(device)
        return self.evaluator.model(
            tree.tokens.to(device),
            position_ids=positions,
            cache=self.cache,
            mosaic_pass=_TreePass(self.backend, self.layers, suffix),
        ).logits

    def _likelihoods(self, logits: torch.Tensor) -> list[float]:
        """Best reference log-likelihood of each row, from the first pass (all rows, in order)."""
        best: list[float] = []
        for row, references in enumerate(self.batch.references):
            totals = []
            for reference in references:
                nodes = self.batch.tree.path(row, reference[:-1])
                wanted = torch.tensor(reference[1:], device=logits.device)
                logprobs = torch.log_softmax(logits[row, nodes].float(), dim=-1)
                totals.append(float(logprobs.gather(1, wanted[:, None]).double().sum()) if nodes else 0.0)
            best.append(max(totals, default=0.0))
        return best

    def _accept(self, tree: TokenTree, predictions: list[list[int]]) -> None:
        """Append to each open row what greedy decoding gives, drop closed rows, keep the accepted slots."""
        paths: list[list[int]] = []
        open_rows: list[int] = []
        for position, row in enumerate(self.rows):
            output = self.outputs[row]
            nodes: list[int] = []
            node = tree.children[position].get((-1, output[-1]))
            while node is not None and not self._closed(output):
                nodes.append(node)
                output.append(predictions[position][node])
                node = tree.children[position].get((node, output[-1]))
            if not self._closed(output) and not self._settled(row):
                open_rows.append(position)
                paths.append(nodes)
        self._keep(open_rows, paths)

    def _closed(self, output: list[int]) -> bool:
        limit = self.evaluator.task.new_tokens
        return len(output) >= limit or output[-1] in self.evaluator.stop_tokens

    def _settled(self, row: int) -> bool:
        example = self.evaluator.examples[self.batch.indices[row]]
        return not self.complete and self.evaluator.settled(example, self.outputs[row])

    def _keep(self, positions: list[int], paths: list[list[int]]) -> None:
        """Keep these open rows, and of the last pass's slots those on each row's path, left-aligned."""
        past = int(self.fed.max())
        fed = [int(self.fed[position]) for position in positions]
        self.rows = [self.rows[position] for position in positions]
        self.fed = torch.tensor([done + len(nodes) for done, nodes in zip(fed, paths, strict=True)])
        if not positions:
            return
        width = int(self.fed.max())
        slots = torch.zeros(len(positions), width, dtype=torch.long)
        for row, (done, nodes) in enumerate(zip(fed, paths, strict=True)):
            kept = [*range(done), *(past + node for node in nodes)]
            slots[row, : len(kept)] = torch.tensor(kept)
        device = self.batch.lengths.device
        for layer in self.layers:
            layer.keep(torch.tensor(positions, device=device), slots.to(device))


class _SliceLayer(PrefixLayer):
    """The first `budget` pairs of a ranked cache, and room for the tokens that follow."""

    def __init__(
        self, keys: torch.Tensor, values: torch.Tensor, budget: int, lengths: torch.Tensor, room: int
    ) -> None:
        super().__init__()
        kept = min(budget, keys.shape[2])
        self.buffers = [
            torch.cat([states[:, :, :kept], states.new_empty(*states.shape[:2], room, states.shape[3])], dim=2)
            for states in (keys, values)
        ]
        real = lengths.clamp(max=kept)
        self.set_prefix(keys[:, :, :kept], values[:, :, :kept], int(lengths.max()), real)
        self.ragged = bool((real < kept).any())
        self.filled = kept

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        end = self.filled + key_states.shape[2]
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, self.filled : end] = states
        self.filled = end
        self.keys, self.values = (buffer[:, :, :end] for buffer in self.buffers)
        return self.keys, self.values

    def keep(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Keep these rows, and of the slots behind the prefix (R, S) those named, in this order."""
        if len(rows) < self.buffers[0].shape[0]:
            self.buffers = [buffer[rows] for buffer in self.buffers]
            self.lengths = self.lengths[rows] if self.lengths is not None else None
        width = slots.shape[1]
        for buffer in self.buffers:
            behind = buffer[:, :, self.kept :]
            index = slots[:, None, :, None].expand(-1, behind.shape[1], -1, behind.shape[3])
            behind[:, :, :width] = behind.gather(2, index)
        self.filled = self.kept + width


class _TreePass(ForwardPass):
    """A verification pass: every query sees its row's prefix, its accepted tokens and its own branch."""

    def __init__(self, backend: Callable[..., Any], layers: list[_SliceLayer], suffix: torch.Tensor) -> None:
        super().__init__(backend)
        self.layers, self.suffix = layers, suffix

    def mask(self, layer: int, queries: int, keys: int, present: torch.Tensor | None) -> torch.Tensor:
        state = self.layers[layer]
        prefix = self.suffix.new_ones(1, 1, state.kept)
        if state.ragged and state.lengths is not None:
            slots = torch.arange(state.kept, device=self.suffix.device)
            prefix = (slots < state.lengths[:, None])[:, None]
        return torch.cat([prefix.expand(self.suffix.shape[0], queries, -1), self.suffix], dim=2)[:, None]


class _PlainPass(ForwardPass):
    """The full cache, whole prompts or single tokens: no mask of our own."""

    def mask(self, layer: int, queries: int, keys: int, present: torch.Tensor | None) -> None:
        return None


class _RankingPass(_PlainPass):
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


def _stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every end-of-sequence id of the generation config, else the tokenizer's."""
    configured = model.generation_config.eos_token_id if model.generation_config else None
    if configured is None:
        configured = tokenizer.eos_token_id
    if configured is None:
        return frozenset()
    return frozenset(configured if isinstance(configured, list) else [configured])


def _equal_lengths(indices: list[int], examples: list[Example], most: int = 2048) -> list[list[int]]:
    """Groups of prompts of one length, at most `most` tokens a group (or a single prompt)."""
    groups: list[list[int]] = []
    for index in sorted(indices, key=lambda i: len(examples[i].tokens)):
        n = len(examples[index].tokens)
        group = groups[-1] if groups else []
        if group and len(examples[group[0]].tokens) == n and (len(group) + 1) * n <= most:
            group.append(index)
        else:
            groups.append([index])
    return groups


def _by_layer(ranked: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Ranked keys or values (L, G, k, d) of each example to one (B, G, max k, d) per layer."""
    layers, kv_heads, _, head_dim = ranked[0].shape
    longest = max(states.shape[2] for states in ranked)
    stacked = torch.zeros(layers, len(ranked), kv_heads, longest, head_dim, dtype=ranked[0].dtype, device=device)
    for row, states in enumerate(ranked):
        stacked[:, row, :, : states.shape[2]] = states
    return list(stacked)


def _read_ranked(path: Path) -> _Ranked | None:
    """A stored ranked cache; None if it is not there or damaged (it is then made again)."""
    if not path.is_file():
        return None
    try:
        content = load_file(path)
        return content["keys"], content["values"], content["draft"].tolist()
    except (SafetensorError, KeyError, OSError):
        return None


def _write_ranked(path: Path, ranked: _Ranked) -> None:
    """Write atomically: a file is whole or not there."""
    keys, values, draft = ranked
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    content = {"keys": keys.contiguous(), "values": values.contiguous(), "draft": torch.tensor(draft)}
    save_file({name: tensor.cpu() for name, tensor in content.items()}, temporary)
    os.replace(temporary, path)
