"""What every eviction method shares: the states it sees, and the way from scores to a ranking.

Shapes: B examples, H query heads, G KV heads, n prompt positions, d head size, W window.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class PromptStates:
    """What one layer's attention saw of a prompt.

    Attributes:
        queries: (B, H, m, d) rotated queries of the last m <= n positions.
        keys: (B, G, n, d) rotated keys, in rising position order.
        values: (B, G, n, d).
        scaling: factor on the query-key products.
        padding: (B, 1 or G, n) bool, True where there is no token (left of the prompt); None without any.
        softcap: the model caps its attention logits: softcap * tanh(logits / softcap); None without.
        sinks: (H,) learned logits that take part in each softmax (gpt-oss); None without.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scaling: float
    padding: torch.Tensor | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.queries.shape[1] // self.keys.shape[1]

    @property
    def tokens(self) -> torch.Tensor:
        """(B, 1 or G) int64, tokens of each example without padding."""
        n = self.keys.shape[2]
        if self.padding is None:
            return torch.full((self.keys.shape[0], 1), n, device=self.keys.device)
        return n - self.padding.sum(dim=2)

    def first(self, count: int) -> PromptStates:
        """The same with the first `count` positions' keys and values only (views)."""
        padding = None if self.padding is None else self.padding[..., :count]
        return replace(self, keys=self.keys[:, :, :count], values=self.values[:, :, :count], padding=padding)

    def last_queries(self, count: int, earlier: torch.Tensor | None = None) -> torch.Tensor:
        """(B, H, up to `count`, d): the last queries, those of earlier forwards in front."""
        known = self.queries if earlier is None else torch.cat([earlier, self.queries], dim=2)
        return known[:, :, -count:].clone()  # a view would keep all of them alive

    def attention(self, queries: torch.Tensor, head: int) -> torch.Tensor:
        """Softmax attention of the last w positions' queries over the keys of one KV head, causal.

        Args:
            queries: (B, H, w, d), w <= n.
            head: KV head, 0 to G-1.

        Returns:
            (B, H/G, w, n) float32; zero at padding, and in the rows of padding queries.
        """
        keys = self.keys[:, head].float()
        B, n, d = keys.shape
        w = queries.shape[2]
        heads = slice(head * self.group, (head + 1) * self.group)
        own = queries[:, heads].float().reshape(B, self.group * w, d) * self.scaling
        logits = (own @ keys.transpose(1, 2)).view(B, self.group, w, n)
        if self.softcap is not None:
            logits = torch.tanh_(logits.div_(self.softcap)).mul_(self.softcap)
        future = torch.ones(w, w, dtype=torch.bool, device=keys.device).triu(1)
        logits[..., n - w :].masked_fill_(future, -torch.inf)
        padding = None
        if self.padding is not None:
            padding = self.padding[:, min(head, self.padding.shape[1] - 1)]
            logits.masked_fill_(padding[:, None, None, :], -torch.inf)
        if self.sinks is None:
            weights = torch.softmax(logits, dim=-1)
        else:
            sinks = self.sinks[heads].float().view(1, -1, 1, 1).expand(B, -1, w, 1)
            weights = torch.softmax(torch.cat([logits, sinks], dim=-1), dim=-1)[..., :-1]
        if padding is not None:  # a padding query's row is all -inf, so NaN without sinks
            weights = weights.masked_fill(padding[:, None, n - w :, None], 0.0)
        return weights


@dataclass(frozen=True)
class Ranking:
    """A layer's prompt positions in the order in which they are kept.

    Attributes:
        order: (B, G, k) int64; the positions kept by a KV head are the first of its row.
        tokens: (B, 1 or G) int64, tokens of each example without padding.
        window: W, kept by every head before anything else.
        heads: (B, S) int64, for methods whose heads share a layer's slots: the KV head that each slot
            beyond the windows goes to, in turn; None where every head keeps equally many.
    """

    order: torch.Tensor
    tokens: torch.Tensor
    window: int
    heads: torch.Tensor | None = None

    def lengths(self, budget: int) -> torch.Tensor:
        """Pairs kept at a layer budget, (B, 1 or G) int64; the mean over heads is min(budget, tokens)."""
        if self.heads is None or budget <= self.window:
            return self.tokens.clamp(max=budget)
        G = self.order.shape[1]
        taken = self.heads[:, : G * (budget - self.window)]
        counts = torch.stack([(taken == head).sum(dim=1) for head in range(G)], dim=1) + self.window
        return torch.minimum(counts, self.tokens)

    def kept(self, budget: int) -> torch.Tensor:
        """Positions kept at a layer budget, (B, G, most) int64, rising; -1 at the left where fewer are kept."""
        lengths = self.lengths(budget).expand(self.order.shape[:2])
        longest = int(lengths.max())
        real = torch.arange(longest, device=lengths.device) < lengths[..., None]
        return self.order[..., :longest].masked_fill(~real, -1).sort(dim=-1).values

    def part(self, rows: slice) -> Ranking:
        """Of some examples."""
        heads = None if self.heads is None else self.heads[rows]
        return replace(self, order=self.order[rows], tokens=self.tokens[rows], heads=heads)

    def cut(self, limit: int) -> Ranking:
        """The same without what no budget up to `limit` needs."""
        longest = int(self.lengths(limit).max())
        heads = self.heads
        if heads is not None:
            heads = heads[:, : self.order.shape[1] * max(limit - self.window, 0)]
        return replace(self, order=self.order[..., :longest], heads=heads)


