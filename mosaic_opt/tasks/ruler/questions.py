"""Documents and questions about them: from a file in SQuAD's or HotpotQA's form, or the shipped invented ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mosaic_opt.tasks.base import SPLITS
from mosaic_opt.tasks.essay import DATA

SHIPPED = "documents.json"


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

    Groups are SQuAD's articles and HotpotQA's titles. SQuAD's questions without an answer are left out; HotpotQA's
    whose supporting documents are not all in their context have no gold.
    Raises ValueError for other files.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
        if isinstance(content, dict):
            return _squad(content["data"])
        return _hotpot(content)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(
            f"path must be a JSON file in the form of SQuAD or HotpotQA, got {str(path)!r} "
            f"({type(error).__name__}: {error})"
        ) from error


def _squad(articles: Sequence[dict[str, Any]]) -> Collection:
    documents: dict[str, int] = {}
    groups: list[str] = []
    questions: list[Question] = []
    for article in articles:
        for paragraph in article["paragraphs"]:
            index = documents.setdefault(_line(paragraph["context"]), len(documents))
            if index == len(groups):
                groups.append(article["title"])
            questions += [
                Question(_line(asked["question"]), _distinct(answer["text"] for answer in asked["answers"]), (index,))
                for asked in paragraph["qas"]
                if asked["answers"]
            ]
    return Collection(tuple(documents), tuple(groups), tuple(questions))


def _hotpot(rows: Sequence[dict[str, Any]]) -> Collection:
    documents: dict[str, int] = {}
    groups: list[str] = []
    questions: list[Question] = []
    for row in rows:
        indices: dict[str, int] = {}
        for title, sentences in row["context"]:
            index = documents.setdefault(_line(f"{title}. {' '.join(sentences)}"), len(documents))
            if index == len(groups):
                groups.append(title)
            indices[title] = index
        titles = dict.fromkeys(title for title, _ in row["supporting_facts"])
        gold = tuple(indices[title] for title in titles) if titles.keys() <= indices.keys() else ()
        near = tuple(index for index in indices.values() if index not in gold)
        questions.append(Question(_line(row["question"]), _distinct([row["answer"]]), gold, near))
    return Collection(tuple(documents), tuple(groups), tuple(questions))


def _distinct(texts: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(line for text in texts if (line := _line(text))))


def _line(text: str) -> str:
    """The text in one line, each run of white space one space."""
    return " ".join(text.split())
