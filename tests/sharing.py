"""What several processes do together in the tests of sharing; importing this loads neither torch nor a model."""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace

import optuna
from optuna.trial import TrialState

from mosaic_opt.allocation import Allocation
from mosaic_opt.objective import LevelObjective
from mosaic_opt.samplers import MosaicSampler
from mosaic_opt.storage import open_storage
from mosaic_opt.study import Measured, completed, decided, open_study, run_trials

LEVELS = (8, 16, 32, 64)


def slow_measure(allocation, complete=False, seconds=0.02):
    """A measurement that takes its time; the first layers matter most."""
    time.sleep(seconds)
    score = sum(budget / 2**layer for layer, budget in enumerate(allocation.budgets)) / 1000
    return SimpleNamespace(
        scores=(score,), log_likelihoods=(score - 1,), score=score, log_likelihood=score - 1, tasks=("x",),
        mean_budget=allocation.mean, realised_mean=allocation.mean, kv_bytes=1, seconds=seconds, outputs=("",),
    )  # fmt: skip


def shared_search(url, total):
    """A worker's part: stage 1 of a small search, then measurements of ten allocations on another split."""
    storage = open_storage(url)
    objective = LevelObjective(levels=LEVELS, measure=slow_measure, layers=4)
    sampler = MosaicSampler(seed=0, decode=objective.decode, known_objective=objective.mean_budget)
    study = open_study(storage, "s", objective=objective, fingerprint={}, user_attrs={}, sampler=sampler)
    design = [("ladder", objective.encode([level] * 4)) for level in range(4)]
    run_trials(study, objective, total=total, design=design, after=lambda _: None)
    assert len(decided(study)) == total
    other = open_study(
        storage, "s-test", objective=Measured, fingerprint={}, user_attrs={}, sampler=optuna.samplers.RandomSampler()
    )
    measured = Measured(other, slow_measure, layers=4, cap=100)
    best = sorted(completed(study), key=lambda trial: trial.number)[:10]
    measured([Allocation(trial.user_attrs["budgets"]) for trial in best])


def check(url, total):
    """Exact totals, nothing running or waiting, no configuration twice but for those done again."""
    storage = open_storage(url)
    for name, wanted in (("s", total), ("s-test", 10)):
        study = optuna.load_study(study_name=name, storage=storage)
        states = Counter(trial.state for trial in study.trials)
        assert states[TrialState.COMPLETE] == wanted
        assert not states[TrialState.RUNNING]
        assert not states[TrialState.WAITING]
        budgets = [tuple(trial.user_attrs["budgets"]) for trial in completed(study)]
        assert len(set(budgets)) == wanted
        retried = {trial.user_attrs.get("retry_of") for trial in study.trials}
        for trial in study.trials:
            if trial.state == TrialState.FAIL:
                assert trial.user_attrs["interrupted"] is True
                assert trial.number in retried or not trial.params
