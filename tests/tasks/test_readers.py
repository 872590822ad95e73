from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mosaic_opt.tasks import RowsFile
from mosaic_opt.tasks.readers import FORMATS, read_rows

LONG = "word " * 30


def write(file: Path, *rows: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")
    return file


@pytest.fixture
def longbench(tmp_path: Path) -> Path:
    """A folder as LongBench's: own templates, two data sets and an extended one."""
    folder = tmp_path / "LongBench"
    row = {"input": "Who?", "answers": ["Ada", "Lovelace"], "all_classes": None, "length": 4, "_id": "x"}
    write(folder / "data" / "qasper.jsonl", {**row, "context": "A {text}.", "dataset": "qasper"})
    write(folder / "data" / "trec.jsonl", {**row, "context": "Examples", "all_classes": ["Ada", "Bo"]})
    extended = (
        {**row, "context": f"Text {length}", "length": length, "dataset": "qasper_e"} for length in (10, 5000)
    )
    write(folder / "data" / "qasper_e.jsonl", *extended)
    templates = {"qasper": "Read.\n{context}\n\nAnswer: {input}\nA:", "trec": "{input}\nafter {context}."}
    (folder / "config").mkdir()
    (folder / "config" / "dataset2prompt.json").write_text(json.dumps(templates))
    return folder


def test_longbench_folder_splits_the_template_where_the_context_ends(longbench: Path) -> None:
    (row,) = read_rows(longbench, task="qasper")
    assert row.context == "Read.\nA {text}."
    assert row.question == "\n\nAnswer: Who?\nA:"
    assert (row.answers, row.classes, row.length, row.document) == (("Ada", "Lovelace"), (), 4, "A {text}.")
    (row,) = read_rows(longbench, task="trec")  # the input stands before the context
    assert (row.context, row.question, row.classes) == ("Who?\nafter Examples.", "", ("Ada", "Bo"))


def test_longbench_file_and_extended_rows(longbench: Path) -> None:
    assert read_rows(longbench / "data" / "qasper.jsonl") == read_rows(longbench, task="qasper")
    assert read_rows(longbench / "data", task="qasper") == read_rows(longbench, task="qasper")
    assert [row.length for row in read_rows(longbench, task="qasper", extended=True)] == [10, 5000]


def test_longbench_folder_errors(longbench: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"path must be .* none is at .*nowhere: put rows there .*data/qasper.jsonl"):
        read_rows(tmp_path / "nowhere", task="qasper")
    with pytest.raises(ValueError, match=r"a folder with data/hotpotqa.jsonl in it, .*LongBench has none"):
        read_rows(longbench, task="hotpotqa")
    templates = longbench / "config" / "dataset2prompt.json"
    templates.write_text('{"trec": "{context}{more}", "other": "{input}"}')
    with pytest.raises(ValueError, match=r"must have a template of 'qasper', got trec, other"):
        read_rows(longbench, task="qasper")
    with pytest.raises(ValueError, match=r"must hold templates of \{context\} and \{input\}"):
        read_rows(longbench, task="trec")
    templates.write_text("{")
    with pytest.raises(ValueError, match=r"dataset2prompt.json must be JSON"):
        read_rows(longbench, task="qasper")
    templates.unlink()
    with pytest.raises(ValueError, match=r"qasper.jsonl, line 1: LongBench's prompts must be in config/dataset2prom"):
        read_rows(longbench, task="qasper")


@pytest.mark.parametrize(
    "template",
    ["{context}{context}", "{input}", "{context}{input}{input}", "{context!r}", "{context:>9}", "{context[0]}",
     "{context} {input[a]}", "{context.x}", "{context}{", "{context}}", "{}{context}", "{{context}}"],
)  # fmt: skip
def test_other_templates_are_refused(longbench: Path, template: str) -> None:
    (longbench / "config" / "dataset2prompt.json").write_text(json.dumps({"qasper": template}))
    with pytest.raises(ValueError, match=r"dataset2prompt.json must hold templates of .* for qasper$"):
        read_rows(longbench, task="qasper")


def test_templates_may_have_double_braces_and_no_input(longbench: Path) -> None:
    (longbench / "config" / "dataset2prompt.json").write_text(json.dumps({"qasper": "{{x}} {context} {{y}}"}))
    (row,) = read_rows(longbench, task="qasper")
    assert (row.context, row.question) == ("{x} A {text}.", " {y}")


def test_templates_are_an_object_of_unicode(longbench: Path) -> None:
    templates = longbench / "config" / "dataset2prompt.json"
    for text, message in (
        ("[1]", "must be a JSON object with templates, got list"),
        ("[" * 100_000, "must be JSON: "),
        ('{"qasper": "{context} \\ud83d"}', r"the template of qasper in .*json must be Unicode text"),
        ('{"qasper": 5}', r"must have a template of 'qasper', got qasper"),
    ):
        templates.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_rows(longbench, task="qasper")


HUB = {
    "context": "Text.\n\n",
    "question": "Who?\n",
    "answer_prefix": "A:",
    "answers": ["Ada"],
    "all_classes": None,
    "task": "qasper",
    "max_new_tokens": "148",
    "length": "3",
}
RULER = {
    "context": "Text. ",
    "question": "What is it? ",
    "answer_prefix": "It is",
    "answer": ["1", "2"],
    "task": "niah_single_1",
    "max_new_tokens": 128,
}


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "folder", "saved", "saved_dict"])
def test_hub_rows_from_every_kind_of_file(tmp_path: Path, kind: str) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [HUB, {**HUB, "task": "trec", "all_classes": ["Ada"]}]
    path = tmp_path / "rows"
    if kind == "jsonl":
        path = write(tmp_path / "rows.jsonl", *rows)
    elif kind == "parquet":
        path = tmp_path / "rows.parquet"
        datasets.Dataset.from_list(rows).to_parquet(path)
    elif kind == "folder":
        write(path / "qasper" / "test.jsonl", rows[0])
        write(path / "trec" / "test.jsonl", rows[1])
    else:
        made = datasets.Dataset.from_list(rows)
        (made if kind == "saved" else datasets.DatasetDict(test=made, train=made)).save_to_disk(path)
    (row,) = read_rows(path, task="qasper")
    assert (row.context, row.question, row.answer_prefix) == ("Text.\n\n", "Who?\n", "A:")
    assert (row.answers, row.classes, row.new_tokens, row.length) == (("Ada",), (), 148, 3)
    (row,) = read_rows(path, task="trec")
    assert row.classes == ("Ada",)


