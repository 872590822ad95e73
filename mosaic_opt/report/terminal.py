"""What a person sees on the terminal: progress bars and the result table, all on stderr."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from mosaic_opt.report.result import COMPARED
from mosaic_opt.report.statistics import gain_text
from mosaic_opt.study import Watch

SHARE = 0.01  # of the time, at most, that goes into notes


class TerminalWatch(Watch):
    """Progress bars with rate and time left (plain, rare lines where stderr is not a terminal).

    Args:
        log: file to which what was said and done is added, with the time.
        trial_done: called after each trial.
    """

    def __init__(self, log: Path | None = None, trial_done: Callable[[], None] = lambda: None) -> None:
        self._log, self._trial_done = log, trial_done

    def trial_done(self) -> None:
        self._trial_done()

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[Callable[[int, Callable[[], str]], None]]:
        last: tuple[int, Callable[[], str]] = (0, str)
        quiet = not sys.stderr.isatty()
        interval = {"mininterval": 10.0, "maxinterval": 30.0} if quiet else {}
        with tqdm(total=total, desc=f"{label:<20}", file=sys.stderr, ncols=130, **interval) as bar:
            started, due = False, 0.0

            def advance(done: int, note: Callable[[], str]) -> None:
                nonlocal started, last, due
                last = done, note
                if not started:  # what an earlier run did must not count for the rate
                    bar.initial = bar.n = done
                    started = True
                before = time.monotonic()
                if before >= due or done == total:
                    bar.set_postfix_str(note(), refresh=False)
                    after = time.monotonic()
                    due = after + (after - before) / SHARE
                bar.update(done - bar.n)
                if not quiet:
                    bar.refresh()

            yield advance
        self._logged(f"{label}: {last[0]} of {total} {last[1]()}")

    def say(self, text: str) -> None:
        tqdm.write(text, file=sys.stderr)
        self._logged(text)

    def _logged(self, text: str) -> None:
        if self._log is not None:
            with self._log.open("a", encoding="utf-8") as file:
                file.write(f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S} {text.rstrip()}\n")


def print_result(result: dict[str, Any], where: dict[str, str]) -> None:
    """The table at the end of a search, and where everything lies.

    Args:
        result: as `report.result.result` gives it.
        where: label -> path or address.
    """
    console = _console()
    names = [name for name in COMPARED if name not in ("full", "uniform")]
    overlap = ", which the search saw" if result["allow_overlap"] else ""
    table = Table(
        title=f"{result['study']}: {result['metric']} ({result['protocol']}) on the test examples{overlap}, in points"
    )
    for heading in ("mean budget", "full", "uniform", *names):
        table.add_column(heading, justify="right")
    table.add_column("gain of refined [95 %]", justify="right")
    table.add_column("cache ratio", justify="right")
    for budget in sorted({row["budget"] for row in result["rows"]}):
        rows = {row["allocation"]: row for row in result["rows"] if row["budget"] == budget}
        refined = rows["refined"]
        ratio = refined["cache_ratio"]
        table.add_row(
            str(budget),
            *(f"{100 * rows[name]['score']:.1f}" for name in ("full", "uniform", *names)),
            gain_text(refined["gain"], refined["interval"]),
            "-" if ratio is None else f"{ratio:.1f}x",
        )
    console.print(table)
    winner = result["winner"]
    console.print(f"winner (mean {winner['mean_budget']:.0f}): {winner['budgets']}", soft_wrap=True)
    for label, place in where.items():
        console.print(f"{label}: {place}", soft_wrap=True)


def print_generations(report: dict[str, Any]) -> None:
    """Generated texts side by side, with what each cost.

    Args:
        report: `plain` and `evicted` (one may be missing), each with `text`, `new_tokens`, `kv_bytes`,
            `prefill_seconds` and `tokens_per_second`; `prompt_tokens`; `budgets`.
    """
    mean = sum(report["budgets"]) / len(report["budgets"])
    titles = {"plain": "full cache", "evicted": f"mean budget {mean:.0f}"}
    shown = [name for name in titles if name in report]
    table = Table(title=f"prompt of {report['prompt_tokens']} tokens", show_lines=True)
    table.add_column("")
    for name in shown:
        table.add_column(titles[name], ratio=1)
    runs = [report[name] for name in shown]
    table.add_row("text", *(Text(_printable(run["text"])) for run in runs))
    table.add_row("tokens", *(str(run["new_tokens"]) for run in runs))
    table.add_row("prefill", *(f"{run['prefill_seconds']:.2f} s" for run in runs))
    table.add_row("tokens/s", *(_number(run["tokens_per_second"]) for run in runs))
    table.add_row("KV cache", *(_size(run["kv_bytes"]) for run in runs))
    _console().print(table)


def print_plan(report: dict[str, Any]) -> None:
    """What `mosaic plan` found, a line each."""
    prompts = f"{report['batch']} x {report['context']} tokens"
    shape = f"{len(report['layers'])} layers to evict, {report['kv_heads']} KV heads of {report['head_dim']}"
    shape += f", {len(report['windows'])} layers with a sliding window" if report["windows"] else ""
    print(f"{report['model']}: {shape}, {report['element_bytes']} bytes an element", file=sys.stderr)
    print(f"full cache, {prompts}: {_size(report['full_bytes'])}", file=sys.stderr)
    if "budget_bytes" in report:
        share = f"{100 * report['share']:.1f} % of it"
        print(f"mean budget {report['budget']}: {_size(report['budget_bytes'])}, {share}", file=sys.stderr)
    if "fitting_mean" in report:
        fits = f"mean budget {report['fitting_mean']:.1f} for {prompts}"
        fits += f"; full cache: batch {report['full_batch']}, or context {report['full_context']}"
        fits += f"; budget {report['budget']}: batch {report['budget_batch']}" if "budget_batch" in report else ""
        print(f"{_size(report['memory'])} hold {fits}", file=sys.stderr)
    if report.get("expected"):
        low, high = report["expected"]["interval"]
        score = report["expected"]["score"]
        print(f"expected score: {100 * score:.1f} [{100 * low:.1f}, {100 * high:.1f}]", file=sys.stderr)
    elif "expected" in report:
        print("expected score: unknown, this budget is outside those that were measured", file=sys.stderr)


def print_table(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """A table as it is."""
    table = Table(*headings)
    for row in cells:
        table.add_row(*map(Text, row))
    _console().print(table)


def print_tasks(rows: Sequence[dict[str, Any]]) -> None:
    """Every task of `mosaic tasks`, and below the table what is missing."""
    cells = [
        [
            row["task"],
            row["category"] or "",
            row["metric"] or "",
            str(row["new_tokens"] or ""),
            ""
            if row["missing"]
            else " / ".join("any" if count is None else str(count) for count in row["examples"].values()),
            "missing" if row["missing"] else "here",
        ]
        for row in rows
    ]
    print_table(
        ["task", "category", "metric", "new tokens", "examples: calibration / selection / test", "data"], cells
    )
    reasons = [f"{row['task']}: {row['missing']}" for row in rows if row["missing"]]
    for reason in reasons[:1]:
        _console().print(reason, soft_wrap=True)
    if len(reasons) > 1:
        _console().print(f"and {len(reasons) - 1} more tasks, see `missing` in the JSON")


def print_studies(rows: Sequence[dict[str, Any]]) -> None:
    """The searches of a database, see `report.studies.study_rows`."""
    cells = [
        [
            row["study"],
            row["stage"] or "",
            f"{row['done']}/{row['total']}" if row["total"] else str(row["done"]),
            str(row["running"]),
            "" if row["best_score"] is None else f"{100 * row['best_score']:.1f} at {row['best_budget']:.0f}",
            "" if row["seconds"] is None else _age(row["seconds"]),
        ]
        for row in rows
    ]
    print_table(["study", "stage", "trials", "running", "best score", "age"], cells)


def print_bench(rows: list[dict[str, Any]]) -> None:
    """Times and bytes of `mosaic bench`: one line for each prompt length, batch and allocation."""
    table = Table()
    for heading in ("prompt", "batch", "allocation", "mean budget", "prefill", "scoring", "tokens/s", "KV cache"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            str(row["prompt_tokens"]),
            str(row["batch"]),
            row["allocation"],
            f"{row['mean_budget']:.0f}",
            f"{row['prefill_seconds']:.3f} s",
            f"{100 * row['scoring_seconds'] / row['prefill_seconds']:.1f} %",
            _number(row["tokens_per_second"]),
            _size(row["kv_bytes"]),
        )
    _console().print(table)


def _console() -> Console:
    return Console(file=sys.stderr, width=None if sys.stderr.isatty() else 110)


def _printable(text: str) -> str:
    """Generated text without what a terminal would take as a command."""
    return "".join(character if character.isprintable() or character == "\n" else "\ufffd" for character in text)


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 10 * 2**30 else f"{count / 2**20:.2f} MiB"
