"""Documents and questions about them: from a file in SQuAD's or HotpotQA's form, or the shipped invented ones."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from mosaic_opt.tasks.base import SPLITS, is_unicode
from mosaic_opt.tasks.essay import DATA

SHIPPED = "documents.json"
YES_NO = {"yes", "no"}  # answers that any text may have in it

_KINDS: dict[type, str] = {dict: "an object", list: "a list", str: "a text"}


@dataclass(frozen=True)
class Question:
    """A question, its answers, the documents that hold them, and others that go with it.

    gold, near: indices into the documents.
    """

    text: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True)
class Collection:
    """Documents, for each the group it belongs to, and questions. A group is always in one split."""

    documents: tuple[str, ...]
    groups: tuple[str, ...]
    questions: tuple[Question, ...]

    def unusable(self, question: Question) -> str:
        """Why a question cannot be asked, or nothing."""
        gold = [self.documents[i].lower() for i in question.gold]
        answers = [answer.lower() for answer in question.answers]
        if not answers or not question.text:
            return "without a question or an answer"
        if YES_NO.issuperset(answers):
            return "answered by yes or no alone"
        if not gold:
            return "without their supporting documents"
        if not any(answer in text for answer in answers for text in gold):
            return "whose answers stand in none of their documents"
        return ""

    def require_usable(self, path: str) -> None:
        """Raise ValueError where no question of the file at `path` can be asked."""
        reasons = Counter(map(self.unusable, self.questions))
        if not reasons.pop("", 0):
            found = ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "no questions at all"
            raise ValueError(f"path must be a file with questions that its documents answer, {path} has {found}")

    def split_of_documents(self) -> list[str]:
        """The split of each document: groups in the order of their hash take the splits in turn."""
        order = sorted(set(self.groups), key=lambda group: hashlib.sha256(group.encode()).hexdigest())
        split = {group: SPLITS[place % len(SPLITS)] for place, group in enumerate(order)}
        return [split[group] for group in self.groups]


def shipped(name: str) -> Collection:
    """The invented documents with their questions about one document (qa_1) or about two (qa_2)."""
    documents: list[str] = []
    groups: list[str] = []
    questions: list[Question] = []
    for pair in json.loads((DATA / SHIPPED).read_text(encoding="ascii")):
        first = len(documents)
        both = tuple(range(first, first + len(pair["documents"])))
        for index, document in zip(both, pair["documents"], strict=True):
            documents.append(document["text"])
            groups.append(pair["documents"][0]["text"])
            if name == "qa_1":
                questions += [Question(text, (answer,), (index,)) for text, answer in document["questions"]]
        if name == "qa_2":
            questions += [Question(text, (answer,), both) for text, answer in pair["questions"]]
    return Collection(tuple(documents), tuple(groups), tuple(questions))


def read(path: Path) -> Collection:
    """The collection of a JSON file in the form of SQuAD (1.1 or 2.0) or HotpotQA, told apart by their keys.

    Groups are SQuAD's articles and HotpotQA's titles. Questions of the same text, answers and documents count once;
    HotpotQA's whose supporting documents are not all in their context have no gold.
    Raises ValueError for other files, naming the file and what of it (articles, paragraphs, questions count from 1).
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
        if isinstance(content, dict):
            return _squad(_field(content, "data", list, "the file"))
        return _hotpot(_typed(content, list, "the file"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"path must be a JSON file in the form of SQuAD or HotpotQA, got {str(path)!r}: {error}"
        ) from error


class _Collector:
    """A collection in the making; equal documents and questions are taken once."""

    def __init__(self) -> None:
        self.documents: dict[str, int] = {}
        self.groups: list[str] = []
        self.questions: dict[tuple[str, frozenset[str], tuple[int, ...]], Question] = {}

    def document(self, text: str, group: str) -> int:
        """The index of a document."""
        index = self.documents.setdefault(text, len(self.documents))
        if index == len(self.groups):
            self.groups.append(group)
        return index

    def question(self, question: Question) -> None:
        self.questions.setdefault((question.text, frozenset(question.answers), question.gold), question)

    @property
    def collection(self) -> Collection:
        return Collection(tuple(self.documents), tuple(self.groups), tuple(self.questions.values()))


def _squad(articles: list[Any]) -> Collection:
    made = _Collector()
    for number, article in enumerate(articles, 1):
        place = f"article {number}"
        title = _text(article, "title", place)
        for part, paragraph in enumerate(_field(article, "paragraphs", list, place), 1):
            _squad_paragraph(made, paragraph, title, f"{place}, paragraph {part}")
    return made.collection


def _squad_paragraph(made: _Collector, paragraph: Any, title: str, place: str) -> None:
    index = made.document(_text(paragraph, "context", place), title)
    for number, asked in enumerate(_field(paragraph, "qas", list, place), 1):
        own = f"{place}, question {number}"
        answers = [_text(answer, "text", f"{own}, answers") for answer in _field(asked, "answers", list, own)]
        made.question(Question(_text(asked, "question", own), _distinct(answers), (index,)))


def _hotpot(rows: list[Any]) -> Collection:
    made = _Collector()
    for number, row in enumerate(rows, 1):
        place = f"question {number}"
        indices = {}
        for title, sentences in _pairs(row, "context", "title", "list of sentences", place):
            lines = [_encodable(text, f"{place}: context") for text in _typed(sentences, list, f"{place}: context")]
            indices[title] = made.document(_line(f"{title}. {' '.join(lines)}"), title)
        facts = _pairs(row, "supporting_facts", "title", "number of a sentence", place)
        titles = dict.fromkeys(title for title, _ in facts)
        gold = tuple(indices[title] for title in titles) if titles.keys() <= indices.keys() else ()
        near = tuple(index for index in indices.values() if index not in gold)
        answers = _distinct([_text(row, "answer", place)])
        made.question(Question(_text(row, "question", place), answers, gold, near))
    return made.collection


def _pairs(row: Any, key: str, first: str, second: str, place: str) -> list[tuple[str, Any]]:
    """The pairs in a list whose first member is a text."""
    found = _field(row, key, list, place)
    for pair in found:
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise ValueError(f"{place}: {key} must be pairs [{first}, {second}], got {shortened(pair)}")
    return [(_encodable(one, f"{place}: {key}"), other) for one, other in found]


def _field(holder: Any, key: str, kind: type, place: str) -> Any:
    """What an object has under a key; ValueError where it is no object, or that is missing or of another type."""
    if key not in _typed(holder, dict, place):
        raise ValueError(f"{place}: {key} must be given, got {', '.join(map(shortened, holder)) or 'no keys'}")
    return _typed(holder[key], kind, f"{place}: {key}")


def _typed(value: Any, kind: type, place: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{place} must be {_KINDS[kind]}, got {shortened(value)}")
    return value


def _text(holder: Any, key: str, place: str) -> str:
    """An object's text, in one line."""
    return _line(_encodable(_field(holder, key, str, place), f"{place}: {key}"))


def _encodable(text: Any, place: str) -> str:
    """The text; ValueError for another type, or half of a surrogate pair, which JSON may hold and UTF-8 may not."""
    if not is_unicode(_typed(text, str, place)):
        raise ValueError(f"{place} must be Unicode text, it has half of a surrogate pair")
    return str(text)


def _distinct(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(filter(None, texts)))


def _line(text: str) -> str:
    """The text in one line, each run of white space one space."""
    return " ".join(text.split())
