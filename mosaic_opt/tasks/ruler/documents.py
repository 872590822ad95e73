"""RULER's qa_1 and qa_2 (questions about documents among others), from a generator and wording of our own.

Departures from the official generator: documents, and so their questions, belong to one split each; no distractor
contains an answer; questions whose answers stand in none of their documents (yes and no) are left out; where a
split's own documents run out, paragraphs of the shipped prose follow; the last distractor is cut to fit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from mosaic_opt.tasks.base import PROTOCOLS, SPLITS, Example, require_one_of, require_text, stable_generator
from mosaic_opt.tasks.essay import paragraphs
from mosaic_opt.tasks.ruler.prompts import FilledTask, Prompt, Quiz
from mosaic_opt.tasks.ruler.questions import Collection, Question, read, shipped
from mosaic_opt.tasks.ruler.supply import placed

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

NAMES = ("qa_1", "qa_2")
INSTRUCTION = "After the documents below comes a question that they answer. Reply with a few of their words."
DOCUMENT = "Document {number}: {text}"
QUESTION = "Question: {question}"
ANSWER_PREFIX = "Answer:"
LEAST_WORDS = 20  # of distractors


class DocumentQuestions(FilledTask):
    """RULER's qa_1 (one document answers) and qa_2 (two documents together answer).

    name: qa_1 or qa_2.
    path: a JSON file in the form of SQuAD or HotpotQA (either for either name); None takes the shipped invented
        documents: 40 (qa_1) or 20 (qa_2) questions a split.
    tokens: most tokens of a prompt; it has at least 95 % of them.
    seed: another seed gives other examples from the same splits.
    """

    category = "question answering"

    def __init__(
        self,
        *,
        name: str,
        path: str | None = None,
        tokens: int = 650,
        seed: int = 0,
        new_tokens: int = 32,
        protocol: str = PROTOCOLS[0],
    ) -> None:
        require_one_of("name", name, NAMES)
        require_text("path", path, optional=True)
        if path is not None and not Path(path).is_file():
            raise ValueError(f"path must be a file or null, got {path!r}")
        super().__init__(name=name, tokens=tokens, seed=seed, new_tokens=new_tokens, protocol=protocol)
        self.path = path
        self.exact = path is None  # texts of unknown files need not come back from the tokenizer unchanged

    @cached_property
    def collection(self) -> Collection:
        """All documents and questions; ValueError for a file of another form, or without a question to ask."""
        if self.path is None:
            return shipped(self.name)
        collection = read(Path(self.path))
        collection.require_usable(self.path)
        return collection

    @cached_property
    def documents(self) -> dict[str, list[int]]:
        """Indices of each split's documents."""
        splits = self.collection.split_of_documents()
        return {split: [i for i, own in enumerate(splits) if own == split] for split in SPLITS}

    def questions(self, split: str) -> list[Question]:
        """The split's questions: those whose documents are all in it and contain an answer."""
        own = set(self.documents[split])
        return [
            question
            for question in self.collection.questions
            if own.issuperset(question.gold) and not self.collection.unusable(question)
        ]

    def examples(self, tokenizer: PreTrainedTokenizerBase, split: str, count: int) -> list[Example]:
        """See FilledTask; ValueError also for a split that none of the file's questions is in."""
        require_one_of("split", split, SPLITS)
        if not self.largest(split):
            raise ValueError(
                f"path must be a file with questions for {split}: {self.path} has documents of "
                f"{len(set(self.collection.groups))} titles, which {', '.join(SPLITS)} take in turn, and a question "
                "belongs to a split that has all its documents"
            )
        return super().examples(tokenizer, split, count)

    def largest(self, split: str) -> int:
        return len(self.questions(split))

    def quizzes(self, split: str, count: int) -> list[Quiz]:
        questions = self.questions(split)
        order = stable_generator(self.seed, self.name, split, "questions").permutation(len(questions))[:count]
        return [
            self._quiz(questions[drawn], split, stable_generator(self.seed, self.name, split, index))
            for index, drawn in enumerate(order)
        ]

    def _quiz(self, question: Question, split: str, generator: np.random.Generator) -> Quiz:
        documents = self.collection.documents
        said = _mentions(question.answers)
        distractors, words = [], 0
        for text in self._others(question, split, generator):
            if words >= self.tokens:  # a word has at least one token
                break
            if text and not said.search(text):
                distractors.append(text)
                words += len(text.split())
        return _Documents(question, [documents[i] for i in question.gold], distractors, generator)

    def _others(self, question: Question, split: str, generator: np.random.Generator) -> Iterator[str]:
        """Documents that the question does not ask about: those that go with it, the split's, then its prose."""
        documents, own, prose = self.collection.documents, self.documents[split], paragraphs(split)
        near = sorted(set(question.near).intersection(own))
        shuffled = [own[i] for i in generator.permutation(len(own))]
        order = dict.fromkeys([*(near[i] for i in generator.permutation(len(near))), *shuffled])
        yield from (documents[i] for i in order if i not in question.gold)
        yield from (prose[i] for i in generator.permutation(len(prose)))


def _mentions(answers: Sequence[str]) -> re.Pattern[str]:
    """Finds any of the answers as whole words, whatever the case."""
    return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, answers))})(?!\w)", re.IGNORECASE)


class _Documents(Quiz):
    """A question with its documents, and distractors between which they stand. Unit: a distractor's word."""

    def __init__(
        self, question: Question, gold: Sequence[str], distractors: Sequence[str], generator: np.random.Generator
    ) -> None:
        self.question = question.text
        self.references = question.answers
        self.gold = gold
        self.distractors = [text.split() for text in distractors]
        self.most = sum(map(len, self.distractors))
        self.least = min(LEAST_WORDS, self.most)
        self.depths = generator.random(len(gold)).tolist()

    def prompt(self, units: int) -> Prompt:
        texts = placed(self._cut(units), self.gold, self.depths)
        documents = "\n\n".join(DOCUMENT.format(number=i, text=text) for i, text in enumerate(texts, start=1))
        question = f"{QUESTION.format(question=self.question)}\n{ANSWER_PREFIX}"
        return Prompt(f"{INSTRUCTION}\n\n{documents}\n\n", question)

    def _cut(self, words: int) -> list[str]:
        """The distractors' first so many words, as documents."""
        starts = [0, *accumulate(map(len, self.distractors))]
        kept = [row[: words - start] for row, start in zip(self.distractors, starts, strict=False) if start < words]
        return [" ".join(row) for row in kept]
