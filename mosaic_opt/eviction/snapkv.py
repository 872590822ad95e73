"""SnapKV: keep what the prompt's last queries look at (arXiv 2404.14469)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from mosaic_opt.eviction.base import EvictionMethod, PromptStates, require_whole


class SnapKV(EvictionMethod):
    """Attention of the last W queries, summed over the window, averaged over a KV head's query heads, then
    max-pooled along the positions (W = 32, kernel 7 in the released configuration).

    Where public implementations differ, this one takes the mean over the group *before* pooling and pools
    with the maximum. Scores are computed in float32 whatever the model's dtype.

    Args:
        window: last prompt tokens whose queries observe and whose pairs are always kept, >= 1.
        kernel: width of the pooling in positions, odd, >= 1.

    Raises:
        ValueError: for a window below 1 or a kernel that is even or below 1.
    """

    def __init__(self, *, window: int = 32, kernel: int = 7) -> None:
        name = type(self).__name__
        require_whole(name, 1, window=window, kernel=kernel)
        if kernel % 2 == 0:
            raise ValueError(f"{name} kernel must be odd; got {kernel}")
        self.window = window
        self.kernel = kernel

    def describe(self) -> dict[str, Any]:
        return {"name": "SnapKV", "window": self.window, "kernel": self.kernel, "version": 1}

    def observe(self, states: PromptStates, earlier: torch.Tensor | None = None) -> torch.Tensor:
        """The last W queries, (B, H, up to W, d)."""
        return states.last_queries(self.window, earlier)

    def scores(self, states: PromptStates, observed: torch.Tensor | None) -> torch.Tensor:
        assert observed is not None
        outside = states.keys.shape[2] - self.window
        heads = range(states.keys.shape[1])
        received = [states.attention(observed, head).sum(dim=2).mean(dim=1)[:, :outside] for head in heads]
        return F.max_pool1d(torch.stack(received, dim=1), self.kernel, stride=1, padding=self.kernel // 2)
