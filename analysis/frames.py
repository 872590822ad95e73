"""A worked example: a database's trials and results as data frames.

    python -m analysis.frames [URL]

Prints, for every search, how the best score rose with the trials, and which allocation won at each budget.
"""

from __future__ import annotations

import sys

from mosaic_opt.report.frame import load_results, load_trials


def main(url: str) -> None:
    trials = load_trials(url)
    found = trials[(trials["stage"] == "search") & (trials["state"] == "COMPLETE")].copy()
    found["best so far"] = found.groupby("study")["score"].cummax()
    print(found.groupby("study")["best so far"].describe()[["count", "50%", "max"]])
    print(found.groupby(["study", "origin"])["score"].agg(["count", "mean", "max"]).round(3))

    results = load_results(url)
    learned = results[results["allocation"].isin(["rescaled", "refined"])]
    print(learned.pivot_table(index=["study", "budget"], columns="allocation", values="gain").round(3))
    certain = learned[learned["gain_low"] > 0]
    print(f"{len(certain)} of {len(learned)} gains over uniform have an interval that excludes zero")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "sqlite:///storage/mosaic.db")