def test_hub_rows_of_ruler_name_their_metric(tmp_path: Path) -> None:
    path = write(tmp_path / "ruler.jsonl", RULER, {**RULER, "task": "qa_1", "answer": "Ada"})
    (row,) = read_rows(path, task="niah_single_1")
    assert (row.answers, row.new_tokens, row.task) == (("1", "2"), 128, "niah_single_1")
    assert RowsFile(path=str(path), tokens=99, subset="niah_single_1").metric == "string_match_all"
    assert RowsFile(path=str(path), tokens=99, subset="qa_1").metric == "string_match_part"
    with pytest.raises(ValueError, match=r"metric must be given, .* they name string_match_all, string_match_part"):
        RowsFile(path=str(path), tokens=99).rows()


def test_answer_prefix_takes_the_place_of_an_empty_question(tmp_path: Path) -> None:
    (row,) = read_rows(write(tmp_path / "a.jsonl", {**HUB, "question": ""}))
    assert (row.context, row.question, row.answer_prefix) == ("Text.\n\n", "A:", "")


def test_official_ruler_files_of_both_vintages_give_the_same_prompt(tmp_path: Path) -> None:
    prompt, prefix = "Text. What is it?", " It is"
    older = write(tmp_path / "older.jsonl", {"index": 0, "input": prompt + prefix, "outputs": ["1"], "length": 9})
    newer = write(tmp_path / "newer.jsonl", {"index": 0, "input": prompt, "outputs": ["1"], "answer_prefix": prefix})
    rows = [read_rows(file)[0] for file in (older, newer)]
    assert {row.context + row.question + row.answer_prefix for row in rows} == {prompt + prefix}
    assert {row.answers for row in rows} == {("1",)}
    assert rows[1].answer_prefix == prefix


