"""Rows and tables of `mosaic compare`."""

import pytest

from mosaic_opt.allocation import Allocation
from mosaic_opt.report.comparison import comparison_rows, layer_table, summary_table
from mosaic_opt.report.statistics import paired_gain

NAMES = ["uniform:20", "some/where/a.json"]
MADE = [Allocation([20, 20, 20]), Allocation([10, 10, 70])]
SCORES = [[0.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0]]


def test_rows_hold_all_against_the_first():
    first, second = comparison_rows(NAMES, MADE, SCORES)
    assert (first["differences"], second["differences"]) == ([0, 0, 0], [-10, -10, 50])
    assert second["distances"] == pytest.approx([70 / 90 - 1 / 3, 0])
    assert (first["score"], second["score"]) == (0.25, 0.75)
    assert (second["gain"], *second["interval"]) == paired_gain(SCORES[1], SCORES[0])
    assert first["interval"] == [0, 0]


def test_without_scores_there_are_none():
    rows = comparison_rows(NAMES, MADE)
    assert all("score" not in row for row in rows)
    headings, cells = summary_table(rows)
    assert headings == ["", "allocation", "mean", "to #1", "to #2"]
    assert cells[1] == ["#2", "some/where/a.json", "30", "0.444", "0.000"]


def test_tables_say_differences():
    rows = comparison_rows(NAMES, MADE, SCORES)
    assert layer_table(rows) == (
        ["layer", "#1", "#2"],
        [["0", "20", "10 (-10)"], ["1", "20", "10 (-10)"], ["2", "20", "70 (+50)"]],
    )
    headings, cells = summary_table(rows)
    assert headings[-2:] == ["score", "difference to #1 [95 %]"]
    assert cells[0][-2:] == ["25.0", ""]
    assert cells[1][-2:] == ["75.0", "+50.0 [+0.0, +100.0]"]