class EvictionMethod(ABC):
    """A rule that ranks a prompt's positions, per layer and KV head.

    A method decides *which* pairs are kept first; an allocation decides how many. Subclasses set `window`
    (the last prompt positions, always kept) and implement `scores`; those that look at queries implement
    `observe` too.

    Attributes:
        window: observation window W in tokens, >= 0.
        skip: layers that are never evicted.
    """

    window: int
    skip: frozenset[int] = frozenset()

    @abstractmethod
    def scores(self, states: PromptStates, observed: torch.Tensor | None) -> torch.Tensor:
        """Score the positions outside the window; higher is kept longer.

        Args:
            states: keys and values of the whole prompt (its queries may be the last chunk's only).
            observed: what `observe` gathered over the whole prompt.

        Returns:
            (B, G, max(n - W, 0)) float32. Scores at padding positions are ignored.
        """

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Name and parameters, JSON-serialisable: part of a study's fingerprint."""

    def observe(self, states: PromptStates, earlier: torch.Tensor | None = None) -> torch.Tensor | None:
        """Gather what the scores need of the queries; called at every forward of a prompt.

        Args:
            states: the states of this forward: its queries, and all keys and values so far.
            earlier: what the forward before returned; None at the first.
        """
        return None

    def after_eviction(self, observed: torch.Tensor | None, kept: torch.Tensor) -> torch.Tensor | None:
        """What was observed, for the positions kept: (B, G, k), -1 where there is none (see `hold_budget`)."""
        return observed

    def shared_slots(self, scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor | None:
        """`Ranking.heads` of these scores (-inf at padding), for methods whose heads share a layer's slots.

        Args:
            tokens: (B, 1 or G) int64, how many of the scored positions of each head hold a token.
        """
        return None

    @property
    def floor(self) -> int:
        """Smallest layer budget a search may give: the window, at least 1."""
        return max(self.window, 1)

    def rank(self, states: PromptStates, observed: torch.Tensor | None = None) -> Ranking:
        """Rank the positions of a prompt.

        The window comes first, latest position leading (so a budget below the window keeps the last b
        tokens), then the other positions by falling score, ties to the lower position; padding comes last.

        Args:
            observed: what `observe` returned at the prompt's last forward; None: the states hold all queries.
        """
        n = states.keys.shape[2]
        outside = max(n - self.window, 0)
        if observed is None:
            observed = self.observe(states)
        order = torch.arange(n - 1, outside - 1, -1, device=states.keys.device).expand(*states.keys.shape[:2], -1)
        heads = None
        if outside:
            scores = self.scores(states, observed)
            if states.padding is not None:
                scores = scores.masked_fill(states.padding[..., :outside], -torch.inf)
            order = torch.cat([order, torch.argsort(scores, dim=-1, descending=True, stable=True)], dim=-1)
            heads = self.shared_slots(scores, (states.tokens - self.window).clamp(min=0))
        if states.padding is not None:
            padded = states.padding.expand_as(order).gather(2, order)
            order = order.gather(2, torch.argsort(padded.to(torch.uint8), dim=-1, stable=True))
        return Ranking(order, states.tokens, self.window, heads)


def gather_pairs(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Copy the states at `positions`: (B, G, n, d) and (B, G, k) to a new (B, G, k, d)."""
    return states.gather(2, positions[..., None].expand(-1, -1, -1, states.shape[-1]))


def require_whole(method: str, least: int, **parameters: Any) -> None:
    """Raise ValueError unless every parameter is a whole number of at least `least`."""
    for name, value in parameters.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{method} {name} must be a whole number of at least {least}; got {value!r}")


def require_share(method: str, **parameters: Any) -> None:
    """Raise ValueError unless every parameter is a number from 0 to 1."""
    for name, value in parameters.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ValueError(f"{method} {name} must be a number between 0 and 1; got {value!r}")
