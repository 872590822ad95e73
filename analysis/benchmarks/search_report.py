"""Tables and a figure from the rows that search.py wrote.

    python analysis/benchmarks/search_report.py [--results analysis/results/search.jsonl]

Writes search.md (hypervolume of every problem and proposer, and how often MosaicSampler wins, run by run) and
search.png (hypervolume of the observed values against trials: mean over the runs, band of one standard error) beside
the rows.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

OURS = "mosaic"
CHECKS = (50, 100, 200)
VARIANTS = ("mosaic", "mosaic_score", "classifier")  # ours, all the same class; anything else is a rival

Row = dict[str, Any]


def grouped(rows: Iterable[Row], *keys: str) -> dict[tuple[str, ...], list[Row]]:
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[key] for key in keys)].append(row)
    return dict(sorted(groups.items()))


def kind(row: Row) -> str:
    """The problem; synthetic ones differ by their seed only and are one kind."""
    problem: str = row["problem"]
    return problem.split()[0] if problem.startswith(("additive", "conjunctive")) else problem


def volumes_table(rows: list[Row]) -> list[str]:
    lines = [f"| problem | proposer | runs | {' | '.join(map(str, CHECKS))} | s a proposal |", "| --- " * 7 + "|"]
    for (problem, sampler), several in grouped(rows, "problem", "sampler").items():
        cells = []
        for check in CHECKS:
            found = [row["hypervolume"][str(check)] for row in several if str(check) in row["hypervolume"]]
            cells.append(f"{statistics.mean(found):.4f}" if found else "")
        seconds = statistics.median(row["proposal_seconds"] for row in several)
        lines.append(f"| {problem} | {sampler} | {len(several)} | {' | '.join(cells)} | {seconds:.3f} |")
    return lines


def wins_table(rows: list[Row]) -> list[str]:
    """MosaicSampler against each rival on the same problem and seed, both after 200 trials."""
    runs = {(row["problem"], row["seed"], row["sampler"]): row["hypervolume"] for row in rows}
    ours = {key[:2]: found for key, found in runs.items() if key[2] == OURS}
    lines = ["| rival | runs | better | equal | worse | mean, ours at 100 | ours at 200 | rival at 200 |"]
    lines.append("| --- " * 8 + "|")
    for rival in sorted({key[2] for key in runs} - set(VARIANTS)):
        shared = [key for key in ours if (*key, rival) in runs]
        if not shared:
            continue
        theirs = np.array([runs[(*key, rival)]["200"] for key in shared])
        late, early = (np.array([ours[key][check] for key in shared]) for check in ("200", "100"))
        counts = [int((late > theirs).sum()), int((late == theirs).sum()), int((late < theirs).sum())]
        means = [f"{values.mean():.4f}" for values in (early, late, theirs)]
        lines.append(f"| {rival} | {len(shared)} | {' | '.join(map(str, counts))} | {' | '.join(means)} |")
    return lines


def figure(rows: list[Row], path: Path) -> None:
    import matplotlib  # here, since the tables do without it

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = grouped(({**row, "kind": kind(row)} for row in rows), "kind")
    colours = {sampler: f"C{number}" for number, (sampler,) in enumerate(grouped(rows, "sampler"))}
    shown: dict[str, Any] = {}
    columns = min(3, len(panels))
    rows_of_panels = -(-len(panels) // columns)
    _, grid = plt.subplots(rows_of_panels, columns, figsize=(4.2 * columns, 3.6 * rows_of_panels), squeeze=False)
    axes = grid.ravel()
    for unused in axes[len(panels) :]:
        unused.remove()
    for axis, ((name,), found) in zip(axes, panels.items(), strict=False):
        for (sampler,), several in grouped(found, "sampler").items():
            counts = sorted({int(count) for row in several for count in row["observed"]})
            values = np.array([[row["observed"][str(count)] for count in counts] for row in several])
            mean, error = values.mean(axis=0), values.std(axis=0) / np.sqrt(len(values))
            look = {"color": colours[sampler], "linewidth": 2.2 if sampler == OURS else 1.2}
            (shown[sampler],) = axis.plot(counts, mean, **look)
            axis.fill_between(counts, mean - error, mean + error, color=colours[sampler], alpha=0.15, linewidth=0)
        axis.set(title=name, xlabel="trials", ylabel="hypervolume (observed)")
    axes[len(panels) - 1].legend(list(shown.values()), list(shown), fontsize=8, loc="lower right")
    plt.tight_layout()
    plt.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=Path("analysis/results/search.jsonl"))
    results: Path = parser.parse_args().results
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    real = [row for row in rows if row["problem"].startswith("niah")]
    parts = ["# Proposers at equal cost", "", f"`python analysis/benchmarks/search_report.py --results {results}`"]
    for title, some in (("Real evaluator", real), ("Synthetic problems", [row for row in rows if row not in real])):
        if some:
            parts += ["", f"## {title}", "", *wins_table(some), "", *volumes_table(some)]
    results.with_suffix(".md").write_text("\n".join(parts) + "\n")
    figure(rows, results.with_suffix(".png"))
    print("\n".join(parts))


if __name__ == "__main__":
    main()
