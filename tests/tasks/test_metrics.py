from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mosaic_opt.tasks import metrics
from mosaic_opt.tasks.metrics import METRICS

ROOT = Path(__file__).parents[2]
VECTORS = Path(__file__).parents[3] / "shared" / "data" / "longbench" / "metric_vectors.jsonl"
LIMITED = """
import json, sys
from mosaic_opt.tasks.longbench import score
rows = [json.loads(line) for line in open(sys.argv[1], encoding="utf-8")]
sys.setrecursionlimit(200)
print(json.dumps([score(row["task"], row["prediction"], row["answers"], row["all_classes"]) for row in rows]))
"""


def test_official_scores_are_reproduced_whatever_the_recursion_limit() -> None:
    if not VECTORS.is_file():
        pytest.skip(f"no official scores at {VECTORS}")
    rows = [json.loads(line) for line in VECTORS.read_text(encoding="utf-8").splitlines()]
    made = subprocess.run(
        [sys.executable, "-c", LIMITED, str(VECTORS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert made.stderr == ""
    scores = json.loads(made.stdout)
    assert len(scores) == len(rows) > 0
    for row, found in zip(rows, scores, strict=True):
        assert found == pytest.approx(row["score"], abs=1e-6), row["task"]


def test_importing_tasks_loads_none_of_the_libraries() -> None:
    program = "import sys, mosaic_opt.tasks; print({'jieba', 'rapidfuzz', 'datasets', 'pyarrow'} & set(sys.modules))"
    made = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("The cat, sat.", "a CAT sat", 1.0),
        ("cat cat dog", "cat", 0.5),  # precision 1/3, recall 1
        ("theatre", "the atre", 0.0),  # an article is a whole word
        ("the", "the", 0.0),  # nothing is left
        ("", "cat", 0.0),
        ("dog", "cat", 0.0),
    ],
)
def test_f1(prediction: str, answer: str, expected: float) -> None:
    assert metrics.f1(prediction, [answer]) == pytest.approx(expected)


def test_f1_zh_leaves_out_punctuation_and_white_space() -> None:
    assert metrics.f1_zh("北京，\n 大学。", ["北京大学"]) == pytest.approx(0.0)  # one token against two
    assert metrics.f1_zh("他来到北京。", ["他 来到 北京！"]) == 1.0
    assert metrics.f1_zh("", ["北京"]) == 0.0


TEXTS = st.text(alphabet="abcAB . \n", max_size=60)


@given(prediction=TEXTS, answer=TEXTS)
def test_rouge_l_equals_the_package(prediction: str, answer: str) -> None:
    rouge = pytest.importorskip("rouge", reason="the package rouge is no dependency")
    try:
        expected = rouge.Rouge().get_scores([prediction], [answer], avg=True)["rouge-l"]["f"]
    except ValueError:  # no sentence
        expected = 0.0
    assert metrics.rouge_l(prediction, [answer]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("a b c d", "a b c d", 1.0),
        ("w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5", 2 * 4 / 8 * 4 / 5 / (4 / 8 + 4 / 5)),  # union of two
        ("a a a", "a", 1.0),  # words count once
        ("A", "a", 0.0),
        ("...", "a", 0.0),
        ("", "", 0.0),
    ],
)
def test_rouge_l(prediction: str, answer: str, expected: float) -> None:
    assert metrics.rouge_l(prediction, [answer]) == pytest.approx(expected, abs=1e-7)


def test_rouge_l_of_very_long_sentences() -> None:
    words = [f"w{number}" for number in range(3000)]
    started = time.process_time()
    assert metrics.rouge_l(" ".join(words), [" ".join(reversed(words))]) == pytest.approx(1 / 3000, rel=1e-3)
    assert metrics.rouge_l(" ".join(words), [" ".join(words[::2])]) == pytest.approx(2 / 3, rel=1e-6)
    assert time.process_time() - started < 60


def test_rouge_l_zh_needs_no_spaces() -> None:
    assert metrics.rouge_l_zh("他来到北京大学", ["他来到北京大学"]) == pytest.approx(1.0, abs=1e-7)
    assert 0 < metrics.rouge_l_zh("他来到上海", ["他来到北京大学"]) < 1


CLASSES = ("Date", "Other number", "Number", "Reason")


@pytest.mark.parametrize(
    ("prediction", "answer", "classes", "expected"),
    [
        ("Type: Date", "Date", CLASSES, 1.0),
        ("Date or Reason", "Date", CLASSES, 0.5),
        ("Reason", "Date", CLASSES, 0.0),
        ("", "Date", CLASSES, 0.0),
        ("Other number", "Other number", ("number", "Other number"), 1.0),  # part of the answer: dropped
        ("a ab abc", "abc", ("a", "ab", "abc"), 0.5),  # as the scorer has it: the second in a row is passed over
        ("Date", "Date", (), 1.0),
    ],
)
def test_classification(prediction: str, answer: str, classes: tuple[str, ...], expected: float) -> None:
    assert metrics.classification(prediction, [answer], classes) == expected


@pytest.mark.parametrize(
    ("metric", "prediction", "answer", "expected"),
    [
        ("retrieval", "Paragraph 12", "Paragraph 12", 1.0),
        ("retrieval", "12 or 3", "Paragraph 12", 0.5),
        ("retrieval", "Paragraph 121", "Paragraph 12", 0.0),
        ("retrieval", "none", "Paragraph 12", 0.0),
        ("retrieval_zh", "段落7，不是段落8", "段落7", 0.5),
        ("count", "There are 5, yes 5 of 6", "5", 2 / 3),
        ("count", "", "5", 0.0),
    ],
)
def test_retrieval_and_count(metric: str, prediction: str, answer: str, expected: float) -> None:
    assert METRICS[metric](prediction, [answer], ()) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("\n\nreturn x", "return x", 1.0),
        ("# comment\n```python\nreturn x\nrest", "return x", 1.0),
        ("// only\n# comments", "return x", 0.0),
        ("", "return x", 0.0),
        ("abcd", "abxx", 0.5),
        ("  x", "x", 0.5),  # indentation counts
    ],
)
def test_code_similarity(prediction: str, answer: str, expected: float) -> None:
    assert metrics.code_similarity(prediction, [answer]) == expected


def test_code_line_is_complete_with_its_newline() -> None:
    assert not metrics.has_code_line("\n\n# comment\nreturn x")
    assert metrics.has_code_line("\n\n# comment\nreturn x\n")
    assert not metrics.has_code_line("\n\n")


@pytest.mark.parametrize(
    ("metric", "expected"), [("string_match_all", 0.5), ("string_match_part", 1.0), ("exact_match", 0.0)]
)
def test_matches(metric: str, expected: float) -> None:
    assert METRICS[metric]("It is ALPHA ", ["alpha", "beta"], ()) == expected
    assert METRICS[metric](" alpha\n", ["alpha"], ()) == 1.0


@pytest.mark.parametrize("metric", METRICS)
@given(
    prediction=st.text(max_size=40) | st.sampled_from(["Date 3 段落3", "return 3 # x", "."]),
    answers=st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=3),
)
def test_every_metric_is_from_0_to_1_and_best_over_the_answers(
    metric: str, prediction: str, answers: list[str]
) -> None:
    score = METRICS[metric](prediction, answers, ())
    assert 0.0 <= score <= 1.0
    alone = [METRICS[metric](prediction, [answer], ()) for answer in answers]
    assert score == (sum(alone) / len(alone) if metric == "string_match_all" else max(alone))
