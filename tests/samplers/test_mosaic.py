import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState, create_trial

from mosaic_opt.samplers import MosaicSampler
from mosaic_opt.samplers.pareto import hypervolume_2d
from mosaic_opt.samplers.space import Space
from tests.samplers import layers

optuna.logging.set_verbosity(optuna.logging.ERROR)

LAYERS = {f"layer_{i:02d}": IntDistribution(0, 6) for i in range(8)}
MIXED = {
    "a": IntDistribution(1, 100, log=True),
    "b": FloatDistribution(1e-5, 1.0, log=True),
    "c": FloatDistribution(0.0, 1.0, step=0.1),
    "d": FloatDistribution(-1.0, 1.0),
    "e": CategoricalDistribution(["x", "y", None, True]),
    "f": IntDistribution(-4, 8, step=4),
    "g": IntDistribution(5, 5),
}
# one process of a study; arguments: the journal file, the number of trials to add
SCRIPT = """
import json, sys, optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from mosaic_opt.samplers import MosaicSampler
optuna.logging.set_verbosity(optuna.logging.ERROR)
study = optuna.create_study(storage=JournalStorage(JournalFileBackend(sys.argv[1])), study_name="s",
                            load_if_exists=True, directions=["minimize", "maximize"],
                            sampler=MosaicSampler(seed=3, n_startup_trials=6))
def objective(trial):
    x = [trial.suggest_int(f"x{i}", 0, 6) for i in range(6)]
    shift = {"p": 0.0, "q": 0.5}[trial.suggest_categorical("kind", ["p", "q"])]
    return sum(x) / 6 + shift, sum((v / 6) ** 0.5 for v in x)
study.optimize(objective, n_trials=int(sys.argv[2]))
print(json.dumps([[t.params, t.user_attrs] for t in study.trials], sort_keys=True))
"""


def budget(parameters):
    return float(sum(parameters.values()))


def values(parameters):
    """Mean budget to be minimised and a score to be maximised in which the even layers count ten times."""
    weights = [10.0 if i % 2 == 0 else 1.0 for i in range(len(parameters))]
    return budget(parameters), float(sum(w * v**0.5 for w, v in zip(weights, parameters.values(), strict=True)))


def fill(study, count, *, seed=0, space=LAYERS, states=(), objective=values):
    """Add `count` finished random trials to the study."""
    rng = np.random.default_rng(seed)
    for parameters in Space(space).parameters(Space(space).box.sample(count, rng)):
        result = objective(parameters)
        result = result if len(study.directions) == 2 else result[1:]
        study.add_trial(create_trial(params=parameters, distributions=space, values=list(result)))


def two(sampler):
    return optuna.create_study(directions=["minimize", "maximize"], sampler=sampler)


def sample(study, space=LAYERS):
    trial = study.ask(space)
    return trial, trial.params


def origin(study):
    sample(study)
    return study.trials[-1].user_attrs["origin"]


def test_guided_search_beats_random_search():
    volumes = []
    for sampler in (MosaicSampler(seed=0, known_objective=budget), optuna.samplers.RandomSampler(seed=0)):
        study = two(sampler)
        for _ in range(80):
            trial, parameters = sample(study)
            study.tell(trial, values(parameters))
        volumes.append(hypervolume_2d([(t.values[0], -t.values[1]) for t in study.trials], (48.0, 0.0)))
    assert volumes[0] > 1.05 * volumes[1]


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_single_objective_improves(direction):
    sign = 1 if direction == "maximize" else -1
    study = optuna.create_study(direction=direction, sampler=MosaicSampler(seed=1))
    for _ in range(35):
        trial, parameters = sample(study)
        study.tell(trial, -sign * sum((v - 2) ** 2 for v in parameters.values()))
    assert abs(study.best_value) <= 10


def test_proposals_spread_along_the_known_objective():
    study = two(MosaicSampler(seed=0, known_objective=budget, exploration=0.0))
    fill(study, 30)
    for level in range(7):
        uniform = dict.fromkeys(LAYERS, level)
        study.add_trial(create_trial(params=uniform, distributions=LAYERS, values=list(values(uniform))))
    budgets = []
    for _ in range(20):
        trial, parameters = sample(study)
        study.tell(trial, values(parameters))
        budgets.append(budget(parameters))
    assert np.ptp(budgets) > 15


