from types import SimpleNamespace

import numpy as np
import pytest

from mosaic_opt.allocation import Allocation, pyramid, uniform
from mosaic_opt.design import initial_design, learned_shapes, refinement_design
from mosaic_opt.objective import LevelObjective, WeightObjective

BOUNDS = {"window": 8, "floor": 8, "cap": 300}


def measured(count, layers, gain):
    """Trials of random allocations whose log-likelihood adds up over the layers by their gains."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        budgets = rng.choice([8, 16, 32, 64, 128, 256], size=layers)
        likelihood = float((gain * (1 - np.exp(-budgets / 60))).sum())
        measurement = {"score": float(likelihood > gain.sum() / 2)}
        recorded = {"budgets": budgets.tolist(), "log_likelihood": likelihood, "measurement": measurement}
        yield SimpleNamespace(user_attrs=recorded)


def test_initial_design_has_every_uniform_and_spreads_over_the_means():
    objective = LevelObjective(levels=(8, 16, 32, 64), measure=None, layers=10)
    design = initial_design(objective, trials=100, seed=3)
    assert design == initial_design(objective, trials=100, seed=3)
    assert len(design) == 25
    assert [objective.decode(params) for origin, params in design if origin == "ladder"] == [
        uniform(10, level).budgets for level in objective.levels
    ]
    means = [np.mean(objective.decode(params)) for origin, params in design if origin == "lhs"]
    assert min(means) < 20
    assert max(means) > 35
    assert len(initial_design(objective, trials=4, seed=3)) == 4


def test_learned_shapes_serve_the_layers_that_matter_at_the_exact_mean():
    gain = np.array([0.1, 5.0, 0.1, 5.0, 0.1, 0.1, 5.0, 0.1])
    shapes = learned_shapes(list(measured(60, 8, gain)), 40, seed=0, **BOUNDS)
    assert shapes == learned_shapes(list(measured(60, 8, gain)), 40, seed=0, **BOUNDS)
    for shape in shapes:
        budgets = np.array(shape.budgets)
        assert shape.mean == 40
        assert 8 <= budgets.min() <= budgets.max() <= 300
        assert budgets[gain > 1].min() > 2 * budgets[gain < 1].max()
    # near the best there is: of what the true gains allow, by trying many allocations
    true = lambda budgets: (gain * (1 - np.exp(-np.array(budgets) / 60))).sum()  # noqa: E731
    rng = np.random.default_rng(1)
    others = [Allocation(rng.integers(8, 300, 8).tolist()).rescale(40, **BOUNDS) for _ in range(300)]
    assert min(true(shape.budgets) for shape in shapes) > max(true(other.budgets) for other in others)


@pytest.mark.parametrize("likelihood", [0.0, -3.0])
def test_learned_shapes_of_trials_that_teach_nothing(likelihood):
    trials = list(measured(5, 3, np.full(3, likelihood)))
    for budget in (8, 50, 300):
        assert all(shape.mean == budget for shape in learned_shapes(trials, budget, seed=0, **BOUNDS))


def test_a_refinement_begins_with_the_rescaled_winner_and_every_seed_once():
    objective = WeightObjective(budget=40, floor=8, cap=300, measure=None, layers=8)
    rescaled = Allocation([8, 100, 8, 100, 8, 8, 80, 8])
    shapes = [rescaled, Allocation([40] * 8), Allocation([8, 72] * 4)]
    trials = list(measured(60, 8, np.linspace(0.1, 3, 8)))
    arguments = {"rescaled": rescaled, "shapes": shapes, "trials": trials, "window": 8}
    design = refinement_design(objective, **arguments, seed=3)
    assert design == refinement_design(objective, **arguments, seed=3)
    assert design != refinement_design(objective, **arguments, seed=4)
    decoded = [objective.decode(params) for _, params in design]
    assert decoded[:4] == [a.budgets for a in (rescaled, uniform(8, 40), pyramid(8, 40, **BOUNDS), shapes[2])]
    assert len(set(decoded)) == len(decoded)
    assert all(sum(budgets) == 320 for budgets in decoded)
    origins = [origin for origin, _ in design]
    assert origins[:4] == ["heuristic"] * 4
    assert origins[-4:] == ["lhs"] * 4
    assert set(origins[4:-4]) == {"surrogate"}
