import numpy as np
import pytest

from mosaic_opt.samplers.box import Box
from mosaic_opt.samplers.evolution import maximise


def integers(dimension, high, nominal=False):
    full = np.full(dimension, 1.0)
    return Box(0 * full, high * full, full, np.zeros(dimension, bool), np.full(dimension, nominal))


def run(box, goal, seed=0, generations=60):
    calls = []

    def closeness(units):
        calls.append(len(units))
        return -np.abs(box.values(units) - goal).sum(axis=1)

    rng = np.random.default_rng(seed)
    points, values = maximise(closeness, box, box.sample(64, rng), rng, generations=generations)
    return box.values(points), values, calls


@pytest.mark.parametrize("dimension", [1, 2, 10])
def test_finds_the_optimum_of_a_separable_problem(dimension):
    goal = np.arange(dimension) % 16.0
    points, values, _ = run(integers(dimension, 15), goal)
    assert values[0] == 0
    assert points[0].tolist() == goal.tolist()


def test_continuous_columns():
    box = Box(np.zeros(3), np.ones(3), np.zeros(3), np.zeros(3, bool), np.zeros(3, bool))
    _, values, _ = run(box, np.array([0.2, 0.5, 1.0]))
    assert values[0] > -0.01


def test_nominal_columns():
    box = integers(4, 3, nominal=True)
    rng = np.random.default_rng(0)
    secret = np.array([3, 0, 2, 1])
    points, values = maximise(
        lambda units: (box.values(units) == secret).sum(axis=1).astype(float), box, box.sample(32, rng), rng
    )
    assert values[0] == 4
    assert box.values(points[:1])[0].tolist() == secret.tolist()


def test_cost_is_bounded_and_result_sorted_without_repeats():
    points, values, calls = run(integers(3, 2), np.ones(3), generations=5)
    assert calls == [64] * 6
    assert (np.diff(values) <= 0).all()
    assert len(np.unique(points, axis=0)) == len(points)


def test_same_seed_same_result():
    for a, b in zip(run(integers(5, 15), 7.0, seed=2)[:2], run(integers(5, 15), 7.0, seed=2)[:2], strict=True):
        np.testing.assert_array_equal(a, b)


def test_bad_input_is_named():
    box, rng = integers(2, 3), np.random.default_rng(0)
    with pytest.raises(ValueError, match="initial must have at least 4 rows, got 3"):
        maximise(lambda u: u[:, 0], box, box.sample(3, rng), rng)
    with pytest.raises(ValueError, match="generations must be at least 0, got -1"):
        maximise(lambda u: u[:, 0], box, box.sample(4, rng), rng, generations=-1)
