import optuna
import pytest
from optuna.trial import TrialState

from mosaic_opt.allocation import Allocation
from mosaic_opt.claims import Claims, this_process
from mosaic_opt.evaluator import Measurement
from mosaic_opt.objective import LevelObjective, WeightObjective, measured, parameter_names
from mosaic_opt.storage import open_storage
from mosaic_opt.study import (
    FingerprintMismatch,
    Measured,
    Plan,
    check_fingerprint,
    completed,
    copy_search,
    delete_search,
    front_of,
    load_study,
    open_study,
    parts_of,
    run_trials,
    stored_study,
)

NUMBERS = {
    "levels": [32, 64], "budgets": [40], "ladder": [40], "trials": 5, "refine_trials": 0, "calibration": 1,
    "selection": 1, "test": 1, "winner": "shape", "seed": 0,
}  # fmt: skip


def measure(allocation: Allocation, complete: bool = False) -> Measurement:
    score = sum(allocation.budgets) / (len(allocation) * 1000)
    return Measurement((score,), (-1.0,), ("text",), allocation.mean, allocation.mean, 100, 0.1)


@pytest.fixture
def storage(tmp_path):
    return open_storage(f"sqlite:///{tmp_path}/deep/er/study.db")


@pytest.fixture
def objective():
    return LevelObjective(levels=(8, 16, 32), measure=measure, layers=3)


def opened(storage, objective, name="s", **fingerprint):
    return open_study(
        storage, name, objective=objective, fingerprint={"levels": [8, 16], **fingerprint},
        user_attrs={"stage": "search"}, sampler=optuna.samplers.RandomSampler(seed=0),
    )  # fmt: skip


def test_trials_are_a_total_and_attributes_are_recorded(storage, objective):
    study = opened(storage, objective)
    run_trials(study, objective, total=4, design=[], after=lambda _: None)
    run_trials(study, objective, total=6, design=[], after=lambda _: None)
    run_trials(
        study,
        objective,
        total=6,
        design=[],
        after=lambda _: pytest.fail,
    )
    assert len(completed(study)) == 6
    trial = completed(study)[0]
    assert trial.values == [sum(trial.user_attrs["budgets"]) / 3, measured(trial)["score"]]
    assert {"kv_bytes", "realised_mean", "example_scores", "example_log_likelihoods", "seconds"} <= set(
        measured(trial)
    )
    assert study.metric_names == ["mean budget", "score"]


def test_the_design_comes_first_once_each(storage, objective):
    study = opened(storage, objective)
    design = [("ladder", objective.encode([i] * 3)) for i in range(3)]
    run_trials(study, objective, total=2, design=design, after=lambda _: None)
    run_trials(study, objective, total=5, design=design, after=lambda _: None)
    budgets = [tuple(trial.user_attrs["budgets"]) for trial in completed(study)]
    assert budgets[:3] == [(8,) * 3, (16,) * 3, (32,) * 3]
    assert budgets.count((8,) * 3) == 1 or len(set(budgets)) == 5
    assert [trial.user_attrs.get("origin") for trial in completed(study)][:3] == ["ladder"] * 3


def test_interrupted_trials_are_failed_tagged_and_done_again(storage, objective):
    study = opened(storage, objective)
    design = [("ladder", objective.encode([i] * 3)) for i in range(3)]
    for origin, params in design:
        study.enqueue_trial(params, user_attrs={"origin": origin})
    zombie = study.ask()  # a process that is killed here leaves it running
    objective.suggest(zombie)
    run_trials(study, objective, total=3, design=design, after=lambda _: None)
    states = [trial.state for trial in study.trials]
    assert states.count(TrialState.RUNNING) == 0
    assert study.trials[zombie.number].user_attrs["interrupted"] is True
    assert {tuple(t.user_attrs["budgets"]) for t in completed(study)} == {(8,) * 3, (16,) * 3, (32,) * 3}


