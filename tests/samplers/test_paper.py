import numpy as np
import optuna
import pytest
from optuna.distributions import FloatDistribution, IntDistribution

from mosaic_opt.samplers import PaperSampler

optuna.logging.set_verbosity(optuna.logging.ERROR)
SPACE = {**{f"layer_{i}": IntDistribution(0, 6) for i in range(4)}, "share": FloatDistribution(0.0, 1.0)}


def run(study, count, score=lambda x: sum(v**0.5 for v in x)):
    for _ in range(count):
        trial = study.ask(SPACE)
        x = list(trial.params.values())
        study.tell(trial, [sum(x), score(x)][: len(study.directions)])
    return [trial.params for trial in study.trials]


def new(seed=0, directions=("minimize", "maximize"), **arguments):
    return optuna.create_study(directions=directions, sampler=PaperSampler(seed=seed, **arguments))


def test_the_same_seed_proposes_the_same_also_after_a_pause():
    whole, halves, other = new(), new(), new(seed=1)
    assert run(whole, 13) == [*run(halves, 11), *run(halves, 2)[11:]]
    assert run(other, 13) != [trial.params for trial in whole.trials]


def test_it_seeks_what_looks_like_the_front():
    """Score only in the share, budget only in the first layer: the front is where both are extreme."""
    study = new(n_startup_trials=40)
    for _ in range(50):
        trial = study.ask(SPACE)
        study.tell(trial, [trial.params["layer_0"], trial.params["share"]])
    guided = [trial.params for trial in study.trials[40:]]
    assert np.mean([p["share"] for p in guided]) > 0.8
    assert np.mean([p["layer_0"] for p in guided]) < 2.5


@pytest.mark.parametrize("directions", [("minimize", "maximize"), ("maximize",)])
def test_labels_that_all_agree(directions):
    study = new(directions=directions, n_startup_trials=2)
    for _ in range(6):
        trial = study.ask(SPACE)
        study.tell(trial, [1.0] * len(directions))
    assert len(study.trials) == 6


@pytest.mark.parametrize("arguments", [{"seed": -1}, {"n_startup_trials": 0}])
def test_bad_settings(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        PaperSampler(**{"seed": 0, **arguments})
