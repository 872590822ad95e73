"""Trials shared between processes: exact totals, no configuration twice, the trials of the dead done again."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections import Counter
from types import SimpleNamespace

import optuna
import psutil
import pytest
from optuna.distributions import IntDistribution
from optuna.trial import TrialState

from mosaic_opt import claims
from mosaic_opt.claims import Claims, this_process, waiting_trial
from mosaic_opt.objective import LevelObjective
from mosaic_opt.storage import LockLost, open_storage
from mosaic_opt.study import begin_plan, completed, decided, enqueue_design, plan_record, record_plan
from tests.sharing import check, shared_search

SPACE = {"a": IntDistribution(0, 9), "b": IntDistribution(0, 9)}


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/s.db"


def study_of(url, name="s"):
    storage = open_storage(url)
    with storage.exclusive(name):
        return optuna.create_study(
            study_name=name, storage=storage, load_if_exists=True, sampler=optuna.samplers.RandomSampler(seed=0)
        )


def up_to(total):
    def need(trials):
        states = Counter(trial.state for trial in trials)
        if states[TrialState.COMPLETE] >= total:
            return "done"
        return "begin" if states[TrialState.COMPLETE] + states[TrialState.RUNNING] < total else "wait"

    return need


def next_point(trials):
    number = sum(not trial.user_attrs.get("interrupted") for trial in trials)
    return waiting_trial(SPACE, {"a": number // 10, "b": number % 10}, origin="x")


def test_all_parameters_are_there_and_the_worker_is_named(url):
    study = study_of(url)
    seen = []
    Claims(study, SPACE).work(lambda t: seen.append(t.params) or 1.0, need=up_to(3), fresh=next_point)
    assert seen == [{"a": 0, "b": number} for number in range(3)]
    assert [trial.user_attrs["worker"][:3] for trial in study.trials] == [list(this_process())] * 3
    assert len({tuple(trial.user_attrs["worker"]) for trial in study.trials}) == 3


def test_a_sampler_fills_what_is_left_open(url):
    study = study_of(url)
    Claims(study, SPACE).work(lambda t: t.params["a"], need=up_to(2), fresh=lambda trials: waiting_trial(SPACE))
    assert all(trial.params.keys() == SPACE.keys() for trial in study.trials)


def test_waiting_trials_come_first(url):
    study = study_of(url)
    study.add_trial(waiting_trial(SPACE, {"a": 5, "b": 6}))
    study.enqueue_trial({"a": 7, "b": 8})
    Claims(study, SPACE).work(lambda t: 1.0, need=up_to(3), fresh=next_point)
    assert [tuple(trial.params.values()) for trial in study.trials] == [(5, 6), (7, 8), (0, 2)]


def test_an_interrupted_trial_is_done_again_once(url):
    study = study_of(url)

    def interrupted(trial):
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            Claims(study, SPACE).work(interrupted, need=up_to(1), fresh=next_point)
    Claims(study, SPACE).work(lambda t: 1.0, need=up_to(1), fresh=next_point)
    assert [trial.state for trial in study.trials] == [TrialState.FAIL, TrialState.FAIL, TrialState.COMPLETE]
    assert [trial.user_attrs.get("retry_of") for trial in study.trials] == [None, 0, 1]
    assert [trial.user_attrs["origin"] for trial in study.trials] == ["x"] * 3
    assert len({tuple(trial.params.values()) for trial in study.trials}) == 1


@pytest.mark.parametrize("worker", [None, [this_process()[0], 2**22 + 1, 5.0, 1], [this_process()[0], 1, 5.0, 1]])
def test_the_dead_of_this_machine_are_known_at_once(url, worker):
    """No name, no such process, or another process that has the number now."""
    study = study_of(url)
    study.add_trial(waiting_trial(SPACE, {"a": 1, "b": 1}))
    trial = study.ask(SPACE)
    if worker:
        trial.set_user_attr("worker", worker)
    trial.set_constraint("c", 9.0)
    Claims(study, SPACE).recover()
    Claims(study, SPACE).recover()
    dead, again = study.trials
    assert (dead.state, again.state) == (TrialState.FAIL, TrialState.WAITING)
    assert dead.user_attrs["interrupted"] is True
    assert again.params == {"a": 1, "b": 1}
    assert again.constraints == {}  # it will have its own


@pytest.fixture
def clock(monkeypatch):
    """The clock that claims read: it moves when a test says so."""
    hands = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(claims, "time", SimpleNamespace(monotonic=lambda: hands.now, sleep=time.sleep))
    return hands


def test_a_trial_of_another_machine_is_left_alone_while_it_beats(url, clock):
    study = study_of(url)
    study.add_trial(waiting_trial(SPACE, {"a": 1, "b": 1}))
    trial = study.ask(SPACE)
    trial.set_user_attr("worker", ["elsewhere", 1, 5.0, 1])
    own = Claims(study, SPACE, grace=3)
    for beat in range(4):
        own.recover()
        clock.now += 2
        trial.set_user_attr("beat", beat)
    assert study.trials[0].state == TrialState.RUNNING
    own.recover()
    clock.now += 4
    own.recover()
    assert study.trials[0].state == TrialState.FAIL
    assert study.trials[1].state == TrialState.WAITING


def test_nobody_is_dead_because_the_database_was_away(url, clock):
    study = study_of(url)
    study.add_trial(waiting_trial(SPACE, {"a": 1, "b": 1}))
    study.ask(SPACE).set_user_attr("worker", ["elsewhere", 1, 5.0, 1])
    own = Claims(study, SPACE, grace=3)
    own.recover()
    clock.now += 4
    study._storage.back = clock.now
    own.recover()
    assert study.trials[0].state == TrialState.RUNNING
    clock.now += 4
    own.recover()
    assert study.trials[0].state == TrialState.FAIL


@pytest.mark.skipif(not psutil.LINUX, reason="reads /proc")
def test_the_start_of_a_process_does_not_depend_on_the_clock():
    ticks, own = os.sysconf("SC_CLK_TCK"), psutil.Process()
    assert this_process()[2] / ticks + psutil.boot_time() == pytest.approx(own.create_time(), abs=1.5)
    assert claims._started(2**22 + 1) == 0.0


def test_a_running_trial_shows_that_it_lives(url, monkeypatch):
    monkeypatch.setattr(claims, "BEAT_SECONDS", 0.05)
    study = study_of(url)

    def until_it_beat_twice(trial):
        deadline = time.monotonic() + 60
        while study.trials[0].user_attrs.get("beat", 0) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return 1.0

    Claims(study, SPACE).work(until_it_beat_twice, need=up_to(1), fresh=next_point)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE]


def test_one_that_was_taken_for_dead_is_not_counted(url):
    study = study_of(url)

    def slow(trial):
        if trial.number == 0:  # another process gives up on this one
            other = study_of(url)
            Claims(other, SPACE)._hand_on(other.trials[0])
            trial.set_user_attr("late", True)
        return 1.0

    Claims(study, SPACE).work(slow, need=up_to(1), fresh=next_point)
    assert [trial.state for trial in study.trials] == [TrialState.FAIL, TrialState.COMPLETE]


def test_a_lost_lock_gives_the_trial_back(url, monkeypatch):
    study = study_of(url)
    storage, lost = study._storage, []
    plain = storage.exclusive

    class Losing:
        def __init__(self, name):
            self.inner = plain(name)

        def __enter__(self):
            return self.inner.__enter__()

        def __exit__(self, *error):
            self.inner.__exit__(*error)
            if not lost:
                lost.append(True)
                raise LockLost("x")

    monkeypatch.setattr(storage, "exclusive", Losing)
    Claims(study, SPACE).work(lambda t: 1.0, need=up_to(1), fresh=next_point)
    assert [trial.state for trial in study.trials] == [TrialState.FAIL, TrialState.COMPLETE]
    assert study.trials[0].params == study.trials[1].params


def test_what_may_be_done_twice_goes_on_after_a_lost_lock(url, monkeypatch):
    study = study_of(url)

    @contextlib.contextmanager
    def losing(name):
        yield
        raise LockLost("x")

    monkeypatch.setattr(study._storage, "exclusive", losing)
    begin_plan(study, "k", {"a": 1})
    record_plan(study, "k", refined_gain={"64": 1}, finished=True)
    record_plan(study, "k", refined_gain={"96": 2})
    objective = LevelObjective(levels=(8, 16), measure=None, layers=2)
    enqueue_design(study, objective, [("x", objective.encode([0, 1]))])
    assert plan_record(study, "k") == {"config": {"a": 1}, "refined_gain": {"64": 1, "96": 2}, "finished": True}
    assert [trial.user_attrs["budgets"] for trial in study.trials] == [[8, 16]]


def test_a_trial_fails_with_its_reason_and_others_go_on(url):
    study = study_of(url)

    def evaluate(trial):
        if trial.number in (0, 1, 3):
            raise ValueError(f"example {trial.number} is odd")
        return 1.0

    Claims(study, SPACE).work(evaluate, need=up_to(2), fresh=next_point)
    assert [trial.user_attrs.get("error") for trial in study.trials] == [
        "example 0 is odd", "example 1 is odd", None, "example 3 is odd", None,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no"):
        Claims(study, SPACE).work(lambda t: (_ for _ in ()).throw(ValueError("no")), need=up_to(9), fresh=next_point)


def test_a_full_disk_is_no_fault_of_the_trial(url):
    study = study_of(url)

    def full(trial):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        Claims(study, SPACE).work(full, need=up_to(1), fresh=next_point)
    states = [trial.state for trial in study.trials]
    assert states == [TrialState.FAIL, TrialState.WAITING]  # others can go on at once
    Claims(study, SPACE).work(lambda t: 1.0, need=up_to(1), fresh=next_point)
    assert [trial.user_attrs.get("retry_of") for trial in completed(study)] == [0]


@pytest.mark.parametrize("kind", ["sqlite", "postgresql", pytest.param("journal", marks=pytest.mark.slow)])
def test_workers_that_are_killed(kind, tmp_path, request):
    """Three workers, three of them killed at random moments and replaced."""
    if kind == "postgresql":
        url = request.getfixturevalue("postgres").database("killed-workers")
    else:
        url = f"{kind}:///{tmp_path}/s.db"
    total = 20
    context = multiprocessing.get_context("spawn")

    def started():
        process = context.Process(target=shared_search, args=(url, total))
        process.start()
        return process

    workers = [started() for _ in range(3)]
    moments = iter((3, 9, 15))
    moment = next(moments)
    storage = open_storage(url)
    while any(process.is_alive() for process in workers):
        names = optuna.get_all_study_names(storage)
        done = len(decided(optuna.load_study(study_name="s", storage=storage))) if "s" in names else 0
        if moment is not None and done >= moment:
            victim = workers.pop(0)
            os.kill(victim.pid, signal.SIGKILL)
            victim.join()
            workers.append(started())
            moment = next(moments, None)
        time.sleep(0.2)
    assert [process.exitcode for process in workers] == [0, 0, 0]
    check(url, total)


def test_values_that_are_no_numbers_fail_and_end_the_work(url):
    study = study_of(url)
    with pytest.raises(ValueError, match="values must be numbers; got nan"):
        Claims(study, SPACE).work(lambda t: float("nan"), need=up_to(1), fresh=next_point)
    assert len(study.trials) == claims.FAILURES


def test_a_trial_that_ended_meanwhile_is_not_handed_on(url):
    study = study_of(url)
    study.add_trial(waiting_trial(SPACE, {"a": 1, "b": 1}))
    trial = study.ask(SPACE)
    seen = study.trials[0]
    study.tell(trial, 1.0)
    Claims(study, SPACE)._hand_on(seen)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE]
