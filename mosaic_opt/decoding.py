"""Greedy decoding from ranked caches, verified against drafts: exact, and mostly one forward.

One forward checks all tokens of every draft; where the argmax agrees they are accepted, and decoding goes on
from the first that differs. The references ride along as further branches of each row's token tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from mosaic_opt.allocation import Allocation
from mosaic_opt.eviction.attention import ForwardPass
from mosaic_opt.eviction.base import Ranking
from mosaic_opt.eviction.cache import PrefixLayer
from mosaic_opt.ranked import Prompt, RankedPairs
from mosaic_opt.tasks import Example

PASS_TOKENS = 32  # tokens a pass after the first may hold: so few cost hardly more than one does


@dataclass(frozen=True)
class Turn:
    """What follows one example's prompt.

    Attributes:
        question: tokens fed before the answer; empty where the prompt ends with the question.
        draft: the greedy output with the full cache, or as much of it as is known: without a question at least the
            first token, which the prefill gives.
        references: tokens of the answers whose log-likelihood is taken.
        new_tokens: generation limit, at least 1.
        stop_tokens: an output ends with the first of these.
        barred: tokens that an output does not begin with.
    """

    question: tuple[int, ...]
    draft: list[int]
    references: list[tuple[int, ...]]
    new_tokens: int
    stop_tokens: frozenset[int]
    barred: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        example: Example,
        draft: list[int],
        *,
        stop_tokens: frozenset[int],
        references: Sequence[tuple[int, ...]] = (),
    ) -> Turn:
        """What follows an example's prompt. `stop_tokens` are the model's; an example may have more."""
        stops = stop_tokens | frozenset(example.stop_tokens)
        # no output begins with what ends it where the example has stop tokens of its own, as LongBench has it
        # for the task that stops at a newline (its `min_length`)
        barred = tuple(sorted(stops)) if example.stop_tokens else ()
        return cls(example.question, draft, list(references), example.new_tokens, stops, barred)

    def sequences(self) -> list[list[int]]:
        """What the first pass feeds: all but the last token of the draft (if it is at its end) and of references."""
        draft = self.draft[:-1] if self.closed(self.draft) else self.draft
        return [[*self.question, *answer] for answer in (draft, *(reference[:-1] for reference in self.references))]

    def closed(self, output: Sequence[int]) -> bool:
        """Whether an output (without the question) is at its end: it has so many tokens, or the last one ends it."""
        return len(output) >= self.new_tokens or (len(output) > 0 and output[-1] in self.stop_tokens)


@dataclass(frozen=True)
class Batch:
    """Examples decoded together.

    Attributes:
        indices: of the examples in the evaluator.
        pairs: their ranked pairs.
        layers: model layer of each ranking.
        rankings: one per evictable layer, on the CPU; they tell how many pairs a budget keeps.
        local: for each sliding-window layer of the model, what it holds.
        lengths: (B,) prompt tokens, on the model's device.
        turns: what follows each prompt.
    """

    indices: list[int]
    pairs: RankedPairs
    layers: tuple[int, ...]
    rankings: list[Ranking]
    local: dict[int, LocalPairs]
    lengths: torch.Tensor
    turns: list[Turn]

    @classmethod
    def of(
        cls,
        prompts: Sequence[Prompt],
        pairs: RankedPairs,
        *,
        indices: list[int],
        layers: tuple[int, ...],
        windows: Mapping[int, int],
        rankings: list[Ranking],
        turns: list[Turn],
    ) -> Batch:
        """The batch of these prompts. `windows` are those of the model's sliding-window layers."""
        local = {
            layer: LocalPairs([prompt.local[index] for prompt in prompts], window, pairs.device)
            for index, (layer, window) in enumerate(windows.items())
        }
        lengths = torch.tensor([prompt.keys.shape[2] for prompt in prompts], device=pairs.device)
        return cls(indices, pairs, layers, rankings, local, lengths, turns)

    @cached_property
    def tree(self) -> TokenTree:
        """Questions, drafts and references merged."""
        return TokenTree([turn.sequences() for turn in self.turns])

    def halves(self) -> tuple[Batch, Batch]:
        """Two batches of half the examples each (at least two)."""
        middle = len(self.indices) // 2
        return self._part(slice(middle)), self._part(slice(middle, None))

    def _part(self, rows: slice) -> Batch:
        return Batch(
            indices=self.indices[rows],
            pairs=self.pairs.part(rows),
            layers=self.layers,
            rankings=[ranking.part(rows) for ranking in self.rankings],
            local={layer: pairs.part(rows) for layer, pairs in self.local.items()},
            lengths=self.lengths[rows],
            turns=self.turns[rows],
        )

    def slices(self, allocation: Allocation, room: int) -> dict[int, SliceLayer]:
        """What each layer of the model holds under an allocation, with room for further tokens."""
        longest = int(self.lengths.max())
        layers = {layer: pairs.slice(room, longest) for layer, pairs in self.local.items()}
        for index, (budget, ranking) in enumerate(zip(allocation.budgets, self.rankings, strict=True)):
            lengths = ranking.lengths(budget)
            kept = int(lengths.max())
            buffers = self.pairs.buffers(kept + room)
            self.pairs.fill(index, kept, buffers)
            layers[self.layers[index]] = SliceLayer(buffers, lengths.to(self.lengths.device), kept, longest)
        return dict(sorted(layers.items()))


