"""Rows of benchmark data from files, folders and the hub, recognised by their keys.

Files are JSONL (UTF-8) or parquet. Texts of a row are joined as they are, without anything between them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shortened
from string import Formatter
from typing import Any, NamedTuple

from mosaic_opt.tasks import ruler
from mosaic_opt.tasks.base import is_unicode
from mosaic_opt.tasks.metrics import METRICS
from mosaic_opt.tasks.rows import Row

FORMATS = (
    "prompt + answers",
    "context + question + answers",
    "input + outputs (RULER)",
    "context + input + answers (LongBench's folder)",
)
TEMPLATES = Path("config") / "dataset2prompt.json"  # in LongBench's folder, beside data/
MOST_DIGITS = 18  # of a number
_HUB = re.compile(r"(?!data/)\w[\w.-]*/[\w.-]+(/[\w.-]+)?(?<!\.jsonl)(?<!\.parquet)")  # data/ is of this machine


@dataclass(frozen=True)
class Record(Row):
    """A row with what its data says beyond the example.

    Attributes:
        task: name within its benchmark; empty where the data has none.
        metric: a key of METRICS, or empty.
        length: length of the context as the data counts it; 0 where it does not.
    """

    task: str = ""
    metric: str = ""
    length: int = 0


class _Raw(NamedTuple):
    """A row as it stands in the data.

    place: file and line, for errors.
    file: where it was read; None from the hub or a saved data set.
    values: by key.
    names: of its file without the ending, its folder or its configuration.
    """

    place: str
    file: Path | None
    values: dict[str, Any]
    names: tuple[str, ...]


def read_rows(path: str | Path, *, task: str = "", extended: bool = False, named: bool = False) -> list[Record]:
    """The rows at a path, in their order.

    path: a file; a folder of files, LongBench's folder (data/<task>.jsonl and config/dataset2prompt.json) or one that
        `datasets.save_to_disk` wrote; or, where nothing of this name is on the machine, a data set of the hub as
        owner/name or owner/name/configuration.
    task: the rows of this task alone, where rows name theirs (`task`, or `dataset`); empty: all rows.
    extended: read LongBench-E's rows, in data/<task>_e.jsonl; each must have its length.
    named: refuse a task that neither the rows nor their file, folder or configuration name; RULER's rows name none.

    The formats, by their keys:
        prompt, answers: a ready prompt.
        context, question, answers: the question follows the context directly, and where it is empty the answer prefix
            takes its place (Xnhyacinth/LongBench, simonjegou/ruler).
        input, outputs: RULER's own files; `answer_prefix` is a key of its own, or the end of `input`; the last line
            of `input` is the question; RULER's generation limits, where `task` is one of its tasks.
        context, input, answers: LongBench's own files, with the templates of dataset2prompt.json.
    `answers` may be called `answer` or `outputs`, and be one text. Optional: answer_prefix, max_new_tokens, metric,
    all_classes, document, task, length. Other keys are left alone.

    Raises:
        ValueError: for data that is missing, empty or broken anywhere, naming file and line; nothing is left out.
    """
    rows = _raw_rows(str(path), f"{task}_e" if extended else task)
    if not rows:
        raise ValueError(f"path must have at least one row, {path} is empty")
    if named and task:
        _require_named(rows, path, task)
    chosen = _of_task(rows, {task, f"{task}_e"} if extended else {task}) if task else rows
    if not chosen:
        found = ", ".join(dict.fromkeys(filter(None, map(_task, rows))))
        raise ValueError(f"{'subset' if named else 'task'} must be one of {found} in {path}, got {task!r}")
    for row in chosen:
        if extended and row.values.get("length") is None:
            raise ValueError(f"{row.place}: length must be given in every row of LongBench-E")
    return [_record(row, task) for row in chosen]


def _require_named(rows: Sequence[_Raw], path: str | Path, task: str) -> None:
    """Raise ValueError where nothing says that the rows are of this task."""
    official = task in ruler.METRICS and all("outputs" in row.values for row in rows)
    if not official and not any(map(_task, rows)) and not all(task in row.names for row in rows):
        raise ValueError(f"subset must be null, for the rows of {path} name no task; got {task!r}")


def _of_task(rows: list[_Raw], names: set[str]) -> list[_Raw]:
    """The rows whose task has one of the names, or all where none names any; ValueError where only some do."""
    if not any(map(_task, rows)):
        return rows
    for row in rows:
        if not _task(row):
            raise ValueError(f"{row.place}: task must be given here, too, as other rows give it")
    return [row for row in rows if _task(row) in names]


def require_classes(records: Iterable[Record]) -> None:
    """Raise ValueError where a row has no class names, which the metric classification looks for."""
    for record in records:
        if not record.classes:
            raise ValueError(f"{record.place}: all_classes must be given in every row for classification")


def _task(row: _Raw) -> str:
    return _text(row, "task") or _text(row, "dataset")


def _record(row: _Raw, task: str) -> Record:
    context, question, prefix, answers = _parts(row, task)
    if not question and prefix and "context" in row.values:
        question, prefix = prefix, ""
    fields: dict[str, Any] = {}
    name = _task(row) or task
    if answers == "outputs" and name in ruler.NEW_TOKENS:
        fields["new_tokens"] = ruler.NEW_TOKENS[name]
    if row.values.get("max_new_tokens") is not None:
        fields["new_tokens"] = _whole(row, "max_new_tokens", 1)
    if row.values.get("length") is not None:
        fields["length"] = _whole(row, "length", 0)
    metric = _text(row, "metric")
    if metric and metric not in METRICS:
        raise ValueError(f"{row.place}: metric must be one of {', '.join(METRICS)}, got {metric!r}")
    return Record(
        context=context,
        question=question,
        answer_prefix=prefix,
        answers=_texts(row, answers, required=True),
        classes=_texts(row, "all_classes"),
        document=_text(row, "document") or _text(row, "context"),
        task=name,
        metric=metric,
        place=row.place,
        **fields,
    )


def _parts(row: _Raw, task: str) -> tuple[str, str, str, str]:
    """Context, question, answer prefix, and the key of the answers."""
    keys, prefix = row.values.keys(), _text(row, "answer_prefix")
    answers = next((key for key in ("outputs", "answers", "answer") if key in keys), None)
    if answers is not None:
        if "prompt" in keys:
            return _text(row, "prompt", required=True), "", prefix, answers
        if {"context", "question"} <= keys:
            return _text(row, "context", required=True), _text(row, "question"), prefix, answers
        if {"input", "outputs"} <= keys:
            context, newline, question = _text(row, "input", required=True).rpartition("\n")
            return (*((context, newline + question) if newline else (question, "")), prefix, answers)
        if {"context", "input"} <= keys:
            return *_templated(row, task), prefix, answers
    found = ", ".join(sorted(map(str, keys))) or "none"
    raise ValueError(f"{row.place}: keys must be those of a known format ({'; '.join(FORMATS)}), got {found}")


def _templated(row: _Raw, task: str) -> tuple[str, str]:
    """Context and question of LongBench's template; no question where the input comes before the context."""
    name = task or _task(row).removesuffix("_e") or (row.file.stem.removesuffix("_e") if row.file else "")
    pieces = _template(row, name)
    values = {"context": _text(row, "context", required=True), "input": _text(row, "input")}
    parts = [text + (values[key] if key else "") for text, key in pieces]
    keys = [key for _, key in pieces]
    end = len(parts) if "input" in keys[: keys.index("context")] else keys.index("context") + 1
    return "".join(parts[:end]), "".join(parts[end:])


