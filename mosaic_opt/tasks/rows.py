"""Tasks whose examples are rows of data: splitting by document, truncation, chat template."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from mosaic_opt.tasks.base import (
    PROTOCOLS,
    SPLITS,
    Example,
    Task,
    build_example,
    encode,
    require_bool,
    require_one_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHARES = {"calibration": 0.2, "selection": 0.3, "test": 0.5}  # of the documents
# Ready prompts that begin alike for half the characters of the longer, or for so many, ask about one document.
DOCUMENT_CHARACTERS = 2048

_Tokens = tuple[tuple[int, ...], tuple[int, ...]]  # of a prompt's compressed part and of its question


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
        document: equal for rows that must not be in different splits; empty derives it from the context (see
            `documents_of`).
        place: where the data has it, for errors; no part of what makes two rows equal.
    """

    context: str
    answers: tuple[str, ...]
    question: str = ""
    answer_prefix: str = ""
    new_tokens: int = 64
    classes: tuple[str, ...] = ()
    document: str = ""
    place: str = field(default="", compare=False, repr=False)


class RowTask(Task):
    """A task over rows; each split holds whole documents, chosen by their hash. Equal rows count once.

    name, metric, tokens, new_tokens, protocol: see `Task`; `tokens` is the most that a prompt keeps (of a longer one
        the first and the last half), chat template and answer prefix not counted; `new_tokens` None: each row's own.
    chat: whether the prompt becomes a user's turn of the tokenizer's chat template, where it has one.
    allow_overlap: every split is all the rows, each once (the protocol of published work).
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
        require_bool("chat", chat)
        require_bool("allow_overlap", allow_overlap)
        self.chat = chat
        self.allow_overlap = allow_overlap
        self._new_tokens = new_tokens
        self._prompts: dict[str, set[_Tokens]] = {split: set() for split in SPLITS}  # of the examples made so far
        self._cut: set[_Tokens] = set()  # those of them that are cut

    @abstractmethod
    def rows(self) -> list[Row]:
        """All rows, in any order that is always the same."""

    def stop_tokens(self, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
        """Token ids that end an output, besides the model's own; here none."""
        return ()

    @cached_property
    def _all_rows(self) -> list[Row]:
        return sorted(self.rows(), key=_content)

    @cached_property
    def splits(self) -> dict[str, list[Row]]:
        """The rows of each split in the order of their contents' hash; those that make equal examples count once."""
        first: dict[Hashable, Row] = {}
        for row in self._all_rows:
            first.setdefault(self._asked(row), row)
        rows = list(first.values())
        if self.allow_overlap:
            return dict.fromkeys(SPLITS, rows)
        made: dict[str, list[Row]] = {split: [] for split in SPLITS}
        for row, document in zip(rows, documents_of(rows), strict=True):
            made[split_of(hashlib.sha256(document.encode()).hexdigest())].append(row)
        return made

    def _asked(self, row: Row) -> Hashable:
        """What an example is made of."""
        together = self.protocol == PROTOCOLS[0]
        prompt = row.context + row.question if together else (row.context, row.question)
        return prompt, row.answer_prefix, row.answers, row.classes, self._new_tokens or row.new_tokens

    def sizes(self) -> dict[str, int | None]:
        """See Task; ValueError where the data cannot be read."""
        return {split: len(rows) for split, rows in self.splits.items()}

    def examples(self, tokenizer: PreTrainedTokenizerBase, split: str, count: int) -> list[Example]:
        """See Task.

        Raises:
            ValueError: for a split of fewer rows, for prompts that are equal once they are cut to `tokens`, or under
                the question-agnostic protocol for a row whose question is not apart from its context.
        """
        require_one_of("split", split, SPLITS)
        rows = self.splits[split]
        if not 1 <= count <= len(rows):
            raise ValueError(
                f"{split} must be from 1 to {len(rows)} examples of {self.name} (its data has "
                f"{self._sizes_in_words()}; rows that begin alike are one document unless they name theirs; "
                f"allow_overlap=true gives every split all), got {count}"
            )
        examples = [self._example(tokenizer, row) for row in rows[:count]]
        self._require_different(examples, split)
        return examples

    def _sizes_in_words(self) -> str:
        sizes = ", ".join(f"{len(own)} {name}" for name, own in self.splits.items())
        different = len({id(row) for own in self.splits.values() for row in own})
        equal = len(self._all_rows) - different
        return sizes + (f"; equal rows count once, which leaves out {equal}" if equal else "")

    def _require_different(self, examples: Sequence[Example], split: str) -> None:
        """Raise ValueError where the cut has made prompts equal, of one split or (without overlap) of two."""
        prompts = [(example.tokens, example.question) for example in examples]
        self._cut |= {prompt for prompt, example in zip(prompts, examples, strict=True) if example.truncated}
        counts = Counter(prompts)
        if not self.allow_overlap:
            counts.update(prompt for name, own in self._prompts.items() if name != split for prompt in own)
        equal = sum(counts[prompt] > 1 for prompt in prompts if prompt in self._cut)
        if equal:
            raise ValueError(
                f"tokens must be so many that the prompts of {self.name} differ: once cut to them, {equal} of "
                f"{len(examples)} prompts of {split} are equal to others; got {self.tokens}"
            )
        self._prompts[split].update(prompts)

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
            body = truncated(tokenizer, row.context + row.question, self._room(0))
            return before + body + after + row.answer_prefix, None, templated
        if not row.question:
            raise ValueError(
                f"protocol of {self.name} must be {PROTOCOLS[0]}: its data does not tell the question from the "
                f"context{f' in {row.place}' if row.place else ''}; got {self.protocol}"
            )
        room = self._room(len(encode(tokenizer, row.question, special=False)))
        body = before + truncated(tokenizer, row.context, room)
        return body + row.question + after + row.answer_prefix, len(body), templated

    def _room(self, question: int) -> int:
        """Tokens that a question of so many leaves; ValueError where they hold no first and last half."""
        if self.tokens < question + 2:
            reason = f" (a question takes {question}, and its context at least 2)" if question else ""
            raise ValueError(f"tokens must be at least {question + 2} for {self.name}{reason}, got {self.tokens}")
        return self.tokens - question


