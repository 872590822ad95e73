"""What the RULER tasks share: a prompt in two parts, and the filling of a prompt to its length."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mosaic_opt.tasks.base import (
    PROTOCOLS,
    SPLITS,
    Example,
    SeededTask,
    build_example,
    check_request,
    encode,
    require_one_of,
    split_prompt,
)
from mosaic_opt.tasks.ruler.metric import METRICS, score, settled

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FULLEST = 0.95  # of `tokens`: no generated prompt is shorter
FIRST_STEP = 32  # units of the second prompt that is measured


class Prompt(NamedTuple):
    """A prompt in its two parts.

    context: instruction and haystack, with the empty line after them.
    question: question and answer prefix.
    """

    context: str
    question: str

    @property
    def text(self) -> str:
        return self.context + self.question


class RulerTask(SeededTask):
    """A task of RULER by its name: metric, seed and protocol."""

    def __init__(self, *, name: str, tokens: int, seed: int, new_tokens: int, protocol: str) -> None:
        super().__init__(
            name=name, metric=METRICS[name], tokens=tokens, seed=seed, new_tokens=new_tokens, protocol=protocol
        )

    def largest(self, split: str) -> int:
        """Number of different examples of a split."""
        return 1_000_000

    def sizes(self) -> dict[str, int | None]:
        return {split: self.largest(split) for split in SPLITS}

    def score(self, prediction: str, example: Example) -> float:
        return score(self.name, prediction, example.references)

    def settled(self, prediction: str, example: Example, reach: Sequence[float]) -> bool:
        """See the function of this name."""
        return settled(prediction, example.references, reach, metric=self.metric)

    def measured(self, tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> tuple[list[int], int]:
        """Token ids of the whole prompt, and how many tokens the model is fed under the protocol.

        The two differ where a token spans both parts and the protocol feeds them apart.
        """
        ids = encode(tokenizer, prompt.text)
        if self.protocol == PROTOCOLS[0]:
            return ids, len(ids)
        return ids, sum(map(len, split_prompt(tokenizer, prompt.text, ids, len(prompt.context))))

    def built(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Prompt,
        references: Sequence[str],
        *,
        ids: Sequence[int] | None = None,
        exact: bool = True,
    ) -> Example:
        """The example of a prompt. ids: token ids of the whole prompt, if known; exact: see `build_example`."""
        return build_example(
            tokenizer,
            prompt.text,
            references,
            new_tokens=self.new_tokens,
            task=self.name,
            tokens=ids,
            context=None if self.protocol == PROTOCOLS[0] else len(prompt.context),
            exact=exact,
        )


class Quiz(ABC):
    """One drawn example, which can be written at any length.

    references: the answers.
    least, most: bounds of the number of haystack units (words, sentences) that a prompt has.
    """

    references: Sequence[str]
    least: int
    most: int

    @abstractmethod
    def prompt(self, units: int) -> Prompt:
        """The prompt with so many haystack units, from `least` to `most`; each one makes it longer."""


class FilledTask(RulerTask):
    """A task whose prompts have as many haystack units as fit: `tokens` at the most, and 95 % of that at least."""

    exact = True

    @abstractmethod
    def quizzes(self, split: str, count: int) -> list[Quiz]:
        """The first `count` quizzes of a split."""

    def examples(self, tokenizer: PreTrainedTokenizerBase, split: str, count: int) -> list[Example]:
        """See Task; ValueError where `tokens` is too few for one of them, or more than there is text for."""
        require_one_of("split", split, SPLITS)
        check_request(split, count, self.largest(split), self.name)
        quizzes = self.quizzes(split, count)
        shortest = [self.measured(tokenizer, quiz.prompt(quiz.least))[1] for quiz in quizzes]
        if self.tokens < max(shortest):
            raise ValueError(
                f"tokens must be at least {max(shortest)} for these examples of {self.name}, got {self.tokens}"
            )
        return [self._filled(tokenizer, quiz, base) for quiz, base in zip(quizzes, shortest, strict=True)]

    def _filled(self, tokenizer: PreTrainedTokenizerBase, quiz: Quiz, base: int) -> Example:
        """The fullest example of a quiz; `base` is the length of its shortest."""

        known: dict[int, tuple[list[int], int]] = {}

        def measure(units: int) -> int:
            known[units] = self.measured(tokenizer, quiz.prompt(units))
            return known[units][1]

        units = fullest(measure, quiz.least, quiz.most, base, self.tokens)
        prompt = quiz.prompt(units)
        ids, length = known[units] if units in known else self.measured(tokenizer, prompt)
        if length < FULLEST * self.tokens:
            raise ValueError(f"tokens must be at most {int(length / FULLEST)} for {self.name}, got {self.tokens}")
        return self.built(tokenizer, prompt, quiz.references, ids=ids, exact=self.exact)


def fullest(measure: Callable[[int], int], least: int, most: int, base: int, limit: int) -> int:
    """The largest number of units whose measure is at most `limit`; found in a few steps where it grows evenly.

    measure: grows with the units. base: measure(least), at most `limit`.
    Each step narrows the bracket, so it ends whatever `measure` gives.
    """
    low, high, units = least, most, min(most, least + FIRST_STEP)
    while low < high:
        found = measure(units)
        low, high = (units, high) if found <= limit else (low, units - 1)
        slope = max((found - base) / (units - least), 0.1)
        units = min(max(least + int((limit - base) / slope), low + 1), high)
    return low
