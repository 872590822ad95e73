"""RULER's vt (variable tracking), from a generator and wording of our own.

One name gets a number, four more take it over from one another; the question gives the number and asks for the
five names. The statements stand in their order between noise sentences, after a short solved example.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mosaic_opt.tasks.base import PROTOCOLS, require_whole, stable_generator
from mosaic_opt.tasks.ruler.prompts import FilledTask, Prompt, Quiz
from mosaic_opt.tasks.ruler.supply import NOISE, letters, number, placed

INSTRUCTION = (
    "Some names get a value in the texts below; other names take over the value of a name before them. "
    "Keep track of every name that ends up with the same value."
)
STATEMENT = "Let {name} = {value}."
QUESTION = "Question: Which names have the value {value} in the text above, directly or through other names?"
ANSWER_PREFIX = "Answer: The {count} names with the value {value} are:"
NAME_LETTERS = 5
VALUE_DIGITS = 5
VALUES_PER_SPLIT = 30_000
EXAMPLE_SENTENCES = 4


class VariableTracking(FilledTask):
    """RULER's vt: one chain.

    hops: names that take the value over; RULER has 4.
    tokens: most tokens of a prompt; it has at least 95 % of them.
    seed: another seed gives other examples from the same splits.
    """

    category = "multi-hop tracing"

    def __init__(
        self,
        *,
        name: str = "vt",
        hops: int = 4,
        tokens: int = 650,
        seed: int = 0,
        new_tokens: int = 30,
        protocol: str = PROTOCOLS[0],
    ) -> None:
        if name != "vt":
            raise ValueError(f"name must be vt, got {name!r}")
        require_whole("hops", hops, 1, 100)
        super().__init__(name=name, tokens=tokens, seed=seed, new_tokens=new_tokens, protocol=protocol)
        self.hops = hops

    def quizzes(self, split: str, count: int) -> list[Quiz]:
        generators = [stable_generator(self.seed, self.name, split, index) for index in range(count)]
        return [_Chain(split, self.hops + 1, self.tokens, generator) for generator in generators]


class _Chain(Quiz):
    """One chain of names, and another one that is solved beforehand. Unit: a noise sentence."""

    least = 1

    def __init__(self, split: str, names: int, most: int, generator: np.random.Generator) -> None:
        drawn = [name.upper() for name in letters(split, generator, NAME_LETTERS, 2 * names)]
        values = [
            number(split, int(index), VALUE_DIGITS) for index in generator.choice(VALUES_PER_SPLIT, 2, replace=False)
        ]
        self.references = drawn[:names]
        self.most = most  # a sentence has at least one token
        self.noise = NOISE[split]
        self.first = int(generator.integers(len(self.noise)))
        self.value = values[0]
        self.depths = np.sort(generator.random(names)).tolist()
        depths = np.sort(generator.random(names)).tolist()
        solved = self._text(drawn[names:], values[1], EXAMPLE_SENTENCES, depths)
        question = _question(values[1], names)
        self.before = f"{INSTRUCTION}\n\n{solved}\n\n{question} {', '.join(drawn[names:])}.\n\n"

    def prompt(self, units: int) -> Prompt:
        text = self._text(self.references, self.value, units, self.depths)
        return Prompt(f"{self.before}{text}\n\n", _question(self.value, len(self.references)))

    def _text(self, names: Sequence[str], value: str, sentences: int, depths: Sequence[float]) -> str:
        """Noise with the chain's statements in their order."""
        haystack = [self.noise[(self.first + i) % len(self.noise)] for i in range(sentences)]
        statements = [
            STATEMENT.format(name=name, value=given) for name, given in zip(names, [value, *names], strict=False)
        ]
        return " ".join(placed(haystack, statements, depths))


def _question(value: str, names: int) -> str:
    return f"{QUESTION.format(value=value)}\n{ANSWER_PREFIX.format(count=names, value=value)}"