def test_ctrl_c_tags_the_trial_and_a_fault_of_the_trial_does_not(storage):
    def explode(error):
        def measure(allocation):
            raise error

        return LevelObjective(levels=(8, 16), measure=measure, layers=3)

    study = opened(storage, explode(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        run_trials(study, explode(KeyboardInterrupt()), total=1, design=[], after=lambda _: None)
    with pytest.raises(RuntimeError):
        run_trials(study, explode(RuntimeError("out of memory")), total=1, design=[], after=lambda _: None)
    states = [TrialState.FAIL] * 4  # interrupted; the same once more, and as many others as are tried
    assert [trial.state for trial in study.trials] == states
    assert [trial.user_attrs.get("interrupted") for trial in study.trials] == [True, None, None, None]
    assert [trial.user_attrs.get("retry_of") for trial in study.trials] == [None, 0, None, None]
    assert study.trials[0].params == study.trials[1].params
    assert [trial.user_attrs.get("error") for trial in study.trials] == [None, *["out of memory"] * 3]


def test_a_finished_trial_is_left_alone_by_the_clean_up(storage, objective):
    study = opened(storage, objective)
    run_trials(study, objective, total=2, design=[], after=lambda _: None)
    before = [(trial.state, trial.params) for trial in study.trials]
    Claims(study, objective.space).recover()
    assert [(trial.state, trial.params) for trial in study.trials] == before


def test_a_different_fingerprint_is_refused_with_what_differs(storage, objective):
    opened(storage, objective, model={"hash": "a"})
    opened(storage, objective, model={"hash": "a"})
    with pytest.raises(FingerprintMismatch, match=r"model\.hash is 'b', stored 'a'"):
        opened(storage, objective, model={"hash": "b"})
    stored = stored_study(storage, "s")
    check_fingerprint(stored, {"levels": [8, 16]})
    with pytest.raises(FingerprintMismatch, match="levels"):
        check_fingerprint(stored, {"levels": [8]})
    assert stored_study(storage, "other") is None


def test_weights_decode_to_the_exact_mean_and_the_constraint_is_recorded(storage):
    objective = WeightObjective(budget=20, floor=4, cap=50, measure=measure, layers=12)
    study = opened(storage, objective, name="refine")
    run_trials(study, objective, total=5, design=[], after=lambda _: None)
    for trial in completed(study):
        assert sum(trial.user_attrs["budgets"]) == 20 * 12
        assert trial.constraints == {"mean_budget": 0.0, "0": 0.0}  # the second for optuna-dashboard
    shape = Allocation([4, 50, 10, 16] * 3)
    assert objective.decode(objective.encode(shape)) == shape.budgets


def test_an_imported_infeasible_trial_is_not_the_best(storage):
    objective = WeightObjective(budget=20, floor=4, cap=50, measure=measure, layers=2)
    study = opened(storage, objective, name="refine")
    run_trials(study, objective, total=2, design=[], after=lambda _: None)
    imported = study.ask()
    objective.suggest(imported)
    imported.set_constraint("mean_budget", 15.0)
    study.tell(imported, 0.99)
    assert study.best_trial.number != imported.number


def measure_in_two_batches(allocation, complete=False, after_batch=None):
    """16 examples, 8 at a time: all right where the last layer has 16 or more, else all wrong."""
    right = float(allocation.budgets[-1] >= 16)
    if after_batch is not None:
        after_batch(dict.fromkeys(range(8), right))
    return Measurement((right,) * 16, (-1.0,) * 16, ("",) * 16, allocation.mean, allocation.mean, 100, 0.1)


def test_a_raced_trial_is_pruned_counts_and_has_no_score(storage):
    objective = LevelObjective(levels=(8, 16, 32), measure=measure_in_two_batches, layers=3, race=True)
    study = opened(storage, objective)
    points = [(0, 0, 0), (0, 0, 1), (2, 2, 0), (2, 0, 0), (1, 1, 1)]
    run_trials(study, objective, total=5, design=[("x", objective.encode(p)) for p in points], after=lambda _: None)
    cheap, best, *raced, late = study.get_trials(deepcopy=False)
    complete = (cheap, best, late)  # nothing as cheap is better than the first
    assert [trial.state for trial in complete] == [TrialState.COMPLETE] * 3
    for trial in raced:
        assert trial.state == TrialState.PRUNED
        assert trial.values is None
        assert "score" not in trial.user_attrs
        assert trial.user_attrs["raced_scores"] == {str(index): 0.0 for index in range(8)}
        assert trial.user_attrs["raced_against"] == best.number
    run_trials(study, objective, total=5, design=[], after=lambda _: None)
    assert len(study.get_trials(deepcopy=False)) == 5
    assert [trial.number for trial in front_of(completed(study))] == [0, 1]


def test_without_racing_every_trial_is_measured_to_its_end(storage):
    objective = LevelObjective(levels=(8, 16, 32), measure=measure_in_two_batches, layers=3)
    study = opened(storage, objective)
    points = [(0, 0, 1), (2, 2, 0)]
    run_trials(study, objective, total=2, design=[("x", objective.encode(p)) for p in points], after=lambda _: None)
    assert [trial.values for trial in study.get_trials(deepcopy=False)] == [[32 / 3, 1.0], [24.0, 0.0]]


def test_measurements_are_stored_once(storage):
    calls = []
    study = opened(storage, Measured, name="s-test")

    def counted(allocation, complete):
        calls.append(allocation)
        return measure(allocation)

    wanted = [Allocation([1, 2]), Allocation([2, 1]), Allocation([1, 2])]
    stored = Measured(study, counted, layers=2, cap=50)
    first, other, same = stored(wanted, outputs=wanted[:1])
    again = Measured(study, counted, layers=2, cap=50)
    assert again.missing([Allocation([3, 3]), *wanted]) == [Allocation([3, 3])]
    assert [trial.user_attrs for trial in again(wanted)] == [t.user_attrs for t in (first, other, same)]
    assert len(calls) == 2
    assert first == same
    assert measured(first)["outputs"] == ["text"]
    assert "outputs" not in measured(other)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"trials": -1}, "trials must be a whole number of at least 1; got -1"),
        ({"trials": 1.5}, "trials"),
        ({"refine_trials": -1}, "refine_trials"),
        ({"test": 0}, "test"),
        ({"levels": []}, "levels"),
        ({"levels": [64, 32]}, "levels"),
        ({"levels": 32}, "levels"),
        ({"budgets": [0]}, "budgets"),
        ({"winner": "best"}, "winner must be one of shape, paper"),
    ],
)
def test_bad_plans(change, named):
    with pytest.raises(ValueError, match=named):
        Plan(**{**NUMBERS, **change})


