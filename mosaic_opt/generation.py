"""Generate text live, with and without eviction, and measure it: for `mosaic generate` and `mosaic bench`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.generation.streamers import BaseStreamer

from mosaic_opt.allocation import Allocation
from mosaic_opt.eviction import Eviction, EvictionMethod, attach
from mosaic_opt.eviction.cache import cache_bytes
from mosaic_opt.model import require_fit


@dataclass(frozen=True)
class Cut:
    """An eviction to generate under (see `attach`)."""

    method: EvictionMethod
    allocation: Allocation
    hold_budget: bool = False


@dataclass(frozen=True)
class Generation:
    """One call of `model.generate`.

    Attributes:
        tokens: generated ids of each row.
        prefill_seconds: until the first token was there, scoring included.
        scoring_seconds: the part of it spent in ranking and cutting.
        decode_seconds: for the tokens after the first.
        kv_bytes: resident bytes of the whole cache at the end.
    """

    tokens: list[list[int]]
    prefill_seconds: float
    scoring_seconds: float
    decode_seconds: float
    kv_bytes: int

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens decoded a second over all rows, the first of each left out; None if there was only that."""
        decoded = sum(len(row) - 1 for row in self.tokens)
        return decoded / self.decode_seconds if decoded and self.decode_seconds > 0 else None


def generate(
    model: PreTrainedModel,
    prompts: torch.Tensor,
    *,
    new_tokens: int,
    cut: Cut | None = None,
    stop_tokens: Sequence[int] = (),
) -> Generation:
    """Continue prompts greedily.

    Args:
        prompts: (B, n) ids without padding.
        new_tokens: most tokens a row may get, >= 1.
        cut: the eviction; None generates with the full cache.
        stop_tokens: a row ends with the first of these; none: every row gets `new_tokens`.

    Raises:
        ValueError: as `attach` does; or for prompts that do not fit the model's context.
    """
    prompts = prompts.to(model.device)
    require_fit(model.config, prompts.shape[1], new_tokens)
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    clock = _Clock(prompts.device)
    config = GenerationConfig(
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=list(stop_tokens) or None,
        pad_token_id=next(iter(stop_tokens), 0),
    )
    model_generate: Any = model.generate
    with _attached(model, cut) as eviction:
        clock.start()
        made = model_generate(
            prompts, attention_mask=torch.ones_like(prompts), generation_config=config, cache=cache, streamer=clock
        )
        scoring = 0.0 if eviction is None else eviction.report().scoring_seconds
        kv_bytes = cache_bytes(cache)
    rows = made[:, prompts.shape[1] :].tolist()
    return Generation(
        tokens=[_until_stop(row, stop_tokens) for row in rows],
        prefill_seconds=clock.times[1] - clock.times[0],
        scoring_seconds=scoring,
        decode_seconds=clock.times[-1] - clock.times[1],
        kv_bytes=kv_bytes,
    )


def bench(
    model: PreTrainedModel,
    cuts: dict[str, Cut | None],
    *,
    lengths: Sequence[int],
    batches: Sequence[int],
    new_tokens: int,
    repeats: int,
    seed: int,
) -> list[dict[str, Any]]:
    """Prefill time, decoding speed and KV bytes of several evictions on prompts of random tokens.

    Args:
        cuts: name -> eviction; None is the full cache.
        lengths: prompt tokens.
        batches: rows of a batch.
        repeats: runs of each, one of all in turn; medians are given. One more of each goes before, unmeasured.

    Returns:
        One row for each length, batch and name: `prompt_tokens`, `batch`, `allocation`, `mean_budget`,
        `prefill_seconds`, `scoring_seconds`, `tokens_per_second`, `kv_bytes`.
    """
    rows = []
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    for length in lengths:
        for batch in batches:
            prompts = torch.randint(vocabulary, (batch, length), generator=generator)
            runs: dict[str, list[Generation]] = {name: [] for name in cuts}
            for _ in range(repeats + 1):
                for name, cut in cuts.items():
                    runs[name].append(generate(model, prompts, new_tokens=new_tokens, cut=cut))
            rows += [_row(length, batch, name, cut, runs[name][1:]) for name, cut in cuts.items()]
    return rows


def _row(length: int, batch: int, name: str, cut: Cut | None, runs: Sequence[Generation]) -> dict[str, Any]:
    speeds = [run.tokens_per_second for run in runs if run.tokens_per_second is not None]
    return {
        "prompt_tokens": length,
        "batch": batch,
        "allocation": name,
        "mean_budget": length if cut is None else cut.allocation.realised(length).mean,
        "prefill_seconds": statistics.median(run.prefill_seconds for run in runs),
        "scoring_seconds": statistics.median(run.scoring_seconds for run in runs),
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "kv_bytes": runs[0].kv_bytes,
    }


def _attached(model: PreTrainedModel, cut: Cut | None) -> AbstractContextManager[Eviction | None]:
    if cut is None:
        return nullcontext()
    return attach(model, cut.method, cut.allocation, hold_budget=cut.hold_budget)


class _Clock(BaseStreamer):
    """Notes when the prompt went in and when each token came out."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.times: list[float] = []

    def start(self) -> None:
        self.times = [self._now()]

    def put(self, value: torch.Tensor) -> None:
        if value.dim() == 1:  # the prompt itself has two dimensions
            self.times.append(self._now())

    def end(self) -> None:
        """Nothing to flush."""

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _until_stop(row: list[int], stop_tokens: Sequence[int]) -> list[int]:
    """A row up to and including its first stop token (behind it there is padding)."""
    ends = [position for position, token in enumerate(row) if token in stop_tokens]
    return row[: ends[0] + 1] if ends else row
