"""One self-contained HTML file about one search or all searches of a database."""

from __future__ import annotations

import base64
import csv
import datetime
import gzip
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import plotly.offline
from filelock import FileLock

import mosaic_opt
from mosaic_opt.objective import measured
from mosaic_opt.report.charts import Chart, charts_of, table_of
from mosaic_opt.report.interactive import figure
from mosaic_opt.report.result import COMPARED
from mosaic_opt.report.static import save
from mosaic_opt.report.statistics import gain_text
from mosaic_opt.report.studies import choice_name
from mosaic_opt.report.view import View

PAGE = "report.html"
EXAMPLES = 8  # answers shown, at most
TEXT = 600  # characters of an answer, at most

Table = tuple[list[str], list[list[str]]]


def write_report(views: Sequence[View], title: str, folder: Path) -> Path:
    """Write report.html, and the figures (PNG, SVG) and tables (CSV) it shows as files beside it.

    An earlier report there is replaced when the new one is complete.

    Args:
        views: the searches, at least one.
        title: of the page.
        folder: is made if it is not there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):  # two processes may write the same report
        new = folder / ".new"
        shutil.rmtree(new, ignore_errors=True)  # of a process that was killed
        new.mkdir()
        try:
            _write_all(views, title, new)
            for name in ("figures", "tables"):
                shutil.rmtree(folder / name, ignore_errors=True)
                (new / name).rename(folder / name)
            (new / PAGE).replace(folder / PAGE)
        finally:
            shutil.rmtree(new)
    return folder / PAGE


def _write_all(views: Sequence[View], title: str, folder: Path) -> None:
    for name in ("figures", "tables"):
        (folder / name).mkdir()
    described = []
    for number, view in enumerate(views, 1):
        search = _described(view)
        mark = f"{number}-{_file_name(view.name)}-" if len(views) > 1 else ""
        tables = {"result": search["result"], **search["tables"]} if search["result"] else search["tables"]
        for name, content in tables.items():
            _write_csv(folder / "tables" / f"{mark}{_file_name(name)}.csv", content)
        for chart in search["charts"]:
            _write_csv(folder / "tables" / f"{mark}{chart.key}.csv", table_of(chart))
        search["charts"] = [_prepared(chart, folder / "figures" / f"{mark}{chart.key}") for chart in search["charts"]]
        described.append(search)
    compared = comparisons(views)
    for name, content in compared.items():
        _write_csv(folder / "tables" / f"{_file_name(name)}.csv", content)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    packed = gzip.compress(plotly.offline.get_plotlyjs().encode(), mtime=0)
    text = template.render(
        title=title,
        version=mosaic_opt.__version__,
        made=datetime.datetime.now().strftime("%Y-%m-%d %H:%M"),
        searches=described,
        comparisons=compared,
        plotly=base64.b64encode(packed).decode(),
    )
    (folder / PAGE).write_text(text, encoding="utf-8", errors="replace")


def save_figures(view: View, folder: Path) -> list[Path]:
    """Write a search's figures as PNG and SVG into a folder; gives the PNG files."""
    charts = charts_of(view)
    for chart in charts:
        save(chart, folder / chart.key)
    return [folder / f"{chart.key}.png" for chart in charts]


def comparisons(views: Sequence[View]) -> dict[str, Table]:
    """Tables over several finished searches; none where there are not two with as many layers."""
    finished = [view for view in views if view.result]
    wanted = [view for view in finished if len(_winner(view)) == len(_winner(finished[0]))]
    if len(wanted) < 2:
        return {}
    shapes = np.array([_winner(view) for view in wanted], dtype=float)
    shapes /= shapes.sum(axis=1, keepdims=True)
    shared = np.minimum(shapes[:, None], shapes[None]).sum(axis=2)
    names = [view.name for view in wanted]
    rows = [[name, *(f"{100 * value:.0f} %" for value in row)] for name, row in zip(names, shared, strict=True)]
    return {"Cache that the winners' shapes give to the same layers": (["winner of", *names], rows)}


def _winner(view: View) -> list[int]:
    assert view.result is not None
    return list(view.result["winner"]["budgets"])


