import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic_opt.samplers.box import Box


def column(low, high, step=1.0, log=False, nominal=False):
    return low, high, step, log, nominal


def make(*columns):
    low, high, step, log, nominal = zip(*columns, strict=True)
    return Box(*(np.array(v, float) for v in (low, high, step)), np.array(log), np.array(nominal))


MIXED = [
    column(-3, 12, 3),
    column(1, 100, 1, log=True),
    column(0, 2, nominal=True),
    column(-1.5, 2.5, 0),
    column(1e-7, 10, 0, log=True),
    column(0.5, 1.0, 0.25),
    column(7, 7),
    column(4, 4, 0),
]


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_values_are_legal_and_snapping_is_idempotent(seed):
    box = make(*MIXED)
    units = np.random.default_rng(seed).random((40, 8)) * 1.2 - 0.1
    values = box.values(units)
    assert ((values >= box.low) & (values <= box.high)).all()
    stepped = box.step > 0
    steps = (values - box.low)[:, stepped] / box.step[stepped]
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-9)
    snapped = box.snap(units)
    np.testing.assert_allclose(box.values(snapped), values, rtol=1e-12)
    np.testing.assert_allclose(box.snap(snapped), snapped, atol=1e-12)


def test_uniform_units_are_fair_to_every_level():
    box = make(column(0, 4), column(0, 4, nominal=True))
    values = box.sample(20000, np.random.default_rng(0))
    for j in range(2):
        counts = np.bincount(box.values(values)[:, j].astype(int))
        assert len(counts) == 5
        assert abs(counts - 4000).max() < 300


def test_latin_hypercube_hits_every_level_equally():
    box = make(column(0, 4), column(0, 9))
    design = box.values(box.latin_hypercube(10, np.random.default_rng(0)))
    assert np.bincount(design[:, 0].astype(int)).tolist() == [2] * 5
    assert sorted(design[:, 1]) == list(range(10))


def test_features_are_one_hot_for_nominal_columns():
    box = make(column(0, 2, nominal=True), column(0, 1))
    features = box.features(box.units(np.array([[2.0, 0.0], [0.0, 1.0]])))
    np.testing.assert_allclose(features, [[0.25, 0, 0, 1], [0.75, 1, 0, 0]])


def test_grid_is_every_configuration_once():
    box = make(column(1, 3), column(0, 1, nominal=True), column(5, 5))
    grid = box.values(box.grid())
    assert box.size == len(grid) == len(np.unique(grid, axis=0)) == 6


def test_size_of_a_continuous_box_is_infinite():
    assert make(*MIXED).size == np.inf


def test_mutations_stay_inside_and_change_something():
    box = make(*MIXED)
    parents = box.sample(200, np.random.default_rng(0))
    children = box.mutate(parents, np.random.default_rng(1))
    np.testing.assert_allclose(children, box.snap(children), atol=1e-12)
    assert (children != parents).any(axis=1).mean() > 0.7
    assert (children == parents).mean() > 0.3


@pytest.mark.parametrize("bad", [column(2, 1), column(0, 5, log=True)], ids=["order", "log of zero"])
def test_bad_bounds(bad):
    with pytest.raises(ValueError, match="low must be"):
        make(bad)
