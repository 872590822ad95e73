from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mosaic_opt.tasks import SPLITS, PassageCounting, PassageRetrieval, passages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from mosaic_opt.tasks import Example

ROOT = Path(__file__).parents[2]
KINDS = [(abstract, numbers) for abstract in passages.QUESTIONS for numbers in passages.NUMBERED]
TASKS = (PassageRetrieval, PassageCounting)


def decode(tokenizer: PreTrainedTokenizerFast, tokens: tuple[int, ...]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def numbered(example: Example) -> dict[int, str]:
    """The prompt's paragraphs by number."""
    found: dict[int, str] = {}
    for piece in example.prompt.split("\n\n")[1:-1]:
        match = re.fullmatch(r"Paragraph (\d+): (.*)|(.*) \[Paragraph (\d{3})\]", piece)
        assert match is not None
        number = int(match[1] or match[4])
        assert number not in found
        assert match[4] or number == len(found) + 1
        found[number] = match[2] or match[3]
    return found


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("tokens", "protocol"), [(400, "question-aware"), (1500, "question-agnostic")])
def test_prompts_fill_the_length(tokenizer: PreTrainedTokenizerFast, task: Any, tokens: int, protocol: str) -> None:
    lengths = [
        len(e.tokens) + len(e.question)
        for split in SPLITS
        for e in task(tokens=tokens, protocol=protocol).examples(tokenizer, split, 12)
    ]
    assert max(lengths) <= tokens
    assert min(lengths) >= tokens - 50
    assert sum(lengths) / len(lengths) >= 0.94 * tokens


@pytest.mark.parametrize("task", TASKS)
def test_all_paragraphs_at_most(tokenizer: PreTrainedTokenizerFast, task: Any) -> None:
    (example,) = task(tokens=60_000).examples(tokenizer, "test", 1)
    paragraphs = numbered(example)
    assert set(paragraphs.values()) == set(passages._paragraphs("test"))


@pytest.mark.parametrize(("abstract", "numbers"), KINDS)
def test_the_answer_is_the_only_paragraph_described(
    tokenizer: PreTrainedTokenizerFast, abstract: str, numbers: str
) -> None:
    task = PassageRetrieval(abstract=abstract, numbers=numbers)
    answers = set()
    for example in task.examples(tokenizer, "calibration", 25):
        question, last = example.prompt.split("\n\n")[-1].split("\n")
        assert question == passages.QUESTIONS[abstract]
        description = last.removesuffix(" This was" if numbers == "before" else " [Paragraph")
        parts = description.removesuffix(".").split(", ") if abstract == "words" else [description]
        fitting = [n for n, text in numbered(example).items() if all(part in text for part in parts)]
        answer = f"Paragraph {fitting[0]}" if numbers == "before" else str(fitting[0])
        assert example.references == (answer,)
        assert len(fitting) == 1
        if abstract == "ending":
            assert numbered(example)[fitting[0]].endswith(description)
        if abstract == "words":
            assert len(parts) == passages.WORDS
        answers.add(list(numbered(example)).index(fitting[0]))
    assert answers >= {0, 1, 2, 3, 4}


def test_counting_counts_different_paragraphs(tokenizer: PreTrainedTokenizerFast) -> None:
    answers, totals = set(), set()
    for example in PassageCounting().examples(tokenizer, "selection", 60):
        paragraphs = list(numbered(example).values())
        assert example.references == (str(len(set(paragraphs))),)
        answers.add(int(example.references[0]))
        totals.add(len(paragraphs))
    assert len(answers) > 5
    assert min(answers) < 0.6 * max(totals)


@pytest.mark.parametrize("task", TASKS)
def test_splits_share_no_paragraph(tokenizer: PreTrainedTokenizerFast, task: Any) -> None:
    parts = [set(passages._paragraphs(split)) for split in SPLITS]
    assert len(set.union(*parts)) == sum(map(len, parts)) > 600
    for split, part in zip(SPLITS, parts, strict=True):
        for example in task().examples(tokenizer, split, 10):
            assert set(numbered(example).values()) <= part


