import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mosaic_opt.samplers.labels import bounded, break_ties, good, ranks
from mosaic_opt.samplers.pareto import shells


def test_one_objective_marks_the_best_third():
    assert good(np.array([[3.0], [1.0], [2.0], [9.0], [8.0], [7.0]])).tolist() == [0, 1, 1, 0, 0, 0]


def test_ties_at_the_border_are_all_good():
    assert good(np.array([[1.0], [1.0], [1.0], [2.0]])).tolist() == [1, 1, 1, 0]
    assert good(np.zeros((5, 1))).all()
    assert good(np.zeros((5, 2))).all()


@pytest.mark.parametrize("objectives", [2, 3])
def test_whole_shells_come_before_worse_ones(objectives):
    losses = np.random.default_rng(0).random((60, objectives))
    labels, ranks = good(losses), shells(losses)
    assert labels.sum() == 20
    assert ranks[labels].max() <= ranks[~labels].min()


def test_a_large_front_is_cut_by_hypervolume():
    crowded = [[0.50 + i / 1000, 0.50 - i / 1000] for i in range(6)]
    losses = np.array([[0.0, 1.0], *crowded, [1.0, 0.0]])
    assert good(losses, share=0.25).tolist() == [1, 0, 0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("share", [0.0, 1.0, -1.0])
def test_share_out_of_range(share):
    with pytest.raises(ValueError, match="share must lie between 0 and 1"):
        good(np.zeros((3, 1)), share=share)


def test_signal_orders_equal_scores_and_nothing_else():
    score, signal = np.array([1.0, 0.0, 1.0, 1.0, 2.0]), np.array([5.0, -9.0, 7.0, np.nan, 0.0])
    finer = break_ties(score, signal)
    assert np.argsort(finer).tolist() == [1, 2, 0, 3, 4]
    assert np.all(np.abs(finer - score) < 1)


def slow_ranks(losses, violation):
    """Shells of the feasible one after the other; then the infeasible, the least violation first."""
    ranked, rank = [None] * len(losses), 0
    left = [i for i in range(len(losses)) if violation[i] <= 0]
    while left:
        shell = [
            i for i in left if not any((losses[j] <= losses[i]).all() and (losses[j] < losses[i]).any() for j in left)
        ]
        for i in shell:
            ranked[i] = rank
        left, rank = [i for i in left if i not in shell], rank + 1
    for bound in sorted({v for v in violation if v > 0}):
        for i in np.flatnonzero(violation == bound):
            ranked[i] = rank
        rank += 1
    return ranked


@given(seed=st.integers(0, 10**6), count=st.integers(0, 15), objectives=st.integers(1, 3))
def test_ranks_agree_with_their_definition(seed, count, objectives):
    rng = np.random.default_rng(seed)
    losses = rng.integers(0, 4, (count, objectives)).astype(float)
    violation = rng.choice([0.0, 0.0, 0.5, 1e-9, np.inf], count)
    assert ranks(losses, violation).tolist() == slow_ranks(losses, violation)


@given(seed=st.integers(0, 10**6), objectives=st.integers(1, 3))
def test_no_infeasible_observation_is_good_before_a_feasible_one(seed, objectives):
    rng = np.random.default_rng(seed)
    losses = rng.random((30, objectives))
    violation = np.where(rng.random(30) < rng.random(), rng.integers(1, 4, 30), 0).astype(float)
    labels = good(losses - 9 * violation[:, None], violation)
    assert labels.sum() >= 10
    if (violation == 0).sum() >= 10:
        assert (violation[labels] == 0).all()
    else:
        assert labels[violation == 0].all()
        assert violation[labels].max() <= violation[~labels].min()


def test_scores_apart_by_rounding_alone_count_as_equal():
    score = np.array([0.5, 0.5, 0.5, 0.5, 0.1 + 0.2, 0.3])
    finer = break_ties(score, np.arange(6.0))
    assert len(set(finer)) == 6
    assert finer[4] > finer[5]
    assert max(finer[4:]) < min(finer[:4])


def test_infinite_losses_lie_just_beyond_the_finite_ones():
    losses = np.array(
        [[0.0, np.inf, np.inf], [10.0, -np.inf, 1.7e308], [np.inf, np.inf, 1.0], [-np.inf, -np.inf, 2.0]]
    )
    assert bounded(losses)[:, 0].tolist() == [0.0, 10.0, 11.0, -1.0]
    assert bounded(losses)[:, 1].tolist() == [1.0, -1.0, 1.0, -1.0]
    assert np.isfinite(bounded(losses)).all()
    assert np.isinf(losses).sum() == 7
