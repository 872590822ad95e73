import numpy as np
import pytest

from mosaic_opt.samplers import proposal
from mosaic_opt.samplers.box import Box
from mosaic_opt.samplers.classifier import Classifier
from mosaic_opt.samplers.labels import good
from mosaic_opt.samplers.pareto import hypervolume_2d, shells
from mosaic_opt.samplers.proposal import (
    Description,
    Observations,
    Proposer,
    Taken,
    _distance,
    _first_untried,
    _gain,
    _target,
    _training_set,
)


def observations(losses):
    return Observations(losses, losses, losses, losses[:, 0], np.zeros(len(losses)))


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
    learned, labels = _training_set(observations(losses), 30)
    np.testing.assert_array_equal(learned.losses, losses)
    np.testing.assert_array_equal(labels, good(losses))


@pytest.mark.parametrize("objectives", [1, 2, 3])
def test_many_observations_are_thinned_to_the_best_and_a_spread_of_the_rest(objectives):
    losses = np.random.default_rng(0).random((900, objectives))
    learned, labels = _training_set(observations(losses), 60)
    assert len(learned.losses) == 60
    assert labels.sum() == 20
    assert learned.losses[labels].sum() < learned.losses[~labels].sum() / 2
    if objectives == 1:
        np.testing.assert_array_equal(np.sort(losses[:, 0])[:20], np.sort(learned.losses[labels, 0]))
        assert learned.losses.max() > 0.95


def test_equal_observations_beyond_the_limit():
    same = np.zeros((100, 2))
    learned, _ = _training_set(observations(same), 40)
    assert len(learned.losses) <= 40


def test_gain_is_the_hypervolume_added():
    rng = np.random.default_rng(0)
    for _ in range(50):
        front, points = rng.random((6, 2)), rng.random((9, 2)) * 1.3
        front = front[shells(front) == 0]
        reference = (1.1, 1.2)
        expected = [hypervolume_2d([*front, point], reference) - hypervolume_2d(front, reference) for point in points]
        np.testing.assert_allclose(_gain(front, points, reference), expected, atol=1e-12)


def described(units):
    """Two columns; configurations are the same where their units agree; the first loss is their sum."""
    return Description(units, [row.tobytes() for row in units], units.sum(axis=1))


def test_taken_is_what_is_stored_or_nearly_pending():
    stored = np.array([[0.1, 0.1], [0.9, 0.9]])
    taken = Taken(frozenset(described(stored).keys), stored[1:], described(stored[1:]))
    asked = np.array([[0.1, 0.1], [0.1, 0.11], [0.9, 0.9], [0.9, 0.861], [0.9, 0.859], [0.88, 0.88], [0.87, 0.87]])
    assert taken.free(asked, described(asked).keys).tolist() == [False, True, False, False, True, True, True]
    nothing = Taken.of(stored[:0], described(stored[:0]))
    assert nothing.free(asked, described(asked).keys).all()
    assert not Taken.of(stored, described(stored)).free(stored, described(stored).keys).any()


def test_a_near_point_is_taken_only_where_all_others_are_stored_or_near():
    units = np.array([[0.5, 0.5], [0.51, 0.51], [0.505, 0.5], [0.8, 0.8]])
    taken = Taken.of(units[:1], described(units[:1]))
    assert _first_untried(units, described, taken).tolist() == [0.8, 0.8]
    assert _first_untried(units[:3], described, taken).tolist() == [0.51, 0.51]
    assert _first_untried(units[:1], described, taken) is None
    many = np.concatenate([np.tile(units[:3], (40, 1)), units[3:]])
    assert _first_untried(many, described, taken).tolist() == [0.8, 0.8]


def test_descriptions_and_observations_are_taken_by_index():
    units = np.random.default_rng(0).random((5, 2))
    part = described(units).take([3, 0])
    assert part.keys == [units[3].tobytes(), units[0].tobytes()]
    np.testing.assert_array_equal(part.features, units[[3, 0]])
    np.testing.assert_array_equal(part.known, units[[3, 0]].sum(axis=1))
    assert Description(units, ["k"] * 5, None).take([1]).known is None
    fields = [np.arange(5.0) + 10 * i for i in range(5)]
    assert [f.tolist() for f in vars(Observations(*fields).take(np.array([4, 1]))).values()] == [
        [10.0 * i + 4, 10.0 * i + 1] for i in range(5)
    ]


def test_thinned_observations_prefer_the_feasible():
    rng = np.random.default_rng(0)
    losses, violation = rng.random((300, 2)), np.repeat([0.0, 1.0], 150)
    losses[150:] -= 5
    observed = Observations(losses, losses, losses, losses[:, 0], violation)
    learned, labels = _training_set(observed, 60)
    assert (learned.violation[labels] == 0).all()
    assert (learned.violation > 0).any()


@pytest.mark.parametrize("count", [0, 5])
def test_pending_configurations_are_bad_examples_for_the_classifier(monkeypatch, count):
    learned = []

    class Recorder(Classifier):
        def fit(self, features, labels, weights=None):
            learned.append((features, labels))
            return super().fit(features, labels, weights)

    monkeypatch.setattr(proposal, "Classifier", Recorder)
    box = Box(*np.array([[0.0, 0], [9, 9], [1, 1]]), np.zeros(2, bool), np.zeros(2, bool))
    rng = np.random.default_rng(0)
    units, waiting = box.sample(12, rng), box.sample(count, rng)
    observed = Observations(units, units, units.copy(), units[:, 0], np.zeros(12))
    taken = Taken(frozenset(described(units).keys), waiting, described(waiting))
    Proposer(exploration=0.0, structured=0.0).propose(observed, described, taken, box, rng)
    [(features, labels)] = learned
    np.testing.assert_array_equal(features, np.concatenate([units, waiting]))
    assert labels.tolist() == [*good(units), *[False] * count]
