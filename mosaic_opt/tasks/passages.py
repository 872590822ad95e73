"""Passage retrieval and counting over the shipped text, after LongBench's tasks of these kinds.

LongBench (Bai et al. 2024, arXiv:2308.14508) takes its paragraphs from Wikipedia and its descriptions from a large
model. Here both come from one text, and the wording is our own; each split has a third of the text to itself.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from functools import cache, cached_property
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
    stable_generator,
)
from mosaic_opt.tasks.essay import paragraphs, sentences_of
from mosaic_opt.tasks.metrics import METRICS

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

NUMBERED = {"before": "Paragraph {number}: {text}", "after": "{text} [Paragraph {number}]"}
RETRIEVAL_INSTRUCTION = "Read these numbered paragraphs, and keep in mind which is which."
RETRIEVAL_PREFIX = {"before": "{description} This was", "after": "{description} [Paragraph"}
RETRIEVAL_ANSWER = {"before": "Paragraph {number}", "after": "{number}"}
QUESTIONS = {
    "ending": "Which of the paragraphs ends like this?",
    "sentence": "Which of the paragraphs has this sentence in it?",
    "words": "Which of the paragraphs has all these words in it?",
}
COUNTING_INSTRUCTION = "Read these paragraphs. Some may stand here more than once."
COUNTING_QUESTION = "How many different paragraphs are there, if each is counted once?"
COUNTING_PREFIX = "The number of different paragraphs is"

NUMBERS = range(100, 1000)  # three digits each; more than a split has paragraphs
LONGEST = 60  # words of a paragraph, so that a prompt has many
REPEATED = 0.7  # the most of a prompt's paragraphs, on average, that repeat another
WORDS = 4  # of a paragraph that describe it

_WORD = re.compile(r"[A-Za-z]{4,}")


class _Passages(SeededTask):
    """What both tasks share: paragraphs chosen to fill `tokens`, and a short answer on one line.

    tokens: the most that a prompt has; fewer by less than a paragraph. It stops growing where all of the split's
        paragraphs are in it (about 20,000 tokens).
    seed: see `SeededTask`.
    new_tokens: generation limit; only the output's first line is scored.
    protocol: question-agnostic compresses the instruction and the paragraphs.

    A split has as many examples as paragraphs.
    """

    category = "synthetic"
    instruction: str

    @abstractmethod
    def _written(self, text: str, number: int) -> str:
        """A paragraph with its number."""

    def _numbers(self, generator: np.random.Generator) -> Sequence[int]:
        """The numbers of the paragraphs in the order of the prompt, at least as many as it has: from 1."""
        return range(1, len(NUMBERS) + 1)

    @abstractmethod
    def _question(self, pool: _Pool, first: int, generator: np.random.Generator) -> _Question:
        """The question of an example that has the pool's paragraph `first`."""

    @abstractmethod
    def _chosen(
        self, pool: _Pool, question: _Question, first: int, room: int, generator: np.random.Generator
    ) -> tuple[list[int], list[int]]:
        """Paragraphs for about `room` tokens, `first` before all others; and those that may fill the rest."""

    @abstractmethod
    def _answer(self, order: Sequence[int], first: int, numbers: Sequence[int]) -> str:
        """The answer for the paragraphs in the order of the prompt, with their numbers."""

    def examples(self, tokenizer: PreTrainedTokenizerBase, split: str, count: int) -> list[Example]:
        """See Task; ValueError where `tokens` cannot hold two paragraphs."""
        check_request(split, count, len(_paragraphs(split)) if split in SPLITS else 0, self.name)
        pool = _Pool(tokenizer, [self._written(text, NUMBERS[-1]) for text in _paragraphs(split)], _paragraphs(split))
        first = stable_generator(self.seed, split).permutation(len(pool.texts))
        return [
            self._example(tokenizer, pool, int(first[index]), stable_generator(self.seed, split, index))
            for index in range(count)
        ]

    def sizes(self) -> dict[str, int | None]:
        return {split: len(_paragraphs(split)) for split in SPLITS}

    def score(self, prediction: str, example: Example) -> float:
        line = prediction.strip().partition("\n")[0]
        return METRICS[self.metric](line, example.references, example.classes)

    def settled(self, prediction: str, example: Example, reach: Sequence[float]) -> bool:
        """Once the first line that is not blank is complete."""
        return "\n" in prediction.lstrip()

    def _example(
        self, tokenizer: PreTrainedTokenizerBase, pool: _Pool, first: int, generator: np.random.Generator
    ) -> Example:
        """Filled by the paragraphs' own tokens, then by what is left of the prompt's; too many are left out again."""
        question = self._question(pool, first, generator)
        numbers = self._numbers(generator)
        room = self.tokens - len(encode(tokenizer, self._prompt([], question, numbers)))
        chosen, others = self._chosen(pool, question, first, room, generator)
        pool.fill(chosen, others, room - sum(pool.counts[i] for i in chosen))
        _, tokens = self._encoded(tokenizer, pool, chosen, question, numbers)
        pool.fill(chosen, [i for i in others if i not in chosen], self.tokens - len(tokens))
        while True:
            order = [chosen[i] for i in generator.permutation(len(chosen))]
            prompt, tokens = self._encoded(tokenizer, pool, order, question, numbers)
            if len(tokens) <= self.tokens and len(chosen) > 1:
                break
            if len(chosen) < 3:
                least = self.tokens - room + pool.counts[first] + max(pool.counts)
                raise ValueError(f"tokens must be at least {least} for {self.name}, got {self.tokens}")
            chosen.pop()
        return build_example(
            tokenizer,
            prompt,
            [self._answer(order, first, numbers)],
            new_tokens=self.new_tokens,
            task=self.name,
            tokens=tokens,
            context=None if self.protocol == PROTOCOLS[0] else len(prompt) - len(question.text),
        )

    def _encoded(
        self,
        tokenizer: PreTrainedTokenizerBase,
        pool: _Pool,
        order: Sequence[int],
        question: _Question,
        numbers: Sequence[int],
    ) -> tuple[str, list[int]]:
        prompt = self._prompt([pool.texts[i] for i in order], question, numbers)
        return prompt, encode(tokenizer, prompt)

    def _prompt(self, texts: Sequence[str], question: _Question, numbers: Sequence[int]) -> str:
        paragraphs = [self._written(text, number) for text, number in zip(texts, numbers, strict=False)]
        return "\n\n".join([self.instruction, *paragraphs, question.text])


