"""All 13 tasks of RULER: what holds for each of them; the metric."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from mosaic_opt import tasks
from mosaic_opt.tasks import SPLITS, Example, Needle, ruler
from mosaic_opt.tasks.base import PROTOCOLS, build_example, encode, stable_generator
from mosaic_opt.tasks.ruler.prompts import RulerTask, fullest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]
LENGTHS = (512, 1024, 4096)
# One of each kind: the other needle tasks differ from these in numbers alone.
KINDS = [name for name in ruler.METRICS if name not in ("niah_single_2", "niah_single_3", "niah_multiquery")]
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"


def ruler_task(name: str, **arguments: Any) -> RulerTask:
    """The task as its file in conf/task makes it."""
    content = yaml.safe_load((ROOT / "conf" / "task" / f"{name}.yaml").read_text(encoding="utf-8"))
    target = getattr(tasks, content.pop("_target_").removeprefix("mosaic_opt.tasks."))
    made = target(**(content | {"tokens": 650, "seed": 0} | arguments))
    assert isinstance(made, RulerTask)
    return made


def possible(name: str, tokens: int) -> bool:
    """Whether a task's shortest prompt has so few tokens (cwe: ten words six times, and a solved list)."""
    return name != "cwe" or tokens > 900


def check(tokenizer: PreTrainedTokenizerFast, task: RulerTask, example: Example) -> None:
    """The length, the ids and where the answers stand."""
    length = len(example.tokens) + len(example.question)
    assert length <= task.tokens
    assert length >= (1.0 if isinstance(task, Needle) else 0.95) * task.tokens
    assert example.new_tokens == task.new_tokens
    context, question = example.prompt.rsplit("\n\n", 1)
    if task.protocol == PROTOCOLS[0]:
        assert list(example.tokens) == encode(tokenizer, example.prompt)
        assert example.question == ()
    else:
        assert decode(tokenizer, example.tokens) == f"{context}\n\n"
        assert decode(tokenizer, example.question) == question
    if not isinstance(task, tasks.DocumentQuestions) or task.path is None:
        for answer, reference in zip(example.answer_tokens, example.references, strict=True):
            full = decode(tokenizer, example.tokens + example.question + answer)
            assert full == f"{example.prompt} {reference}"
    for reference in example.references:
        assert reference.lower() in context.lower()
        assert reference.lower() not in question.lower()
    assert task.score(" " + ", ".join(example.references), example) == 1.0
    assert task.score("", example) == 0.0
    assert task.settled(" " + ", ".join(example.references), example, [9.0] * len(example.references))
    assert not task.settled("", example, [99.0] * len(example.references))