def test_same_trials_in_other_processes_and_in_two_halves(tmp_path):
    def process(name, count, hash_seed):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": hash_seed,
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / name), str(count)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    whole = process("whole.log", 20, "1")
    assert process("halves.log", 10, "2") == whole[:10]
    assert process("halves.log", 10, "3") == whole
    assert {attributes["origin"] for _, attributes in whole} >= {"lhs", "classifier"}


@pytest.mark.parametrize("finished", [0, 4, 30])
def test_killed_trial_is_proposed_again_once_marked(finished):
    def run(kill):
        study = two(MosaicSampler(seed=5, search_space=LAYERS))
        fill(study, finished)
        trial, parameters = sample(study)
        if kill:
            trial.set_user_attr("interrupted", True)
            study.tell(trial, state=TrialState.FAIL)
            trial, again = sample(study)
            assert again == parameters
        study.tell(trial, values(parameters))
        return sample(study)[1]

    assert run(kill=True) == run(kill=False)


def test_killed_first_trial_of_an_unknown_space():
    study = two(MosaicSampler(seed=5))
    trial, parameters = sample(study)
    assert len(set(parameters.values())) > 1
    trial.set_user_attr("interrupted", True)
    study.tell(trial, state=TrialState.FAIL)
    assert sample(study)[1] == parameters


@pytest.mark.parametrize("count", [4, 40])
def test_order_of_storage_does_not_matter(count):
    source = two(MosaicSampler(seed=0))
    fill(source, count)
    source.add_trial(source.trials[0])  # a duplicate with the same values
    proposals = []
    for order in (range(count + 1), reversed(range(count + 1))):
        study = two(MosaicSampler(seed=2, known_objective=budget, signal="likelihood", search_space=LAYERS))
        for i in order:
            trial = source.trials[i]
            trial.set_user_attr("likelihood", float(i % 3))
            study.add_trial(trial)
        proposals.append(sample(study)[1])
    assert proposals[0] == proposals[1]


def test_state_is_not_kept_between_calls_and_studies():
    shared = MosaicSampler(seed=2)
    proposals = []
    for sampler in (shared, shared, MosaicSampler(seed=2)):
        study = two(sampler)
        fill(study, 20)
        proposals.append(sample(study)[1])
    assert proposals[0] == proposals[1] == proposals[2]
    other = two(MosaicSampler(seed=3))
    fill(other, 20)
    assert sample(other)[1] != proposals[0]


def test_configurations_are_told_apart_after_decoding():
    space = {"a": IntDistribution(0, 7), "b": IntDistribution(0, 7)}

    def decode(parameters):  # 64 parameter pairs, 15 configurations
        return [parameters["a"] + parameters["b"], 1.0]

    study = optuna.create_study(sampler=MosaicSampler(seed=0, decode=decode, n_startup_trials=3))
    sums = []
    for _ in range(15):
        trial, parameters = sample(study, space)
        sums.append(sum(parameters.values()))
        study.tell(trial, float(sums[-1]))
    assert sorted(sums) == list(range(15))


@pytest.mark.parametrize("end", ["fail", "prune", "run", "infinite", "enqueue"])
@pytest.mark.parametrize("startup", [1, 50])
def test_small_space_is_gone_through_without_repeats(end, startup):
    space = {"a": IntDistribution(0, 2), "b": CategoricalDistribution(["x", "y"]), "c": IntDistribution(1, 1)}
    study = optuna.create_study(sampler=MosaicSampler(seed=0, n_startup_trials=startup, search_space=space))
    seen = [(0, "x"), (1, "x")] if end == "enqueue" else []
    study.add_trials(create_trial(params={"a": a, "b": b, "c": 1}, distributions=space, value=1.0) for a, b in seen)
    while len(seen) < 6:
        trial, parameters = sample(study, space)
        seen.append((parameters["a"], parameters["b"]))
        if end == "fail":
            study.tell(trial, state=TrialState.FAIL)
        elif end == "prune":
            study.tell(trial, state=TrialState.PRUNED)
        elif end in ("infinite", "enqueue"):
            study.tell(trial, float("inf") if end == "infinite" else 1.0)
    assert len(set(seen)) == 6
    assert sample(study, space)[1]["b"] in (
        "x",
        "y",
    )  # exhausted: some configuration, no crash, no endless loop


def test_enqueued_configuration_counts_as_pending():
    space = {"a": IntDistribution(0, 2)}
    study = optuna.create_study(sampler=MosaicSampler(seed=0, search_space=space))
    running, _ = sample(study, space)
    missing = next(a for a in range(3) if a != running.params["a"])
    study.enqueue_trial({"a": missing})
    trial = study._storage.get_trial(study._storage.create_new_trial(study._study_id))
    proposed = study.sampler.sample_relative(study, trial, space)["a"]
    assert proposed not in (running.params["a"], missing)


