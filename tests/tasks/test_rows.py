"""Tasks over rows: which rows share a document, equal rows, and what is left of prompts that are cut."""

from __future__ import annotations

import json
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic_opt.tasks import SPLITS, RowsFile
from mosaic_opt.tasks.rows import DOCUMENT_CHARACTERS, Row, beginnings, documents_of


def rows_file(tmp_path: Path, rows: list[dict[str, Any]], **settings: Any) -> RowsFile:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return RowsFile(**({"path": str(file), "tokens": 400, "metric": "f1"} | settings))


@pytest.mark.parametrize("words", [20, 60, 600])
def test_ready_prompts_about_one_document_are_in_one_split(tmp_path: Path, words: int) -> None:
    """Whatever the length of the document, and of the questions, which have other lengths each."""
    texts = [f"Text {letter} " + f"{letter} is a word. " * words for letter in "abcdefghijklmnopqrstuvwxyz"]
    questions = [f"\nWhat of {'this ' * number}?" for number in range(12)]
    task = rows_file(
        tmp_path, [{"prompt": text + question, "answers": ["x"]} for text in texts for question in questions]
    )
    places = [{row.context[5] for row in rows} for rows in task.splits.values()]
    assert all(places)
    assert sum(map(len, places)) == len(texts)
    assert sum(size or 0 for size in task.sizes().values()) == len(texts) * len(questions)


def test_names_and_contexts_tell_documents_where_there_are_any() -> None:
    rows = [
        Row(context="Same text", answers=("a",), document="one"),
        Row(context="Same text", answers=("a",), document="two"),
        Row(context="Same text, first.", question="Q", answers=("a",)),
        Row(context="Same text, second.", question="Q", answers=("a",)),
    ]
    assert documents_of(rows) == ["one", "two", "Same text, first.", "Same text, second."]


def test_long_prompts_share_a_document_by_so_many_characters() -> None:
    text = "x" * DOCUMENT_CHARACTERS
    one, other, third = f"{text}{'a' * 9000}", f"{text}{'b' * 5000}", f"{text[1:]}{'c' * 9000}"
    found = beginnings([one, other, third])
    assert found[one] == found[other] == text
    assert found[third] != text


def test_a_short_prompt_does_not_join_long_ones() -> None:
    found = beginnings(["Read this. A", f"Read this. {'b' * 90}", f"Read this. {'c' * 90}"])
    assert len(set(found.values())) == 3


