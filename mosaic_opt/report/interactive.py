"""Charts as plotly figures, for optuna-dashboard's study pages and for the report."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from mosaic_opt.report.charts import COLOURS, Bars, Chart, Heatmap, Lines, Series

AXIS = {"automargin": True, "gridcolor": "rgba(128,128,128,0.3)", "zeroline": False}
MODES = {"points": "markers", "line": "lines+markers", "dashed": "lines+markers", "star": "markers"}


def figure(chart: Chart) -> go.Figure:
    """A figure without a theme of its own: its page decides on the colours of text and background."""
    made = go.Figure(_traces(chart))
    made.update_layout(
        template="none",
        title={"text": chart.title, "x": 0.02},
        xaxis={"title": {"text": chart.x}, **AXIS},
        yaxis={"title": {"text": chart.y}, **AXIS},
        margin={"l": 50, "r": 20, "t": 50, "b": 50},
        legend={"orientation": "h", "y": -0.25},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": "#808080"},  # read on white and on black
        barmode="group",
        modebar={"bgcolor": "rgba(0,0,0,0)"},
    )
    if isinstance(chart, Heatmap):
        made.update_xaxes(type="category", showgrid=False)
        made.update_yaxes(type="category", showgrid=False)
    return made


def _traces(chart: Chart) -> list[Any]:
    if isinstance(chart, Heatmap):
        columns = [f"{number}: {name}" for number, name in enumerate(chart.columns, 1)]  # equal means stay apart
        bar = {"title": {"text": chart.unit}}
        values = [list(row) for row in chart.values]
        return [go.Heatmap(x=columns, y=list(chart.rows), z=values, colorscale="Cividis", colorbar=bar)]
    if isinstance(chart, Bars):
        return [
            go.Bar(name=s.name, x=list(s.x), y=list(s.y), marker={"color": COLOURS[s.colour]}) for s in chart.series
        ]
    assert isinstance(chart, Lines)
    return [_line(series) for series in chart.series]


def _line(series: Series) -> go.Scatter:
    colour = COLOURS[series.colour]
    error = None
    if series.low:
        above = [high - y for high, y in zip(series.high, series.y, strict=True)]
        below = [y - low for low, y in zip(series.low, series.y, strict=True)]
        error = {"array": above, "arrayminus": below, "thickness": 1}
    return go.Scatter(
        name=series.name,
        x=list(series.x),
        y=list(series.y),
        mode=MODES[series.style],
        line={"color": colour, "dash": "dash" if series.style == "dashed" else "solid"},
        marker={
            "color": colour,
            "symbol": "star" if series.style == "star" else "circle",
            "size": {"star": 14, "points": 5}.get(series.style, 7),
            "opacity": 0.5 if series.style == "points" else 1.0,
        },
        error_y=error,
    )