def test_official_ruler_files_split_by_text_with_a_question_apart_and_rulers_limits(tmp_path: Path) -> None:
    """Prompts that begin alike are different documents; `subset` names the task where the rows do not."""
    noise = "The grass is green. " * 200
    rows = [
        {"index": i, "input": f"{noise} The number is {i}.\nWhat is it?", "outputs": [str(i)]} for i in range(200)
    ]
    task = RowsFile(path=str(write(tmp_path / "cwe.jsonl", *rows)), tokens=100, subset="cwe")
    assert task.metric == "string_match_all"
    sizes = task.sizes()
    assert sum(size or 0 for size in sizes.values()) == 200
    assert min(size or 0 for size in sizes.values()) > 20
    assert {row.new_tokens for row in task.rows()} == {120}
    assert {row.question for row in task.rows()} == {"\nWhat is it?"}


def test_rows_that_stand_twice_count_once(tmp_path: Path) -> None:
    own = {"prompt": LONG, "answers": "one", "metric": "f1"}
    task = RowsFile(path=str(write(tmp_path / "a.jsonl", own, own)), tokens=100)
    assert sorted(size or 0 for size in task.sizes().values()) == [0, 0, 1]


def test_own_rows(tmp_path: Path) -> None:
    own = {"prompt": LONG, "answers": "one", "metric": "f1", "max_new_tokens": 7, "document": "d", "note": 3}
    (row,) = read_rows(write(tmp_path / "a.jsonl", own))
    assert (row.context, row.question, row.answers) == (LONG, "", ("one",))
    assert (row.metric, row.new_tokens, row.document) == ("f1", 7, "d")
    (row,) = read_rows(write(tmp_path / "b.jsonl", {"context": LONG, "question": "Q", "answer": "one"}))
    assert (row.question, row.document, row.new_tokens) == ("Q", LONG, 64)


