"""Greedy decoding from ranked caches, verified against drafts: exact, and mostly one forward.

One forward checks all tokens of every draft; where the argmax agrees they are accepted, and decoding goes on
from the first that differs. The references ride along as further branches of each row's token tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from mosaic_opt.allocation import Allocation
from mosaic_opt.eviction.attach import ForwardPass, PrefixLayer, prefix_cache

PASS_TOKENS = 32  # tokens a pass after the first may hold: so few cost hardly more than one does


@dataclass(frozen=True)
class Batch:
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


class Decoding:
    """Greedy decoding of one batch under one allocation, verified against the drafts.

    Rows that are still open are decoded together; each pass feeds every row the token it has not been fed
    yet and a guess of what follows, and accepts what agrees.

    Args:
        model, backend: the switched model, and its own attention function.
        batch, allocation: what is decoded, and the layer budgets.
        new_tokens: generation limit, >= 1.
        stop_tokens: an output ends with the first of these.
        settled: whether a row's output (batch row, tokens so far) need not go on.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        backend: Callable[..., Any],
        batch: Batch,
        allocation: Allocation,
        *,
        new_tokens: int,
        stop_tokens: frozenset[int],
        settled: Callable[[int, Sequence[int]], bool] = lambda row, tokens: False,
    ) -> None:
        self.model, self.backend, self.batch = model, backend, batch
        self.new_tokens, self.stop_tokens, self.settled = new_tokens, stop_tokens, settled
        room = new_tokens + max(batch.tree.tokens.shape[1], PASS_TOKENS)
        self.layers = [
            SliceLayer(keys, values, budget, batch.lengths, room)
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
        last = min(done + max(0, PASS_TOKENS // len(self.rows) - 1), self.new_tokens - 1)
        return [self.outputs[row][-1], *self.batch.drafts[row][done:last]]

    def _forward(self, tree: TokenTree) -> torch.Tensor:
        device = self.batch.lengths.device
        rows = torch.tensor(self.rows, device=device)
        fed = self.fed.to(device)
        width = tree.tokens.shape[1]
        past = torch.arange(int(self.fed.max()), device=device) < fed[:, None]
        suffix = torch.cat([past[:, None].expand(-1, width, -1), tree.visible.to(device)], dim=2)
        positions = self.batch.lengths[rows, None] + fed[:, None] + tree.depths.to(device)
        return self.model(
            tree.tokens.to(device),
            position_ids=positions,
            cache=self.cache,
            mosaic_pass=TreePass(self.backend, self.layers, suffix),
        ).logits

    def _likelihoods(self, logits: torch.Tensor) -> list[float]:
        """Best reference log-likelihood of each row, from the first pass (all rows, in order)."""
        best: list[float] = []
        for row, references in enumerate(self.batch.references):
            totals = [self._likelihood(row, reference, logits) for reference in references]
            best.append(max(totals, default=0.0))
        return best

    def _likelihood(self, row: int, reference: Sequence[int], logits: torch.Tensor) -> float:
        if len(reference) < 2:  # the first token comes from the prefill
            return 0.0
        nodes = self.batch.tree.path(row, reference[:-1])
        wanted = torch.tensor(reference[1:], device=logits.device)
        logprobs = torch.log_softmax(logits[row, nodes].float(), dim=-1)
        return float(logprobs.gather(1, wanted[:, None]).double().sum())

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
            if not self._closed(output) and not self.settled(row, output):
                open_rows.append(position)
                paths.append(nodes)
        self._keep(open_rows, paths)

    def _closed(self, output: list[int]) -> bool:
        return len(output) >= self.new_tokens or output[-1] in self.stop_tokens

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


class SliceLayer(PrefixLayer):
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


class TreePass(ForwardPass):
    """A verification pass: every query sees its row's prefix, its accepted tokens and its own branch."""

    def __init__(self, backend: Callable[..., Any], layers: list[SliceLayer], suffix: torch.Tensor) -> None:
        super().__init__(backend)
        self.layers, self.suffix = layers, suffix

    def mask(self, layer: int, queries: int, keys: int, present: torch.Tensor | None) -> torch.Tensor:
        state = self.layers[layer]
        prefix = self.suffix.new_ones(1, 1, state.kept)
        if state.ragged and state.lengths is not None:
            slots = torch.arange(state.kept, device=self.suffix.device)
            prefix = (slots < state.lengths[:, None])[:, None]
        return torch.cat([prefix.expand(self.suffix.shape[0], queries, -1), self.suffix], dim=2)[:, None]