def test_plans_that_cannot_be_met():
    plan = Plan(**NUMBERS)
    plan.check_range(floor=32, prompt=64)
    with pytest.raises(ValueError, match="levels must be between 33 and 64"):
        plan.check_range(floor=33, prompt=64)
    with pytest.raises(ValueError, match="levels must be between 1 and 50"):
        plan.check_range(floor=1, prompt=50)


def test_parameter_names_sort_like_layers():
    assert parameter_names("layer", 3) == ["layer_00", "layer_01", "layer_02"]
    assert parameter_names("layer", 101)[-1] == "layer_100"


def test_studies_that_only_look_like_parts_are_left_alone(tmp_path):
    storage = open_storage(f"sqlite:///{tmp_path}/s.db")
    for name, stage in [("n", "search"), ("n-test", "test"), ("n-selection", "search"), ("n-test-test", "test")]:
        optuna.create_study(study_name=name, storage=storage).set_user_attr("stage", stage)
    assert parts_of(storage, "n") == ["n", "n-test"]
    with pytest.raises(ValueError, match="part of 'n'"):
        copy_search(storage, "n", "n-refine-64-abcdef")
    running = load_study(storage, "n").ask()
    running.set_user_attr("worker", [*this_process(), 1])
    with pytest.raises(ValueError, match="has running trials"):
        copy_search(storage, "n", "m")
    running.set_user_attr("worker", [this_process()[0], 2**22 + 1, 5.0, 1])  # a process that has died
    copy_search(storage, "n", "m")
    delete_search(storage, "n")
    assert set(optuna.get_all_study_names(storage)) == {"n-selection", "n-test-test", "m", "m-test"}
