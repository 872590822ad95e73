"""Charts as PNG and SVG files."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mosaic_opt.report.charts import COLOURS, Bars, Chart, Heatmap, Lines, Series

SIZE = (7.0, 4.2)  # inches
TICKS = 16  # labels of a heatmap's axis, at most


def save(chart: Chart, stem: Path) -> str:
    """Write STEM.png and STEM.svg, the same for the same chart; gives the SVG file's text."""
    figure, vector = _drawn(chart), stem.with_name(f"{stem.name}.svg")
    with mpl.rc_context({"svg.hashsalt": "mosaic", "svg.fonttype": "none"}):
        figure.savefig(vector, metadata={"Date": None})
    figure.savefig(stem.with_name(f"{stem.name}.png"), dpi=120)
    return vector.read_text(encoding="utf-8")


def _drawn(chart: Chart) -> Figure:
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    axes.set_title(_plain(chart.title))
    axes.set_xlabel(_plain(chart.x))
    axes.set_ylabel(_plain(chart.y))
    if isinstance(chart, Heatmap):
        _heatmap(figure, axes, chart)
        return figure
    if isinstance(chart, Bars):
        _bars(axes, chart)
    elif isinstance(chart, Lines):
        for series in chart.series:
            _line(axes, series)
    axes.grid(alpha=0.3)
    if len(chart.series) > 1:  # type: ignore[attr-defined]
        axes.legend(fontsize="small")
    return figure


def _heatmap(figure: Figure, axes: Axes, chart: Heatmap) -> None:
    image = axes.imshow(chart.values, aspect="auto", origin="lower", cmap="cividis", interpolation="nearest")
    figure.colorbar(image, label=chart.unit)
    for axis, names in ((axes.xaxis, chart.columns), (axes.yaxis, chart.rows)):
        places = range(0, len(names), -(-len(names) // TICKS) or 1)
        axis.set_ticks(list(places), [names[place] for place in places])
    axes.tick_params(axis="x", rotation=90)


def _bars(axes: Axes, chart: Bars) -> None:
    width = 0.8 / len(chart.series)
    for number, series in enumerate(chart.series):
        places = [x + (number - (len(chart.series) - 1) / 2) * width for x in series.x]
        axes.bar(places, series.y, width, label=series.name, color=COLOURS[series.colour])


def _line(axes: Axes, series: Series) -> None:
    colour, points = COLOURS[series.colour], series.style in ("points", "star")
    axes.plot(
        series.x,
        series.y,
        label=_plain(series.name),
        color=colour,
        linestyle="none" if points else "--" if series.style == "dashed" else "-",
        marker="*" if series.style == "star" else "o",
        markersize={"star": 13, "points": 3}.get(series.style, 4),
        alpha=0.5 if series.style == "points" else 1.0,
    )
    if series.low:
        axes.vlines(series.x, series.low, series.high, color=colour, linewidth=1)


def _plain(text: str) -> str:
    """Text in which nothing is a formula."""
    return text.replace("$", r"\$")
