from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from mosaic_opt.allocation import uniform
from mosaic_opt.evaluator import Evaluator
from mosaic_opt.eviction import SnapKV
from mosaic_opt.tasks import LongBench
from mosaic_opt.tasks.base import encode
from mosaic_opt.tasks.longbench import BUCKETS, DATASETS, score
from mosaic_opt.tasks.metrics import METRICS

CONF = Path(__file__).parents[2] / "conf" / "task"
ROWS = Path(__file__).parents[3] / "shared" / "data" / "longbench" / "rows.jsonl"


def real_rows() -> list[dict[str, Any]]:
    if not ROWS.is_file():
        pytest.skip(f"no LongBench rows at {ROWS}")
    return [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]


def folder(tmp_path: Path, name: str, rows: list[dict[str, Any]], suffix: str = "") -> str:
    """A folder as LongBench's with one data set."""
    (tmp_path / "config").mkdir()
    (tmp_path / "data").mkdir()
    template = "Read this.\n{context}\n\nNow answer.\n{input}\nAnswer:"
    (tmp_path / "config" / "dataset2prompt.json").write_text(json.dumps({name: template}))
    lines = "".join(f"{json.dumps({'dataset': f'{name}{suffix}', **row})}\n" for row in rows)
    (tmp_path / "data" / f"{name}{suffix}.jsonl").write_text(lines)
    return str(tmp_path)


def rows_of(count: int, **more: Any) -> list[dict[str, Any]]:
    return [
        {"context": f"Text {i} " * 40, "input": f"Q{i}?", "answers": ["Ada"], "length": 3000 * i, **more}
        for i in range(count)
    ]


