"""TOVA: keep what the last token looks at (arXiv 2401.06104)."""

from __future__ import annotations

from typing import Any

import torch

from mosaic_opt.eviction.base import EvictionMethod, PromptStates


class TOVA(EvictionMethod):
    """Attention of the last query, averaged over all query heads of the layer, so that all heads keep the
    same positions.

    Departures. The paper drops one token at every step; here the prompt is cut once, at its end
    (`hold_budget=True` of `attach` goes on dropping). The last token itself is always kept.
    """

    window = 1

    def describe(self) -> dict[str, Any]:
        return {"name": "TOVA", "version": 1}

    def observe(self, states: PromptStates, earlier: torch.Tensor | None = None) -> torch.Tensor:
        """The last query, (B, H, 1, d)."""
        return states.last_queries(1, earlier)

    def scores(self, states: PromptStates, observed: torch.Tensor | None) -> torch.Tensor:
        assert observed is not None
        G = states.keys.shape[1]
        received = torch.stack([states.attention(observed, head).mean(dim=(1, 2)) for head in range(G)], dim=1)
        return received.mean(dim=1, keepdim=True).expand(-1, G, -1)[..., :-1]