def test_byte_order_mark_blank_lines_and_unicode_line_ends(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    text = json.dumps({"prompt": "a\u2028b\x85", "answers": "x"}, ensure_ascii=False)
    file.write_bytes(b"\xef\xbb\xbf" + f"{text}\r\n\n{text}".encode())
    assert [row.context for row in read_rows(file)] == ["a\u2028b\x85"] * 2


GOOD = {"prompt": "p", "answers": ["a"]}


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ('{"prompt": "p", "answ', r"line 2 must be JSON: Unterminated string"),
        ("[" * 100_000, r"line 2 must be JSON: "),
        ('{"prompt": "\\ud800", "answers": ["a"]}', r"line 2: prompt must be Unicode text"),
        ("[1, 2]", r"line 2 must be a JSON object with keys, got list"),
        (b'{"prompt": "\xff", "answers": ["a"]}', r"line 2 must be UTF-8: invalid start byte at byte 13"),
        ({"prompt": "p", "answers": []}, r"line 2: answers must be .* none empty, got \[\]"),
        ({"prompt": "p", "answers": ["a", " "]}, r"line 2: answers must be .* none empty, got \['a', ' '\]"),
        ({"prompt": "p", "answers": ""}, r"line 2: answers must be .* none empty, got ''"),
        ({"prompt": "p", "answers": None}, r"line 2: answers must be .* none empty, got None"),
        ({"prompt": "p", "answers": [3]}, r"line 2: answers must be .* got \[3\]"),
        ({"prompt": " ", "answers": ["a"]}, r"line 2: prompt must be a text, not empty, got ' '"),
        ({"prompt": 3, "answers": ["a"]}, r"line 2: prompt must be a text, not empty, got 3"),
        ({"text": "p", "label": 1}, r"line 2: keys must be those of a known format \(.*\), got label, text"),
        ({"prompt": "p"}, r"line 2: keys must be those of a known format \(.*\), got prompt"),
        ({}, r"line 2: keys must be those of a known format \(.*\), got none"),
        ({**GOOD, "max_new_tokens": 0}, r"line 2: max_new_tokens must be whole and at least 1, got 0"),
        ({**GOOD, "max_new_tokens": "x"}, r"line 2: max_new_tokens must be whole and at least 1, got 'x'"),
        ({**GOOD, "max_new_tokens": "9" * 6000}, r"line 2: max_new_tokens must have at most 18 digits, got '999"),
        ({**GOOD, "length": 10**18}, r"line 2: length must have at most 18 digits, got 1000000"),
        ({**GOOD, "metric": "bleu"}, r"line 2: metric must be one of f1, .*, got 'bleu'"),
        ({**GOOD, "all_classes": [""]}, r"line 2: all_classes must be .* none empty, got \[''\]"),
        ({**GOOD, "answer_prefix": 1}, r"line 2: answer_prefix must be a text, got 1"),
    ],
)
def test_a_broken_row_is_named_in_one_line(tmp_path: Path, second: Any, message: str) -> None:
    file = write(tmp_path / "rows.jsonl", GOOD)
    line = (
        second if isinstance(second, bytes) else (second if isinstance(second, str) else json.dumps(second)).encode()
    )
    file.write_bytes(file.read_bytes() + line + b"\n")
    with pytest.raises(ValueError, match=message) as caught:
        read_rows(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_known_formats_are_listed(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        read_rows(write(tmp_path / "rows.jsonl", {"text": "p"}))
    assert all(known in str(caught.value) for known in FORMATS)


def test_empty_file_unknown_task_and_missing_task(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"path must have at least one row, .*empty.jsonl is empty"):
        read_rows(write(tmp_path / "empty.jsonl"))
    file = write(tmp_path / "rows.jsonl", {**GOOD, "task": "one"}, {**GOOD, "task": "two"})
    assert len(read_rows(file)) == 2
    with pytest.raises(ValueError, match=r"task must be one of one, two in .*, got 'three'"):
        read_rows(file, task="three")
    with pytest.raises(ValueError, match=r"rows.jsonl, line 2: task must be given here, too"):
        read_rows(write(file, {**GOOD, "task": "one"}, GOOD), task="one")
    (tmp_path / "bare").mkdir()
    with pytest.raises(ValueError, match=r"a folder with JSONL or parquet files in it, .* has none"):
        read_rows(tmp_path / "bare")


def test_broken_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    file = tmp_path / "rows.parquet"
    file.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"rows.parquet must be a parquet file: ") as caught:
        read_rows(file)
    assert "\n" not in str(caught.value)


class Hub:
    """Stands in for the hub: data sets by name and configuration."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **configurations: list[dict[str, Any]]) -> None:
        self.datasets = pytest.importorskip("datasets")
        self.configurations, self.asked = configurations, []
        monkeypatch.setattr(self.datasets, "get_dataset_config_names", lambda name: list(configurations))
        monkeypatch.setattr(self.datasets, "load_dataset", self.load)

    def load(self, name: str, configuration: str) -> Any:
        self.asked.append((name, configuration))
        return self.datasets.DatasetDict(test=self.datasets.Dataset.from_list(self.configurations[configuration]))


def test_hub_configuration_is_the_task_or_given(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(monkeypatch, qasper=[HUB], qasper_e=[{**HUB, "task": "qasper_e"}])
    assert read_rows("Xnhyacinth/LongBench", task="qasper")[0].new_tokens == 148
    assert read_rows("Xnhyacinth/LongBench", task="qasper", extended=True)[0].task == "qasper_e"
    assert len(read_rows("Xnhyacinth/LongBench/qasper")) == 1
    assert hub.asked == [("Xnhyacinth/LongBench", name) for name in ("qasper", "qasper_e", "qasper")]
    with pytest.raises(
        ValueError, match=r"path must name a configuration, Xnhyacinth/LongBench/ and one of qasper, q"
    ):
        read_rows("Xnhyacinth/LongBench", task="trec")
    Hub(monkeypatch, **{"4096": [RULER]})
    assert read_rows("simonjegou/ruler", task="niah_single_1")[0].answers == ("1", "2")


def test_hub_data_set_with_a_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", minversion="4")
    (tmp_path / "LongBench").mkdir()
    (tmp_path / "LongBench" / "LongBench.py").write_text("")
    real = datasets.get_dataset_config_names
    local = str(tmp_path / "LongBench")
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda name: real(local))
    with pytest.raises(ValueError, match=r"without a loading script, THUDM/LongBench has one: download .*Xnhyacinth"):
        read_rows("THUDM/LongBench", task="qasper")


def test_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def fail(name: str) -> list[str]:
        raise ConnectionError("no way\nthere")

    monkeypatch.setattr(datasets, "get_dataset_config_names", fail)
    with pytest.raises(ValueError, match=r"none is at no/such: .*; the hub answers: no way$"):
        read_rows("no/such")
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda name: pytest.fail("asked the hub"))
    for path in ("data/LongBench", "rows.jsonl", "some/rows.jsonl", "tests/rows", "/no/such"):
        with pytest.raises(ValueError, match="none is at"):
            read_rows(path)


def test_rows_file_scores_by_the_given_metric_or_the_rows(tmp_path: Path, byte_tokenizer: Any) -> None:
    rows = [{"prompt": f"{LONG}{number}", "answers": ["Ada B"], "metric": "f1"} for number in range(4)]
    path = str(write(tmp_path / "mine.jsonl", *rows))
    task = RowsFile(path=path, tokens=50, allow_overlap=True)
    assert (task.name, task.metric) == ("mine", "f1")
    examples = task.examples(byte_tokenizer, "test", 4)
    assert {example.new_tokens for example in examples} == {64}
    assert task.score("ada", examples[0]) == pytest.approx(2 / 3)
    given = RowsFile(path=path, tokens=50, allow_overlap=True, metric="string_match_all", new_tokens=3, name="n")
    example = given.examples(byte_tokenizer, "test", 1)[0]
    assert (given.name, example.task, example.new_tokens) == ("n", "n", 3)
    assert given.score("It is ada b.", example) == 1.0
    assert given.settled("It is ada b.", example, [0.0])
    assert not task.settled("It is ada b.", example, [0.0])
    code = RowsFile(path=path, tokens=50, metric="code_similarity")
    assert code.settled("x = 1\n", example, [9.0])
    assert not code.settled("x = 1", example, [9.0])


def test_a_subset_that_nothing_names_is_refused(tmp_path: Path) -> None:
    own = write(tmp_path / "qasper" / "rows.jsonl", GOOD)
    for subset in ("foo", "cwe"):  # RULER's files alone have tasks without a name
        with pytest.raises(ValueError, match=rf"subset must be null, .*rows.jsonl name no task; got '{subset}'"):
            RowsFile(path=str(own), tokens=50, metric="f1", subset=subset).rows()
    ruler = write(tmp_path / "ruler.jsonl", {"input": "a\nb", "outputs": ["1"]})
    with pytest.raises(ValueError, match="subset must be null"):
        RowsFile(path=str(ruler), tokens=50, metric="f1", subset="foo").rows()
    other = write(tmp_path / "other.jsonl", {**GOOD, "task": "one"}, {**GOOD, "task": "two"})
    with pytest.raises(ValueError, match=r"subset must be one of one, two in .*other.jsonl, got 'three'"):
        RowsFile(path=str(other), tokens=50, metric="f1", subset="three").rows()
    for path, subset in ((own, "rows"), (own, "qasper"), (tmp_path, "qasper"), (own.parent, "rows"), (ruler, "cwe")):
        assert len(RowsFile(path=str(path), tokens=50, metric="f1", subset=subset).rows()) == 1


@pytest.mark.parametrize(
    ("setting", "value"),
    [("path", 5), ("path", None), ("path", ""), ("subset", 3), ("subset", ""), ("name", 5), ("metric", ["f1"])],
)
def test_rows_file_has_texts_for_settings(setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{setting} must be .*, got "):
        RowsFile(**({"path": "x", "tokens": 50} | {setting: value}))


def test_rows_file_errors(tmp_path: Path) -> None:
    path = str(write(tmp_path / "mine.jsonl", GOOD))
    with pytest.raises(ValueError, match=r"metric must be one of f1, .*, got 'bleu'"):
        RowsFile(path=path, tokens=50, metric="bleu")
    with pytest.raises(ValueError, match=r"metric must be given, .* they name none"):
        RowsFile(path=path, tokens=50).rows()
    with pytest.raises(ValueError, match=r"mine\.jsonl, line 1: all_classes must be given in every row"):
        RowsFile(path=path, tokens=50, metric="classification").rows()
    with pytest.raises(ValueError, match="new_tokens must be at least 1"):
        RowsFile(path=path, tokens=50, new_tokens=0)
    assert RowsFile(path="nowhere.jsonl", tokens=50).name == "nowhere"  # read when its rows are asked for
