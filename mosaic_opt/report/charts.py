"""What is drawn, as plain data: a chart is made once, then rendered as an interactive or static figure or a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mosaic_opt.objective import measured
from mosaic_opt.report.result import COMPARED
from mosaic_opt.report.view import View, budgets_of

Style = Literal["points", "line", "dashed", "star"]
# Okabe and Ito's colours, which people with any usual form of colour blindness tell apart, on white and on black
COLOURS = {
    "blue": "#0072B2", "vermilion": "#D55E00", "green": "#009E73", "purple": "#CC79A7", "orange": "#E69F00",
    "sky": "#56B4E9", "grey": "#808080",
}  # fmt: skip
ALLOCATION_COLOURS = dict(zip(COMPARED, ("grey", "vermilion", "purple", "sky", "blue"), strict=True))


@dataclass(frozen=True)
class Series:
    """Points of one colour: x and y of equal lengths; low and high, bounds of an interval around y, or none."""

    name: str
    x: Sequence[Any]
    y: Sequence[float]
    colour: str
    style: Style = "line"
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True)
class Chart:
    """A figure's words.

    key: its name in files and page addresses; title; text: what it shows, in one sentence; x, y: the axes' titles.
    """

    key: str
    title: str
    text: str
    x: str
    y: str


@dataclass(frozen=True)
class Lines(Chart):
    """Several series on one pair of axes."""

    series: Sequence[Series] = field(default=())


@dataclass(frozen=True)
class Bars(Chart):
    """Bars side by side: one series' x are all series' x."""

    series: Sequence[Series] = field(default=())


@dataclass(frozen=True)
class Heatmap(Chart):
    """A number for each row and column: values (rows, columns); what they are is `unit`."""

    columns: Sequence[str] = ()
    rows: Sequence[str] = ()
    values: Sequence[Sequence[float]] = ()
    unit: str = ""


def charts_of(view: View) -> list[Chart]:
    """All that can be drawn of a search by now."""
    return [*search_charts(view), *(result_charts(view.result) if view.result else [])]


def search_charts(view: View) -> list[Chart]:
    """What stage 1 shows so far; nothing without a completed trial."""
    if not view.trials:
        return []
    charts: list[Chart] = [front_chart(view), heatmap_chart(view), shares_chart(view)]
    return [*charts, starved_chart(view)] if len(view.trials) > 1 else charts


def result_charts(result: dict[str, Any]) -> list[Chart]:
    """What a finished search shows."""
    return [scores_chart(result), *layer_charts(result)]


def front_chart(view: View) -> Lines:
    """Mean budget against score on the calibration examples: all trials, the front, uniform, the winner."""

    def series(name: str, trials: Sequence[Any], colour: str, style: Style) -> Series:
        points = [measured(trial) for trial in trials]
        means, scores = [p["mean_budget"] for p in points], _points([p["score"] for p in points])
        return Series(name, means, scores, colour, style)

    drawn = [
        series("other trials", [t for t in view.trials if t not in view.front], "grey", "points"),
        series("uniform", view.uniform, "vermilion", "dashed"),
        series("Pareto front", view.front, "blue", "line"),
    ]
    winner = [trial for trial in view.front if budgets_of(trial) == view.winner]
    if winner:
        drawn.append(series("winner", winner, "green", "star"))
    return Lines(
        "front",
        "Pareto front",
        f"Score on the calibration examples against the mean budget: {len(view.trials)} trials, "
        f"{len(view.front)} on the front.",
        "mean budget (tokens)",
        "score (points)",
        drawn,
    )


def heatmap_chart(view: View) -> Heatmap:
    """Layer budgets of the front's members."""
    columns = [f"{measured(trial)['mean_budget']:.0f}" for trial in view.front]
    values = list(zip(*map(budgets_of, view.front), strict=True))
    return Heatmap(
        "allocations",
        "Allocations on the front",
        "How many KV pairs each layer keeps, for every member of the front by rising mean budget.",
        "member of the front (its mean budget, tokens)",
        "layer",
        columns,
        [str(layer) for layer in range(len(values))],
        values,
        "tokens",
    )


