from copy import deepcopy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.search_space import intersection_search_space
from optuna.trial import create_trial

from mosaic_opt.samplers.space import Space, shared_space

SPACE = {
    "whole": IntDistribution(2, 10, step=4),
    "log": IntDistribution(1, 1000, log=True),
    "real": FloatDistribution(1e-9, 1.0, log=True),
    "tenths": FloatDistribution(0.0, 1.0, step=0.1),
    "kind": CategoricalDistribution(["a", None, 3, False]),
}


def test_parameters_survive_the_round_trip():
    space = Space(SPACE)
    rows = space.parameters(space.box.sample(200, np.random.default_rng(0)))
    units, kept = space.units(rows)
    assert kept == list(range(200))
    for before, after in zip(rows, space.parameters(units), strict=True):
        assert list(before) == sorted(SPACE)
        space.check(after)
        assert [before[k] for k in ("whole", "log", "kind")] == [after[k] for k in ("whole", "log", "kind")]
        assert after["real"] == pytest.approx(before["real"], rel=1e-9)
        assert after["tenths"] == before["tenths"]
        assert [type(before[k]) for k in ("whole", "log", "real", "tenths")] == [int, int, float, float]


def test_foreign_parameters_are_left_out():
    space = Space(SPACE)
    good = {"whole": 6, "log": 7, "real": 0.5, "tenths": 0.3, "kind": None, "unrelated": 1}
    bad = [{**good, "whole": 11}, {**good, "kind": "z"}, {**good, "real": float("nan")}, {"whole": 6}]
    units, kept = space.units([*bad, good])
    assert kept == [4]
    assert units.shape == (1, 5)
    assert space.units([])[0].shape == (0, 5)


def test_an_empty_space_is_refused():
    with pytest.raises(ValueError, match="distributions must hold at least one parameter, got none"):
        Space({})


DISTRIBUTIONS = st.dictionaries(
    st.sampled_from("abcd"),
    st.sampled_from(
        [
            IntDistribution(0, 3),
            IntDistribution(0, 4),
            IntDistribution(0, 4, step=2),
            IntDistribution(1, 4, log=True),
            FloatDistribution(0, 3),
            FloatDistribution(0, 4),
            FloatDistribution(0.0, 3.0, step=1.0),
            CategoricalDistribution([0, 1, 2, 3]),
            CategoricalDistribution([0, 1, 2]),
            CategoricalDistribution(["x", None]),
            CategoricalDistribution([float("nan"), 1]),
        ]
    ),
)


@given(spaces=st.lists(DISTRIBUTIONS, max_size=4), copies=st.integers(1, 2))
def test_shared_space_is_optunas_intersection(spaces, copies):
    trials = [
        create_trial(
            params={name: d.to_external_repr(1 if d._contains(1) else 0) for name, d in space.items()},
            distributions=deepcopy(space),
            value=0.0,
        )
        for space in spaces
        for _ in range(copies)
    ]
    expected = intersection_search_space(trials)
    assert shared_space(trials) == expected
    assert list(shared_space(trials)) == list(expected)


@pytest.mark.parametrize("changed", [IntDistribution(0, 5), FloatDistribution(0, 6), None])
def test_one_trial_of_another_space_among_many_is_noticed_wherever_it_stands(changed):
    space = {f"x{i:02d}": IntDistribution(0, 6) for i in range(30)}
    other = {name: d for name, d in {**space, "x07": changed}.items() if d is not None}
    for place in (0, 5, 9):
        spaces = [other if i == place else space for i in range(10)]
        trials = [create_trial(params=dict.fromkeys(s, 1), distributions=s, value=0.0) for s in spaces]
        assert list(shared_space(trials)) == [name for name in sorted(space) if name != "x07"]


def test_shared_space_is_not_the_trials_own():
    trial = create_trial(params={"x": 1}, distributions={"x": IntDistribution(0, 6)}, value=0.0)
    shared_space([trial])["y"] = IntDistribution(0, 1)
    assert list(trial.distributions) == ["x"]
