"""H2O: keep the heavy hitters, what all of the prompt looks at (arXiv 2306.14048)."""

from __future__ import annotations

from typing import Any

import torch

from mosaic_opt.eviction.base import EvictionMethod, PromptStates, require_share, require_whole

BLOCK = 128  # queries whose rows of attention are held at a time


class H2O(EvictionMethod):
    """Attention received from all queries (column sums of the causal softmax), averaged over a KV head's
    query heads.

    Departures. This is the prefill form: one cut at the prompt's end with a small window, as in the authors'
    later releases; the first one evicted after every forward (`hold_budget=True` of `attach` does). The sums
    are taken over blocks of rows, so memory grows linearly with the prompt.

    Args:
        window: last prompt tokens, always kept, >= 0.
        recent_fraction: the paper's "half heavy, half recent" is 0.5: at every budget the r most recent and
            the h heaviest positions are kept with r : h = recent_fraction : 1 - recent_fraction, positions
            that are both counted once. None: heavy ones only.

    Raises:
        ValueError: for a parameter out of range.
    """

    def __init__(self, *, window: int = 8, recent_fraction: float | None = None) -> None:
        require_whole("H2O", 0, window=window)
        if recent_fraction is not None:
            require_share("H2O", recent_fraction=recent_fraction)
        self.window = window
        self.recent_fraction = None if recent_fraction is None else float(recent_fraction)

    def describe(self) -> dict[str, Any]:
        return {"name": "H2O", "window": self.window, "recent_fraction": self.recent_fraction, "version": 1}

    def observe(self, states: PromptStates, earlier: torch.Tensor | None = None) -> torch.Tensor:
        """Attention received so far, (B, G, n) float32."""
        heads = [column_sums(states, head) for head in range(states.keys.shape[1])]
        received = torch.stack(heads, dim=1)
        if earlier is not None:
            received[..., : earlier.shape[2]] += earlier
        return received

    def after_eviction(self, observed: torch.Tensor | None, kept: torch.Tensor) -> torch.Tensor | None:
        return None if observed is None else observed.gather(2, kept.clamp(min=0))

    def scores(self, states: PromptStates, observed: torch.Tensor | None) -> torch.Tensor:
        assert observed is not None
        received = observed
        if states.padding is not None:
            received = received.masked_fill(states.padding, -torch.inf)
        if self.recent_fraction is not None:
            received = _earliest_entry(received, self.recent_fraction)
        return received[..., : states.keys.shape[2] - self.window]


def column_sums(states: PromptStates, head: int) -> torch.Tensor:
    """Attention that each position receives from the queries of these states, for one KV head.

    Returns:
        (B, n) float32: summed over the queries, averaged over the group's query heads. Extra memory is
        O(B * H/G * BLOCK * n).
    """
    n, m = states.keys.shape[2], states.queries.shape[2]
    total = torch.zeros(states.keys.shape[0], n, device=states.keys.device)
    for start in reversed(range(0, m, BLOCK)):  # the largest first, so that the others reuse its memory
        end = min(start + BLOCK, m)
        known = states.first(n - m + end)
        total[:, : n - m + end] += known.attention(states.queries[:, :, start:end], head).sum(dim=(1, 2))
    return total / states.group


def _earliest_entry(received: torch.Tensor, recent_fraction: float) -> torch.Tensor:
    """Scores that keep the most recent and the heaviest in proportion: by the budget at which a position enters."""
    n = received.shape[-1]
    counted = torch.arange(1, n + 1, device=received.device, dtype=torch.float64)
    order = torch.argsort(received, dim=-1, descending=True, stable=True)
    rank = torch.empty_like(received, dtype=torch.float64).scatter_(2, order, counted.expand_as(order))
    by_recency = counted.flip(0) / recent_fraction if recent_fraction > 0 else counted + torch.inf
    by_weight = rank / (1 - recent_fraction) if recent_fraction < 1 else rank + torch.inf
    entry = torch.minimum(by_recency, by_weight)
    return -(entry * 2**20).round().div(2**20).float()  # rounded, so that equal budgets are equal