def layer_bars(key: str, title: str, text: str, y: str, drawn: Sequence[tuple[str, Sequence[float], str]]) -> Bars:
    """A bar for every layer: `drawn` holds a name, the layers' numbers and a colour for each series."""
    series = [Series(name, list(range(len(values))), values, colour) for name, values, colour in drawn]
    return Bars(key, title, text, "layer", y, series)


def shares_chart(view: View) -> Bars:
    """Mean share of every layer on the front."""
    text = "A layer's budget over its allocation's mean, averaged over the front: 1 is what uniform gives."
    shares = [round(float(share), 3) for share in view.shares]
    return layer_bars("shares", "Share of each layer", text, "share (1 = uniform)", [("share", shares, "blue")])


def starved_chart(view: View) -> Bars:
    """Expected loss where a layer alone is starved."""
    text = (
        "Expected loss of score if this layer alone is cut to the least budget, by a surrogate of stage 1's trials."
    )
    losses = _points(view.starved.tolist())
    return layer_bars("starved", "What each layer is worth", text, "loss (points)", [("loss", losses, "vermilion")])


def scores_chart(result: dict[str, Any]) -> Lines:
    """Test score against mean budget for every compared allocation."""
    drawn = [_scores(name, [row for row in result["rows"] if row["allocation"] == name]) for name in COMPARED]
    budgets, scores = zip(*result["uniform_curve"], strict=True)
    drawn.append(Series("uniform's curve", budgets, _points(scores), "orange", "points"))
    return Lines(
        "scores",
        "Score by mean budget",
        "Score on the test examples, with 95 % intervals, for every compared allocation; points: uniform's curve.",
        "mean budget (tokens)",
        "score (points)",
        drawn,
    )


def _scores(name: str, rows: Sequence[dict[str, Any]]) -> Series:
    """One allocation's scores at every budget, with their intervals."""
    budgets, scores = [row["budget"] for row in rows], [row["score"] for row in rows]
    low, high = (_points([row["score_interval"][end] for row in rows]) for end in (0, 1))
    style: Style = "dashed" if name in ("full", "uniform") else "line"
    return Series(name, budgets, _points(scores), ALLOCATION_COLOURS[name], style, low, high)


def _points(scores: Sequence[float]) -> list[float]:
    return [round(100 * score, 2) for score in scores]


def layer_charts(result: dict[str, Any]) -> list[Bars]:
    """Layer budgets of the winner's shape and of the refined allocation, one chart a budget."""
    charts = []
    for budget in sorted({row["budget"] for row in result["rows"]}):
        rows = {row["allocation"]: row["budgets"] for row in result["rows"] if row["budget"] == budget}
        text = f"KV pairs kept in each layer by the rescaled winner and the refined allocation of mean {budget}."
        drawn = [(name, rows[name], ALLOCATION_COLOURS[name]) for name in ("rescaled", "refined")]
        charts.append(layer_bars(f"layers-{budget}", f"Layer budgets at a mean of {budget}", text, "tokens", drawn))
    return charts


def table_of(chart: Chart) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of what a chart draws."""
    if isinstance(chart, Heatmap):
        return [chart.y, *chart.columns], [
            [row, *(f"{value:g}" for value in values)] for row, values in zip(chart.rows, chart.values, strict=True)
        ]
    assert isinstance(chart, Lines | Bars)
    cells = []
    for series in chart.series:
        nothing: list[Any] = [""] * len(series.x)
        low, high = (bound or nothing for bound in (series.low, series.high))
        cells += [
            [series.name, *(value if isinstance(value, str) else f"{value:g}" for value in values)]
            for values in zip(series.x, series.y, low, high, strict=True)
        ]
    return ["series", chart.x, chart.y, "low", "high"], cells
