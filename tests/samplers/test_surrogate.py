import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mosaic_opt.samplers.surrogate import Surrogate, knapsack_path

LEVELS = np.array([32.0, 64, 128, 256, 512])


def additive(numbers, weights, tau):
    return ((1 - np.exp(-numbers / tau)) * weights).sum(axis=1)


@pytest.fixture
def problem():
    rng = np.random.default_rng(0)
    weights, tau = rng.lognormal(0, 1, 12), rng.uniform(40, 250, 12)
    return lambda numbers: additive(numbers, weights, tau)


def sample(count, seed=1):
    return np.random.default_rng(seed).choice(LEVELS, size=(count, 12))


def test_an_additive_signal_is_predicted_and_the_score_follows_it(problem):
    numbers, unseen = sample(120), sample(200, seed=2)
    score = 1 - np.exp(-problem(numbers) / 5)
    surrogate = Surrogate(numbers, problem(numbers), score)
    assert np.corrcoef(surrogate.signal(unseen), problem(unseen))[0, 1] > 0.995
    assert np.abs(surrogate.score(unseen) - (1 - np.exp(-problem(unseen) / 5))).mean() < 0.03


def test_it_never_falls_as_a_number_rises(problem):
    rng = np.random.default_rng(3)
    numbers = sample(60)
    noisy = problem(numbers) + rng.normal(0, 2, 60)
    surrogate = Surrogate(numbers, noisy, noisy, rng)
    gains = surrogate.gains(np.tile(LEVELS, (12, 1)))
    assert (np.diff(gains, axis=1) >= 0).all()
    higher = np.minimum(numbers * 2, 512)
    assert (surrogate.signal(higher) >= surrogate.signal(numbers) - 1e-9).all()
    assert (surrogate.score(higher) >= surrogate.score(numbers) - 1e-9).all()


def test_gains_are_differences_of_the_signal(problem):
    numbers = sample(80)
    surrogate = Surrogate(numbers, problem(numbers), problem(numbers))
    gains = surrogate.gains(np.tile(LEVELS, (12, 1)))
    low, high = np.full((1, 12), 32.0), np.full((1, 12), 32.0)
    high[0, 4] = 256.0
    expected = surrogate.signal(high) - surrogate.signal(low)
    assert gains[4, 3] - gains[4, 0] == pytest.approx(expected[0])


@pytest.mark.parametrize("signal", [np.zeros(20), np.full(20, -7.5), np.linspace(5, -5, 20)])
def test_signals_that_teach_nothing(signal):
    """Constant, or falling as the numbers rise."""
    numbers = np.tile(np.linspace(32, 512, 20)[:, None], (1, 12))
    surrogate = Surrogate(numbers, signal, signal)
    assert surrogate.signal(numbers) == pytest.approx(np.full(20, signal.mean()))
    assert np.isfinite(surrogate.score(numbers)).all()


def test_a_random_prior_moves_what_the_observations_leave_open_and_nothing_else():
    """Parameters 0 to 2 are observed to matter, 3 is not varied at all: only its gain is a guess."""
    rng = np.random.default_rng(0)
    numbers = sample(200)[:, :4]
    numbers[:, 3] = 32.0
    numbers[0, 3] = 512.0
    signal = additive(numbers, np.array([5.0, 3.0, 1.0, 0.0]), 100.0) + rng.normal(0, 0.05, 200)
    table = np.tile(LEVELS, (4, 1))
    gains = [np.diff(Surrogate(numbers, signal, signal, rng).gains(table)[:, [0, -1]])[:, 0] for _ in range(40)]
    plain = np.diff(Surrogate(numbers, signal, signal).gains(table)[:, [0, -1]])[:, 0]
    spread, mean = np.std(gains, axis=0), np.mean(gains, axis=0)
    np.testing.assert_allclose(mean[:3], plain[:3], rtol=0.05)
    assert (spread[:3] / mean[:3] < 0.1).all()
    assert spread[3] > 0.3 * mean[3]
    assert mean[3] > 0


def test_without_a_signal_the_score_is_fitted_on_the_scale_on_which_it_adds_up(problem):
    """A score that saturates in the sum of the effects is predicted better than the sum of its own effects could."""
    numbers, unseen = sample(150), sample(200, seed=2)
    saturating = lambda n: 1 - np.exp(-problem(n) / problem(sample(300, seed=3)).mean() * 2)  # noqa: E731
    surrogate = Surrogate(numbers, None, saturating(numbers))
    straight = Surrogate(numbers, saturating(numbers), saturating(numbers))
    error = np.abs(surrogate.score(unseen) - saturating(unseen)).mean()
    assert error < 0.7 * np.abs(straight.score(unseen) - saturating(unseen)).mean()
    assert np.corrcoef(surrogate.signal(unseen), problem(unseen))[0, 1] > 0.99


@pytest.mark.parametrize("score", [np.zeros(20), np.full(20, 0.3)])
def test_without_a_signal_equal_scores_teach_nothing(score):
    surrogate = Surrogate(sample(20), None, score, np.random.default_rng(0))
    assert surrogate.score(sample(20)) == pytest.approx(score)


@given(seed=st.integers(0, 200), d=st.integers(1, 4), levels=st.integers(1, 4))
def test_the_path_rises_from_all_lowest_to_all_highest(seed, d, levels):
    rng = np.random.default_rng(seed)
    gains, costs = (np.cumsum(rng.exponential(size=(d, levels)), axis=1) for _ in range(2))
    gains[rng.random(d) < 0.3] = 0.0
    path = knapsack_path(gains, costs)
    assert path[0].tolist() == [0] * d
    assert path[-1].tolist() == [levels - 1] * d
    assert (np.diff(path, axis=0).sum(axis=1) >= 1).all()
    assert ((np.diff(path, axis=0) > 0).sum(axis=1) == 1).all()


@given(seed=st.integers(0, 60))
def test_every_point_of_the_path_is_the_best_of_its_cost(seed):
    """Greedy by gain a cost gives corners of the convex hull: nothing cheaper or as cheap gains more."""
    rng = np.random.default_rng(seed)
    gains = np.cumsum(rng.exponential(size=(3, 4)), axis=1)
    costs = np.tile(np.cumsum(rng.uniform(0.5, 2, 4)), (3, 1))
    rows = np.arange(3)
    every = [np.array(point) for point in itertools.product(range(4), repeat=3)]
    for point in knapsack_path(gains, costs):
        cost, gain = costs[rows, point].sum(), gains[rows, point].sum()
        for other in every:
            if costs[rows, other].sum() <= cost + 1e-12:
                assert gains[rows, other].sum() <= gain + 1e-9


def slow_path(gains, costs):
    """The greedy knapsack by its definition: every step of every row compared each time."""
    point = [0] * len(gains)
    path = [list(point)]
    while True:
        steps = [
            (-(gains[row][to] - gains[row][at]) / (costs[row][to] - costs[row][at]), row, to)
            for row, at in enumerate(point)
            for to in range(at + 1, len(gains[row]))
        ]
        if not steps:
            return path
        _, row, to = min(steps)
        point[row] = to
        path.append(list(point))


@given(seed=st.integers(0, 200), d=st.integers(1, 4), levels=st.integers(1, 5))
def test_the_path_agrees_with_its_definition(seed, d, levels):
    rng = np.random.default_rng(seed)
    gains, costs = (np.cumsum(rng.integers(1, 4, size=(d, levels)), axis=1).astype(float) for _ in range(2))
    assert knapsack_path(gains, costs).tolist() == slow_path(gains, costs)