def alike(one: str, other: str) -> bool:
    length = min(DOCUMENT_CHARACTERS, max(1, max(len(one), len(other)) // 2))
    return one[:length] == other[:length]


@given(st.lists(st.text("ab", min_size=1, max_size=9), max_size=14))
@settings(max_examples=300)
def test_beginnings_are_the_groups_of_what_begins_alike(prompts: list[str]) -> None:
    """Against every pair, joined step by step."""
    group = {prompt: prompt for prompt in prompts}
    for one, other in combinations(sorted(group), 2):
        if alike(one, other):
            old, new = group[other], group[one]
            group = {prompt: new if own == old else own for prompt, own in group.items()}
    found = beginnings(prompts)
    assert found == beginnings(prompts[::-1])
    for one, other in combinations(group, 2):
        assert (found[one] == found[other]) >= (group[one] == group[other])
    assert len(set(group.values())) >= len(set(found.values()))


SEED = "word " * 300


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("answers", ["one", "each"])
def test_prompts_that_are_equal_once_cut_are_refused(
    tmp_path: Path, byte_tokenizer: Any, overlap: bool, answers: str
) -> None:
    rows = [{"prompt": f"{SEED}{number:03}{SEED}", "answers": [f"{answers}{number}"[:4]]} for number in range(20)]
    task = rows_file(tmp_path, [*rows, {"prompt": "Other text", "answers": ["a"]}], tokens=300, allow_overlap=overlap)
    split, size = max(task.sizes().items(), key=lambda item: item[1] or 0)
    message = rf"tokens must be so many .* rows differ: .*, 20 of {size} prompts of {split} are equal .*; got 300"
    with pytest.raises(ValueError, match=message):
        task.examples(byte_tokenizer, split, size or 0)
    whole = rows_file(tmp_path, rows, tokens=5000, allow_overlap=overlap)
    assert len({example.id for example in whole.examples(byte_tokenizer, split, 20)}) == 20


def test_prompts_of_two_splits_that_are_equal_once_cut_are_refused(tmp_path: Path, byte_tokenizer: Any) -> None:
    rows = [{"context": f"{SEED}{n:03}{SEED}", "question": "Q", "answers": ["a"]} for n in range(40)]
    task = rows_file(tmp_path, rows, tokens=300)
    task.examples(byte_tokenizer, SPLITS[0], 1)
    with pytest.raises(ValueError, match=r"tokens must be so many .*, 1 of 1 prompts of selection .*; got 300"):
        task.examples(byte_tokenizer, SPLITS[1], 1)
    assert len(task.examples(byte_tokenizer, SPLITS[0], 1)) == 1  # the same split again
    free = rows_file(tmp_path, rows, tokens=300, allow_overlap=True)
    first, *others = (free.examples(byte_tokenizer, split, 1) for split in SPLITS)
    assert others == [first, first]


def test_equal_prompts_with_other_answers_are_examples_where_none_is_cut(tmp_path: Path, byte_tokenizer: Any) -> None:
    rows = [{"prompt": "The same text", "answers": [str(number)]} for number in range(5)]
    rows.append({"prompt": f"The same text {SEED}", "answers": ["a"]})
    task = rows_file(tmp_path, rows, tokens=300, allow_overlap=True)
    examples = task.examples(byte_tokenizer, "test", 6)
    assert Counter(example.truncated for example in examples) == {False: 5, True: 1}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("more", [{}, {"document": "d"}, {"length": 7}, {"task": "t"}])
def test_equal_rows_count_once_and_the_error_says_how_many(
    tmp_path: Path, byte_tokenizer: Any, overlap: bool, more: dict[str, Any]
) -> None:
    """Equal in what makes an example: the rows may differ in what else their data says."""
    row = {"prompt": "Some text", "answers": ["a"]}
    task = rows_file(tmp_path, [row, row, {**row, **more}], allow_overlap=overlap)
    assert sum(size or 0 for size in task.sizes().values()) == (3 if overlap else 1)
    with pytest.raises(ValueError, match="equal rows count once, which leaves out 2; "):
        task.examples(byte_tokenizer, "test", 9)
    other = rows_file(tmp_path, [row], allow_overlap=overlap)
    with pytest.raises(ValueError) as caught:
        other.examples(byte_tokenizer, "test", 9)
    assert "equal rows" not in str(caught.value)


def test_tokens_that_leave_nothing_are_named(tmp_path: Path, byte_tokenizer: Any) -> None:
    rows = [{"context": "Some text.", "question": "What?", "answers": ["a"]}]
    for tokens, protocol, message in (
        (1, "question-aware", r"tokens must be at least 2 for rows, got 1"),
        (
            5,
            "question-agnostic",
            r"tokens must be at least 7 for rows \(a question takes 5, and its context .*, got 5",
        ),
    ):
        task = rows_file(tmp_path, rows, tokens=tokens, protocol=protocol, allow_overlap=True)
        with pytest.raises(ValueError, match=message):
            task.examples(byte_tokenizer, "test", 1)
    task = rows_file(tmp_path, rows, tokens=7, protocol="question-agnostic", allow_overlap=True)
    assert task.examples(byte_tokenizer, "test", 1)[0].prompt == "S.What?"


def test_a_row_without_a_question_is_named(tmp_path: Path, byte_tokenizer: Any) -> None:
    rows = [{"context": f"Text {n}", "question": "" if n == 4 else "Q?", "answers": ["a"]} for n in range(9)]
    task = rows_file(tmp_path, rows, protocol="question-agnostic", allow_overlap=True)
    with pytest.raises(
        ValueError, match=r"protocol of rows must be question-aware: .* in .*rows\.jsonl, line 5; got q"
    ):
        task.examples(byte_tokenizer, "test", 9)


@pytest.mark.parametrize("setting", ["chat", "allow_overlap"])
def test_switches_are_true_or_false(tmp_path: Path, setting: str) -> None:
    with pytest.raises(ValueError, match=f"{setting} must be true or false, got 1"):
        rows_file(tmp_path, [], **{setting: 1})
