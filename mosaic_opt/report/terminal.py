"""What a person sees on the terminal: progress bars and the result table, all on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from mosaic_opt.report.result import COMPARED
from mosaic_opt.study import Watch


class TerminalWatch(Watch):
    """Progress bars with rate and time left (plain, rare lines where stderr is not a terminal)."""

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[Callable[[int, str], None]]:
        quiet = not sys.stderr.isatty()
        interval = {"mininterval": 10.0, "maxinterval": 30.0} if quiet else {}
        with tqdm(total=total, desc=f"{label:<20}", file=sys.stderr, ncols=110, **interval) as bar:
            started = False

            def advance(done: int, note: str) -> None:
                nonlocal started
                if not started:  # what an earlier run did must not count for the rate
                    bar.initial = bar.n = done
                    started = True
                bar.set_postfix_str(note, refresh=False)
                bar.update(done - bar.n)
                if not quiet:
                    bar.refresh()

            yield advance

    def say(self, text: str) -> None:
        tqdm.write(text, file=sys.stderr)


def print_result(result: dict[str, Any], where: dict[str, str]) -> None:
    """The table at the end of a search, and where everything lies.

    Args:
        result: as `report.result.result` gives it.
        where: label -> path or address.
    """
    console = Console(file=sys.stderr, width=None if sys.stderr.isatty() else 110)
    names = [name for name in COMPARED if name not in ("full", "uniform")]
    table = Table(title=f"{result['study']}: {result['metric']} on the test examples, in points")
    for heading in ("mean budget", "full", "uniform", *names):
        table.add_column(heading, justify="right")
    table.add_column("gain of refined [95 %]", justify="right")
    table.add_column("cache ratio", justify="right")
    for budget in sorted({row["budget"] for row in result["rows"]}):
        rows = {row["allocation"]: row for row in result["rows"] if row["budget"] == budget}
        refined = rows["refined"]
        low, high = refined["interval"]
        ratio = refined["cache_ratio"]
        table.add_row(
            str(budget),
            *(f"{100 * rows[name]['score']:.1f}" for name in ("full", "uniform", *names)),
            f"{100 * refined['gain']:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]",
            "-" if ratio is None else f"{ratio:.1f}x",
        )
    console.print(table)
    winner = result["winner"]
    console.print(f"winner (mean {winner['mean_budget']:.0f}): {winner['budgets']}", soft_wrap=True)
    for label, place in where.items():
        console.print(f"{label}: {place}", soft_wrap=True)
