"""What every task gives: examples as exact token ids, and a score from 0 to 1."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPLITS = ("calibration", "selection", "test")


@dataclass(frozen=True)
class Example:
    """One prompt with its references.

    id: 16 hex digits of a sha256 over `tokens` and `references`.
    prompt: the text that was tokenised; no chat template.
    tokens: the prompt's token ids exactly as fed to the model, with the tokenizer's own BOS, if it adds one.
    references: the answers, without leading space.
    answer_tokens: per reference, the token ids of " " + reference after the prompt, so that
        `tokens + answer_tokens[i]` decodes to `prompt + " " + references[i]`.
    """

    id: str
    prompt: str
    tokens: tuple[int, ...]
    references: tuple[str, ...]
    answer_tokens: tuple[tuple[int, ...], ...]


class Task(ABC):
    """A set of examples, their metric and generation limit.

    name: shown in reports.
    metric: name of the metric behind `score`.
    tokens: prompt length in tokens of the model's tokenizer.
    new_tokens: generation limit in tokens.
    """

    def __init__(self, *, name: str, metric: str, tokens: int, new_tokens: int) -> None:
        for field, value in (("tokens", tokens), ("new_tokens", new_tokens)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{field} must be at least 1 and whole, got {value!r}")
        self.name = name
        self.metric = metric
        self.tokens = tokens
        self.new_tokens = new_tokens

    @abstractmethod
    def examples(self, tokenizer: PreTrainedTokenizerBase, split: str, count: int) -> list[Example]:
        """The first `count` examples of a split; a larger count begins with the same examples.

        split: one of SPLITS; no two splits share text or answers.
        """

    @abstractmethod
    def score(self, prediction: str, references: Sequence[str]) -> float:
        """Score of a generated text, from 0 to 1."""

    def settled(self, prediction: str, references: Sequence[str], reach: Sequence[float]) -> bool:
        """Whether no continuation of the text can change its score any more, so that decoding may stop.

        reach: for each reference, the most of its characters that the tokens still allowed can add.
        Here never; a task that can tell overrides this.
        """
        return False

    def describe(self) -> dict[str, Any]:
        """What determines the examples, as JSON values, for a fingerprint; subclasses add to it."""
        return {
            "task": type(self).__name__,
            "name": self.name,
            "metric": self.metric,
            "tokens": self.tokens,
            "new_tokens": self.new_tokens,
        }


def check_request(split: str, count: int, largest: int) -> None:
    """Raise ValueError unless `split` is one of SPLITS and 1 <= count <= largest."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    if not 1 <= count <= largest:
        raise ValueError(f"count must be from 1 to {largest}, got {count}")


def stable_generator(*parts: str | int) -> np.random.Generator:
    """A random generator that depends on `parts` alone: the same in every process and on every machine."""
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest, "big"))


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Token ids of a whole prompt, with the special tokens the tokenizer adds by itself."""
    return list(tokenizer(prompt, verbose=False)["input_ids"])


def build_example(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    references: Sequence[str],
    tokens: Sequence[int] | None = None,
) -> Example:
    """An Example whose answer tokens are checked to continue the prompt.

    references: at least one; none empty or with outer spaces.
    tokens: `encode(tokenizer, prompt)` if it is known already.
    Raises ValueError where the prompt's last token would merge with an answer, or decoding changes the text.
    """
    if not references or any(not text or text != text.strip() for text in references):
        raise ValueError(f"references must be non-empty texts without outer spaces, got {list(references)!r}")
    ids = encode(tokenizer, prompt) if tokens is None else list(tokens)
    answers = tuple(_answer_tokens(tokenizer, prompt, ids, text) for text in references)
    content = json.dumps([ids, list(references)]).encode()
    digest = hashlib.sha256(content).hexdigest()[:16]
    return Example(digest, prompt, tuple(ids), tuple(references), answers)


def _answer_tokens(
    tokenizer: PreTrainedTokenizerBase, prompt: str, ids: list[int], reference: str
) -> tuple[int, ...]:
    """Tokenises the answer after the prompt's last line (whole prompts are slow), then checks the whole."""
    line = prompt.rpartition("\n")[2]
    alone = encode(tokenizer, line)
    joint = encode(tokenizer, f"{line} {reference}")
    answer = joint[len(alone) :]
    decoded = tokenizer.decode(ids + answer, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    if joint[: len(alone)] != alone or decoded != f"{prompt} {reference}":
        raise ValueError(
            f"tokenizer must keep the prompt's tokens when an answer follows and decode to the same text, "
            f"got another result for the answer {reference!r} after {prompt[-40:]!r}"
        )
    return tuple(answer)
