"""The shipped prose, a contiguous third of its paragraphs for each split."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from mosaic_opt.tasks.base import SPLITS

DATA = Path(__file__).parent / "data"

_SENTENCE_END = re.compile(r"""(?:(?<=[.!?])|(?<=[.!?]["')]))\s+(?=["'(]?[A-Z])""")


@cache
def essay() -> str:
    """The whole text, a paragraph a line."""
    return (DATA / "haystack.txt").read_text(encoding="ascii")


@cache
def paragraphs(split: str) -> tuple[str, ...]:
    """The split's paragraphs."""
    lines = essay().splitlines()
    part = SPLITS.index(split)
    return tuple(lines[len(lines) * part // len(SPLITS) : len(lines) * (part + 1) // len(SPLITS)])


def sentences_of(paragraph: str) -> list[str]:
    """A paragraph's sentences, in order."""
    return _SENTENCE_END.split(paragraph)
