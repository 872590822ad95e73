from types import SimpleNamespace

import optuna
import pytest

from mosaic_opt.allocation import Allocation
from mosaic_opt.evaluator import Measurement
from mosaic_opt.stages import Search
from mosaic_opt.study import Measured, Watch, front_of, plan_record


def trial(number, budgets, score, likelihood=-1.0):
    mean = sum(budgets) / len(budgets)
    measurement = {"score": score, "mean_budget": mean}
    attributes = {"budgets": budgets, "log_likelihood": likelihood, "measurement": measurement}
    return SimpleNamespace(number=number, values=[mean, score], user_attrs=attributes)


def test_front_keeps_each_allocation_once_and_tells_ties_apart_by_likelihood():
    trials = [
        trial(0, [10, 10], 0.2),
        trial(1, [15, 15], 0.2, likelihood=-0.5),  # same score, more certain: stays
        trial(2, [30, 30], 0.2, likelihood=-2.0),  # dominated
        trial(3, [30, 10], 0.9),
        trial(4, [10, 10], 0.2),
        trial(5, [40, 40], 0.8),  # dominated
        trial(6, [25, 25], 0.9),  # as good as number 3 in both, and dearer
    ]
    budgets = [member.user_attrs["budgets"] for member in front_of(trials)]
    assert budgets == [[10, 10], [15, 15], [30, 10]]
    assert front_of([]) == []


@pytest.fixture
def search():
    """A search whose selection split prefers budget in layer 1."""

    def measure(allocation, complete):
        score = allocation.budgets[1] / 1000
        return Measurement((score,), (score,), ("",), allocation.mean, allocation.mean, 1, 0.1)

    made = Search.__new__(Search)
    made.watch = Watch()
    made.study = optuna.create_study(directions=["minimize", "maximize"])
    selection = optuna.create_study(directions=["minimize", "maximize"])
    made.selection = Measured(selection, measure, layers=3, cap=500)
    made.plan = SimpleNamespace(ladder=(50, 100), winner="shape", key="k")
    method = SimpleNamespace(window=10, floor=10)
    made.bench = SimpleNamespace(method=method, cap=500, layers=3, evaluator=lambda split: None)
    made._inside = 0.0
    return made


FRONT = [
    trial(0, [10, 40, 10], 0.3),  # the shape that gives layer 1 most
    trial(1, [200, 300, 100], 0.7),
    trial(2, [400, 400, 400], 0.8),  # the best as it stands, but uniform
]


def test_the_default_winner_is_the_best_shape_after_rescaling(search):
    assert search.select(FRONT) == Allocation([10, 40, 10])
    assert plan_record(search.study, "k")["winners"] == {"shape": [10, 40, 10], "paper": [200, 300, 100]}


def test_the_published_rule_takes_the_best_as_it_stands_among_the_uneven(search):
    search.plan.winner = "paper"
    assert search.select(FRONT) == Allocation([200, 300, 100])


def test_rescaling_meets_every_budget(search):
    for budget in (10, 50, 333, 500):
        assert search.rescale(Allocation([10, 40, 10]), budget).mean == pytest.approx(budget, abs=1 / 6)
