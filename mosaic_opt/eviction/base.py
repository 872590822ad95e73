"""What every eviction method shares: from scores to a keep order.

Shapes: B examples, H query heads, G KV heads, n prompt positions, d head size, W window.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch


class EvictionMethod(ABC):
    """A rule that ranks a prompt's positions, per layer and KV head.

    A method decides *which* pairs are kept first; an allocation decides how many. Subclasses set `window`
    (the last prompt positions, always kept) and implement `scores`.

    Attributes:
        window: observation window W in tokens, >= 0.
    """

    window: int

    @abstractmethod
    def scores(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scaling: float,
        padding: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Score the positions outside the window; higher is kept longer.

        Args:
            queries: (B, H, n, d) rotated queries of the prompt.
            keys: (B, G, n, d) rotated keys.
            values: (B, G, n, d).
            scaling: factor on the query-key products.
            padding: (B, n) bool, True where a position is padding (left of the prompt); None without any.

        Returns:
            (B, G, max(n - W, 0)) float32. Scores at padding positions are ignored.
        """

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Name and parameters, JSON-serialisable: part of a study's fingerprint."""

    @property
    def floor(self) -> int:
        """Smallest layer budget a search may give: the window, at least 1."""
        return max(self.window, 1)

    def keep_order(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scaling: float,
        limit: int,
        padding: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Prompt positions in the order in which they are kept: the set kept at budget b is the first b.

        The window comes first, latest position leading (so a budget below the window keeps the last b
        tokens), then the other positions by falling score, ties to the lower position; padding comes last.

        Args:
            limit: how many positions to return at most (the largest budget that will be asked for), >= 1.
            The others are those of `scores`.

        Returns:
            (B, G, min(n, limit)) int64.
        """
        n = keys.shape[2]
        outside = max(n - self.window, 0)
        recent = torch.arange(n - 1, outside - 1, -1, device=keys.device).expand(*keys.shape[:2], -1)
        if outside and (limit > n - outside or padding is not None):
            scores = self.scores(queries, keys, values, scaling=scaling, padding=padding)
            if padding is not None:
                scores = scores.masked_fill(padding[:, None, :outside], -torch.inf)
            order = torch.cat([recent, torch.argsort(scores, dim=-1, descending=True, stable=True)], dim=-1)
        else:
            order = recent
        if padding is not None:
            padded = padding[:, None, :].expand_as(order).gather(2, order)
            order = order.gather(2, torch.argsort(padded.to(torch.uint8), dim=-1, stable=True))
        return order[..., :limit]


def gather_pairs(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Copy the states at `positions`: (B, G, n, d) and (B, G, k) to a new (B, G, k, d)."""
    return states.gather(2, positions[..., None].expand(-1, -1, -1, states.shape[-1]))
