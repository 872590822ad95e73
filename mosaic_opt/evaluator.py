"""Prefill once, evict many: exact scores of any allocation from ranked caches.

Eviction happens after each layer's prefill attention, so a prompt's keys, values and scores do not depend on
the budgets. Every example is prefilled once and its pairs are stored in keep order; an allocation is then a
prefix slice per layer, and a trial costs a short decode (see decoding.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mosaic_opt.allocation import Allocation
from mosaic_opt.decoding import Batch, Decoding, Turn
from mosaic_opt.eviction.attention import attention_switched
from mosaic_opt.eviction.base import EvictionMethod, Ranking
from mosaic_opt.model import require_fit, stop_tokens
from mosaic_opt.prefill import Prefiller, Progress, require_smaller
from mosaic_opt.ranked import HeldPairs, MappedPairs, Order, Prompt, RankedPairs, batch_rankings, place
from mosaic_opt.tasks import Example, Task

AfterBatch = Callable[[Mapping[int, float]], None]

REFERENCE_TOKENS = 64  # longer references are cut for the log-likelihood


@dataclass(frozen=True)
class Measurement:
    """One allocation on one set of examples.

    Attributes:
        scores: task score of each example, 0 to 1.
        log_likelihoods: log-probability of each example's best reference, summed over its tokens without
            the first (which comes from the prefill and no allocation changes, unless a question is fed after it).
        outputs: generated text of each example (cut where its score was settled, if so asked).
        mean_budget: nominal mean layer budget in tokens.
        realised_mean: the same, where no prompt keeps more pairs than it has tokens.
        kv_bytes: bytes of the kept prompt pairs of one example (mean over the examples).
        seconds: wall time.
        tasks: name of each example's task.
    """

    scores: tuple[float, ...]
    log_likelihoods: tuple[float, ...]
    outputs: tuple[str, ...]
    mean_budget: float
    realised_mean: float
    kv_bytes: int
    seconds: float
    tasks: tuple[str, ...] = ()

    @property
    def score(self) -> float:
        return sum(self.scores) / len(self.scores)

    @property
    def task_scores(self) -> dict[str, float]:
        """Mean score of each task's examples."""
        of_task: dict[str, list[float]] = {}
        for name, score in zip(self.tasks, self.scores, strict=True):
            of_task.setdefault(name, []).append(score)
        return {name: sum(scores) / len(scores) for name, scores in of_task.items()}

    @property
    def log_likelihood(self) -> float:
        return sum(self.log_likelihoods) / len(self.log_likelihoods)