def test_interrupted_trials_are_as_if_they_had_never_been():
    plain, marked = two(MosaicSampler(seed=0)), two(MosaicSampler(seed=0))
    fill(plain, 20)
    fill(marked, 20)
    for trial in plain.trials[:3]:
        trial.set_user_attr("interrupted", True)
        trial.values = (-1e9, 1e9)
        marked.add_trial(trial)
    assert sample(plain)[1] == sample(marked)[1]


def test_origin_is_recorded_and_kept():
    study = two(MosaicSampler(seed=0, n_startup_trials=4, exploration=0.0))
    study.enqueue_trial({"layer_00": 1}, user_attrs={"origin": "ladder"})
    for _ in range(8):
        trial, parameters = sample(study)
        study.tell(trial, values(parameters))
    origins = [t.user_attrs["origin"] for t in study.trials]
    assert origins == ["ladder", "lhs", "lhs", "lhs", *["classifier"] * 4]
    always = two(MosaicSampler(seed=0, exploration=1.0))
    fill(always, 20)
    assert origin(always) == "random"


def test_no_latin_hypercube_once_enough_trials_exist():
    study = two(MosaicSampler(seed=0, exploration=0.0, n_startup_trials=10))
    fill(study, 10)
    assert origin(study) == "classifier"


def test_signal_breaks_ties_of_the_score():
    def best_layer(signal):
        study = optuna.create_study(
            direction="maximize", sampler=MosaicSampler(seed=0, signal=signal, exploration=0.0)
        )
        fill(study, 60, objective=lambda parameters: (0.0, 1.0))
        rebuilt = optuna.create_study(direction="maximize", sampler=study.sampler)
        for trial in study.trials:
            trial.set_user_attr("likelihood", float(trial.params["layer_03"]))
            rebuilt.add_trial(trial)
        picked = []
        for _ in range(8):
            trial, parameters = sample(rebuilt)
            picked.append(parameters["layer_03"])
        return np.mean(picked)

    assert best_layer("likelihood") > 4.5
    assert best_layer("likelihood") > best_layer(None)


@pytest.mark.parametrize("directions", [["minimize"], ["maximize", "minimize"], ["minimize"] * 3])
def test_mixed_distributions_and_any_number_of_objectives(directions):
    study = optuna.create_study(directions=directions, sampler=MosaicSampler(seed=0, n_startup_trials=4))
    for _ in range(15):
        trial, parameters = sample(study, MIXED)
        for name, distribution in MIXED.items():
            assert distribution._contains(distribution.to_internal_repr(parameters[name]))
        score = parameters["d"] + parameters["c"] + (parameters["e"] == "y")
        study.tell(trial, [score, -score, parameters["a"] / 100][: len(directions)])
    assert study.trials[-1].user_attrs["origin"] in ("classifier", "random")
    assert type(parameters["a"]) is int
    assert type(parameters["c"]) is float


@pytest.mark.parametrize(
    "space",
    [
        {"x": IntDistribution(0, 3)},
        {"x": FloatDistribution(0, 1)},
        {"x": CategoricalDistribution(["only"])},
        {f"x{i}": IntDistribution(2, 2) for i in range(5)},
        {f"x{i:02d}": IntDistribution(0, 6) for i in range(80)},
        {"x": IntDistribution(0, 10**12)},
    ],
    ids=["one", "float", "single-choice", "single-levels", "eighty", "huge"],
)
@pytest.mark.parametrize("scores", ["equal", "nan", "varied"])
@pytest.mark.parametrize("objectives", [1, 2])
def test_odd_shapes(space, scores, objectives):
    directions = ["minimize", "maximize"][:objectives]
    study = optuna.create_study(
        directions=directions, sampler=MosaicSampler(seed=0, n_startup_trials=3, search_space=space)
    )
    for i in range(8):
        trial = study.ask()
        parameters = study.sampler.sample_relative(study, study._storage.get_trial(trial._trial_id), space)
        assert set(parameters) == set(space)
        trial = study.ask(space) if i else trial
        value = {"equal": 1.0, "nan": float("nan") if i % 2 else 1.0, "varied": float(i)}[scores]
        study.tell(trial, [value] * objectives, skip_if_finished=True)