class PassageRetrieval(_Passages):
    """Which of the prompt's numbered paragraphs a description is of; the answer is its number.

    Scored as LongBench's passage_retrieval_en: share of the output's numbers that are right.

    abstract: the description: "ending" (the paragraph's last sentence), "sentence" (any of them) or "words" (its
        WORDS rarest words); all stay in the paragraph.
    numbers: "before" a paragraph stands its number, counted from 1, as in LongBench (the answer is "Paragraph 7"); or
        one of NUMBERS, drawn, stands "after" it. A small model finds that more easily, and counts on where the
        numbers are in order, whatever the question.
    For the other arguments see `_Passages`.
    """

    instruction = RETRIEVAL_INSTRUCTION

    def __init__(
        self,
        *,
        name: str = "passage_retrieval",
        tokens: int = 650,
        seed: int = 0,
        new_tokens: int = 8,
        protocol: str = PROTOCOLS[0],
        abstract: str = "ending",
        numbers: str = "after",
    ) -> None:
        require_one_of("abstract", abstract, QUESTIONS)
        require_one_of("numbers", numbers, NUMBERED)
        super().__init__(
            name=name, metric="retrieval", tokens=tokens, seed=seed, new_tokens=new_tokens, protocol=protocol
        )
        self.abstract = abstract
        self.numbers = numbers

    def _written(self, text: str, number: int) -> str:
        return NUMBERED[self.numbers].format(number=number, text=text)

    def _numbers(self, generator: np.random.Generator) -> Sequence[int]:
        if self.numbers == "before":
            return super()._numbers(generator)
        return [NUMBERS[i] for i in generator.permutation(len(NUMBERS))]

    def _question(self, pool: _Pool, first: int, generator: np.random.Generator) -> _Question:
        text = pool.texts[first]
        sentences = sentences_of(text)
        if self.abstract == "words":
            parts = pool.rarest(text)
            description = ", ".join(parts) + "."
        else:
            last = len(sentences) - 1
            parts = [sentences[last if self.abstract == "ending" else int(generator.integers(len(sentences)))]]
            description = parts[0]
        prefix = RETRIEVAL_PREFIX[self.numbers].format(description=description)
        return _Question(f"{QUESTIONS[self.abstract]}\n{prefix}", parts)

    def _chosen(
        self, pool: _Pool, question: _Question, first: int, room: int, generator: np.random.Generator
    ) -> tuple[list[int], list[int]]:
        others = [int(i) for i in generator.permutation(len(pool.texts)) if not question.fits(pool.texts[i])]
        return [first], others

    def _answer(self, order: Sequence[int], first: int, numbers: Sequence[int]) -> str:
        return RETRIEVAL_ANSWER[self.numbers].format(number=numbers[order.index(first)])


