import json

import optuna
import pytest
from optuna.distributions import IntDistribution
from optuna.trial import create_trial

from mosaic_opt.report.dashboard import draw
from mosaic_opt.report.frame import load_results, load_trials
from mosaic_opt.report.page import PAGE, write_report
from mosaic_opt.report.studies import study_rows
from mosaic_opt.report.view import View
from mosaic_opt.storage import open_storage
from mosaic_opt.study import stage_of
from tests.searches import Bench, search


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/s.db"


def imported(**attributes):
    return create_trial(params={}, distributions={}, values=[50.0, 0.5], user_attrs=attributes)


@pytest.mark.parametrize("layers", [1, 40])
def test_what_is_imported_or_infinite_breaks_no_reader(url, layers, tmp_path):
    storage = open_storage(url)
    study = search(storage, "s", bench=Bench(layers=layers), stop=6).study
    measurement = {"score": 0.5, "mean_budget": 32.0, "example_scores": [0.5], "kv_bytes": 1, "seconds": 1.0}
    budgets = {"budgets": [32] * layers}
    for trial in (
        imported(),
        imported(**budgets),
        imported(**budgets, log_likelihood=float("-inf"), measurement=measurement),
        create_trial(params={"x": 1}, distributions={"x": IntDistribution(0, 1)}, values=[1.0, float("inf")]),
    ):
        study.add_trial(trial)
    view = View.of(storage, "s")
    assert len(view.trials) == 5 + 1  # of the imported ones only the third was measured
    draw(storage, "s")
    write_report([view], "x", tmp_path / "r")
    assert len(load_trials(url)) == len(study.trials)
    (row,) = study_rows(storage)
    assert (row["stage"], row["study"]) == ("search", "s")


def test_the_stage_is_that_of_the_plan_begun_last(url):
    storage = open_storage(url)
    made = search(storage, "s", budgets=(48,))
    assert stage_of(made.study) == View.of(storage, "s").stage == "finished"
    search(storage, "s", budgets=(48,), trials=18, stop=1)
    assert stage_of(made.study) == View.of(storage, "s").stage == study_rows(storage)[0]["stage"] == "search"
    search(storage, "s", budgets=(48, 96), trials=18, stop=4)
    assert stage_of(made.study) == "refine"
    assert View.of(storage, "s").result is None


@pytest.mark.parametrize(
    "plan", [{"x": 1}, {"finished": True}, {"config": [1]}, {"config": {"trials": 1}}, {"config": "x"}, 3]
)
def test_look_alikes_are_no_searches_and_harm_none(url, plan):
    storage = open_storage(url)
    search(storage, "own", stop=2)
    other = optuna.create_study(study_name="other", storage=storage, directions=["minimize", "maximize"])
    other.set_user_attr("plan", "k")
    other.set_user_attr("plan:k", plan)
    with pytest.raises(ValueError, match="'other'"):
        View.of(storage, "other")
    assert {row["study"]: row["stage"] for row in study_rows(storage)} == {"own": "search", "other": None}
    assert set(load_trials(url)["study"]) == {"own"}
    assert load_results(url).empty


def test_a_search_that_is_not_whole_is_named(url):
    storage = open_storage(url)
    search(storage, "s", budgets=(48,))
    optuna.delete_study(study_name="s-test", storage=storage)
    with pytest.raises(ValueError, match="study 's' is not there or not whole"):
        View.of(storage, "s")
    with pytest.raises(ValueError, match="study 'none' is not there"):
        View.of(storage, "none")


def test_a_report_that_fails_leaves_the_earlier_one(url, tmp_path, monkeypatch):
    storage = open_storage(url)
    search(storage, "s", stop=6)
    view = View.of(storage, "s")
    view.plan["config"]["command"] = "mosaic \udcff"
    page = write_report([view], "one", tmp_path / "r")
    assert page == tmp_path / "r" / PAGE
    (tmp_path / "r" / "mine.txt").write_text("kept")
    before = {path: path.read_bytes() for path in (tmp_path / "r").rglob("*") if path.is_file()}
    monkeypatch.setattr(json, "dumps", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_report([view], "two", tmp_path / "r")
    assert {path: path.read_bytes() for path in (tmp_path / "r").rglob("*") if path.is_file()} == before
