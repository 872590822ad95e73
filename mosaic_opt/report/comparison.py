"""Allocations beside each other: layer by layer, by shape, and on the same examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mosaic_opt.allocation import Allocation
from mosaic_opt.report.statistics import gain_text, paired_gain


def comparison_rows(
    names: Sequence[str], allocations: Sequence[Allocation], scores: Sequence[Sequence[float]] | None = None
) -> list[dict[str, Any]]:
    """One row an allocation.

    Args:
        names, allocations: of the same model, the one that the others are held against first.
        scores: (A, N) of each allocation on the same examples, 0 to 1; None where none were measured.

    Returns:
        `allocation` (its name), `budgets`, `mean_budget`, `differences` (tokens a layer, to the first), `distances`
        (`Allocation.distance` to each) and, where measured, `score`, `example_scores`, `gain` (mean paired difference
        to the first) and `interval` (95 %).

    Raises:
        ValueError: if the allocations have not the same number of layers.
    """
    rows = []
    for index, (name, made) in enumerate(zip(names, allocations, strict=True)):
        row: dict[str, Any] = {
            "allocation": name,
            "budgets": list(made.budgets),
            "mean_budget": made.mean,
            "differences": [a - b for a, b in zip(made.budgets, allocations[0].budgets, strict=True)],
            "distances": [made.distance(other) for other in allocations],
        }
        if scores is not None:
            gain, *interval = paired_gain(scores[index], scores[0])
            own = list(scores[index])
            row |= {"score": sum(own) / len(own), "example_scores": own, "gain": gain, "interval": interval}
        rows.append(row)
    return rows


def layer_table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells: budgets by layer, with the differences to the first."""
    first, *others = rows
    cells = [
        [str(layer), str(budget), *(f"{row['budgets'][layer]} ({row['differences'][layer]:+d})" for row in others)]
        for layer, budget in enumerate(first["budgets"])
    ]
    return ["layer", *_labels(rows)], cells


def summary_table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells: mean budget, distances between the shapes, scores in points with paired differences.

    rows: of `comparison_rows`; `eviction` (the method's description) is shown where they hold it.
    """
    labels = _labels(rows)
    measured = "score" in rows[0]
    headings = ["", "allocation", "mean", *(f"to {label}" for label in labels)]
    headings += ["method"] if "eviction" in rows[0] else []
    headings += ["score", f"difference to {labels[0]} [95 %]"] if measured else []
    cells = []
    for label, row in zip(labels, rows, strict=True):
        distances = [f"{distance:.3f}" for distance in row["distances"]]
        cells.append([label, row["allocation"], f"{row['mean_budget']:g}", *distances])
        if "eviction" in row:
            cells[-1].append(row["eviction"]["name"])
        if measured:
            gain = "" if row is rows[0] else gain_text(row["gain"], row["interval"])
            cells[-1] += [f"{100 * row['score']:.1f}", gain]
    return headings, cells


def _labels(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A short label for each row, as names may be long paths."""
    return [f"#{number}" for number in range(1, len(rows) + 1)]