class PassageCounting(_Passages):
    """How many different paragraphs the prompt has, where some stand more than once; the answer is a number.

    Scored as LongBench's passage_count: share of the output's numbers that are right. For the arguments see
    `_Passages`.
    """

    instruction = COUNTING_INSTRUCTION

    def __init__(
        self,
        *,
        name: str = "passage_counting",
        tokens: int = 650,
        seed: int = 0,
        new_tokens: int = 6,
        protocol: str = PROTOCOLS[0],
    ) -> None:
        super().__init__(
            name=name, metric="count", tokens=tokens, seed=seed, new_tokens=new_tokens, protocol=protocol
        )

    def _written(self, text: str, number: int) -> str:
        return NUMBERED["before"].format(number=number, text=text)

    def _question(self, pool: _Pool, first: int, generator: np.random.Generator) -> _Question:
        return _Question(f"{COUNTING_QUESTION}\n{COUNTING_PREFIX}", [])

    def _chosen(
        self, pool: _Pool, question: _Question, first: int, room: int, generator: np.random.Generator
    ) -> tuple[list[int], list[int]]:
        """Each after the first repeats one before it with a probability that is the example's own."""
        repeated = REPEATED * generator.random()
        fresh = [int(i) for i in generator.permutation(len(pool.texts)) if i != first]
        chosen: list[int] = []
        following = first
        while pool.counts[following] <= room:
            chosen.append(following)
            room -= pool.counts[following]
            if not fresh or generator.random() < repeated:
                following = chosen[int(generator.integers(len(chosen)))]
            else:
                following = fresh.pop()
        return chosen, fresh

    def _answer(self, order: Sequence[int], first: int, numbers: Sequence[int]) -> str:
        return str(len(set(order)))


class _Question(NamedTuple):
    """text: the question and the answer's beginning. parts: texts that the paragraph asked for has."""

    text: str
    parts: list[str]

    def fits(self, paragraph: str) -> bool:
        """Whether the question could be about this paragraph."""
        return all(part in paragraph for part in self.parts)


class _Pool:
    """One split's paragraphs, with the tokens that each takes in a prompt."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, written: Sequence[str], texts: Sequence[str]) -> None:
        ids = tokenizer([f"\n\n{text}" for text in written], add_special_tokens=False, verbose=False)["input_ids"]
        self.texts = texts
        self.counts = [len(row) for row in ids]

    def fill(self, chosen: list[int], others: Sequence[int], room: int) -> None:
        """Append to the chosen, of the others one after another, each that has no more tokens than are left."""
        for index in others:
            if self.counts[index] <= room:
                chosen.append(index)
                room -= self.counts[index]

    def rarest(self, text: str) -> list[str]:
        """The WORDS words of a text that the fewest of the paragraphs have, in the text's order."""
        words = list(dict.fromkeys(_WORD.findall(text)))
        rare = sorted(words, key=lambda word: self._spread[word])[:WORDS]
        return sorted(rare, key=words.index)

    @cached_property
    def _spread(self) -> Counter[str]:
        """Number of paragraphs with each word."""
        return Counter(word for text in self.texts for word in set(_WORD.findall(text)))


@cache
def _paragraphs(split: str) -> tuple[str, ...]:
    """Those of the split's third of the text (contiguous) of at least two sentences and at most LONGEST words."""
    return tuple(text for text in paragraphs(split) if len(sentences_of(text)) > 1 and len(text.split()) <= LONGEST)
