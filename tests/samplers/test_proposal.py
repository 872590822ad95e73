import numpy as np
import pytest

from mosaic_opt.samplers.labels import good
from mosaic_opt.samplers.pareto import hypervolume_2d, shells
from mosaic_opt.samplers.proposal import Observations, _distance, _gain, _target, _training_set


def targets(losses, bounds, count=200):
    losses = np.array(losses, float)
    front = np.arange(len(losses))
    return [_target(losses, front, bounds, np.random.default_rng(i)) for i in range(count)]


def test_gaps_are_drawn_by_their_area():
    losses = [[0.0, 10.0], [1.0, 5.0], [9.0, 1.0], [10.0, 0.0]]  # areas 5, 32, 1; the ends are the box's own
    intervals = [target.interval for target in targets(losses, (0.0, 10.0))]
    assert set(intervals) == {(0.0, 1.0), (1.0, 9.0), (9.0, 10.0)}
    assert 0.7 < np.mean([i == (1.0, 9.0) for i in intervals]) < 0.95


def test_a_front_is_continued_inside_the_bounds():
    losses = [[40.0, 5.0], [60.0, 1.0], [95.0, 0.0], [99.0, 9.0]]
    front = np.arange(3)
    found = [_target(np.array(losses), front, (0.0, 100.0), np.random.default_rng(i)) for i in range(300)]
    assert {t.interval for t in found} == {(30.0, 40.0), (40.0, 60.0), (60.0, 95.0), (95.0, 100.0)}
    assert {t.interval: t.parents.tolist() for t in found}[(30.0, 40.0)] == [0, 1]


@pytest.mark.parametrize("losses", [[[1.0], [1.0]], [[0.0, 0.0, 1.0], [1.0, 1.0, 0.0]], [[3.0, 3.0], [3.0, 3.0]]])
def test_no_interval_without_a_two_dimensional_front(losses):
    for target in targets(losses, (losses[0][0], losses[0][0]), count=3):
        assert target.interval is None
        assert sorted(target.parents.tolist()) == [0, 1]


def test_distance_is_measured_in_lengths_of_the_interval():
    assert _distance(np.array([1.0, 2.0, 5.0, 10.0]), (2.0, 6.0)).tolist() == [0.25, 0, 0, 1]
    assert _distance(None, (2.0, 6.0)) == 0.0
    assert _distance(np.zeros(2), None) == 0.0


def test_few_observations_are_all_learned():
    losses = np.random.default_rng(0).random((30, 2))
    learned, labels = _training_set(Observations(losses, losses, losses, losses[:, 0]), 30)
    np.testing.assert_array_equal(learned.losses, losses)
    np.testing.assert_array_equal(labels, good(losses))


@pytest.mark.parametrize("objectives", [1, 2, 3])
def test_many_observations_are_thinned_to_the_best_and_a_spread_of_the_rest(objectives):
    losses = np.random.default_rng(0).random((900, objectives))
    learned, labels = _training_set(Observations(losses, losses, losses, losses[:, 0]), 60)
    assert len(learned.losses) == 60
    assert labels.sum() == 20
    assert learned.losses[labels].sum() < learned.losses[~labels].sum() / 2
    if objectives == 1:
        np.testing.assert_array_equal(np.sort(losses[:, 0])[:20], np.sort(learned.losses[labels, 0]))
        assert learned.losses.max() > 0.95


def test_equal_observations_beyond_the_limit():
    same = np.zeros((100, 2))
    learned, _ = _training_set(Observations(same, same, same, same[:, 0]), 40)
    assert len(learned.losses) <= 40


def test_gain_is_the_hypervolume_added():
    rng = np.random.default_rng(0)
    for _ in range(50):
        front, points = rng.random((6, 2)), rng.random((9, 2)) * 1.3
        front = front[shells(front) == 0]
        reference = (1.1, 1.2)
        expected = [hypervolume_2d([*front, point], reference) - hypervolume_2d(front, reference) for point in points]
        np.testing.assert_allclose(_gain(front, points, reference), expected, atol=1e-12)
