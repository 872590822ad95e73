"""StreamingLLM: keep the first tokens and the most recent (arXiv 2309.17453)."""

from __future__ import annotations

from typing import Any

import torch

from mosaic_opt.eviction.base import EvictionMethod, PromptStates, require_whole


class StreamingLLM(EvictionMethod):
    """The last token, then the first `sinks` tokens, then the others, latest first.

    Departures. The paper moves the kept keys to consecutive positions; here they keep their own.

    Args:
        sinks: first tokens that are kept, >= 0 (4 in the paper).

    Raises:
        ValueError: for a number of sinks that is not a whole number of at least 0.
    """

    window = 1

    def __init__(self, *, sinks: int = 4) -> None:
        require_whole("StreamingLLM", 0, sinks=sinks)
        self.sinks = sinks

    def describe(self) -> dict[str, Any]:
        return {"name": "StreamingLLM", "sinks": self.sinks, "version": 1}

    def scores(self, states: PromptStates, observed: torch.Tensor | None) -> torch.Tensor:
        B, G, n, _ = states.keys.shape
        first = (n - states.tokens)[..., None]  # (B, 1 or G, 1): where the prompt begins
        position = torch.arange(n - 1, device=states.keys.device) - first
        score = torch.where(position < self.sinks, n + self.sinks - position, position)
        return score.float().expand(B, G, -1)