class LocalPairs:
    """What a sliding-window layer holds of a batch's prompts.

    Args:
        pairs: keys and values (G, s, d) of each example.
        window: tokens that a query sees, itself included.
        device: where they are held.
    """

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], window: int, device: torch.device) -> None:
        self.window = window
        self.lengths = torch.tensor([[keys.shape[1]] for keys, _ in pairs], device=device)
        most = int(self.lengths.max())
        self.held = [
            torch.stack([F.pad(states[part], (0, 0, 0, most - states[part].shape[1])) for states in pairs]).to(device)
            for part in (0, 1)
        ]

    def part(self, rows: slice) -> LocalPairs:
        """Those of some examples."""
        part = copy(self)
        part.lengths, part.held = self.lengths[rows], [states[rows] for states in self.held]
        return part

    def slice(self, room: int, prompt_tokens: int) -> SliceLayer:
        buffers = [F.pad(states, (0, 0, 0, room)) for states in self.held]
        return SliceLayer(buffers, self.lengths, self.held[0].shape[2], prompt_tokens, window=self.window)


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
        model: the switched model.
        batch, allocation: what is decoded, and the layer budgets.
        settled: whether a row's output (batch row, tokens so far) need not go on.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batch: Batch,
        allocation: Allocation,
        *,
        settled: Callable[[int, Sequence[int]], bool] = lambda row, tokens: False,
    ) -> None:
        self.model, self.batch, self.settled = model, batch, settled
        room = max(len(turn.question) + turn.new_tokens for turn in batch.turns)
        self.layers = batch.slices(allocation, room + max(batch.tree.tokens.shape[1], PASS_TOKENS))
        self.cache = Cache(layers=list(self.layers.values()))
        # without a question the prefill has given the first token
        self.outputs = [[] if turn.question else turn.draft[:1] for turn in batch.turns]
        self.rows = list(range(len(batch.turns)))  # the open rows, in cache order
        self.fed = torch.zeros(len(self.rows), dtype=torch.long)  # tokens behind the prompt, per open row

    def run(self) -> tuple[list[list[int]], list[float]]:
        """Output tokens and reference log-likelihood of each row."""
        logits = self._forward(self.batch.tree)
        likelihoods = self._likelihoods(logits)
        for row, turn in enumerate(self.batch.turns):
            if turn.question and turn.barred:
                logits[row, self.batch.tree.path(row, turn.question)[-1], list(turn.barred)] = float("-inf")
        self._accept(self.batch.tree, logits.argmax(-1).tolist())
        while self.rows:
            tree = TokenTree([[self._guess(row)] for row in self.rows])
            self._accept(tree, self._forward(tree).argmax(-1).tolist())
        return self.outputs, likelihoods

    def _guess(self, row: int) -> list[int]:
        """The token not yet fed, then the draft's tokens at the positions behind it."""
        turn, output = self.batch.turns[row], self.outputs[row]
        done = len(output)
        last = min(done + max(0, PASS_TOKENS // len(self.rows) - 1), turn.new_tokens - 1)
        return [output[-1], *turn.draft[done:last]]

    def _forward(self, tree: TokenTree) -> torch.Tensor:
        device = self.batch.lengths.device
        rows = torch.tensor(self.rows, device=device)
        fed = self.fed.to(device)
        width = tree.tokens.shape[1]
        past = torch.arange(int(self.fed.max()), device=device)
        seen = (past < fed[:, None])[:, None].expand(-1, width, -1)
        offsets = fed[:, None] + tree.depths.to(device)
        suffix = torch.cat([seen, tree.visible.to(device)], dim=2)
        suffix_offsets = torch.cat([past.expand(len(rows), -1), offsets], dim=1)
        return self.model(
            tree.tokens.to(device),
            position_ids=self.batch.lengths[rows, None] + offsets,
            cache=self.cache,
            mosaic_pass=TreePass(self.layers, suffix, offsets, suffix_offsets),
        ).logits

    def _likelihoods(self, logits: torch.Tensor) -> list[float]:
        """Best reference log-likelihood of each row, from the first pass (all rows, in order)."""
        best: list[float] = []
        for row, turn in enumerate(self.batch.turns):
            first = 0 if turn.question else 1  # without a question the first token comes from the prefill
            longer = [reference for reference in turn.references if len(reference) > first]
            totals = [self._likelihood(row, turn.question, reference, first, logits) for reference in longer]
            best.append(max(totals, default=0.0))
        return best

    def _likelihood(
        self, row: int, question: Sequence[int], reference: Sequence[int], first: int, logits: torch.Tensor
    ) -> float:
        """Of the reference's tokens from the one at `first` on."""
        nodes = self.batch.tree.path(row, [*question, *reference[:-1]])[-(len(reference) - first) :]
        wanted = torch.tensor(reference[first:], device=logits.device)
        logprobs = torch.log_softmax(logits[row, nodes].float(), dim=-1)
        return float(logprobs.gather(1, wanted[:, None]).double().sum())

    def _accept(self, tree: TokenTree, predictions: list[list[int]]) -> None:
        """Append to each open row what greedy decoding gives, drop closed rows, keep the accepted slots."""
        paths: list[list[int]] = []
        open_rows: list[int] = []
        for position, row in enumerate(self.rows):
            turn, output = self.batch.turns[row], self.outputs[row]
            nodes = tree.path(position, output[-1:] or turn.question)  # what was fed before any guess
            while not turn.closed(output):
                output.append(predictions[position][nodes[-1]])
                node = tree.children[position].get((nodes[-1], output[-1]))
                if node is None:
                    break
                nodes.append(node)
            if not turn.closed(output) and not self.settled(row, output):
                open_rows.append(position)
                paths.append(nodes)
        self._keep(open_rows, paths)

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
        for layer in self.layers.values():
            layer.keep(torch.tensor(positions, device=device), slots.to(device))


class SliceLayer(PrefixLayer):
    """The first pairs of a ranked cache, left-aligned, and room for the tokens that follow.

    Args:
        buffers: keys and values (B, G, kept + room, d), the prefix filled in.
        lengths: (B, 1 or G) int64, real prefix pairs.
        kept: the most of them.
        prompt_tokens: tokens of the longest prompt.
        window: for a sliding-window layer, whose prefix is the prompt's last positions: tokens that a query sees.
    """

    def __init__(
        self,
        buffers: list[torch.Tensor],
        lengths: torch.Tensor,
        kept: int,
        prompt_tokens: int,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.window = window
        self.buffers, self.lengths, self.filled = buffers, lengths, kept
        self.prompt_tokens = prompt_tokens
        self.slots = kept
        self.ragged = bool((lengths < kept).any())
        self.keys, self.values = (buffer[:, :, :kept] for buffer in buffers)
        self.is_initialized = True

    @property
    def kept(self) -> int:
        return self.slots

    def prefix_mask(self) -> torch.Tensor | None:
        if not self.ragged:
            return None
        return torch.arange(self.slots, device=self.lengths.device) < self.lengths[..., None]

    def get_seq_length(self) -> int:
        return self.prompt_tokens + self.filled - self.slots

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
            self.lengths = self.lengths[rows]
        width = slots.shape[1]
        for buffer in self.buffers:
            behind = buffer[:, :, self.slots :]
            index = slots[:, None, :, None].expand(-1, behind.shape[1], -1, behind.shape[3])
            behind[:, :, :width] = behind.gather(2, index)
        self.filled = self.slots + width


class TreePass(ForwardPass):
    """A verification pass: every query sees its row's prefix, its accepted tokens and its own branch.

    Args:
        layers: the slice of each layer of the model.
        suffix: (B, queries, slots behind the prefix) bool.
        offsets: (B, queries) int64, positions of the queries behind the prompt's end.
        suffix_offsets: (B, slots behind the prefix) int64, the same of the slots.
    """

    def __init__(
        self,
        layers: dict[int, SliceLayer],
        suffix: torch.Tensor,
        offsets: torch.Tensor,
        suffix_offsets: torch.Tensor,
    ) -> None:
        super().__init__(tuple(layers))
        self.layers = list(layers.values())
        self.suffix, self.offsets, self.suffix_offsets = suffix, offsets, suffix_offsets

    def mask(self, index: int, queries: int, keys: int, present: torch.Tensor | None) -> torch.Tensor:
        state = self.layers[index]
        before, behind = state.prefix_mask(), self.suffix
        before = self.suffix.new_ones(1, 1, state.kept) if before is None else before
        before = before[:, :, None].expand(self.suffix.shape[0], before.shape[1], queries, state.kept)
        if state.window is not None:
            slots = torch.arange(state.kept, device=self.suffix.device) - state.lengths  # (B, kept), below 0
            before = before & self._near(slots, state.window)[:, None]
            behind = behind & self._near(self.suffix_offsets, state.window)
        return torch.cat([before, behind[:, None].expand(-1, before.shape[1], -1, -1)], dim=3)

    def _near(self, slots: torch.Tensor, window: int) -> torch.Tensor:
        """(B, queries, slots) bool: which slots, at these offsets (B, slots), lie inside a query's window."""
        return self.offsets[:, :, None] - slots[:, None, :] < window