class Evaluator:
    """Ranked caches of a fixed set of examples, and the measurement of any allocation on them.

    Args:
        model: decoder-only model in eval mode, sdpa attention.
        tokenizer: decodes outputs.
        task: metric and generation limit.
        examples: at least one.
        method: eviction method that ranks the pairs.
        prefill_for: further methods whose rankings the same prefill stores (they are used by other evaluators).
        cap: largest layer budget that will be asked for (tokens); None keeps whole prompts.
        batch_size: examples decoded together.
        store: folder for ranked caches; None keeps them in memory only.
        device_bytes, host_bytes: the pairs lie on the model's device up to so many bytes, in pinned host memory
            up to so many, and beyond that they are read from the (memory-mapped) store each time. On the CPU
            only the second counts.
        progress: called with (done, total) examples while prefilling.
        say: told when batches are made smaller.

    Raises:
        ValueError: without examples, with a prompt longer than the model's context, or for a model with layers
            that have neither full nor sliding-window attention.
        MemoryError: if a prompt alone does not fit the device's memory.
    """

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        task: Task,
        examples: Sequence[Example],
        method: EvictionMethod,
        prefill_for: Sequence[EvictionMethod] = (),
        cap: int | None = None,
        batch_size: int = 16,
        store: Path | None = None,
        device_bytes: int = 8 * 2**30,
        host_bytes: int = 8 * 2**30,
        progress: Progress | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        if not examples:
            raise ValueError("evaluator needs at least one example")
        self.longest = max(len(example.tokens) for example in examples)
        for example in examples:
            require_fit(model.config, example.length, example.new_tokens)
        self.model, self.tokenizer, self.task, self.method = model, tokenizer, task, method
        self.examples = list(examples)
        self.cap = min(cap or self.longest, self.longest)
        self.say = say
        self.stop_tokens = stop_tokens(model, tokenizer)
        self._pieces: dict[str, float] = {}
        methods = [method, *(other for other in prefill_for if other.describe() != method.describe())]
        prefiller = Prefiller(model, methods, stop_tokens=self.stop_tokens)
        self.layers, self.windows = prefiller.layers, prefiller.windows
        loaded = prefiller.load(self.examples, store, progress or (lambda done, total: None))
        self.drafts = [prompt.draft for prompt, _ in loaded]
        self.pair_bytes = _pair_bytes(loaded[0][0])
        order = sorted(range(len(examples)), key=lambda index: len(self.examples[index].tokens))
        chunks = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
        rankings = [batch_rankings([loaded[index][1][0] for index in chunk], method.window) for chunk in chunks]
        limits = [[int(layer.lengths(self.cap).max()) for layer in layers] for layers in rankings]
        total = self.pair_bytes * sum(len(chunk) * sum(limit) for chunk, limit in zip(chunks, limits, strict=True))
        self.place = place(total, model.device, device_bytes=device_bytes, host_bytes=host_bytes)
        self.batches = [
            self._batch(chunk, [loaded[index] for index in chunk], layers, limit)
            for chunk, layers, limit in zip(chunks, rankings, limits, strict=True)
        ]

    @torch.inference_mode()
    def evaluate(
        self, allocation: Allocation, *, complete: bool = True, after_batch: AfterBatch | None = None
    ) -> Measurement:
        """Score, outputs and reference log-likelihood of every example under this allocation.

        The tokens are those of `model.generate` with the eviction attached (greedy).

        Args:
            complete: decode every output to its end. Otherwise an output may end where the task says that
                its score is settled: scores and log-likelihoods are the same, texts are cut, and it is faster.
            after_batch: called between batches with the scores so far, by the example's index; what it raises ends
                the measurement.

        Raises:
            ValueError: for an allocation of the wrong length, or one above the cap.
            MemoryError: if one example alone does not fit the device's memory (batches that do not are halved).
        """
        allocation = self._applied(allocation)
        start = time.perf_counter()
        tokens: list[list[int]] = [[] for _ in self.examples]
        likelihoods = [0.0] * len(self.examples)
        scores: dict[int, float] = {}
        with attention_switched(self.model):
            done = 0
            while done < len(self.batches):
                if scores and after_batch is not None:
                    after_batch(scores)
                batch, decoded = self._decoded(done, allocation, complete)
                done += 1
                for index, output, likelihood in zip(batch.indices, *decoded, strict=True):
                    tokens[index], likelihoods[index] = output, likelihood
                    scores[index] = self._score(self.examples[index], output)
        ordered = [scores[index] for index in range(len(self.examples))]
        return self._measurement(tokens, ordered, likelihoods, allocation, time.perf_counter() - start)

    def _applied(self, allocation: Allocation) -> Allocation:
        """The allocation as the method applies it: layers it never evicts keep whole prompts.

        Raises:
            ValueError: for an allocation of the wrong length, or one above the cap.
        """
        allocation.require_layers(len(self.layers))
        skipped = [layer in self.method.skip for layer in self.layers]
        pairs = zip(allocation.budgets, skipped, strict=True)
        budgets = [self.longest if skip else budget for budget, skip in pairs]
        if self.cap < self.longest and max(budgets) > self.cap:
            raise ValueError(f"layer budgets must be at most {self.cap} here; got {max(budgets)}")
        return Allocation(budgets)

    def _decoded(
        self, position: int, allocation: Allocation, complete: bool
    ) -> tuple[Batch, tuple[list[list[int]], list[float]]]:
        """The batch at this position, decoded (see `Decoding.run`); halved from now on where memory is too small."""
        batch = self.batches[position]

        def settled(row: int, tokens: Sequence[int]) -> bool:
            return not complete and self.settled(self.examples[batch.indices[row]], tokens)

        try:
            return batch, Decoding(self.model, batch, allocation, settled=settled).run()
        except torch.OutOfMemoryError as error:
            require_smaller(len(batch.indices), error)
        torch.cuda.empty_cache()
        self.batches[position : position + 1] = batch.halves()
        self.say(
            f"a batch of {len(batch.indices)} examples does not fit the device's memory: half as many from now on"
        )
        return self._decoded(position, allocation, complete)

    def full_scores(self) -> tuple[float, ...]:
        """Task score of each example with the full cache."""
        return tuple(self._score(example, draft) for example, draft in zip(self.examples, self.drafts, strict=True))

    def text(self, tokens: Sequence[int]) -> str:
        """Generated text without the stop token."""
        kept = [token for token in tokens if token not in self.stop_tokens]
        return str(self.tokenizer.decode(kept, skip_special_tokens=True))

    def settled(self, example: Example, tokens: Sequence[int]) -> bool:
        """Whether the task says that nothing that may follow these tokens changes the example's score."""
        left = example.new_tokens - len(tokens)
        reach = [left * self._most_per_token(reference) for reference in example.references]
        return self.task.settled(self.text(tokens), example, reach)

    def _most_per_token(self, reference: str) -> float:
        """The most characters of a reference that one token can supply (case aside).

        That is the longest piece of the reference which a token's text contains. Infinite where a token's
        text alone does not tell: for anything but ASCII letters and digits.
        """
        if reference not in self._pieces:
            text = reference.lower()
            known = (
                n
                for n in range(len(text), 0, -1)
                if any(text[i : i + n] in self._token_texts for i in range(len(text) - n + 1))
            )
            plain = text.isascii() and text.isalnum()
            self._pieces[reference] = float(next(known, 0)) if plain else float("inf")
        return self._pieces[reference]

    @cached_property
    def _token_texts(self) -> str:
        """The texts of all tokens in lower case, separated by zero bytes."""
        texts = self.tokenizer.batch_decode([[token] for token in range(len(self.tokenizer))])
        return "\0".join(texts).lower()

    def _score(self, example: Example, tokens: Sequence[int]) -> float:
        return self.task.score(self.text(tokens), example)

    def _measurement(
        self,
        tokens: list[list[int]],
        scores: list[float],
        likelihoods: list[float],
        allocation: Allocation,
        seconds: float,
    ) -> Measurement:
        realised = [allocation.realised(len(example.tokens)) for example in self.examples]
        return Measurement(
            scores=tuple(scores),
            log_likelihoods=tuple(likelihoods),
            outputs=tuple(self.text(output) for output in tokens),
            mean_budget=allocation.mean,
            realised_mean=sum(kept.mean for kept in realised) / len(realised),
            kv_bytes=round(self.pair_bytes * sum(sum(kept.budgets) for kept in realised) / len(realised)),
            seconds=seconds,
            tasks=tuple(example.task for example in self.examples),
        )

    def _batch(
        self,
        indices: list[int],
        loaded: Sequence[tuple[Prompt, Sequence[Order]]],
        rankings: list[Ranking],
        limits: list[int],
    ) -> Batch:
        prompts, orders = [prompt for prompt, _ in loaded], [orders[0] for _, orders in loaded]
        device = self.model.device
        pairs: RankedPairs = MappedPairs(prompts, orders, device)
        if self.place != "mapped":
            pairs = HeldPairs(prompts, orders, limits, device, on_device=self.place == "device")
        return Batch.of(
            prompts,
            pairs,
            indices=indices,
            layers=self.layers,
            windows=self.windows,
            rankings=rankings,
            turns=[self._turn(self.examples[i], prompt.draft) for i, prompt in zip(indices, prompts, strict=True)],
        )

    def _turn(self, example: Example, draft: list[int]) -> Turn:
        references = [tokens[:REFERENCE_TOKENS] for tokens in example.answer_tokens]
        return Turn.of(example, draft, stop_tokens=self.stop_tokens, references=references)


def _pair_bytes(prompt: Prompt) -> int:
    """Bytes of one key and value in all KV heads of a layer."""
    return sum(states.shape[1] * states.shape[3] * states.element_size() for states in (prompt.keys, prompt.values))
