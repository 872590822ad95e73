"""Tasks whose examples are rows of data: splitting by document, truncation, chat template."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from mosaic_opt.tasks.base import PROTOCOLS, SPLITS, Example, Task, build_example, encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHARES = {"calibration": 0.2, "selection": 0.3, "test": 0.5}  # of the documents
DOCUMENT_CHARACTERS = 2048  # prompts that begin alike for so long ask about the same document


@dataclass(frozen=True)
class Row:
    """One example as data gives it, before any tokenizer.

    Attributes:
        context: the long text, with the instruction before it; the whole prompt where nothing tells the two apart.
        answers: at least one, none empty.
        question: follows the context directly (its own leading newlines included); empty where it is not apart.
        answer_prefix: begins the answer; stands outside the chat template.
        new_tokens: generation limit.
        classes: names that a classification's metric looks for.
        document: equal for rows that must not be in different splits; empty derives it from the context.
    """

    context: str
    answers: tuple[str, ...]
    question: str = ""
    answer_prefix: str = ""
    new_tokens: int = 64
    classes: tuple[str, ...] = ()
    document: str = ""

    @property
    def group(self) -> str:
        """Hash that decides the split."""
        beginning = self.context if self.question else self.context[:DOCUMENT_CHARACTERS]
        return hashlib.sha256((self.document or beginning).encode()).hexdigest()


class RowTask(Task):
    """A task over rows; each split holds whole documents, chosen by their hash.

    name, metric, tokens, new_tokens, protocol: see `Task`; `tokens` is the most that a prompt keeps (of a longer one
        the first and the last half), chat template and answer prefix not counted; `new_tokens` None: each row's own.
    chat: whether the prompt becomes a user's turn of the tokenizer's chat template, where it has one.
    allow_overlap: every split is all the rows (the protocol of published work).
    """

    def __init__(
        self,
        *,
        name: str,
        metric: str,
        tokens: int,
        new_tokens: int | None = None,
        protocol: str = PROTOCOLS[0],
        chat: bool = False,
        allow_overlap: bool = False,
    ) -> None:
        limit = Row.new_tokens if new_tokens is None else new_tokens
        super().__init__(name=name, metric=metric, tokens=tokens, new_tokens=limit, protocol=protocol)
        for field, value in (("chat", chat), ("allow_overlap", allow_overlap)):
            if not isinstance(value, bool):
                raise ValueError(f"{field} must be true or false, got {value!r}")
        self.chat = chat
        self.allow_overlap = allow_overlap
        self._new_tokens = new_tokens

    @abstractmethod
    def rows(self) -> list[Row]:
        """All rows, in any order that is always the same."""

    def stop_tokens(self, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
        """Token ids that end an output, besides the model's own; here none."""
        return ()

    @cached_property
    def splits(self) -> dict[str, list[Row]]:
        """The rows of each split, each once, in the order of their contents' hash."""
        rows = sorted(dict.fromkeys(self.rows()), key=_content)
        if self.allow_overlap:
            return dict.fromkeys(SPLITS, rows)
        made: dict[str, list[Row]] = {split: [] for split in SPLITS}
        for row in rows:
            made[split_of(row.group)].append(row)
        return made

    def sizes(self) -> dict[str, int | None]:
        """See Task; ValueError where the data cannot be read."""
        return {split: len(rows) for split, rows in self.splits.items()}

    def examples(self, tokenizer: PreTrainedTokenizerBase, split: str, count: int) -> list[Example]:
        """See Task.

        Raises:
            ValueError: for a split of fewer rows, or under the question-agnostic protocol for a row whose question is
                not apart from its context.
        """
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
        rows = self.splits[split]
        if not 1 <= count <= len(rows):
            sizes = ", ".join(f"{len(own)} {name}" for name, own in self.splits.items())
            raise ValueError(
                f"{split} must be from 1 to {len(rows)} examples of {self.name} (its data has {sizes}; rows that "
                "begin alike are one document unless they name theirs; allow_overlap=true gives every split all), "
                f"got {count}"
            )
        return [self._example(tokenizer, row) for row in rows[:count]]

    def _example(self, tokenizer: PreTrainedTokenizerBase, row: Row) -> Example:
        prompt, context, templated = self._prompt(tokenizer, row)
        return build_example(
            tokenizer,
            prompt,
            row.answers,
            new_tokens=self._new_tokens or row.new_tokens,
            task=self.name,
            context=context,
            special=not templated,
            exact=False,
            classes=row.classes,
            stop_tokens=self.stop_tokens(tokenizer),
            truncated=row.context + row.question not in prompt,
        )

    def _prompt(self, tokenizer: PreTrainedTokenizerBase, row: Row) -> tuple[str, int | None, bool]:
        """The whole prompt, the length of its compressed part (None: all of it), whether a template wrote it."""
        templated = self.chat and tokenizer.chat_template is not None
        before, after = _template(tokenizer) if templated else ("", "")
        if self.protocol == PROTOCOLS[0]:
            body = truncated(tokenizer, row.context + row.question, self.tokens)
            return before + body + after + row.answer_prefix, None, templated
        if not row.question:
            raise ValueError(
                f"protocol of {self.name} must be {PROTOCOLS[0]}: its data does not tell the question from the "
                f"context; got {self.protocol}"
            )
        room = self.tokens - len(encode(tokenizer, row.question, special=False))
        body = before + truncated(tokenizer, row.context, room)
        return body + row.question + after + row.answer_prefix, len(body), templated


def truncated(tokenizer: PreTrainedTokenizerBase, text: str, limit: int) -> str:
    """A text of more than `limit` tokens, cut to the first and last half of them (LongBench's rule).

    Raises:
        ValueError: for a limit below 2, which leaves nothing.
    """
    if limit < 2:
        raise ValueError(f"tokens must leave at least 2 for the context, got {limit}")
    ids = encode(tokenizer, text, special=False)
    if len(ids) <= limit:
        return text
    half = limit // 2
    return "".join(str(tokenizer.decode(part, skip_special_tokens=True)) for part in (ids[:half], ids[-half:]))


def _template(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """What the chat template writes before and after a user's turn, up to where the answer begins."""
    mark = "(content)"
    turn = [{"role": "user", "content": mark}]
    text = str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
    if mark not in text:
        raise ValueError("chat must be false: the tokenizer's chat template does not repeat what the user says")
    before, _, after = text.partition(mark)
    return before, after


def _content(row: Row) -> str:
    return hashlib.sha256(repr(row).encode()).hexdigest()


def split_of(group: str) -> str:
    """The split of a document's hash: its place between 0 and 1 against the cumulated shares."""
    place = int(group[:16], 16) / 16**16
    for split, share in SHARES.items():
        if place < share:
            return split
        place -= share
    return SPLITS[-1]
