"""Needle tasks after RULER (Hsieh et al., 2024, arXiv:2404.06654), from a generator and wording of our own.

A prompt is an instruction, a haystack with needles between its sentences, a question and an answer prefix
that the model continues. Departures from the official generator: every prompt has exactly the wished number
of tokens; every example has its own random generator and haystack offset; the splits share no haystack text,
key or value.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mosaic_opt.tasks.base import (
    SPLITS,
    Example,
    Task,
    build_example,
    check_request,
    encode,
    stable_generator,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

GENERATOR_VERSION = 1
HAYSTACKS = ("noise", "essay")

INSTRUCTION = (
    "Some pass numbers for different things are hidden in the text below. "
    "Remember them, because a question about one of them follows."
)
# The answer prefix repeats the needle up to its value: with other wordings SmolLM2-135M took a distractor's
# value more often. Question and prefix have 25 of its tokens: an observation window of 32 covers both.
NEEDLE = "The pass number for {key}: {value}."
QUESTION = "Question: What is the pass number for {key} in the text above?"
ANSWER_PREFIX = "Answer: The pass number for {key}:"
# One set a split, so that the splits share no haystack text.
NOISE = {
    "calibration": (
        "The rain fell softly on the roof.",
        "A cart rolled slowly down the lane.",
        "Birds were singing in the tall trees.",
        "Smoke rose from the old chimney.",
        "The baker opened his shop at dawn.",
        "Two dogs slept beside the warm stove.",
        "The children walked home before dinner.",
    ),
    "selection": (
        "Snow covered the fields all winter.",
        "The clerk closed the heavy green ledger.",
        "A cool wind came over the hills.",
        "Someone had left a lamp burning upstairs.",
        "The ferry crossed at noon and again at four.",
        "Fresh bread was cooling near the door.",
        "The guests talked quietly until midnight.",
    ),
    "test": (
        "Waves rolled in from the grey sea.",
        "The gardener watered the roses every evening.",
        "Bees moved from flower to flower.",
        "An empty bench stood under the elm.",
        "The mail arrived late that week.",
        "Dry leaves gathered along the wall.",
        "The neighbours painted their fence white.",
    ),
}
VALUES_PER_SPLIT = 3_000_000  # the 7-digit numbers, split by their remainder modulo 3
RESERVE = 16  # tokens kept for the cut sentence at the haystack's end, which makes the length exact
ATTEMPTS = 256  # places where that cut sentence may begin

# Metric by task name in RULER: `all` is the share of references found, `part` is 1 if any is.
METRICS = {
    **{f"niah_{kind}_{number}": "string_match_all" for kind in ("single", "multikey") for number in (1, 2, 3)},
    **dict.fromkeys(("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe"), "string_match_all"),
    **dict.fromkeys(("qa_1", "qa_2"), "string_match_part"),
}

_DATA = Path(__file__).parent / "data"
_SENTENCE_END = re.compile(r"""(?:(?<=[.!?])|(?<=[.!?]["')]))\s+(?=["'(]?[A-Z])""")
_CONTROL = re.compile(r"[\x00-\x1f]")


def score(task: str, prediction: str, references: Sequence[str]) -> float:
    """RULER's score of one prediction, from 0 to 1: case-insensitive substring matches.

    task: a key of METRICS.
    prediction: the generated text; control characters count as newlines.
    references: at least one, none empty.
    """
    if task not in METRICS:
        raise ValueError(f"task must be one of {', '.join(METRICS)}, got {task!r}")
    if not references or not all(references):
        raise ValueError(f"references must be non-empty texts, got {list(references)!r}")
    text = _normalised(prediction)
    found = [reference.lower() in text for reference in references]
    return float(any(found)) if METRICS[task] == "string_match_part" else sum(found) / len(found)


def settled(prediction: str, references: Sequence[str], reach: Sequence[float]) -> bool:
    """Whether every reference is found, or out of reach however the prediction goes on (see `Task.settled`)."""
    text = _normalised(prediction)
    return all(
        reference in text or _begun(text, reference) + more < len(reference)
        for reference, more in zip(map(str.lower, references), reach, strict=True)
    )


def _begun(text: str, reference: str) -> int:
    """Length of the longest end of `text` with which `reference` begins."""
    return next(n for n in range(len(reference), -1, -1) if text.endswith(reference[:n]))


def _normalised(prediction: str) -> str:
    return _CONTROL.sub("\n", prediction).lower()


class Needle(Task):
    """RULER's niah_single_1 (noise, 1 key), niah_single_2 (essay, 1 key) and niah_multikey_1 (essay, 4 keys).

    name: niah_single_1, niah_single_2 or niah_multikey_1.
    haystack: "noise" (seven sentences over and over) or "essay" (the shipped prose).
    keys: needles in the haystack, each with a key and value of its own; one of them is asked for.
    tokens: exact prompt length.
    seed: another seed gives other examples from the same splits.
    new_tokens: generation limit; a 7-digit answer takes at most 8 tokens.
    """

    def __init__(
        self, *, name: str, haystack: str, keys: int, tokens: int = 650, seed: int = 0, new_tokens: int = 9
    ) -> None:
        if name not in METRICS:
            raise ValueError(f"name must be one of {', '.join(METRICS)}, got {name!r}")
        if haystack not in HAYSTACKS:
            raise ValueError(f"haystack must be one of {', '.join(HAYSTACKS)}, got {haystack!r}")
        if keys < 1:
            raise ValueError(f"keys must be at least 1, got {keys}")
        super().__init__(name=name, metric=METRICS[name], tokens=tokens, new_tokens=new_tokens)
        self.haystack = haystack
        self.keys = keys
        self.seed = seed

    def examples(self, tokenizer: PreTrainedTokenizerBase, split: str, count: int) -> list[Example]:
        """See Task; ValueError where `tokens` cannot hold the needles or the split has too few keys."""
        check_request(split, count, largest=len(_key_pairs(SPLITS[0])) // self.keys)
        self._check_length(tokenizer)
        passage = _Passage(tokenizer, _sentences(self.haystack, split))
        drawn_keys = stable_generator(self.seed, split, "keys").permutation(len(_key_pairs(split)))
        drawn_values = stable_generator(self.seed, split, "values").permutation(VALUES_PER_SPLIT)
        examples = []
        for index in range(count):
            own = slice(index * self.keys, (index + 1) * self.keys)
            keys = [_key_pairs(split)[i] for i in drawn_keys[own]]
            values = [_value(split, int(i)) for i in drawn_values[own]]
            generator = stable_generator(self.seed, split, index)
            prompt, tokens = self._fit(tokenizer, passage, _Quiz(keys, values), generator)
            examples.append(build_example(tokenizer, prompt, values[:1], tokens))
        return examples

    def settled(self, prediction: str, references: Sequence[str], reach: Sequence[float]) -> bool:
        """See the function of this name."""
        return settled(prediction, references, reach)

    def score(self, prediction: str, references: Sequence[str]) -> float:
        return score(self.name, prediction, references)

    def describe(self) -> dict[str, Any]:
        wording = [INSTRUCTION, NEEDLE, QUESTION, ANSWER_PREFIX, _words("adjectives"), _words("nouns")]
        return super().describe() | {
            "haystack": self.haystack,
            "keys": self.keys,
            "seed": self.seed,
            "generator_version": GENERATOR_VERSION,
            "haystack_sha256": _haystack_digest(self.haystack),
            "wording_sha256": hashlib.sha256(json.dumps(wording).encode()).hexdigest(),
        }

    def _check_length(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise ValueError unless the longest words of the lists fit with RESERVE tokens of haystack."""

        def length(word: str) -> int:
            return _count(tokenizer, word)

        key = f"{max(_words('adjectives'), key=length)} {max(_words('nouns'), key=length)}"
        quiz = _Quiz([key] * self.keys, ["1000000"] * self.keys)
        minimum = len(encode(tokenizer, quiz.prompt([], [0.0] * self.keys))) + RESERVE
        if self.tokens < minimum:
            raise ValueError(f"tokens must be at least {minimum} for {self.keys} keys, got {self.tokens}")

    def _fit(
        self,
        tokenizer: PreTrainedTokenizerBase,
        passage: _Passage,
        quiz: _Quiz,
        generator: np.random.Generator,
    ) -> tuple[str, list[int]]:
        """The prompt and its token ids, exactly `tokens` of them.

        Whole sentences are chosen by their token counts; the rest is a run of words cut to the missing number
        of tokens. Where no cut has that number, or its tokens merge with their neighbours, the run begins one
        word further on.
        """
        first = int(generator.integers(len(passage.sentences)))
        depths = [float(depth) for depth in generator.random(self.keys)]
        missing = self.tokens - len(encode(tokenizer, quiz.prompt([], depths)))
        whole = 0
        while missing - passage.count(first + whole) >= RESERVE // 2:
            missing -= passage.count(first + whole)
            whole += 1
        for shift in range(ATTEMPTS):
            while missing < RESERVE // 2 and whole > 0:
                whole -= 1
                missing += passage.count(first + whole)
            cut = passage.cut(first + whole, shift, missing)
            if cut is None:
                continue
            prompt = quiz.prompt([*passage.run(first, whole), cut], depths)
            tokens = encode(tokenizer, prompt)
            if len(tokens) == self.tokens:
                return prompt, tokens
            missing += self.tokens - len(tokens)
        raise ValueError(f"tokens must be a length that the tokenizer can reach, got {self.tokens}")


class _Quiz(NamedTuple):
    """Keys and values of one example; the first key is asked for."""

    keys: list[str]
    values: list[str]

    def prompt(self, sentences: list[str], depths: list[float]) -> str:
        """The whole prompt, each needle at its depth (0 to 1, a share of the sentences)."""
        pieces = list(sentences)
        for depth, key, value in sorted(zip(depths, self.keys, self.values, strict=True), reverse=True):
            pieces.insert(int(depth * (len(sentences) + 1)), NEEDLE.format(key=key, value=value))
        question = QUESTION.format(key=self.keys[0])
        return f"{INSTRUCTION}\n\n{' '.join(pieces)}\n\n{question}\n{ANSWER_PREFIX.format(key=self.keys[0])}"


class _Passage:
    """One split's haystack as a ring of sentences, tokenised once; indices past the end begin again."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, sentences: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.sentences = sentences
        texts = [f" {sentence}" for sentence in sentences]
        ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        self.counts: NDArray[np.int64] = np.array([len(row) for row in ids])
        words = [sentence.split() for sentence in sentences]
        self.words = [word for row in words for word in row]
        self.first_word: NDArray[np.int64] = np.cumsum([0] + [len(row) for row in words[:-1]])

    def count(self, index: int) -> int:
        """Tokens of one sentence with the space before it."""
        return int(self.counts[index % len(self.sentences)])

    def run(self, first: int, number: int) -> list[str]:
        return [self.sentences[i % len(self.sentences)] for i in range(first, first + number)]

    def cut(self, sentence: int, shift: int, tokens: int) -> str | None:
        """Words from `shift` words after the sentence's start on, with a full stop: exactly `tokens` tokens.

        Returns None where no number of words has that many. Binary search: a word has at least one token.
        """
        start = int(self.first_word[sentence % len(self.sentences)]) + shift
        low, high = 1, tokens
        while low <= high:
            middle = (low + high) // 2
            words = [self.words[i % len(self.words)] for i in range(start, start + middle)]
            text = " ".join(words).rstrip(".,;:!?-\"'(") + "."
            found = _count(self.tokenizer, text)
            if found == tokens:
                return text
            low, high = (middle + 1, high) if found < tokens else (low, middle - 1)
        return None


def _count(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """Tokens of a text after a space, without special tokens."""
    return len(tokenizer(f" {text}", add_special_tokens=False, verbose=False)["input_ids"])


def _value(split: str, index: int) -> str:
    """The split's 7-digit number with this index: remainder modulo 3 tells the split."""
    return str(1_000_000 + len(SPLITS) * index + SPLITS.index(split))


@cache
def _words(name: str) -> tuple[str, ...]:
    return tuple((_DATA / f"{name}.txt").read_text(encoding="ascii").split())


@cache
def _key_pairs(split: str) -> tuple[str, ...]:
    """The split's third of all adjective-noun pairs; every word is in every split, no pair is in two."""
    return tuple(
        f"{adjective} {noun}"
        for i, adjective in enumerate(_words("adjectives"))
        for j, noun in enumerate(_words("nouns"))
        if (i + j) % len(SPLITS) == SPLITS.index(split)
    )


@cache
def _sentences(haystack: str, split: str) -> tuple[str, ...]:
    """The split's noise set, or its third of the essay's paragraphs (contiguous), as sentences."""
    if haystack == "noise":
        return NOISE[split]
    paragraphs = (_DATA / "haystack.txt").read_text(encoding="ascii").splitlines()
    part = SPLITS.index(split)
    own = paragraphs[len(paragraphs) * part // len(SPLITS) : len(paragraphs) * (part + 1) // len(SPLITS)]
    return tuple(sentence for paragraph in own for sentence in _SENTENCE_END.split(paragraph))


@cache
def _haystack_digest(haystack: str) -> str:
    content = json.dumps(NOISE).encode() if haystack == "noise" else (_DATA / "haystack.txt").read_bytes()
    return hashlib.sha256(content).hexdigest()