def _template(row: _Raw, name: str) -> list[tuple[str, str]]:
    """A template's pieces: a text, and the key whose value follows it ("context", "input"; "" at the end)."""
    file = _templates_file(row)
    templates = _templates(file)
    template = templates.get(name)
    if not isinstance(template, str):
        raise ValueError(f"{file} must have a template of {name!r}, got {', '.join(templates) or 'none'}")
    _encodable(row, f"the template of {name} in {file}", template)
    try:
        found = list(Formatter().parse(template))
    except ValueError:  # a brace without its other
        found = []
    keys = sorted(key for _, key, _, _ in found if key is not None)
    plain = not any(form or conversion for _, _, form, conversion in found)
    if not plain or keys not in (["context"], ["context", "input"]):
        raise ValueError(
            f"{file} must hold templates of {{context}} and {{input}} as they stand here, the first once, the second "
            f"at most once; got {template!r} for {name}"
        )
    return [(text, key or "") for text, key, _, _ in found]


def _templates_file(row: _Raw) -> Path:
    places = [] if row.file is None else [folder / TEMPLATES for folder in list(row.file.absolute().parents)[:2]]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise ValueError(
            f"{row.place}: LongBench's prompts must be in {TEMPLATES} beside its data folder, found none"
        )
    return file


