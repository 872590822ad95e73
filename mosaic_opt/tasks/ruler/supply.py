"""What prompts are made of: haystack text, keys, values and words; no split has what another split has."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from mosaic_opt.tasks.base import SPLITS
from mosaic_opt.tasks.essay import DATA, essay, paragraphs, sentences_of

if TYPE_CHECKING:
    import numpy as np

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
NUMBERS_PER_SPLIT = 3_000_000  # the 7-digit numbers, split by their remainder modulo 3

_FIRST_DIGITS = "0123456789abcde"  # of a uuid; five a split
_WORD = re.compile(r"(?<![\w'-])[a-z]{4,10}(?![\w'-])")


def number(split: str, index: int, digits: int = 7) -> str:
    """The split's number of so many digits with this index: its remainder modulo 3 tells the split.

    index: from 0 to 3 * 10**(digits - 1) - 1.
    """
    return str(10 ** (digits - 1) + len(SPLITS) * index + SPLITS.index(split))


def identifier(split: str, generator: np.random.Generator) -> str:
    """A random uuid (RFC 9562, version 4) whose first digit tells the split."""
    text = str(uuid.UUID(bytes=generator.bytes(16), version=4))
    return _FIRST_DIGITS[len(SPLITS) * int(generator.integers(5)) + SPLITS.index(split)] + text[1:]


def letters(split: str, generator: np.random.Generator, length: int, count: int) -> list[str]:
    """`count` different random words of so many lower-case letters: every third of all such words is the split's."""
    drawn = generator.choice(26**length // len(SPLITS), size=count, replace=False)
    return [_spelled(len(SPLITS) * int(index) + SPLITS.index(split), length) for index in drawn]


def _spelled(index: int, length: int) -> str:
    """The number `index` to the base 26, in letters."""
    return "".join(chr(ord("a") + index // 26**place % 26) for place in range(length))


@cache
def words(name: str) -> tuple[str, ...]:
    """The word list `adjectives` or `nouns`."""
    return tuple((DATA / f"{name}.txt").read_text(encoding="ascii").split())


@cache
def key_pairs(split: str) -> tuple[str, ...]:
    """The split's third of all adjective-noun pairs; every word is in every split, no pair is in two."""
    return tuple(
        f"{adjective} {noun}"
        for i, adjective in enumerate(words("adjectives"))
        for j, noun in enumerate(words("nouns"))
        if (i + j) % len(SPLITS) == SPLITS.index(split)
    )


@cache
def vocabulary(split: str) -> tuple[str, ...]:
    """The split's third of the essay's lower-case words of 4 to 10 letters."""
    found = sorted(set(_WORD.findall(essay())))
    return tuple(found[SPLITS.index(split) :: len(SPLITS)])


@cache
def sentences(haystack: str, split: str) -> tuple[str, ...]:
    """The split's noise set (haystack "noise"), or its paragraphs of the essay as sentences ("essay")."""
    if haystack == "noise":
        return NOISE[split]
    return tuple(sentence for paragraph in paragraphs(split) for sentence in sentences_of(paragraph))


def placed(haystack: Sequence[str], inserts: Sequence[str], depths: Sequence[float]) -> list[str]:
    """The haystack's pieces with each insert at its depth: a share of the pieces, 0 to below 1."""
    pieces = list(haystack)
    for depth, text in sorted(zip(depths, inserts, strict=True), reverse=True):
        pieces.insert(int(depth * (len(haystack) + 1)), text)
    return pieces
