from dataclasses import replace

import numpy as np
import pytest

from mosaic_opt.objective import measured
from mosaic_opt.report.charts import Heatmap, charts_of, result_charts, search_charts, table_of
from mosaic_opt.report.interactive import figure
from mosaic_opt.report.static import save
from mosaic_opt.report.view import View
from mosaic_opt.storage import open_storage
from tests.searches import search


@pytest.fixture(scope="module")
def views(tmp_path_factory):
    storage = open_storage(f"sqlite:///{tmp_path_factory.mktemp('charts')}/s.db")
    search(storage, "whole")
    search(storage, "half", stop=9)
    return {name: View.of(storage, name) for name in ("whole", "half")}


def test_the_front_is_drawn_as_it_was_measured(views):
    view = views["whole"]
    chart = next(chart for chart in search_charts(view) if chart.key == "front")
    series = {one.name: one for one in chart.series}
    assert list(series) == ["other trials", "uniform", "Pareto front", "winner"]
    assert len(series["other trials"].x) + len(series["Pareto front"].x) == 16
    points = sorted((measured(t)["mean_budget"], round(100 * measured(t)["score"], 2)) for t in view.front)
    assert list(zip(series["Pareto front"].x, series["Pareto front"].y, strict=True)) == points
    assert list(series["uniform"].x) == [16, 32, 64, 128, 256]
    assert series["winner"].x[0] == np.mean(view.winner)


def test_layers_add_up_and_the_higher_matter_more(views):
    view = views["whole"]
    assert view.shares.mean() == pytest.approx(1.0)
    assert len(view.starved) == 6
    assert (view.starved >= -1e-9).all()
    chart = next(chart for chart in search_charts(view) if isinstance(chart, Heatmap))
    assert np.array(chart.values).T.tolist() == [trial.user_attrs["budgets"] for trial in view.front]


def test_scores_lie_inside_their_intervals(views):
    (scores, *layers) = result_charts(views["whole"].result)
    assert [chart.key for chart in layers] == ["layers-48", "layers-96"]
    for series in scores.series[:-1]:
        assert all(low <= y <= high for low, y, high in zip(series.low, series.y, series.high, strict=True))
        assert min(series.low) >= 0
        assert max(series.high) <= 100


@pytest.mark.parametrize("name", ["whole", "half"])
def test_every_chart_has_three_forms(views, name, tmp_path):
    view = views[name]
    charts = charts_of(view)
    assert len(charts) == {"whole": 7, "half": 4}[name]
    for chart in charts:
        headings, cells = table_of(chart)
        assert cells
        assert {len(row) for row in cells} == {len(headings)}
        first, again = save(chart, tmp_path / chart.key), save(chart, tmp_path / chart.key)
        assert first == again
        assert chart.title in first
        assert (tmp_path / f"{chart.key}.png").read_bytes().startswith(b"\x89PNG")
        drawn = figure(chart)
        assert drawn.layout.title.text == chart.title
        assert sum(np.size(trace.z if isinstance(chart, Heatmap) else trace.y) for trace in drawn.data) == sum(
            len(row) - 1 if isinstance(chart, Heatmap) else 1 for row in cells
        )


def test_nothing_is_drawn_of_a_study_without_a_measurement(views):
    assert search_charts(replace(views["half"], trials=[])) == []