def _templates(file: Path) -> dict[str, Any]:
    try:
        templates = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:  # of the encoding, too
        raise ValueError(f"{file} must be JSON: {error}") from error
    if not isinstance(templates, dict):
        raise ValueError(f"{file} must be a JSON object with templates, got {type(templates).__name__}")
    return templates


def _text(row: _Raw, key: str, *, required: bool = False) -> str:
    value = row.values.get(key)
    if value is None and not required:
        return ""
    if not isinstance(value, str) or (required and not value.strip()):
        kind = "a text, not empty" if required else "a text"
        raise ValueError(f"{row.place}: {key} must be {kind}, got {shortened(value)}")
    return _encodable(row, key, value)


def _texts(row: _Raw, key: str, *, required: bool = False) -> tuple[str, ...]:
    value = row.values.get(key)
    texts = [value] if isinstance(value, str) else value
    if texts is None and not required:
        return ()
    if (
        not isinstance(texts, Sequence)
        or (required and not texts)
        or not all(isinstance(text, str) and text.strip() for text in texts)
    ):
        raise ValueError(f"{row.place}: {key} must be a text or a list of texts, none empty, got {shortened(value)}")
    return tuple(_encodable(row, key, text) for text in texts)


def _encodable(row: _Raw, key: str, text: str) -> str:
    """The text; ValueError for half of a surrogate pair, which JSON may hold and UTF-8 may not."""
    if not is_unicode(text):
        raise ValueError(f"{row.place}: {key} must be Unicode text, it has half of a surrogate pair")
    return text


def _whole(row: _Raw, key: str, least: int) -> int:
    """A whole number of at most MOST_DIGITS digits; the hub has some as texts."""
    value = row.values[key]
    digits = isinstance(value, str) and value.isdecimal()
    number = int(value[: MOST_DIGITS + 1]) if digits else value
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise ValueError(f"{row.place}: {key} must be whole and at least {least}, got {shortened(value)}")
    if number >= 10**MOST_DIGITS:
        raise ValueError(f"{row.place}: {key} must have at most {MOST_DIGITS} digits, got {shortened(value)}")
    return number


def _raw_rows(path: str, name: str) -> list[_Raw]:
    place = Path(path).expanduser()
    if place.is_file():
        return _from_file(place)
    if place.is_dir():
        return _from_folder(place, name)
    if _HUB.fullmatch(path) and not Path(place.parts[0]).is_dir():
        return _from_hub(path, name)
    raise ValueError(_missing(path, name))


def _missing(path: str, name: str) -> str:
    return (
        f"path must be a JSONL or parquet file, a folder of them or a data set of the hub (owner/name), none is "
        f"at {path}: put rows there (of LongBench: data/{name or '<task>'}.jsonl and {TEMPLATES})"
    )


def _from_folder(folder: Path, name: str) -> list[_Raw]:
    if any((folder / mark).is_file() for mark in ("state.json", "dataset_dict.json")):
        from datasets import load_from_disk

        return _from_dataset(load_from_disk(str(folder)), str(folder), folder.absolute().name)
    own = [place / name for place in (folder / "data", folder) if name and (place / name).is_dir()]
    if own:
        return _from_folder(own[0], "")
    return [row for file in _files(folder, name) for row in _from_file(file)]


