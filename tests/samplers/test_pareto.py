"""Oracles: the definitions written as loops, and Optuna's own non-domination and hypervolume functions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from optuna._hypervolume import compute_hypervolume
from optuna.study._multi_objective import _fast_non_domination_rank

from mosaic_opt.samplers.pareto import contributions_2d, hypervolume_2d, ideal_volumes, losses, shells

# few distinct values, so that ties and duplicates are common
small = st.integers(0, 6).map(float)


def clouds(objectives):
    return arrays(float, st.tuples(st.integers(0, 14), st.just(objectives)), elements=small)


def dominates(a, b):
    return all(x <= y for x, y in zip(a, b, strict=True)) and any(x < y for x, y in zip(a, b, strict=True))


def peel(points):
    """Shells by the definition: take away the non-dominated points until none is left."""
    ranks, left, rank = [-1] * len(points), set(range(len(points))), 0
    while left:
        shell = {i for i in left if not any(dominates(points[j], points[i]) for j in left)}
        for i in shell:
            ranks[i] = rank
        left, rank = left - shell, rank + 1
    return ranks


def area(points, reference):
    """Hypervolume of integer points by counting unit cells."""
    cells = np.mgrid[: int(reference[0]), : int(reference[1])].reshape(2, -1).T
    return sum(any(p[0] <= c[0] and p[1] <= c[1] for p in points) for c in cells)


@pytest.mark.parametrize("objectives", [1, 2, 3, 4])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_shells_follow_the_definition_and_optuna(objectives, data):
    points = data.draw(clouds(objectives))
    assert shells(points).tolist() == peel(points.tolist())
    assert shells(points).tolist() == _fast_non_domination_rank(points).tolist()


@settings(max_examples=60, deadline=None)
@given(points=clouds(2))
def test_hypervolume_counts_cells_and_agrees_with_optuna(points):
    reference = (5.0, 6.0)
    assert hypervolume_2d(points, reference) == area(points, reference)
    inside = points[(points <= reference).all(axis=1)]
    assert hypervolume_2d(inside, reference) == compute_hypervolume(inside, np.array(reference))


@settings(max_examples=60, deadline=None)
@given(points=clouds(2))
def test_contribution_is_what_is_lost_without_the_point(points):
    reference = (5.0, 6.0)
    whole = area(points, reference)
    lost = [whole - area(np.delete(points, i, axis=0), reference) for i in range(len(points))]
    assert contributions_2d(points, reference).tolist() == lost


@pytest.mark.parametrize("objectives", [2, 3])
def test_own_volume_is_the_hypervolume_of_the_point_alone(objectives):
    points = np.random.default_rng(0).random((20, objectives)) * 1.3
    volumes = ideal_volumes(points, [1.0] * objectives)
    inside = (points < 1).all(axis=1)
    alone = [compute_hypervolume(p[None], np.ones(objectives)) for p in points[inside]]
    np.testing.assert_allclose(volumes[inside], alone)
    assert not volumes[~inside].any()


def test_many_points_in_two_objectives_agree_with_optuna():
    points = np.random.default_rng(1).normal(size=(2000, 2)).round(2)
    assert shells(points).tolist() == _fast_non_domination_rank(points).tolist()


@pytest.mark.parametrize("objectives", [1, 2, 3])
def test_nan_points_share_one_last_shell(objectives):
    points = np.arange(5.0)[:, None].repeat(objectives, axis=1)
    points[1, 0] = np.nan
    points[3] = np.nan
    assert shells(points).tolist() == [0, 3, 1, 3, 2]
    assert shells(np.full((2, objectives), np.nan)).tolist() == [0, 0]


def test_infinities_compare_as_usual():
    assert shells([[np.inf, 0.0], [0.0, 0.0], [-np.inf, np.inf]]).tolist() == [1, 0, 0]


def test_directions_flip_signs():
    points = np.array([[1.0, 5.0], [2.0, 5.0], [1.0, 4.0]])
    assert shells(points, ["minimize", "maximize"]).tolist() == [0, 1, 1]
    assert shells(points, ["maximize", "minimize"]).tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("points", "directions", "message"),
    [
        ([1.0, 2.0], None, "points must have two dimensions"),
        ([[1.0, 2.0]], ["minimize"], "directions must have length 2"),
        ([[1.0]], ["upwards"], "directions must be 'minimize' or 'maximize', got 'upwards'"),
    ],
)
def test_bad_input_is_named(points, directions, message):
    with pytest.raises(ValueError, match=message):
        losses(points, directions)


def test_hypervolume_refuses_three_objectives():
    with pytest.raises(ValueError, match="reference"):
        hypervolume_2d(np.zeros((1, 3)), (1.0, 1.0, 1.0))
