"""Python source files, and their lines that can be asked for."""

from __future__ import annotations

import ast
import builtins
import hashlib
import keyword
import os
import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from mosaic_opt.tasks.metrics import is_code

FILE_BYTES = (4_000, 100_000)  # smaller files hold no whole prompt, larger ones are slow to parse
ANSWER_CHARACTERS = (16, 100)
MOST_CHARACTERS = 8  # of code to a token on average; a prompt begins no further from its end
SURE_CHARACTERS = 2  # so many to a token fit in any prompt
QUESTION_LINES = 6  # the last lines before the answer: fed after the compression if question-agnostic

# Tests, copies of other modules, tables, and what does not belong to the library.
_SKIPPED_FOLDERS = frozenset(
    (
        *("__phello__", "__pycache__", "dist-packages", "distutils", "encodings", "idle_test", "idlelib", "lib2to3"),
        *("pydoc_data", "site-packages", "test", "tests", "turtledemo"),
    )
)
_NAME = re.compile(r"[A-Za-z_]\w{3,}")
_COMMON_NAMES = frozenset([*keyword.kwlist, *dir(builtins), "self"])
_UNSUITED = (ast.Import, ast.ImportFrom, ast.Pass, ast.Break, ast.Continue, ast.Global, ast.Nonlocal)


class SourceFile(NamedTuple):
    """Lines of a source file, and the indices of those that may be asked for."""

    lines: tuple[str, ...]
    places: tuple[int, ...]

    def before(self, place: int, characters: int) -> list[str]:
        """The last lines before a place: about so many characters, at least one line."""
        totals = accumulate(len(line) + 1 for line in reversed(self.lines[: place - 1]))
        return list(self.lines[place - 1 - sum(total <= characters for total in totals) : place])


@cache
def files(folder: str) -> tuple[str, ...]:
    """Names, relative to the folder, of its Python files of a fitting size."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith("config-")]
        paths = [
            Path(parent, name) for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
        found += [path for path in paths if path.is_file() and FILE_BYTES[0] <= path.stat().st_size <= FILE_BYTES[1]]
    return tuple(sorted(path.relative_to(folder).as_posix() for path in found))


@cache
def digest(folder: str, name: str) -> str:
    """Hash of a file's content, which decides its split: copies are in the same."""
    return hashlib.sha256(Path(folder, name).read_bytes()).hexdigest()


@cache
def read(folder: str, name: str, tokens: int) -> SourceFile:
    """One source file; without places where it is generated, no valid Python or too short for a prompt.

    tokens: prompt length; a place has a prompt's length of text before it, in a shorter file at least half the file.
    A place is a statement on one line with a name that stands in the prompt as well, last more than QUESTION_LINES
    lines before it.
    """
    try:
        text = Path(folder, name).read_text(encoding="utf-8-sig")
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return SourceFile((), ())
    short = len(text) < min(MOST_CHARACTERS * tokens, FILE_BYTES[1] // 2)
    if short or "generated" in text[:1000].lower():
        return SourceFile((), ())
    lines = tuple(text.split("\n"))
    return SourceFile(lines, tuple(_places(lines, set(_statements(tree)), tokens)))


def _statements(tree: ast.AST) -> Iterator[int]:
    """Indices of the lines on which a statement without a body begins and ends; no doc string, no import."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for node in getattr(tree, field, ()):
            if hasattr(node, "body"):
                yield from _statements(node)
            elif node.lineno == node.end_lineno and not isinstance(node, _UNSUITED) and not _is_text(node):
                yield node.lineno - 1


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _places(lines: Sequence[str], statements: set[int], tokens: int) -> Iterator[int]:
    """Indices of the lines to complete; see `read`."""
    starts = [0, *accumulate(len(line) + 1 for line in lines)]
    least = min(MOST_CHARACTERS * tokens, starts[-1] // 2)
    last: dict[str, int] = {}  # line where a name was seen last
    for index, line in enumerate(lines):
        names = set(_NAME.findall(line)) - _COMMON_NAMES
        if index in statements and starts[index] >= least and _suits(lines[index - 1], line):
            seen = (last[name] for name in names if name in last)
            nearest = starts[index] - SURE_CHARACTERS * tokens
            if any(line < index - QUESTION_LINES and starts[line] >= nearest for line in seen):
                yield index
        last.update(dict.fromkeys(names, index))


def _suits(before: str, line: str) -> bool:
    """Whether a line can be an answer; `before`: the last line of the prompt, whose end must be a token's."""
    text = line.strip()
    fits = ANSWER_CHARACTERS[0] <= len(text) <= ANSWER_CHARACTERS[1] and text.isascii()
    return fits and is_code(text) and before == before.rstrip() != ""