def test_trials_of_another_space_are_left_out():
    study = two(MosaicSampler(seed=0, search_space=LAYERS))
    fill(study, 12)
    wide = {name: IntDistribution(0, 50) for name in LAYERS}
    study.add_trial(create_trial(params=dict.fromkeys(LAYERS, 50), distributions=wide, values=[-1.0, 1e9]))
    part = {"layer_00": LAYERS["layer_00"]}
    study.add_trial(create_trial(params={"layer_00": 1}, distributions=part, values=[-1.0, 1e9]))
    assert origin(study) in ("classifier", "random")


def test_a_value_outside_its_distribution_raises(monkeypatch):
    study = two(MosaicSampler(seed=0, search_space=LAYERS))
    fill(study, 12)
    monkeypatch.setattr(Space, "parameters", lambda self, units: [dict.fromkeys(LAYERS, 7)] * len(units))
    with pytest.raises(RuntimeError, match="layer_00 must lie in"):
        sample(study)


@pytest.mark.parametrize("name", ["decode", "known_objective"])
def test_decoded_numbers_must_be_finite(name):
    wrong = {"decode": lambda p: [float("nan")], "known_objective": lambda p: float("inf")}[name]
    study = two(MosaicSampler(seed=0, search_space=LAYERS, **{name: wrong}))
    with pytest.raises(ValueError, match="must give a sequence of finite numbers"):
        sample(study)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("seed", -1, "seed must be a whole number of at least 0, got -1"),
        ("seed", 1.5, "seed must be a whole number of at least 0, got 1.5"),
        ("seed", None, "seed must be a whole number of at least 0, got None"),
        ("n_startup_trials", 0, "n_startup_trials must be at least 1, got 0"),
        ("exploration", 1.5, "exploration must lie between 0 and 1, got 1.5"),
        ("n_candidates", 15, "n_candidates must be at least 16, got 15"),
        ("n_generations", -1, "n_generations must be at least 0, got -1"),
        ("n_observations", 15, "n_observations must be at least 16, got 15"),
    ],
)
def test_bad_arguments_are_named(argument, value, message):
    with pytest.raises(ValueError, match=message):
        MosaicSampler(**{"seed": 0, argument: value})


@pytest.mark.parametrize(("trials", "limit"), [(200, 0.2), pytest.param(2000, 1.0, marks=pytest.mark.slow)])
def test_a_proposal_is_cheap(trials, limit):
    space = {f"layer_{i:02d}": IntDistribution(1, 16) for i in range(30)}
    sampler = MosaicSampler(
        seed=0, decode=lambda p: list(p.values()), known_objective=budget, exploration=0.0, search_space=space
    )
    study = two(sampler)
    fill(study, trials, space=space)
    seconds = []
    for _ in range(4):
        trial = study._storage.get_trial(study.ask()._trial_id)
        start = time.process_time()
        sampler.sample_relative(study, trial, space)
        seconds.append(time.process_time() - start)
    assert min(seconds) < limit


