"""RULER's needle tasks (niah), from a generator and wording of our own.

A prompt is an instruction, a haystack with needles between its sentences, a question and an answer prefix
that the model continues. Departures from the official generator: every prompt has exactly the wished number
of tokens; every example has its own random generator and haystack offset; the splits share no haystack text,
key or value; what a haystack of needles leaves free is filled with noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count as counted
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from mosaic_opt.tasks.base import (
    PROTOCOLS,
    SPLITS,
    Example,
    check_request,
    encode,
    require_one_of,
    require_whole,
    stable_generator,
)
from mosaic_opt.tasks.ruler.metric import METRICS
from mosaic_opt.tasks.ruler.passage import RESERVE, Passage, count_tokens, exact_prompt
from mosaic_opt.tasks.ruler.prompts import Prompt, RulerTask
from mosaic_opt.tasks.ruler.supply import (
    NOISE,
    NUMBERS_PER_SPLIT,
    identifier,
    key_pairs,
    number,
    placed,
    sentences,
    words,
)

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

NAMES = tuple(name for name in METRICS if name.startswith("niah_"))
HAYSTACKS = ("noise", "essay", "needle")
KEY_KINDS = ("word", "uuid")
VALUE_KINDS = ("number", "uuid")

INSTRUCTION = (
    "Some {what}s for different things are hidden in the text below. "
    "Remember them, because a question about {asked} of them follows."
)
# The answer prefix repeats the needle up to its value: with other wordings SmolLM2-135M took a distractor's
# value more often. Question and prefix have 25 of its tokens: an observation window of 32 covers both.
NEEDLE = "The {what} for {key}: {value}."
QUESTION = "Question: What is the {what} for {key} in the text above?"
ANSWER_PREFIX = "Answer: The {what} for {key}:"
# The same for several answers
QUESTIONS = "Question: What are all the {what}s for {keys} in the text above?"
ANSWERS_PREFIX = "Answer: The {what}s for {keys}:"
WHAT = {"number": "pass number", "uuid": "pass code"}

NEW_TOKENS = {"number": 10, "uuid": 40}  # for an answer and what stands before the next one
SAMPLE = 100  # numbers and uuids whose longest stands for all of them


class Needle(RulerTask):
    """RULER's eight niah tasks.

    name: one of NAMES; names the task, the other arguments make it.
    haystack: "noise" (seven sentences over and over), "essay" (the shipped prose) or "needle" (needles with other
        keys and values, as many as fit).
    keys: different keys in the haystack, besides those of a haystack of needles.
    values: needles of each key, each with a value of its own.
    queries: keys that are asked for, at most `keys`; all their values are the answers.
    key_kind: "word" (adjective and noun) or "uuid".
    value_kind: "number" (7 digits) or "uuid".
    tokens: exact prompt length.
    seed: another seed gives other examples from the same splits.
    new_tokens: generation limit; None allows 10 tokens for each number and 40 for each uuid, less one.
    """

    category = "retrieval"

    def __init__(
        self,
        *,
        name: str,
        haystack: str,
        keys: int = 1,
        values: int = 1,
        queries: int = 1,
        key_kind: str = "word",
        value_kind: str = "number",
        tokens: int = 650,
        seed: int = 0,
        new_tokens: int | None = None,
        protocol: str = PROTOCOLS[0],
    ) -> None:
        for argument, given, known in (
            ("name", name, NAMES),
            ("haystack", haystack, HAYSTACKS),
            ("key_kind", key_kind, KEY_KINDS),
            ("value_kind", value_kind, VALUE_KINDS),
        ):
            require_one_of(argument, given, known)
        for argument, amount in (("keys", keys), ("values", values), ("queries", queries)):
            require_whole(argument, amount, 1, 100)
        if queries > keys:
            raise ValueError(f"queries must be from 1 to {keys} (keys), got {queries}")
        if new_tokens is None:
            new_tokens = values * queries * NEW_TOKENS[value_kind] - 1
        super().__init__(name=name, tokens=tokens, seed=seed, new_tokens=new_tokens, protocol=protocol)
        self.haystack = haystack
        self.keys = keys
        self.values = values
        self.queries = queries
        self.key_kind = key_kind
        self.value_kind = value_kind

    def examples(self, tokenizer: PreTrainedTokenizerBase, split: str, count: int) -> list[Example]:
        """See Task; ValueError where `tokens` cannot hold the needles or the split has too few keys."""
        check_request(split, count, self.largest(split), self.name)
        self._check_length(tokenizer)
        passage = None
        if self.haystack != "needle":
            passage = Passage(tokenizer, sentences(self.haystack, split))
        return [
            self._example(tokenizer, passage, quiz, split, index)
            for index, quiz in enumerate(self._quizzes(split, count))
        ]

    def _example(
        self, tokenizer: PreTrainedTokenizerBase, passage: Passage | None, quiz: _Quiz, split: str, index: int
    ) -> Example:
        """The quiz between the passage's sentences; None makes a passage of needles for it."""
        generator = stable_generator(self.seed, split, index)
        passage = passage or self._distractors(tokenizer, quiz, split, generator)
        first = int(generator.integers(len(passage.sentences)))
        depths = [float(depth) for depth in generator.random(len(quiz.keys))]
        prompt, ids = exact_prompt(
            passage,
            lambda pieces: quiz.prompt(pieces, depths),
            lambda prompt: self.measured(tokenizer, prompt),
            first,
            self.tokens,
        )
        return self.built(tokenizer, prompt, quiz.answers, ids=ids)

    def largest(self, split: str) -> int:
        """Number of different examples of a split."""
        pairs = len(key_pairs(SPLITS[0])) if self.key_kind == "word" else NUMBERS_PER_SPLIT
        return min(pairs, NUMBERS_PER_SPLIT // self.values) // self.keys

    def _quizzes(self, split: str, count: int) -> Iterator[_Quiz]:
        """The first `count` quizzes of a split; no two have a key or value in common."""
        keys = _keys(self.key_kind, split, stable_generator(self.seed, split, "keys"))
        values = _values(self.value_kind, split, stable_generator(self.seed, split, "values"))
        for _ in range(count):
            own = [key for key in islice(keys, self.keys) for _ in range(self.values)]
            yield _Quiz(WHAT[self.value_kind], own, list(islice(values, len(own))), self.queries, self.values)

    def _distractors(
        self, tokenizer: PreTrainedTokenizerBase, quiz: _Quiz, split: str, generator: np.random.Generator
    ) -> Passage:
        """A passage of needles with neither key nor value of the quiz; long prompts may repeat keys."""
        shortest = count_tokens(tokenizer, NEEDLE.format(what=quiz.what, key="", value=""))
        most = self.tokens // shortest + 1
        keys = [key for key in islice(_keys(self.key_kind, split, generator), most) if key not in quiz.keys]
        if self.value_kind == "uuid":
            values = [identifier(split, generator) for _ in range(most)]
        else:
            values = [number(split, int(i)) for i in generator.choice(NUMBERS_PER_SPLIT, most, replace=False)]
        values = [value for value in values if value not in quiz.values]
        needles = [
            NEEDLE.format(what=quiz.what, key=keys[i % len(keys)], value=value) for i, value in enumerate(values)
        ]
        return Passage(tokenizer, needles, NOISE[split])

    def _check_length(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise ValueError unless the longest keys and values fit with RESERVE tokens of haystack."""
        key, value = _longest_key(tokenizer, self.key_kind), _longest_value(tokenizer, self.value_kind)
        needles = self.keys * self.values
        quiz = _Quiz(WHAT[self.value_kind], [key] * needles, [value] * needles, self.queries, self.values)
        haystack = [NEEDLE.format(what=quiz.what, key=key, value=value)] if self.haystack == "needle" else []
        minimum = len(encode(tokenizer, quiz.prompt(haystack, [0.0] * needles).text)) + RESERVE
        if self.tokens < minimum:
            raise ValueError(f"tokens must be at least {minimum} for {needles} needles, got {self.tokens}")


class _Quiz(NamedTuple):
    """Keys and values of one example's needles; the first keys are asked for, and each has so many in a row."""

    what: str
    keys: list[str]
    values: list[str]
    queries: int
    values_each: int

    @property
    def answers(self) -> list[str]:
        return self.values[: self.queries * self.values_each]

    def prompt(self, haystack: list[str], depths: list[float]) -> Prompt:
        """The whole prompt, each needle at its depth (0 to 1, a share of the sentences)."""
        what = self.what
        needles = [
            NEEDLE.format(what=what, key=key, value=value) for key, value in zip(self.keys, self.values, strict=True)
        ]
        instruction = INSTRUCTION.format(what=what, asked="one" if len(self.answers) == 1 else "some")
        context = f"{instruction}\n\n{' '.join(placed(haystack, needles, depths))}\n\n"
        if len(self.answers) == 1:
            key = self.keys[0]
            return Prompt(
                context, f"{QUESTION.format(what=what, key=key)}\n{ANSWER_PREFIX.format(what=what, key=key)}"
            )
        keys = _listed(self.keys[: len(self.answers) : self.values_each])
        return Prompt(
            context, f"{QUESTIONS.format(what=what, keys=keys)}\n{ANSWERS_PREFIX.format(what=what, keys=keys)}"
        )


def _listed(names: list[str]) -> str:
    """The names with commas, and `and` before the last."""
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _keys(kind: str, split: str, generator: np.random.Generator) -> Iterator[str]:
    """Different keys of a split; the adjective-noun pairs come to an end."""
    if kind == "uuid":
        return (identifier(split, generator) for _ in counted())
    pairs = key_pairs(split)
    return (pairs[i] for i in generator.permutation(len(pairs)))


def _values(kind: str, split: str, generator: np.random.Generator) -> Iterator[str]:
    """Different values of a split; the numbers come to an end."""
    if kind == "uuid":
        return (identifier(split, generator) for _ in counted())
    return (number(split, int(i)) for i in generator.permutation(NUMBERS_PER_SPLIT))


def _longest_key(tokenizer: PreTrainedTokenizerBase, kind: str) -> str:
    if kind == "uuid":
        return _longest_value(tokenizer, kind)
    return " ".join(_longest(tokenizer, words(name)) for name in ("adjectives", "nouns"))


def _longest_value(tokenizer: PreTrainedTokenizerBase, kind: str) -> str:
    generator = stable_generator("longest")
    if kind == "uuid":
        return _longest(tokenizer, [identifier(SPLITS[0], generator) for _ in range(SAMPLE)])
    return _longest(
        tokenizer, [number(SPLITS[0], int(i)) for i in generator.integers(NUMBERS_PER_SPLIT, size=SAMPLE)]
    )


def _longest(tokenizer: PreTrainedTokenizerBase, texts: list[str] | tuple[str, ...]) -> str:
    return max(texts, key=lambda text: count_tokens(tokenizer, text))
