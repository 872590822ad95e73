"""Rows and table of `mosaic baseline`."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from mosaic_opt.report import terminal
from mosaic_opt.report.baseline import BRIEF, COLUMNS, baseline_row, baseline_table, markdown

NAMED = {"category": "synthetic", "metric": "string_match_part", "protocol": "question-aware", "prompt_tokens": 650}


def row(full, **uniform):
    by_budget = {int(budget[1:]): scores for budget, scores in uniform.items()}
    return baseline_row(full, by_budget, task="passage_retrieval", **NAMED)


@pytest.mark.parametrize(
    ("full", "uniform", "mark"),
    [
        ([0.0] * 9 + [1.0], [0.0] * 10, "floor"),  # .1 is still the floor
        ([0.0] * 8 + [1.0] * 2, [0.0] * 10, ""),
        ([1.0] * 10, [1.0] * 10, "ceiling"),
        ([1.0] * 10, [1.0] * 9 + [0.0], ""),  # headroom .1
        ([1.0] * 20, [1.0] * 19 + [0.0], "ceiling"),
        ([0.0] * 4 + [1.0] * 4, [1.0] * 8, "ceiling"),  # better than full cache
    ],
)
def test_floor_and_ceiling_are_marked(full, uniform, mark):
    assert row(full, b64=uniform)["mark"] == {64: mark}


def test_intervals_are_of_the_scores_and_of_the_paired_difference():
    made = row([1.0, 1.0, 0.0, 1.0], b64=[1.0, 0.0, 0.0, 0.0], b128=[1.0, 1.0, 0.0, 1.0])
    assert made["examples"] == 4
    assert made["full"][0] == 0.75
    assert made["uniform"][64][0] == 0.25
    assert made["headroom"][64][0] == 0.5
    assert made["headroom"][128] == (0, 0, 0)
    for score, low, high in (made["full"], made["uniform"][64], made["headroom"][64]):
        assert low < score < high


def test_tables(monkeypatch):
    rows = [row([1.0] * 4, b64=[0.0] * 4, b128=[1.0] * 4)]
    headings, cells = baseline_table(rows)
    assert headings == list(COLUMNS)
    assert [line[headings.index("budget")] for line in cells] == ["64", "128"]
    assert [line[-1] for line in cells] == ["", "ceiling"]
    assert markdown(headings, cells).splitlines()[1] == f"|{' --- |' * len(COLUMNS)}"
    shown = io.StringIO()
    monkeypatch.setattr(terminal, "_console", lambda: Console(file=shown, width=110))
    terminal.print_table(*baseline_table(rows, BRIEF))
    lines = shown.getvalue().splitlines()
    assert all(cell in lines[3] for cell in ("passage_retrieval", "100.0 [100, 100]", "0.0 [0, 0]"))  # uncut
