"""All measurements of a database as tidy data frames, for notebooks and scripts."""

from __future__ import annotations

from typing import Any

import pandas as pd
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial

from mosaic_opt.objective import is_measured, measured
from mosaic_opt.report.studies import study_rows
from mosaic_opt.report.view import View
from mosaic_opt.storage import open_storage
from mosaic_opt.study import load_study, parts_of

TRIAL_COLUMNS = {
    "study": "name of the search",
    "model": "name of the model",
    "task": "name of the task",
    "eviction": "name of the eviction method",
    "stage": "search (calibration examples), selection, refine (calibration examples) or test",
    "trial": "number of the trial in its study",
    "state": "COMPLETE, PRUNED (raced and given up), FAIL, RUNNING or WAITING",
    "origin": "where the allocation came from: ladder, lhs, surrogate, classifier, random, heuristic",
    "budgets": "layer budgets in tokens, bottom layer first (a list)",
    "mean_budget": "their mean, in tokens",
    "score": "mean score over the examples, 0 to 1",
    "log_likelihood": "mean log-likelihood of the reference answers",
    "kv_bytes": "bytes of the evicted cache of one batch's example",
    "seconds": "that the measurement took",
    "examples": "number of examples measured",
    "started": "when it began (local time)",
    "ended": "when it ended (local time)",
}
RESULT_COLUMNS = (
    "study", "model", "task", "eviction", "budget", "allocation", "mean_budget", "score", "selection_score", "gain",
    "gain_low", "gain_high", "cache_ratio", "kv_bytes", "budgets",
)  # fmt: skip


def load_trials(url: str) -> pd.DataFrame:
    """Every trial of every search of a database, one row each; the columns are TRIAL_COLUMNS.

    What was not measured (of trials that failed, were given up or run) is missing.

    Args:
        url: as in `storage.url`.

    Raises:
        ValueError: if it cannot be opened.
    """
    storage = open_storage(url)
    rows = []
    for search in _searches(storage):
        for part in parts_of(storage, search["study"]):
            study = load_study(storage, part)
            stage = study.user_attrs.get("stage")
            rows += [{**search, "stage": stage, **_row(trial)} for trial in study.get_trials(deepcopy=False)]
    return pd.DataFrame(rows, columns=list(TRIAL_COLUMNS))


def load_results(url: str) -> pd.DataFrame:
    """What every finished search of a database reports: one row for each budget and compared allocation.

    The columns are RESULT_COLUMNS: those of `load_trials`, and `gain` over uniform on the same test examples with its
    95 % interval, and the cache ratio. Scores are on the test examples.
    """
    storage = open_storage(url)
    rows = []
    for search in _searches(storage):
        result = View.of(storage, search["study"]).result
        for row in result["rows"] if result else ():
            low, high = row["interval"]
            rows.append({**search, **row, "gain_low": low, "gain_high": high})
    return pd.DataFrame(rows, columns=list(RESULT_COLUMNS))


def _searches(storage: BaseStorage) -> list[dict[str, Any]]:
    names = ("study", "model", "task", "eviction")
    return [{key: row[key] for key in names} for row in study_rows(storage) if row["stage"]]


def _row(trial: FrozenTrial) -> dict[str, Any]:
    row: dict[str, Any] = {
        "trial": trial.number,
        "state": trial.state.name,
        "origin": trial.user_attrs.get("origin"),
        "budgets": trial.user_attrs.get("budgets"),
        "started": trial.datetime_start,
        "ended": trial.datetime_complete,
    }
    if is_measured(trial):
        content = measured(trial)
        row |= {key: content[key] for key in ("mean_budget", "score", "log_likelihood", "kv_bytes", "seconds")}
        row["examples"] = len(content["example_scores"])
    return row
