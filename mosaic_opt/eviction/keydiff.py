"""KeyDiff: keep keys that differ from the others (arXiv 2504.15364)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from mosaic_opt.eviction.base import EvictionMethod, PromptStates, require_whole


class KeyDiff(EvictionMethod):
    """Minus the cosine similarity of a key and the mean direction of all the prompt's keys (the mean of the
    keys scaled to length one).

    Departures. The paper evicts block by block while the prompt is read, in bounded memory; here the prompt
    is ranked once, at its end.

    Args:
        window: last prompt tokens, always kept, >= 0 (none by default).

    Raises:
        ValueError: for a window that is not a whole number of at least 0.
    """

    def __init__(self, *, window: int = 0) -> None:
        require_whole("KeyDiff", 0, window=window)
        self.window = window

    def describe(self) -> dict[str, Any]:
        return {"name": "KeyDiff", "window": self.window, "version": 1}

    def scores(self, states: PromptStates, observed: torch.Tensor | None) -> torch.Tensor:
        directions = F.normalize(states.keys.float(), dim=-1)
        if states.padding is not None:
            directions = directions.masked_fill(states.padding[..., None], 0.0)
        anchor = F.normalize(directions.sum(dim=2, keepdim=True), dim=-1)  # its length plays no part
        return -(directions[:, :, : states.keys.shape[2] - self.window] * anchor).sum(dim=-1)
