"""Several workers on one study: nothing is proposed twice, nor close to what another one evaluates."""

import contextlib
import multiprocessing
import sqlite3
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import optuna
import pytest
from optuna.distributions import IntDistribution
from optuna.trial import TrialState, create_trial

from mosaic_opt.samplers import MosaicSampler, mosaic
from mosaic_opt.samplers.mosaic import other_trials
from mosaic_opt.samplers.proposal import NEAR
from tests.samplers import layers

SPACE = layers.space(30)
WORKERS = 4
barrier = None  # of the worker processes


def receive(shared):
    global barrier
    barrier = shared


def load(path, **arguments):
    return optuna.load_study(
        study_name="s", storage=layers.storage(path), sampler=layers.sampler(SPACE, n_startup_trials=10, **arguments)
    )


def create(path):
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
    return optuna.create_study(study_name="s", storage=layers.storage(path), directions=["minimize", "maximize"])


def objective(trial):
    parameters = {name: trial.suggest_int(name, d.low, d.high) for name, d in SPACE.items()}
    time.sleep(0.003)
    trial.set_user_attr("likelihood", layers.likelihood(parameters))
    return layers.mean_budget(parameters), layers.score(parameters)


def work(path, count):
    study = load(path)
    barrier.wait(60)
    study.optimize(objective, n_trials=count)


def ask_together(path, arguments):
    study = load(path, **arguments)
    barrier.wait(60)
    return study.ask().relative_params


@pytest.fixture(scope="module")
def pool():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sqlalchemy", "mosaic_opt.samplers"])
    shared = context.Barrier(WORKERS)
    with ProcessPoolExecutor(WORKERS, mp_context=context, initializer=receive, initargs=(shared,)) as executor:
        yield executor


def together(pool, function, *arguments):
    """What all workers return that begin at the same moment."""
    return [f.result(120) for f in [pool.submit(function, *arguments) for _ in range(WORKERS)]]


@pytest.mark.parametrize("count", [8, pytest.param(50, marks=pytest.mark.slow)])
def test_four_processes_on_one_database_never_evaluate_a_configuration_twice(pool, tmp_path, count):
    study = create(tmp_path / "s.db")
    together(pool, work, tmp_path / "s.db", count)
    trials = study.trials
    assert [t.state for t in trials] == [TrialState.COMPLETE] * WORKERS * count
    assert len({tuple(t.params.values()) for t in trials}) == WORKERS * count
    assert {t.user_attrs["origin"] for t in trials} >= {"lhs", "surrogate", "classifier"}


def test_workers_that_ask_at_the_same_moment_are_given_points_that_are_apart(pool, tmp_path):
    """Without the claim, only parameters that are set would tell a worker what the others evaluate."""
    study = create(tmp_path / "s.db")
    layers.fill(study, SPACE, 40)
    proposals = []
    for _ in range(5):
        proposals += together(pool, ask_together, tmp_path / "s.db", {"exploration": 0.0, "structured": 1.0})
    assert len(proposals) == 20
    assert layers.apart(SPACE, proposals) >= NEAR


def test_workers_in_lockstep_part(monkeypatch):
    """Two threads that always claim before the other one looks, and see the same: one of them must give way."""
    step = threading.Barrier(2)

    def in_step(*arguments):
        with contextlib.suppress(threading.BrokenBarrierError):
            step.wait(5)
        return other_trials(*arguments)

    def ask(study):
        parameters = study.ask().relative_params
        step.abort()
        return parameters

    monkeypatch.setattr(mosaic, "other_trials", in_step)
    with ThreadPoolExecutor(2) as executor:
        for seed in range(6):
            study = layers.study(SPACE, seed=seed, exploration=0.0, structured=1.0)
            layers.fill(study, SPACE, 40)
            step.reset()
            proposals = [f.result(60) for f in [executor.submit(ask, study) for _ in range(2)]]
            assert layers.apart(SPACE, proposals) >= NEAR, seed


@pytest.mark.parametrize("state", [TrialState.RUNNING, TrialState.WAITING])
def test_pending_trials_count_as_believed(state):
    """The uniform allocations leave one wide gap: pending trials split it, each as if it had been evaluated."""
    study = layers.study(SPACE, exploration=0.0, structured=1.0)
    layers.fill(study, SPACE, 40)
    study.add_trials(layers.finished(dict.fromkeys(SPACE, level), SPACE) for level in (0, 6))
    proposals = []
    for _ in range(4):
        trial = study._storage.get_trial(study._storage.create_new_trial(study._study_id))
        proposals.append(study.sampler.sample_relative(study, trial, SPACE))
        study._storage.set_trial_user_attr(trial._trial_id, "interrupted", True)
        study.add_trial(pending(proposals[-1], state))
    budgets = np.sort([layers.mean_budget(p) for p in proposals])
    assert np.diff(budgets).min() > 40


@pytest.mark.parametrize("structured", [0.0, 0.75, 1.0])
def test_eight_asked_and_none_told_are_apart(structured):
    study = layers.study(SPACE, seed=3, structured=structured)
    layers.fill(study, SPACE, 40)
    proposals = [study.ask(SPACE).params for _ in range(8)]
    assert layers.apart(SPACE, proposals) >= NEAR
    assert len({layers.mean_budget(p) for p in proposals}) >= 6


def test_what_an_enqueued_trial_was_given_counts_before_its_claim():
    """A worker has taken the enqueued trial, but not set its parameters: they will not be what it claimed."""
    space = {"a": IntDistribution(0, 2)}
    for given in range(3):
        study = optuna.create_study(sampler=MosaicSampler(seed=0, search_space=space))
        study.enqueue_trial({"a": given})
        assert study.ask().relative_params.keys() == {"a"}
        assert {study.ask(space).params["a"] for _ in range(2)} == {0, 1, 2} - {given}


def test_order_of_pending_trials_does_not_matter():
    waiting = [pending(p, TrialState.WAITING) for p in layers.configurations(SPACE, 12, 5)]
    for seed in range(4):
        proposals = []
        for order in (waiting, waiting[::-1]):
            study = layers.study(SPACE, seed=seed, exploration=0.0, structured=0.0)
            layers.fill(study, SPACE, 60)
            study.add_trials(order)
            trial = study._storage.get_trial(study._storage.create_new_trial(study._study_id))
            proposals.append(study.sampler.sample_relative(study, trial, SPACE))
        assert proposals[0] == proposals[1]


def pending(parameters, state):
    """A trial that runs, or waits with the parameters it was enqueued with."""
    if state == TrialState.WAITING:
        return create_trial(state=state, system_attrs={"fixed_params": parameters})
    return create_trial(state=state, params=parameters, distributions=SPACE)
