"""What a study database holds, one row a search."""

from __future__ import annotations

import datetime
from collections import Counter, defaultdict
from contextlib import suppress
from typing import Any

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from mosaic_opt.objective import is_measured, measured
from mosaic_opt.study import latest_plan, load_study, parts_of, stage_of


def study_rows(storage: BaseStorage) -> list[dict[str, Any]]:
    """Every search of a database, the latest first.

    Returns:
        For each: `study`; `model`, `task`, `eviction` (names); `stage` (search, selection, refine, test or finished;
        None for a study of another program); `done` and `total` trials of stages 1 and 4; `running` trials of any;
        `best_score` of stage 1 on the calibration examples and `best_budget`, its mean; `seconds` since something was
        last begun or ended, None where nothing was.
    """
    names = sorted(optuna.get_all_study_names(storage))
    parts = {name: parts_of(storage, name, names) for name in names}
    derived = {part for own in parts.values() for part in own[1:]}
    rows = []
    for name in names:
        with suppress(KeyError):  # it was deleted meanwhile
            rows += [] if name in derived else [_row(storage, parts[name])]
    return sorted(rows, key=lambda row: (row["seconds"] is None, row["seconds"] or 0.0))


def _row(storage: BaseStorage, parts: list[str]) -> dict[str, Any]:
    main, *others = [load_study(storage, part) for part in parts]
    plan = latest_plan(main)
    config = plan.get("config", {})
    trials: dict[str | None, list[FrozenTrial]] = defaultdict(list)
    for study in (main, *others):
        trials[study.user_attrs.get("stage") if plan else None] += study.get_trials(deepcopy=False)
    every = [trial for own in trials.values() for trial in own]
    states = Counter(trial.state for stage in ("search", "refine", None) for trial in trials[stage])
    moments = [moment for trial in every for moment in (trial.datetime_start, trial.datetime_complete) if moment]
    scored = [trial for trial in trials["search"] if is_measured(trial)]
    best = max(scored, key=lambda trial: (measured(trial)["score"], -measured(trial)["mean_budget"]), default=None)
    return {
        "study": main.study_name,
        **{group: choice_name(config.get(group)) for group in ("model", "task", "eviction")},
        "stage": stage_of(main),
        "done": states[TrialState.COMPLETE] + states[TrialState.PRUNED],
        "total": config["trials"] + config["refine_trials"] * len(config["budgets"]) if config else None,
        "running": sum(trial.state == TrialState.RUNNING for trial in every),
        "best_score": best and measured(best)["score"],
        "best_budget": best and measured(best)["mean_budget"],
        "seconds": (datetime.datetime.now() - max(moments)).total_seconds() if moments else None,
    }


def choice_name(settings: Any) -> str | None:
    """The name of a choice (a model, task or method as a search's settings have it): its own, or its class's."""
    if not settings or not isinstance(settings, dict):
        return None
    return str(settings.get("name") or str(settings.get("_target_", "")).rpartition(".")[2])