def _files(folder: Path, name: str) -> list[Path]:
    """The file of a task, or all files of the folder where none is named after it."""
    places, endings = [folder / "data", folder], (".jsonl", ".parquet")
    own = [place / f"{name}{ending}" for place in places for ending in endings if name]
    found = next(([file] for file in own if file.is_file()), [])
    if not found and not (folder / TEMPLATES).is_file():
        lists = [sorted(file for file in place.glob("*") if file.suffix in endings) for place in places]
        found = next(filter(None, lists), [])
    if not found:
        wanted = f"data/{name}.jsonl" if name else "JSONL or parquet files"
        raise ValueError(f"path must be a folder with {wanted} in it, {folder} has none: put the data there")
    return found


def _from_file(file: Path) -> list[_Raw]:
    return _from_parquet(file) if file.suffix == ".parquet" else _from_jsonl(file)


def _from_jsonl(file: Path) -> list[_Raw]:
    rows = []
    # Split at line feeds alone: a JSON text may hold other characters that end a line in Unicode.
    for number, line in enumerate(file.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        place = f"{file}, line {number}"
        try:
            values = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{place} must be UTF-8: {error.reason} at byte {error.start + 1}") from error
        except (ValueError, RecursionError) as error:
            what = (
                f"{error.msg} at character {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
            )
            raise ValueError(f"{place} must be JSON: {what}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{place} must be a JSON object with keys, got {type(values).__name__}")
        rows.append(_Raw(place, file, values, _names(file)))
    return rows


def _from_parquet(file: Path) -> list[_Raw]:
    from pyarrow import ArrowInvalid, parquet

    try:
        table = parquet.read_table(file)
    except (ArrowInvalid, OSError) as error:
        raise ValueError(f"{file} must be a parquet file: {_line(error)}") from error
    rows = enumerate(table.to_pylist(), 1)
    return [_Raw(f"{file}, row {number}", file, values, _names(file)) for number, values in rows]


def _names(place: Path) -> tuple[str, ...]:
    return place.stem, place.absolute().parent.name


def _from_hub(path: str, name: str) -> list[_Raw]:
    """A data set of the hub; its configuration is the path's third part, else the task, else the only one."""
    import datasets

    owner, title, *given = path.split("/")
    source = f"{owner}/{title}"
    try:
        known = datasets.get_dataset_config_names(source)
        chosen = given or ([name] if name in known else known)
        loaded = datasets.load_dataset(source, chosen[0]) if len(chosen) == 1 else None
    except Exception as error:  # whatever the hub's clients raise: no connection, no such data, no right to it
        if "Dataset scripts" in str(error):
            raise ValueError(
                f"path must be a data set without a loading script, {source} has one: download its files and name "
                f"their folder (for LongBench data/<task>.jsonl and {TEMPLATES}), or take Xnhyacinth/LongBench"
            ) from error
        raise ValueError(f"{_missing(path, name)}; the hub answers: {_line(error)}") from error
    if loaded is None:
        raise ValueError(f"path must name a configuration, {source}/ and one of {', '.join(known)}; got {path}")
    return _from_dataset(loaded, path, chosen[0])


def _from_dataset(loaded: Any, source: str, name: str) -> list[_Raw]:
    """Rows of a `datasets.Dataset`, or of a DatasetDict's test split, or its only one; `name`: see `_Raw.names`."""
    if isinstance(loaded, dict):
        if "test" not in loaded and len(loaded) != 1:
            raise ValueError(f"{source} must have a test split or only one, got {', '.join(map(str, loaded))}")
        loaded = loaded["test"] if "test" in loaded else next(iter(loaded.values()))
    return [_Raw(f"{source}, row {number}", None, values, (name,)) for number, values in enumerate(loaded, 1)]


def _line(error: Exception) -> str:
    """The first line of what an error says."""
    return (str(error).splitlines() or [type(error).__name__])[0]