def decode(tokenizer: PreTrainedTokenizerFast, tokens: tuple[int, ...]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def test_there_is_a_configuration_for_each_task() -> None:
    assert len(ruler.METRICS) == 13
    for name, metric in ruler.METRICS.items():
        task = ruler_task(name)
        assert (task.name, task.metric, task.tokens, task.seed) == (name, metric, 650, 0)
        assert task.protocol == "question-aware"
    limits = {name: ruler_task(name).new_tokens for name in ("vt", "cwe", "fwe", "qa_1", "qa_2")}
    assert limits == {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}


@pytest.mark.parametrize("name", ruler.METRICS)
def test_examples(tokenizer: PreTrainedTokenizerFast, tokenizer_with_bos: PreTrainedTokenizerFast, name: str) -> None:
    """A few examples at the short lengths; `test_many_examples` has them all."""
    for each, tokens, protocol in zip((tokenizer, tokenizer_with_bos), LENGTHS, PROTOCOLS, strict=False):
        task = ruler_task(name, tokens=tokens if possible(name, tokens) else 1024, protocol=protocol)
        for example in task.examples(each, "test", 5):
            check(each, task, example)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("name", ruler.METRICS)
def test_many_examples(
    tokenizer: PreTrainedTokenizerFast, smollm2_tokenizer: PreTrainedTokenizerFast, name: str, tokens: int
) -> None:
    if not possible(name, tokens):
        return
    for each, protocol in zip((smollm2_tokenizer, tokenizer), PROTOCOLS, strict=True):
        task = ruler_task(name, tokens=tokens, protocol=protocol)
        for example in task.examples(each, "selection", {"qa_1": 40, "qa_2": 20}.get(name, 50)):
            check(each, task, example)


@pytest.mark.parametrize("name", KINDS)
def test_too_few_tokens_are_refused_with_the_minimum(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    with pytest.raises(ValueError, match=r"tokens must be at least \d+ .*, got 20") as caught:
        ruler_task(name, tokens=20).examples(tokenizer, "test", 3)
    found = re.search(r"at least (\d+)", str(caught.value))
    assert found is not None
    minimum = int(found.group(1))
    with pytest.raises(ValueError, match=f"tokens must be at least {minimum} .*, got {minimum - 1}"):
        ruler_task(name, tokens=minimum - 1).examples(tokenizer, "test", 3)
    for tokens in (minimum, minimum + 5):
        for example in ruler_task(name, tokens=tokens).examples(tokenizer, "test", 3):
            assert 0.95 * tokens <= len(example.tokens) <= tokens


@pytest.mark.parametrize("name", KINDS)
def test_splits_and_seeds(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    """Splits share no answer and no piece of the haystack; more examples begin with fewer; seeds differ."""
    answers: dict[str, set[str]] = {}
    pieces: dict[str, set[str]] = {}
    task = ruler_task(name, tokens=850)
    for split in SPLITS:
        examples = task.examples(tokenizer, split, 8)
        answers[split] = {answer for example in examples for answer in example.references}
        pieces[split] = set.union(*(_pieces(name, example.prompt) for example in examples))
        assert len({example.id for example in examples}) == 8
    for kind in (answers, pieces):
        assert all(kind.values())
        assert len(set.union(*kind.values())) == sum(map(len, kind.values()))
    other = ruler_task(name, tokens=850, seed=1).examples(tokenizer, SPLITS[-1], 4)
    assert not {example.prompt for example in other} & {example.prompt for example in examples}
    assert not _pieces(name, other[0].prompt) & set.union(*(pieces[split] for split in SPLITS[:-1]))
    assert task.examples(tokenizer, SPLITS[-1], 4) == examples[:4]


def _pieces(name: str, prompt: str) -> set[str]:
    """Words of a list or code, names and values, otherwise whole sentences of the haystack."""
    body = [part for part in prompt.split("\n\n")[1:-1] if not part.startswith("Question:")]
    if name == "cwe":
        return {word for part in body for word in re.findall(r"[a-z]+", part)}
    if name == "fwe":
        return set(body[0].split()) - {"..."}
    if name == "vt":
        statements = {word for part in body for word in re.findall(r"[A-Z]{5}|\d{5}", part)}
        return statements | {line for part in body for line in re.findall(r"[A-Z][a-z ]{12,}\.", part)}
    return {line for part in body for line in re.split(r"(?<=[.])\s+", part) if len(line) > 30}


def test_same_examples_in_another_process(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    program = (
        "import hashlib, json, sys\n"
        "from transformers import PreTrainedTokenizerFast\n"
        "from mosaic_opt.tasks import ruler\n"
        "from tests.tasks.test_ruler import ruler_task\n"
        "tokenizer = PreTrainedTokenizerFast.from_pretrained(sys.argv[1])\n"
        "tasks = [ruler_task(name, tokens=1024) for name in ruler.METRICS]\n"
        "examples = [e for task in tasks for e in task.examples(tokenizer, 'selection', 2)]\n"
        "print(json.dumps([[e.id, hashlib.sha256(e.prompt.encode()).hexdigest()] for e in examples]))\n"
    )
    environment = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    here = [
        [example.id, hashlib.sha256(example.prompt.encode()).hexdigest()]
        for name in ruler.METRICS
        for example in ruler_task(name, tokens=1024).examples(tokenizer, "selection", 2)
    ]
    assert json.loads(done.stdout) == here


@pytest.mark.parametrize("most", [1, 5, 40, 1000])
@pytest.mark.parametrize("limit", [10, 11, 57, 300, 4000])
def test_the_fullest_prompt_is_found_for_any_growth(most: int, limit: int) -> None:
    for growth in (lambda n: 10 + n, lambda n: 10 + 7 * n, lambda n: 10 + n * n // 9, lambda n: 10 + n // 5):
        found = fullest(growth, 0, most, growth(0), limit)
        assert growth(found) <= limit
        assert found == most or growth(found + 1) > limit


@pytest.mark.parametrize(
    ("text", "reach", "expected"),
    [
        ("in Paris", [9.0, 9.0], True),  # one is enough
        ("in Rome", [9.0, 9.0], False),
        ("in Rome", [5.0, 4.0], True),  # neither can be reached
        ("in Rome", [6.0, 4.0], False),
        ("to Lon", [3.0, 0.0], False),
    ],
)
def test_one_reference_settles_the_partial_match(text: str, reach: list[float], expected: bool) -> None:
    assert ruler.settled(text, ["London", "paris"], reach, metric=ruler.METRICS["qa_1"]) is expected


@pytest.mark.parametrize(
    ("task", "prediction", "references", "expected"),
    [
        ("niah_single_1", " 1234567.", ["1234567"], 1.0),
        ("niah_single_1", " 123456", ["1234567"], 0.0),
        ("niah_single_1", "", ["1234567"], 0.0),
        ("niah_single_1", "The answer IS Amber", ["amber"], 1.0),
        ("niah_single_1", "123\x004567", ["1234567"], 0.0),
        ("vt", "one\ttwo", ["one\ntwo"], 1.0),
        ("niah_multivalue", "11 and 22", ["11", "22", "33", "44"], 0.5),
        ("niah_multiquery", "nothing", ["11", "22"], 0.0),
        ("cwe", "a b", ["A", "B", "C"], 2 / 3),
        ("qa_1", "in Paris", ["London", "paris"], 1.0),
        ("qa_2", "in Rome", ["London", "Paris"], 0.0),
    ],
)
def test_score(task: str, prediction: str, references: list[str], expected: float) -> None:
    assert ruler.score(task, prediction, references) == pytest.approx(expected)


def test_bad_scores() -> None:
    with pytest.raises(ValueError, match=r"task must be one of .*, got 'niah'"):
        ruler.score("niah", "text", ["text"])
    for references in ([], [""]):
        with pytest.raises(ValueError, match="references must be non-empty texts"):
            ruler.score("niah_single_1", "text", references)


@pytest.mark.parametrize(
    ("text", "reach", "expected"),
    [
        ("it is 1234567.", 0, True),  # found
        ("it is 1234", 3, False),  # can still be completed
        ("it is 1234", 2, True),
        ("it is 9", 7, False),  # can still begin anew
        ("it is 9", 6, True),
        ("it is 1", 6, False),
        ("", float("inf"), False),
    ],
)
def test_a_score_is_settled_when_found_or_out_of_reach(text: str, reach: float, expected: bool) -> None:
    assert ruler.settled(text, ["1234567"], [reach]) is expected
    assert not ruler.settled(text, ["1234567", "x"], [reach, float("inf")])


def test_answer_that_would_change_the_prompts_tokens_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="tokenizer must keep the prompt's tokens"):
        build_example(tokenizer, "The code is", ["1234567"], new_tokens=9, tokens=[0, 1, 2])
    for references in ([], [""], [" 12"]):
        with pytest.raises(ValueError, match="references must be non-empty texts without outer spaces"):
            build_example(tokenizer, "The code is", references, new_tokens=9)


def test_stable_generator_depends_on_all_parts() -> None:
    parts: list[tuple[int, str, int]] = [(0, "test", 1), (0, "test", 2), (1, "test", 1)]
    draws = {int(stable_generator(*each).integers(2**62)) for each in parts}
    assert len(draws) == 3
    assert int(stable_generator(0, "test", 1).integers(2**62)) in draws


def test_import_stays_light() -> None:
    program = "import sys, mosaic_opt.tasks; print({'torch', 'transformers'} & set(sys.modules))"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