@pytest.mark.parametrize("task", TASKS)
def test_question_agnostic_feeds_the_question_after_the_paragraphs(
    tokenizer: PreTrainedTokenizerFast, tokenizer_with_bos: PreTrainedTokenizerFast, task: Any
) -> None:
    for each in (tokenizer, tokenizer_with_bos):
        pairs = zip(
            task(protocol="question-agnostic").examples(each, "test", 10),
            task().examples(each, "test", 10),
            strict=True,
        )
        for apart, whole in pairs:
            assert apart.tokens + apart.question == whole.tokens
            assert whole.question == ()
            assert decode(each, apart.question).strip() == whole.prompt.split("\n\n")[-1]
            assert apart.id != whole.id
            ((answer,), (reference,)) = (whole.answer_tokens, whole.references)
            assert list(whole.tokens + answer) == each(f"{whole.prompt} {reference}")["input_ids"]


@pytest.mark.parametrize("task", TASKS)
def test_more_examples_begin_with_fewer_and_seeds_differ(tokenizer: PreTrainedTokenizerFast, task: Any) -> None:
    examples = task().examples(tokenizer, "test", 20)
    assert examples[:7] == task().examples(tokenizer, "test", 7)
    others = task(seed=1).examples(tokenizer, "test", 20)
    assert len({e.id for e in examples + others}) == 40
    assert {e.task for e in examples} == {task().name}


def test_same_examples_in_another_process(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    program = (
        "import json, sys\n"
        "from transformers import PreTrainedTokenizerFast\n"
        "from mosaic_opt.tasks import PassageCounting, PassageRetrieval\n"
        "tokenizer = PreTrainedTokenizerFast.from_pretrained(sys.argv[1])\n"
        "tasks = [PassageCounting(), PassageRetrieval(abstract='words')]\n"
        "print(json.dumps([[e.id, e.prompt] for t in tasks for e in t.examples(tokenizer, 'selection', 5)]))\n"
    )
    tasks = [PassageCounting(), PassageRetrieval(abstract="words")]
    expected = [[e.id, e.prompt] for task in tasks for e in task.examples(tokenizer, "selection", 5)]
    environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == expected


def test_only_the_first_line_is_scored(tokenizer: PreTrainedTokenizerFast) -> None:
    task = PassageRetrieval()
    (example,) = task.examples(tokenizer, "test", 1)
    right = example.references[0]
    assert task.score(f" {right}.", example) == 1.0
    assert task.score(f"\n{right}.\n999", example) == 1.0
    assert task.score(f"{right} or 999", example) == 0.5
    assert task.score("", example) == task.score("999", example) == 0.0
    assert task.settled(f"\n{right}.\n", example, [9.0])
    assert not task.settled(f"\n\n {right}", example, [0.0])
    counting = PassageCounting()
    (example,) = counting.examples(tokenizer, "test", 1)
    assert counting.score(f" {example.references[0]}.\n\n8 9", example) == 1.0
    assert counting.score(" 99", example) == 0.0


def test_bad_arguments(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="abstract must be one of ending, sentence, words, got 'gist'"):
        PassageRetrieval(abstract="gist")
    with pytest.raises(ValueError, match="numbers must be one of before, after, got 'none'"):
        PassageRetrieval(numbers="none")
    with pytest.raises(ValueError, match=r"abstract must be one of ending, sentence, words, got \['ending'\]"):
        PassageRetrieval(abstract=["ending"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="protocol must be one of"):
        PassageCounting(protocol="none")
    for task in (PassageRetrieval, PassageCounting):
        largest = len(passages._paragraphs("test"))
        with pytest.raises(ValueError, match=f"test must be from 1 to {largest} examples of {task().name}, got"):
            task().examples(tokenizer, "test", largest + 1)
        with pytest.raises(ValueError, match="split must be one of"):
            task().examples(tokenizer, "train", 1)
        with pytest.raises(ValueError, match=rf"tokens must be at least \d+ for {task().name}, got 100"):
            task(tokens=100).examples(tokenizer, "test", 1)
