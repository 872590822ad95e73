"""RULER's cwe (common words) and fwe (frequent coded words), from a generator and wording of our own."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mosaic_opt.tasks.base import PROTOCOLS, stable_generator
from mosaic_opt.tasks.ruler.prompts import FilledTask, Prompt, Quiz
from mosaic_opt.tasks.ruler.supply import letters, vocabulary

COMMON_INSTRUCTION = (
    "Every list below repeats {count} of its words more often than all the others. Remember which words these are."
)
COMMON_QUESTION = "Question: Which {count} words does the list above repeat most often?"
COMMON_PREFIX = "Answer: The {count} words repeated most often are:"
COMMON = 10  # common words, which are the answers
EXAMPLE_OTHERS = 5  # other words of the solved example
EXAMPLE_TIMES = (2, 1)  # how often each common and each other word stands in it
TIMES = (30, 3)  # the same in the list itself
SHORT_TIMES = (6, 1)  # the same in prompts of fewer than SHORT tokens
SHORT = 4096

CODED_INSTRUCTION = "The text below is in code. Count how often each of its words occurs; dots are gaps, not words."
CODED_QUESTION = "Question: Which {count} coded words occur most often in the text above, dots left out?"
CODED_PREFIX = "Answer: The {count} coded words that occur most often are:"
GAP = "..."  # the most frequent "word"
CODED_LETTERS = 6
CODED_WORDS = 500  # those of lower rank stand in no text of fewer than 400,000 words
CODED_ANSWERS = 3  # the words of rank 2 to 4
ALPHA = 2.0
ZETA = math.pi**2 / 6  # Riemann's zeta function at ALPHA
CODED_LEAST = 73  # words; from here on the expected counts of ranks 4 and 5 differ by more than 1


class CommonWords(FilledTask):
    """RULER's cwe: a numbered list in which ten words stand more often than all others, after a solved example.

    Ten words stand 30 times and the others 3 times, 6 times and once in prompts of fewer than 4,096 tokens. No word
    of a prompt contains an answer but the answer itself.

    tokens: most tokens of a prompt; it has at least 95 % of them.
    seed: another seed gives other examples from the same splits.
    """

    category = "aggregation"

    def __init__(
        self,
        *,
        name: str = "cwe",
        tokens: int = 650,
        seed: int = 0,
        new_tokens: int = 120,
        protocol: str = PROTOCOLS[0],
    ) -> None:
        if name != "cwe":
            raise ValueError(f"name must be cwe, got {name!r}")
        super().__init__(name=name, tokens=tokens, seed=seed, new_tokens=new_tokens, protocol=protocol)

    def quizzes(self, split: str, count: int) -> list[Quiz]:
        times = SHORT_TIMES if self.tokens < SHORT else TIMES
        generators = [stable_generator(self.seed, self.name, split, index) for index in range(count)]
        return [_List(split, times, generator) for generator in generators]


class _List(Quiz):
    """A list with ten common words, and another one that is solved beforehand. Unit: one of the other words."""

    least = 1

    def __init__(self, split: str, times: tuple[int, int], generator: np.random.Generator) -> None:
        words = vocabulary(split)
        shuffled = [words[i] for i in generator.permutation(len(words))]
        self.references = _apart(shuffled, COMMON)
        rest = [word for word in shuffled if not any(answer in word for answer in self.references)]
        example, self.others = rest[: COMMON + EXAMPLE_OTHERS], rest[COMMON + EXAMPLE_OTHERS :]
        self.most = len(self.others)
        solved = _Order(EXAMPLE_TIMES, EXAMPLE_OTHERS, generator).text(example[:COMMON], example[COMMON:])
        self.order = _Order(times, self.most, generator)
        instruction = COMMON_INSTRUCTION.format(count=COMMON)
        self.before = f"{instruction}\n\n{solved}\n\n{_common_question()} {', '.join(example[:COMMON])}.\n\n"

    def prompt(self, units: int) -> Prompt:
        text = self.order.text(self.references, self.others[:units])
        return Prompt(f"{self.before}{text}\n\n", _common_question())


class _Order:
    """A random place in a list for each time that a word stands in it."""

    def __init__(self, times: tuple[int, int], others: int, generator: np.random.Generator) -> None:
        self.places = [generator.random((COMMON, times[0])), generator.random((others, times[1]))]

    def text(self, common: Sequence[str], others: Sequence[str]) -> str:
        """The numbered list of the common words and the first of the others."""
        places = [self.places[0], self.places[1][: len(others)]]
        entries = [
            word
            for words, own in zip((common, others), places, strict=True)
            for word in words
            for _ in range(own.shape[1])
        ]
        order = np.argsort(np.concatenate([own.ravel() for own in places]), kind="stable")
        return " ".join(f"{place}. {entries[i]}" for place, i in enumerate(order, start=1))


def _apart(words: Sequence[str], count: int) -> list[str]:
    """The first `count` words of which none is part of another or of the wording."""
    wording = f"{COMMON_INSTRUCTION} {COMMON_QUESTION} {COMMON_PREFIX}".lower()
    chosen: list[str] = []
    for word in words:
        if len(chosen) == count:
            break
        if word not in wording and not any(word in other or other in word for other in chosen):
            chosen.append(word)
    return chosen


def _common_question() -> str:
    return f"{COMMON_QUESTION.format(count=COMMON)}\n{COMMON_PREFIX.format(count=COMMON)}"


class FrequentWords(FilledTask):
    """RULER's fwe: coded words whose counts follow a zeta distribution; the answers are those of rank 2 to 4.

    Rank k stands floor(n / (k^2 zeta(2))) times in a text of n words; rank 1 is "...".

    tokens: most tokens of a prompt; it has at least 95 % of them.
    seed: another seed gives other examples from the same splits.
    """

    category = "aggregation"

    def __init__(
        self,
        *,
        name: str = "fwe",
        tokens: int = 650,
        seed: int = 0,
        new_tokens: int = 50,
        protocol: str = PROTOCOLS[0],
    ) -> None:
        if name != "fwe":
            raise ValueError(f"name must be fwe, got {name!r}")
        super().__init__(name=name, tokens=tokens, seed=seed, new_tokens=new_tokens, protocol=protocol)

    def quizzes(self, split: str, count: int) -> list[Quiz]:
        generators = [stable_generator(self.seed, self.name, split, index) for index in range(count)]
        return [_Coded(split, max(self.tokens, CODED_LEAST), generator) for generator in generators]


class _Coded(Quiz):
    """A coded text. Unit: a word, gaps included."""

    least = CODED_LEAST

    def __init__(self, split: str, most: int, generator: np.random.Generator) -> None:
        # a word has more than a token, a gap at least one, and the floors lose a few words
        self.most = 2 * most
        self.words = [GAP, *letters(split, generator, CODED_LETTERS, CODED_WORDS)]
        self.references = self.words[1 : 1 + CODED_ANSWERS]
        self.places = generator.random(self.most)

    def prompt(self, units: int) -> Prompt:
        entries = [word for word, count in zip(self.words, counts(units), strict=False) for _ in range(count)]
        order = np.argsort(self.places[: len(entries)], kind="stable")
        text = " ".join(entries[i] for i in order)
        question = f"{CODED_QUESTION}\n{CODED_PREFIX}".format(count=CODED_ANSWERS)
        return Prompt(f"{CODED_INSTRUCTION}\n\n{text}\n\n", question)


def counts(words: int) -> list[int]:
    """How often the words of rank 1, 2, ... stand in a text of so many words; those that stand in it at all."""
    ranks = range(1, math.isqrt(words) + 1)
    return [count for rank in ranks if (count := int(words / (rank**ALPHA * ZETA))) > 0]
