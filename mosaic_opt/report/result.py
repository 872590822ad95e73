"""The result of a search, computed from the study database alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from mosaic_opt.allocation import Allocation
from mosaic_opt.objective import measured
from mosaic_opt.report.statistics import cache_ratio, paired_gain
from mosaic_opt.study import latest_plan, load_study, parts_of, plan_record

COMPARED = ("full", "uniform", "pyramid", "rescaled", "refined")


def result(storage: BaseStorage, name: str, key: str | None = None) -> dict[str, Any]:
    """Everything `result.json` holds, JSON-serialisable.

    Args:
        storage: study database.
        name: name of the stage-1 study.
        key: of the plan whose result it is; None: the one begun last.

    Raises:
        KeyError: if the study is not there.
        ValueError: if its search has not come to an end yet.
    """
    study = load_study(storage, name)
    plan = latest_plan(study) if key is None else plan_record(study, key)
    if not plan.get("finished"):
        raise ValueError(f"study {name!r} is not finished: run the same search again to go on")
    splits = {split: _by_budgets(load_study(storage, f"{name}-{split}")) for split in ("selection", "test")}
    winner, budgets = plan["config"]["winner"], plan["config"]["budgets"]
    chosen, won = plan["allocations"], plan["winners"][winner]
    rows = [row for budget in budgets for row in budget_rows(budget, chosen[str(budget)], **splits)]
    return {
        "study": name,
        "config": plan["config"],
        "fingerprint": study.user_attrs["fingerprint"],
        "versions": study.user_attrs["versions"],
        "about": study.user_attrs["about"],
        "examples": {split: len(ids) for split, ids in study.user_attrs["splits"].items()},
        "protocol": study.user_attrs["protocol"],
        "allow_overlap": study.user_attrs["allow_overlap"],
        "truncated": study.user_attrs["truncated"],
        "metric": study.user_attrs["metric"],
        "winner": {
            "rule": winner,
            "budgets": won,
            "mean_budget": sum(won) / len(won),
            "scores": {split: _score(trials.get(tuple(won))) for split, trials in splits.items()},
        },
        "selection_gain": {
            "winner": plan["winner_gain"],
            "refined": {str(budget): plan.get("refined_gain", {}).get(str(budget)) for budget in budgets},
        },
        "winners": plan["winners"],
        "rows": rows,
        "uniform_curve": _uniform_curve(splits["test"]),
        "trials": _trial_counts(storage, name),
        "seconds": study.user_attrs.get("seconds", {}),
    }


def budget_rows(
    budget: int,
    chosen: dict[str, list[int]],
    *,
    selection: dict[tuple[int, ...], FrozenTrial],
    test: dict[tuple[int, ...], FrozenTrial],
) -> list[dict[str, Any]]:
    """One row per compared allocation at one mean budget, all on the same test examples.

    The score on the selection examples stands beside it where it was measured (rescaled and refined always are).
    """
    curve = _uniform_curve(test)
    trials = {name: test[tuple(chosen[name])] for name in COMPARED}
    full = measured(trials["full"])["score"]
    baseline = measured(trials["uniform"])["example_scores"]
    rows = []
    for name, trial in trials.items():
        recorded = measured(trial)
        gain, low, high = paired_gain(recorded["example_scores"], baseline)
        _, *score_interval = paired_gain(recorded["example_scores"], [0.0] * len(baseline))
        rows.append(
            {
                "budget": budget,
                "allocation": name,
                "budgets": recorded["budgets"],
                "mean_budget": recorded["mean_budget"],
                "kv_bytes": recorded["kv_bytes"],
                "score": recorded["score"],
                "score_interval": score_interval,
                **{key: recorded[key] for key in ("task_scores",) if key in recorded},
                "selection_score": _score(selection.get(tuple(recorded["budgets"]))),
                "gain": gain,
                "interval": [low, high],
                "cache_ratio": cache_ratio(recorded["score"], recorded["mean_budget"], curve, full),
            }
        )
    return rows


def allocations_of(result: dict[str, Any]) -> dict[str, Allocation]:
    """What a search found, ready to be saved as allocation files: `winner`, `rescaled-BUDGET`, `refined-BUDGET`."""
    winner, counts = result["winner"], result["examples"]
    config, versions = result["config"], result["versions"]
    provenance = {"study": result["study"], "command": config.get("command"), "versions": versions}

    def made(name: str, budgets: list[int], scores: dict[str, dict[str, Any]]) -> Allocation:
        measured = {split: score | {"examples": counts[split]} for split, score in scores.items()}
        return Allocation(
            budgets, {**result["about"], "scores": measured, "provenance": {"allocation": name, **provenance}}
        )

    known = {split: {"score": score} for split, score in winner["scores"].items() if score is not None}
    found = {"winner": made("winner", winner["budgets"], known)}
    for row in result["rows"]:
        if row["allocation"] in ("rescaled", "refined"):
            scores = {"test": {"score": row["score"], "interval": row["score_interval"]}}
            if row["selection_score"] is not None:
                scores["selection"] = {"score": row["selection_score"]}
            name = f"{row['allocation']}-{row['budget']}"
            found[name] = made(name, row["budgets"], scores)
    return found


def _by_budgets(study: optuna.Study) -> dict[tuple[int, ...], FrozenTrial]:
    trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return {tuple(trial.user_attrs["budgets"]): trial for trial in trials}


def _uniform_curve(test: dict[tuple[int, ...], FrozenTrial]) -> list[tuple[float, float]]:
    return sorted(
        (float(budgets[0]), measured(trial)["score"]) for budgets, trial in test.items() if len(set(budgets)) == 1
    )


def _score(trial: FrozenTrial | None) -> float | None:
    return None if trial is None else measured(trial)["score"]


def _trial_counts(storage: BaseStorage, name: str) -> dict[str, dict[str, int]]:
    """Trials by state for every study of this search."""
    return {
        part: dict(Counter(trial.state.name for trial in load_study(storage, part).get_trials(deepcopy=False)))
        for part in parts_of(storage, name)
    }