def _described(view: View) -> dict[str, Any]:
    """What the page shows of a search."""
    result, config = view.result, view.config
    budget = min((row["budget"] for row in result["rows"]), default=0) if result else 0
    return {
        "name": view.name,
        "what": what(view),
        "missing": None
        if result
        else f"The search has not come to its end: it is in stage {view.stage!r}. The command below goes on there.",
        "result": _result_table(result) if result else None,
        "tables": _tables(view),
        "charts": charts_of(view),
        "examples_budget": budget,
        "examples": changed_answers(view, budget) if result else [],
        "command": config.get("command") or f"mosaic search study={view.name}",
    }


def what(view: View) -> str:
    """One sentence: model, task, method, protocol, examples."""
    names = {group: choice_name(view.config.get(group)) for group in ("model", "task", "eviction")}
    attributes = view.attributes
    overlap = "; the splits may share examples" if attributes.get("allow_overlap") else ""
    splits = ", ".join(f"{len(ids)} {split}" for split, ids in attributes.get("splits", {}).items())
    return (
        f"{names['model']} on {names['task']} ({attributes.get('metric')}, {attributes.get('protocol')}) under "
        f"{names['eviction']}; examples: {splits}{overlap}."
    )


def _prepared(chart: Chart, stem: Path) -> dict[str, Any]:
    """What the page needs of a chart, whose files are written beside it."""
    return {
        "title": chart.title,
        "text": chart.text,
        "table": table_of(chart),
        "svg": base64.b64encode(save(chart, stem).encode()).decode(),
        "figure": figure(chart).to_json(),
    }


def _tables(view: View) -> dict[str, Table]:
    states = sorted({state for counts in view.states.values() for state in counts})
    trials = [[name, *(str(counts.get(state, 0)) for state in states)] for name, counts in view.states.items()]
    seconds = view.attributes.get("seconds", {})
    costs = [[phase, f"{value:.1f}"] for phase, value in seconds.items()]
    versions = [[name, str(value)] for name, value in view.attributes.get("versions", {}).items()]
    made = [[name, json.dumps(value)] for name, value in view.attributes.get("fingerprint", {}).items()]
    return {
        "Trials": (["study", *states], trials),
        "Seconds": (["phase", "seconds"], costs),
        "Versions": (["package", "version"], versions),
        "Fingerprint": (["part", "value"], made),
    }


def _result_table(result: dict[str, Any]) -> Table:
    rows = [
        [
            str(row["budget"]),
            row["allocation"],
            f"{100 * row['score']:.1f}",
            gain_text(row["gain"], row["interval"]),
            "-" if row["cache_ratio"] is None else f"{row['cache_ratio']:.1f}x",
            f"{row['kv_bytes'] / 2**20:.1f}",
        ]
        for row in result["rows"]
    ]
    return ["mean budget", "allocation", "score", "gain over uniform [95 %]", "cache ratio", "KV cache (MiB)"], rows


def changed_answers(view: View, budget: int) -> list[dict[str, Any]]:
    """Test examples whose scores differ between the compared allocations of one budget, with their answers."""
    assert view.result is not None
    rows = {row["allocation"]: tuple(row["budgets"]) for row in view.result["rows"] if row["budget"] == budget}
    trials = {name: measured(view.tested[rows[name]]) for name in COMPARED}
    if not all("outputs" in content for content in trials.values()):
        return []
    ids = view.attributes["splits"]["test"]
    changed = [i for i in range(len(ids)) if len({content["example_scores"][i] for content in trials.values()}) > 1]
    return [
        {
            "id": ids[i],
            "answers": [
                {
                    "allocation": name,
                    "score": f"{100 * content['example_scores'][i]:.0f}",
                    "text": content["outputs"][i][:TEXT],
                }
                for name, content in trials.items()
            ],
        }
        for i in changed[:EXAMPLES]
    ]


def _write_csv(path: Path, content: Table) -> None:
    with path.open("w", encoding="utf-8", errors="replace", newline="") as file:
        csv.writer(file).writerows([content[0], *content[1]])


def _file_name(text: str) -> str:
    return re.sub(r"[^a-z0-9_.-]+", "-", text.lower()).strip("-.") or "x"
