"""Full-cache and uniform scores of a model on several tasks: what eviction costs, and where there is room."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mosaic_opt.report.statistics import paired_gain

# What stands in the table's columns, for a row and one of its budgets.
COLUMNS: dict[str, Callable[[Mapping[str, Any], int], str]] = {
    "task": lambda row, budget: row["task"],
    "category": lambda row, budget: row["category"],
    "metric": lambda row, budget: row["metric"],
    "protocol": lambda row, budget: row["protocol"],
    "prompt": lambda row, budget: f"{row['prompt_tokens']:.0f}",
    "full": lambda row, budget: _points(row["full"]),
    "budget": lambda row, budget: str(budget),
    "uniform": lambda row, budget: _points(row["uniform"][budget]),
    "headroom": lambda row, budget: _points(row["headroom"][budget]),
    "": lambda row, budget: row["mark"][budget],
}
BRIEF = ("task", "prompt", "full", "budget", "uniform", "headroom", "")  # columns that fit a terminal

FLOOR = 0.1  # a full-cache score up to this: the model cannot do the task
HEADROOM = 0.1  # full cache less far above uniform: there is nothing to win


def baseline_row(full: Sequence[float], uniform: Mapping[int, Sequence[float]], **described: Any) -> dict[str, Any]:
    """One task's row.

    Args:
        full: (N,) scores with the full cache.
        uniform: by mean budget (tokens), (N,) scores of the same examples under uniform allocation.
        described: further entries, put first.

    Returns:
        `described`, `examples` (N), `full` and, by budget, `uniform`: each (score, lower, upper bound) with a 95 %
        bootstrap interval over the examples; by budget `headroom`: the paired difference full - uniform with its
        interval; by budget `mark`: `floor`, `ceiling` (see FLOOR and HEADROOM) or empty.
    """
    nothing = [0.0] * len(full)
    headroom = {budget: paired_gain(full, scores) for budget, scores in uniform.items()}
    low = sum(full) / len(full) <= FLOOR
    return {
        **described,
        "examples": len(full),
        "full": paired_gain(full, nothing),
        "uniform": {budget: paired_gain(scores, nothing) for budget, scores in uniform.items()},
        "headroom": headroom,
        "mark": {
            budget: "floor" if low else "ceiling" if gain < HEADROOM else ""
            for budget, (gain, *_) in headroom.items()
        },
    }


def baseline_table(
    rows: Sequence[Mapping[str, Any]], columns: Iterable[str] = tuple(COLUMNS)
) -> tuple[list[str], list[list[str]]]:
    """Headings and cells for people, in points; one line for each task and budget."""
    headings = list(columns)
    cells = [[COLUMNS[heading](row, budget) for heading in headings] for row in rows for budget in row["uniform"]]
    return headings, cells


def markdown(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [headings, ["---"] * len(headings), *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _points(estimate: tuple[float, float, float]) -> str:
    score, low, high = (100 * value for value in estimate)
    return f"{score:.1f} [{low:.0f}, {high:.0f}]"
