"""SnapKV: keep what the prompt's last queries look at (arXiv 2404.14469)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from mosaic_opt.eviction.base import EvictionMethod


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
        for name, value in (("window", window), ("kernel", kernel)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"SnapKV {name} must be a whole number of at least 1; got {value!r}")
        if kernel % 2 == 0:
            raise ValueError(f"SnapKV kernel must be odd; got {kernel}")
        self.window = window
        self.kernel = kernel

    def describe(self) -> dict[str, Any]:
        return {"name": "SnapKV", "window": self.window, "kernel": self.kernel, "version": 1}

    def scores(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scaling: float,
        padding: torch.Tensor | None = None,
    ) -> torch.Tensor:
        received = window_attention(queries, keys, self.window, scaling=scaling, padding=padding)
        outside = received[..., : keys.shape[2] - self.window]
        return F.max_pool1d(outside, self.kernel, stride=1, padding=self.kernel // 2)


def window_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    window: int,
    *,
    scaling: float,
    padding: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention that each position receives from the last `window` queries, causal among themselves.

    Args:
        queries, keys, scaling, padding: as in `EvictionMethod.scores`; padding queries count for nothing.
        window: W >= 1; the last min(W, n) queries are used.

    Returns:
        (B, G, n) float32, summed over the window and averaged over each KV head's query heads.
    """
    B, G, n, d = keys.shape
    W = min(window, n)
    group = queries.shape[1] // G
    observing = queries[:, :, -W:].float().reshape(B, G, group * W, d)
    logits = (observing @ keys.float().transpose(2, 3) * scaling).view(B, G, group, W, n)
    future = torch.ones(W, W, dtype=torch.bool, device=keys.device).triu(1)
    logits[..., n - W :].masked_fill_(future, -torch.inf)
    if padding is not None:
        logits.masked_fill_(padding[:, None, None, None, :], -torch.inf)
    weights = torch.softmax(logits, dim=-1)
    if padding is not None:  # rows of padding queries are all -inf, so NaN: they observe nothing
        weights.masked_fill_(padding[:, None, None, n - W :, None], 0.0)
    return weights.sum(dim=3).mean(dim=2)
