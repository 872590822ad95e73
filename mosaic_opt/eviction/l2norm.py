"""L2Norm: keep keys of small norm (arXiv 2406.11430)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mosaic_opt.eviction.base import EvictionMethod, PromptStates, require_whole


class L2Norm(EvictionMethod):
    """Minus the Euclidean norm of a position's key.

    Departures. The paper keeps the first layers whole (0 and 1, or 0, 1 and 12) and evicts from 2,048 tokens
    up only; here no layer is skipped unless asked for and there is no such threshold: how much a layer keeps
    is the allocation's business.

    Args:
        window: last prompt tokens, always kept, >= 0 (the paper has none).
        skip: layers that are never evicted; they keep all pairs, and those count in the realised mean.

    Raises:
        ValueError: for a window or a layer that is not a whole number of at least 0.
    """

    def __init__(self, *, window: int = 0, skip: Sequence[int] = ()) -> None:
        require_whole("L2Norm", 0, window=window)
        if isinstance(skip, str | bytes) or not hasattr(skip, "__iter__"):
            raise ValueError(f"L2Norm skip must be a list of layers; got {skip!r}")
        skip = list(skip)
        for layer in skip:
            require_whole("L2Norm", 0, skip=layer)
        self.window = window
        self.skip = frozenset(int(layer) for layer in skip)

    def describe(self) -> dict[str, Any]:
        return {"name": "L2Norm", "window": self.window, "skip": sorted(self.skip), "version": 1}

    def scores(self, states: PromptStates, observed: torch.Tensor | None) -> torch.Tensor:
        outside = states.keys.shape[2] - self.window
        return -torch.linalg.vector_norm(states.keys[:, :, :outside].float(), dim=-1)
