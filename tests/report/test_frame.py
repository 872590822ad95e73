import pytest

from mosaic_opt.objective import measured
from mosaic_opt.report.frame import RESULT_COLUMNS, TRIAL_COLUMNS, load_results, load_trials
from mosaic_opt.report.view import View
from mosaic_opt.storage import open_storage
from tests.searches import search


def test_all_trials_and_results_of_a_database(tmp_path):
    url = f"sqlite:///{tmp_path}/s.db"
    assert list(load_trials(url).columns) == list(TRIAL_COLUMNS)
    assert load_trials(url).empty
    storage = open_storage(url)
    search(storage, "whole")
    search(storage, "half", stop=9, method="H2O")
    storage.create_new_study([1], "of another program")
    trials, results = load_trials(url), load_results(url)
    view = View.of(storage, "whole")
    assert list(trials.columns) == list(TRIAL_COLUMNS)
    assert set(trials["study"]) == {"whole", "half"}
    assert dict(trials.groupby("study")["eviction"].first()) == {"whole": "SnapKV", "half": "H2O"}
    assert len(trials[trials["study"] == "whole"]) == sum(sum(counts.values()) for counts in view.states.values())
    own = trials[(trials["study"] == "whole") & (trials["stage"] == "search")].set_index("trial")
    for trial in view.trials:
        assert own.loc[trial.number, "score"] == measured(trial)["score"]
        assert own.loc[trial.number, "budgets"] == trial.user_attrs["budgets"]
        assert own.loc[trial.number, "examples"] == 8
    assert list(results.columns) == list(RESULT_COLUMNS)
    assert len(results) == 2 * 5
    row = results[(results["budget"] == 48) & (results["allocation"] == "refined")].iloc[0]
    (stored,) = [r for r in view.result["rows"] if r["budget"] == 48 and r["allocation"] == "refined"]
    assert row["gain"] == pytest.approx(stored["score"] - results.iloc[1]["score"])
    assert [row["gain_low"], row["gain_high"]] == stored["interval"]