def test_table_is_complete() -> None:
    assert len(DATASETS) == 21
    assert Counter(rules.category for rules in DATASETS.values()) == {
        "single-document QA": 4, "multi-document QA": 4, "summarisation": 4, "few-shot": 4, "synthetic": 3, "code": 2,
    }  # fmt: skip
    assert {rules.metric for rules in DATASETS.values()} <= set(METRICS)
    assert sum(rules.extended for rules in DATASETS.values()) == 13
    unchatted = {name for name, rules in DATASETS.items() if not rules.chat}
    assert unchatted == {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
    assert {name for name, rules in DATASETS.items() if rules.first_line} == {"trec", "triviaqa", "samsum", "lsht"}


@pytest.mark.parametrize("name", DATASETS)
def test_every_data_set_has_a_configuration(name: str) -> None:
    arguments = yaml.safe_load((CONF / f"{name.replace('-', '_')}.yaml").read_text())
    assert arguments.pop("_target_") == "mosaic_opt.tasks.LongBench"
    task = LongBench(**{**arguments, "tokens": 7950})
    rules = DATASETS[name]
    assert (task.name, task.metric, task.new_tokens, task.chat) == (name, rules.metric, rules.new_tokens, rules.chat)


@pytest.mark.parametrize(
    ("task", "prediction", "answers", "classes", "expected"),
    [
        ("triviaqa", "\n\nAda\nmore words", ["Ada"], None, 1.0),  # the first line alone
        ("hotpotqa", "Ada\nmore words", ["Ada"], None, 0.5),  # all of it
        ("hotpotqa", "Ada", ["Bo", "Ada"], None, 1.0),  # best over the answers
        ("samsum", "Ada left.\nDialogue", ["Ada left."], None, 1.0),
        ("trec", "Date\nReason", ["Date"], ["Date", "Reason"], 1.0),
        ("trec", "Date", ["Date"], None, 1.0),
        ("passage_count", "5", ["5"], None, 1.0),
        ("lcc", "x = 1\ny = 2", ["x = 1"], None, 1.0),
    ],
)
def test_score(task: str, prediction: str, answers: list[str], classes: list[str] | None, expected: float) -> None:
    assert score(task, prediction, answers, classes) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("task", DATASETS)
def test_score_of_empty_and_endless_predictions(task: str) -> None:
    assert score(task, "", ["Paragraph 1"]) == 0.0
    assert score(task, "\n\n", ["Paragraph 1"]) == 0.0
    assert 0.0 <= score(task, "word " * 3000, ["other word " * 500]) <= 1.0


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"name of a LongBench task must be one of narrativeqa, .*, got 'nqa'"):
        score("nqa", "", ["a"])
    with pytest.raises(ValueError, match="answers must be a list of at least one text"):
        score("qasper", "", [])
    with pytest.raises(ValueError, match="answers must be a list of at least one text, got 'a'"):
        score("qasper", "", "a")
    with pytest.raises(ValueError, match="name of a LongBench task"):
        LongBench(name="nqa", path="x", tokens=100)
    with pytest.raises(ValueError, match=r"bucket of qasper must be null or one of 0-4k, 4-8k, 8k\+, all; got '4k'"):
        LongBench(name="qasper", path="x", tokens=100, bucket="4k")
    with pytest.raises(ValueError, match=r"bucket of musique must be null, for LongBench-E lacks it,; got 'all'"):
        LongBench(name="musique", path="x", tokens=100, bucket="all")
    for wrong, message in (
        ({"path": None}, "path must be a text, not blank, got None"),
        ({"path": 5}, "path must be a text, not blank, got 5"),
        ({"name": ["qasper"]}, "name of a LongBench task must be one of"),
        ({"bucket": ["all"]}, "bucket of qasper must be null or one of"),
        ({"chat": "yes"}, "chat must be true or false, got 'yes'"),
        ({"new_tokens": 0}, "new_tokens must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            LongBench(**({"name": "qasper", "path": "x", "tokens": 100} | wrong))


@pytest.mark.parametrize(("bucket", "lengths"), [("0-4k", [0, 3000]), ("4-8k", [6000]), ("8k+", [9000]), ("all", 4)])
def test_buckets_of_the_extended_version(tmp_path: Path, bucket: str, lengths: Any) -> None:
    task = LongBench(name="qasper", path=folder(tmp_path, "qasper", rows_of(4), "_e"), tokens=500, bucket=bucket)
    found = [int(row.question.split("Q")[1].split("?")[0]) * 3000 for row in task.rows()]
    assert found == lengths or len(found) == lengths


def test_a_bucket_without_rows(tmp_path: Path) -> None:
    task = LongBench(name="qasper", path=folder(tmp_path, "qasper", rows_of(2), "_e"), tokens=500, bucket="8k+")
    with pytest.raises(ValueError, match=r"bucket must be one that rows of .* are in, got '8k\+'"):
        task.rows()


@pytest.mark.parametrize("bucket", BUCKETS)
def test_a_bucket_needs_the_length_of_every_row(tmp_path: Path, bucket: str) -> None:
    rows = rows_of(3)
    del rows[1]["length"]
    task = LongBench(name="qasper", path=folder(tmp_path, "qasper", rows, "_e"), tokens=500, bucket=bucket)
    with pytest.raises(ValueError, match=r"qasper_e\.jsonl, line 2: length must be given in every row"):
        task.rows()


def test_both_protocols_give_the_same_prompt(tmp_path: Path, byte_tokenizer: Any) -> None:
    path = folder(tmp_path, "qasper", rows_of(1))
    made = {}
    for protocol in ("question-aware", "question-agnostic"):
        task = LongBench(name="qasper", path=path, tokens=5000, protocol=protocol, allow_overlap=True, chat=False)
        (made[protocol],) = task.examples(byte_tokenizer, "test", 1)
    aware, agnostic = made.values()
    assert aware.question == ()
    assert aware.tokens == agnostic.tokens + agnostic.question
    assert byte_tokenizer.decode(list(agnostic.question)) == "\n\nNow answer.\nQ0?\nAnswer:"
    assert aware.prompt == agnostic.prompt
    assert aware.new_tokens == 128


def test_only_samsum_stops_at_a_newline(smollm2_tokenizer: Any, byte_tokenizer: Any) -> None:
    for tokenizer in (smollm2_tokenizer, byte_tokenizer):
        for name in DATASETS:
            stops = LongBench(name=name, path="x", tokens=99).stop_tokens(tokenizer)
            assert stops == ((encode(tokenizer, "\n", special=False)[-1],) if name == "samsum" else ())


def test_classification_needs_the_classes(tmp_path: Path) -> None:
    path = folder(tmp_path, "trec", rows_of(2))
    with pytest.raises(ValueError, match=r"trec\.jsonl, line 1: all_classes must be given in every row"):
        LongBench(name="trec", path=path, tokens=500).rows()


@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.parametrize(
    "prediction", ["", "\n\n", "\nfirst", "\nfirst\n", "# note\nx = 1", "# note\nx = 1\n", "3\n\n"]
)
def test_what_is_settled_does_not_change(tmp_path: Path, byte_tokenizer: Any, name: str, prediction: str) -> None:
    path = folder(tmp_path, name, rows_of(1, answers=["first 3 x = 1"], all_classes=["first 3 x = 1", "more"]))
    task = LongBench(name=name, path=path, tokens=900, allow_overlap=True)
    (example,) = task.examples(byte_tokenizer, "test", 1)
    if task.settled(prediction, example, [100.0]):
        before = task.score(prediction, example)
        for more in ("more", "first 3 x = 1", "\nx = 1\n", "段落3", "# 7"):
            assert task.score(prediction + more, example) == before


@pytest.mark.parametrize(
    ("name", "prediction", "expected"),
    [
        ("triviaqa", "\n\nAda", False),
        ("triviaqa", "\nAda\n", True),
        ("lcc", "# x\nx", False),
        ("lcc", "# x\nx\n", True),
        ("qasper", "Ada\n\nQuestion", False),
    ],
)
def test_settled(name: str, prediction: str, expected: bool) -> None:
    assert LongBench(name=name, path="x", tokens=99).settled(prediction, None, []) is expected  # type: ignore[arg-type]


def test_buckets_cover_every_length() -> None:
    for length in (0, 3999, 4000, 7999, 8000, 10**6):
        assert sum(length in BUCKETS[name] for name in ("0-4k", "4-8k", "8k+")) == 1
        assert length in BUCKETS["all"]


def test_real_rows_are_loaded_and_truncated(smollm2_tokenizer: Any) -> None:
    counts = Counter(row["task"] for row in real_rows())
    long = 0
    for name, count in counts.items():
        task = LongBench(name=name, path=str(ROWS), tokens=2048, allow_overlap=True)
        examples = task.examples(smollm2_tokenizer, "test", count)
        for example in examples:
            # Halves joined may be tokenised otherwise at the seam; the chat template comes on top.
            assert len(example.tokens) <= 2048 + 8 + 32 * task.chat
            assert task.score(example.references[0], example) > 0
            long += len(example.tokens) > 2000
        assert len({example.id for example in examples}) == count
    assert sum(counts.values()) == 41
    assert long > 20


@pytest.mark.slow
def test_real_rows_are_generated_and_scored(smollm2: Any) -> None:
    source, model = smollm2
    counts = Counter(row["task"] for row in real_rows())
    scored = 0
    for name, count in counts.items():
        task = LongBench(name=name, path=str(ROWS), tokens=2048, allow_overlap=True)
        examples = task.examples(source.tokenizer, "test", count)
        evaluator = Evaluator(
            model=model, tokenizer=source.tokenizer, task=task, examples=examples, method=SnapKV(), cap=512
        )
        measured = evaluator.evaluate(uniform(model.config.num_hidden_layers, 256), complete=False)
        for example, output, found in zip(examples, measured.outputs, measured.scores, strict=True):
            assert found == score(name, output, example.references, example.classes or None)
            assert 0.0 <= found <= 1.0
        scored += len(measured.scores)
    assert scored == 41