def truncated(tokenizer: PreTrainedTokenizerBase, text: str, limit: int) -> str:
    """A text of more than `limit` tokens (at least 2), cut to the first and last half of them (LongBench's rule)."""
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


def documents_of(rows: Sequence[Row]) -> list[str]:
    """What tells each row's document: its name; its context, where the question is apart; else its beginning.

    Ready prompts whose beginnings are alike have the same one (see `beginnings`).
    """
    beginning = beginnings(row.context for row in rows if not row.document and not row.question)
    return [row.document or (row.context if row.question else beginning[row.context]) for row in rows]


def beginnings(prompts: Iterable[str]) -> dict[str, str]:
    """The beginning of each prompt's document, the same for prompts that begin alike, also through others.

    Two prompts begin alike where both begin with the first half of the longer one (DOCUMENT_CHARACTERS of it at the
    most). Each is compared with the nearest, in alphabetical order, that are no longer: what begins alike and lies
    further off is linked to these. The beginning is that of the first in alphabetical order.
    """
    ordered = sorted(set(prompts))
    first = {prompt: prompt for prompt in ordered}
    open_prompts: list[str] = []  # of growing length
    for prompt in ordered:
        while open_prompts and len(open_prompts[-1]) > len(prompt):
            _link(first, open_prompts.pop(), prompt)
        if open_prompts:
            _link(first, prompt, open_prompts[-1])
        open_prompts.append(prompt)
    return {prompt: _beginning(_first(first, prompt)) for prompt in ordered}


def _link(first: dict[str, str], longer: str, shorter: str) -> None:
    """Give both prompts the same first one if they begin alike."""
    if shorter.startswith(_beginning(longer)):
        one, other = sorted((_first(first, longer), _first(first, shorter)))
        first[other] = one


def _first(first: dict[str, str], prompt: str) -> str:
    while first[prompt] != prompt:
        first[prompt] = prompt = first[first[prompt]]
    return prompt


def _beginning(prompt: str) -> str:
    """The first half, at most DOCUMENT_CHARACTERS; what is asked stands at the end."""
    return prompt[: min(DOCUMENT_CHARACTERS, max(1, len(prompt) // 2))]


def split_of(group: str) -> str:
    """The split of a document's hash: its place between 0 and 1 against the cumulated shares."""
    place = int(group[:16], 16) / 16**16
    for split, share in SHARES.items():
        if place < share:
            return split
        place -= share
    return SPLITS[-1]
