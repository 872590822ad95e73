"""AdaKV: SnapKV's scores, the layer's slots shared by its heads (arXiv 2407.11550)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from mosaic_opt.eviction.base import require_share
from mosaic_opt.eviction.snapkv import SnapKV


class AdaKV(SnapKV):
    """The G * (b - W) slots of a layer go to the best-scored positions of all its heads together, softened by
    a floor: with c_h of the best G * (b - W) in head h, its real-valued share is
    (1 - floor) * c_h + floor * (b - W). A head keeps its own best positions, as many as it has slots, and its
    window; the mean over heads is b exactly.

    Shares are rounded by largest remainder at every budget (ties: lower head), so the total is exact; the release
    rounds each head by itself, and its total drifts. Kept sets are nested: as the budget grows by a token, a head
    whose c_h grew gained a share of at least 1; one whose c_h did not grow gained `floor` in its remainder, and
    another head comes to stand before it only where its remainder wraps below 0, which leaves a slot more to the
    remainders. What a head cannot hold goes to the heads of the next slots.

    Args:
        window, kernel: as in `SnapKV`.
        floor: part of the budget spread evenly over the heads, 0 to 1 (0.2 in the released runner).

    Raises:
        ValueError: for a parameter out of range.
    """

    def __init__(self, *, window: int = 32, kernel: int = 7, floor: float = 0.2) -> None:
        super().__init__(window=window, kernel=kernel)
        require_share("AdaKV", floor=floor)
        self.even_share = float(floor)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "name": "AdaKV", "floor": self.even_share}

    def shared_slots(self, scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        B, G, m = scores.shape  # m budgets beyond the window
        best = torch.argsort(scores.transpose(1, 2).reshape(B, m * G), dim=1, descending=True, stable=True) % G
        best_in_head = F.one_hot(best, G).cumsum(dim=1)[:, G - 1 :: G].double()  # (B, m, G): c_h at b - W = 1 ... m
        each = torch.arange(1, m + 1, device=scores.device, dtype=torch.float64)[:, None]
        share = (1 - self.even_share) * best_in_head + self.even_share * each
        whole = (share + 1e-9).floor()
        remainder = ((share - whole) * 2**24).round()  # so that equal remainders are equal
        place = remainder.argsort(dim=2, descending=True, stable=True).argsort(dim=2)
        counts = (whole + (place < G * each - whole.sum(dim=2, keepdim=True))).long()
        more = counts.diff(dim=1, prepend=counts.new_zeros(B, 1, G))
        heads = torch.arange(G, device=scores.device).repeat(B * m)
        turns = torch.repeat_interleave(heads, more.flatten()).view(B, m * G)
        of_head = F.one_hot(turns, G).cumsum(dim=1).gather(2, turns[..., None])[..., 0]
        beyond = of_head > tokens.expand(B, G).gather(1, turns)  # a head cannot keep what it does not hold
        return turns.gather(1, beyond.to(torch.uint8).argsort(dim=1, stable=True))
