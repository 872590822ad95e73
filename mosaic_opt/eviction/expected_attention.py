"""Expected Attention: keep what queries still to come are expected to look at (arXiv 2510.00636)."""

from __future__ import annotations

from typing import Any

import torch

from mosaic_opt.eviction.base import EvictionMethod, PromptStates, require_whole


class ExpectedAttention(EvictionMethod):
    """Queries are taken as Gaussian with mean m and covariance C. A key's expected weight is
    exp(m.k s + k'Ck s^2 / 2), s being the attention's scaling; it is normalised over the prompt, averaged over
    a KV head's query heads and multiplied by the norm of the value. The first `sinks` tokens are kept.

    Departures. The paper takes the statistics of the queries *before* their rotary embedding and rotates them
    by the average over the next 512 positions, which needs each model's own projections and rotary layout.
    Here they are taken of the rotated queries of the last `queries` positions: the average over the past 512
    positions stands for that over the next 512. Soft-caps and learned sinks of a model play no part.

    Args:
        queries: last prompt positions whose queries give the statistics, >= 2.
        sinks: first tokens that are kept and whose queries do not count, >= 0.

    Raises:
        ValueError: for a parameter that is not a whole number in range.
    """

    window = 1

    def __init__(self, *, queries: int = 512, sinks: int = 4) -> None:
        require_whole("ExpectedAttention", 2, queries=queries)
        require_whole("ExpectedAttention", 0, sinks=sinks)
        self.queries, self.sinks = queries, sinks

    def describe(self) -> dict[str, Any]:
        return {"name": "ExpectedAttention", "queries": self.queries, "sinks": self.sinks, "version": 1}

    def observe(self, states: PromptStates, earlier: torch.Tensor | None = None) -> torch.Tensor:
        """The last queries, (B, H, up to `queries`, d)."""
        return states.last_queries(self.queries, earlier)

    def scores(self, states: PromptStates, observed: torch.Tensor | None) -> torch.Tensor:
        assert observed is not None
        B, G, n, _ = states.keys.shape
        first = (n - states.tokens)[..., None]
        position = (torch.arange(n, device=states.keys.device) - first).expand(B, G, n)
        weights = torch.stack([self._weights(states, observed, position, head) for head in range(G)], dim=1)
        scores = weights * torch.linalg.vector_norm(states.values.float(), dim=-1)
        kept = position < self.sinks  # lower positions first, above every other score
        return torch.where(kept, scores.amax(dim=-1, keepdim=True) + 1 + self.sinks - position, scores)[..., :-1]

    def _weights(
        self, states: PromptStates, observed: torch.Tensor, position: torch.Tensor, head: int
    ) -> torch.Tensor:
        """Expected attention of each position of one KV head, (B, n) float32, normalised over the prompt."""
        keys = states.keys[:, head].float() * states.scaling
        heads = slice(head * states.group, (head + 1) * states.group)
        queries = observed[:, heads, -keys.shape[1] :].float()
        asked = position[:, head, -queries.shape[2] :]
        counted = (asked >= self.sinks) | (asked == asked[:, -1:])  # the last query counts in any case
        counted = counted.to(queries)[:, None, :, None]
        total = counted.sum(dim=2, keepdim=True)
        mean = (queries * counted).sum(dim=2, keepdim=True) / total
        spread = (queries - mean) * counted
        covariance = spread.transpose(2, 3) @ spread / total
        logits = (mean @ keys[:, None].transpose(2, 3))[:, :, 0]
        logits = logits + ((keys[:, None] @ covariance) * keys[:, None]).sum(dim=-1) / 2
        logits = logits.masked_fill(position[:, head, None] < 0, -torch.inf)
        return torch.softmax(logits, dim=-1).mean(dim=1)