@pytest.mark.parametrize("count", [1, pytest.param(80, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind",
    ["plain", "infinite scores", "failing", "equal scores", "some signals", "no signals", "nan signals", "swapped"],
)
def test_the_surrogates_way_holds_for_odd_studies(kind, count):
    """decode, known objective and signal given; odd results before and during the search."""
    space = layers.space(count)
    directions = ("maximize", "minimize") if kind == "swapped" else ("minimize", "maximize")
    study = layers.study(space, directions=directions, n_startup_trials=4)
    layers.fill(study, space, 6)
    origins = set()
    for i in range(8):
        trial = study.ask(space)
        assert all(space[name]._contains(value) for name, value in trial.params.items())
        origins.add(study.trials[-1].user_attrs["origin"])
        if kind not in ("no signals", "nan signals") and (kind != "some signals" or i % 2):
            trial.set_user_attr("likelihood", layers.likelihood(trial.params))
        if kind == "nan signals":
            trial.set_user_attr("likelihood", float("nan"))
        score = {"equal scores": 0.5, "infinite scores": float("inf")}.get(kind, layers.score(trial.params))
        if kind == "failing" and i % 2:
            study.tell(trial, state=TrialState.FAIL)
        else:
            study.tell(trial, [layers.mean_budget(trial.params), score])
    assert "surrogate" in origins or count == 1
    if count > 1:
        assert len({tuple(t.params.values()) for t in study.trials}) == 14
        assert len({layers.mean_budget(t.params) for t in study.trials[6:]}) >= 4


@pytest.mark.parametrize("likely", [0.5, float("nan")])
def test_scores_that_all_agree_leave_the_surrogate_something_to_propose(likely):
    space = layers.space(12)
    study = layers.study(space, exploration=0.0, structured=1.0)
    study.add_trials(
        layers.finished(p, space, values=[layers.mean_budget(p), 0.5], likely=likely)
        for p in layers.configurations(space, 20)
    )
    proposals = [study.ask(space).params for _ in range(5)]
    assert layers.apart(space, proposals) > 0


def run_two(values, count, *, constraint=None, enqueue=()):
    """A study of two floats and two losses with the sampler's own way from trial 10 on."""

    def evaluate(trial):
        x, y = trial.suggest_float("x", 0, 1), trial.suggest_float("y", 0, 1)
        if constraint:
            trial.set_constraint("c", constraint(x, y))
        trial.set_user_attr("q", 1e200 * x)
        return values(x, y)

    study = optuna.create_study(directions=["minimize"] * 2, sampler=MosaicSampler(seed=1, signal="q"))
    for params in enqueue:
        study.enqueue_trial(params)
    study.optimize(evaluate, n_trials=count, catch=(TypeError, ValueError))
    return study


def test_studies_without_a_feasible_point_or_with_huge_values_go_on():
    infeasible = run_two(lambda x, y: (x, y), 25, constraint=lambda x, y: 1.0 if x + y < 1.99 else -1.0)
    largest = sys.float_info.max
    huge = run_two(lambda x, y: (largest, largest) if x > 0.8 else (x, y), 40)
    for study in (infeasible, huge):
        assert all(trial.state == TrialState.COMPLETE for trial in study.trials)


def test_values_that_are_no_numbers_are_left_out():
    study = run_two(lambda x, y: (x, y), 20, enqueue=[{"x": "abc", "y": 0.5}, {"x": [1], "y": 0.5}])
    assert [trial.state for trial in study.trials] == [TrialState.FAIL] * 2 + [TrialState.COMPLETE] * 18


def test_eighty_layers():
    space = layers.space(80)
    study = layers.study(space, n_startup_trials=4)
    layers.fill(study, space, 6)
    assert layers.apart(space, [study.ask(space).params for _ in range(4)]) > 0


def test_every_origin_copes_with_a_single_level():
    space = {f"layer_{i}": IntDistribution(0, 0) for i in range(3)}
    for structured in (0.0, 1.0):
        study = layers.study(space, n_startup_trials=1, structured=structured)
        for _ in range(3):
            trial = study.ask(space)
            trial.set_user_attr("likelihood", 1.0)
            study.tell(trial, [32.0, 1.0])
            assert trial.params == dict.fromkeys(space, 0)


def test_the_surrogate_finds_which_layers_matter():
    """Only the first four of 20 layers count: what it proposes gives them more than the others."""
    space = layers.space(20)

    def likelihood(parameters):
        return float(np.sqrt(layers.decode(parameters)[:4]).sum())

    study = layers.study(space, exploration=0.0, structured=1.0)
    study.add_trials(
        layers.finished(p, space, values=[layers.mean_budget(p), round(likelihood(p))], likely=likelihood(p))
        for p in layers.configurations(space, 60)
    )
    proposals = np.array([list(study.ask(space).params.values()) for _ in range(6)])
    assert (proposals[:, :4].mean(axis=1) > proposals[:, 4:].mean(axis=1) + 1).all()


def test_a_known_objective_to_be_maximised_is_turned_once():
    """The same study with the first objective negated and maximised: the same proposals."""
    space = layers.space(12)
    for structured in (0.0, 1.0):
        proposals = []
        for sign, direction in ((1, "minimize"), (-1, "maximize")):
            study = layers.study(
                space,
                directions=(direction, "maximize"),
                known_objective=lambda p, sign=sign: sign * layers.mean_budget(p),
                exploration=0.0,
                structured=structured,
            )
            study.add_trials(
                layers.finished(p, space, values=[sign * layers.mean_budget(p), layers.score(p)])
                for p in layers.configurations(space, 30)
            )
            proposals.append(study.ask(space).params)
        assert proposals[0] == proposals[1]


def test_a_proposal_after_5000_trials_is_cheap():
    space = layers.space(30)
    study = layers.study(space, exploration=0.0)
    study.add_trials(
        layers.finished(p, space, values=[layers.mean_budget(p), 0.5], likely=float(i))
        for i, p in enumerate(layers.configurations(space, 5000))
    )
    seconds = {}
    for _ in range(8):
        trial = study._storage.get_trial(study._storage.create_new_trial(study._study_id))
        start = time.process_time()
        study.sampler.sample_relative(study, trial, space)
        taken = time.process_time() - start
        origin = study._storage.get_trial(trial._trial_id).user_attrs["origin"]
        seconds[origin] = min(seconds.get(origin, np.inf), taken)
    assert seconds.keys() == {"surrogate", "classifier"}
    assert max(seconds.values()) < 2


# one process of a study as a search makes it; arguments: the database, the number of trials to add
SEARCH = """
import json, sys
import optuna
from tests.samplers import layers
space = layers.space(4)
study = optuna.create_study(storage=layers.storage(sys.argv[1]), study_name="s", load_if_exists=True,
                            directions=["minimize", "maximize"],
                            sampler=layers.sampler(space, seed=3, n_startup_trials=6))
def objective(trial):
    parameters = {name: trial.suggest_int(name, d.low, d.high) for name, d in space.items()}
    trial.set_user_attr("likelihood", layers.likelihood(parameters))
    return layers.mean_budget(parameters), layers.score(parameters)
study.optimize(objective, n_trials=int(sys.argv[2]))
print(json.dumps([[t.params, t.values, t.user_attrs] for t in study.trials], sort_keys=True))
"""


def test_a_resumed_database_goes_on_as_if_it_had_not_stopped(tmp_path):
    def process(name, count, hash_seed):
        command = [sys.executable, "-c", SEARCH, str(tmp_path / name), str(count)]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    whole = process("whole.db", 20, "1")
    assert process("halves.db", 10, "2") == whole[:10]
    assert process("halves.db", 10, "3") == whole
    assert {attributes["origin"] for *_, attributes in whole} >= {"lhs", "surrogate", "classifier"}


def test_infinite_values_are_learned_from():
    study = run_two(lambda x, y: (np.inf, np.inf) if x > 0.4 else (x, y), 60)
    guided = [t.params["x"] > 0.4 for t in study.trials if t.user_attrs["origin"] == "classifier"]
    assert len(guided) > 30
    assert np.mean(guided) < 0.2
    hopeless = run_two(lambda x, y: (np.inf, -np.inf), 12)
    assert hopeless.trials[-1].user_attrs["origin"] != "lhs"


def test_the_rest_of_a_partly_enqueued_trial_is_new():
    space = {"a": IntDistribution(0, 3), "b": IntDistribution(0, 4), "c": CategoricalDistribution(["x"])}
    study = optuna.create_study(sampler=MosaicSampler(seed=0, search_space=space, n_startup_trials=3))
    for _ in range(5):
        study.enqueue_trial({"a": 2})
    for _ in range(5):
        trial = study.ask(space)
        study.tell(trial, trial.params["b"])
    assert sorted(t.params["b"] for t in study.trials) == [0, 1, 2, 3, 4]
    study.enqueue_trial({"a": 9})
    with pytest.warns(UserWarning, match="out of range"):
        assert study.ask(space).params["a"] == 9


def test_conditional_parameters_do_not_use_up_the_shared_ones():
    def evaluate(trial):
        kind = trial.suggest_categorical("kind", ["p", "q"])
        return trial.suggest_float("x" if kind == "p" else "y", 0, 1) + (kind == "q")

    study = optuna.create_study(sampler=MosaicSampler(seed=0, exploration=0.0))
    study.optimize(evaluate, n_trials=30)
    assert sum(trial.params["kind"] == "p" for trial in study.trials[12:]) > 12


def test_callbacks_that_do_not_fit_are_named():
    def ask(directions=("minimize", "maximize"), *, fixed=None, **settings):
        sampler = MosaicSampler(seed=0, n_startup_trials=1, **settings)
        if fixed:
            sampler = optuna.samplers.PartialFixedSampler(fixed, sampler)
        study = optuna.create_study(directions=list(directions), sampler=sampler)
        fill(study, 3)
        study.ask(LAYERS)

    with pytest.raises(ValueError, match="known_objective needs a study of at least 2 objectives, got 1"):
        ask(["maximize"], known_objective=budget)
    with pytest.raises(ValueError, match="decode must give a sequence"):
        ask(decode=budget)
    with pytest.raises(ValueError, match="'layer_00' is none of them: give search_space"):
        ask(fixed={"layer_00": 3}, decode=lambda p: [p["layer_00"]], search_space=LAYERS)
