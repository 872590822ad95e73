"""Trials that violate a constraint come after all feasible ones."""

import numpy as np
import optuna
import pytest
from optuna.distributions import IntDistribution
from optuna.trial import create_trial

from mosaic_opt.samplers import MosaicSampler
from mosaic_opt.samplers.proposal import Observations
from tests.samplers import layers

SPACE = {f"x{i}": IntDistribution(0, 6) for i in range(8)}


def forbidden(parameters):
    """Violated where the first parameter is above 2."""
    return parameters["x0"] - 2.0


def values(parameters, objectives):
    """By far the best where the constraint is violated."""
    bonus = 100.0 if forbidden(parameters) > 0 else 0.0
    x = list(parameters.values())
    return [sum(x) - bonus, sum(v**0.5 for v in x) + bonus][-objectives:]


def trials(objectives, form="new", count=60, seed=0):
    """Complete trials; form of the constraint: new, list (the old one), none."""
    for parameters in layers.configurations(SPACE, count, seed):
        bound = forbidden(parameters)
        yield create_trial(
            params=parameters,
            distributions=SPACE,
            values=values(parameters, objectives),
            constraints={"a": bound, "b": -1.0} if form == "new" else None,
            system_attrs={"constraints": [bound, -1.0]} if form == "list" else None,
        )


def study(imported, objectives, **arguments):
    made = optuna.create_study(
        directions=["minimize", "maximize"][-objectives:],
        sampler=MosaicSampler(seed=0, search_space=SPACE, exploration=0.0, **arguments),
    )
    made.add_trials(imported)
    return made


def proposals(made, count, objectives, violation=forbidden):
    """What is proposed and then told, with the constraint."""
    for _ in range(count):
        trial = made.ask(SPACE)
        if violation is not None:
            trial.set_constraint("a", violation(trial.params))
        made.tell(trial, values(trial.params, objectives))
        yield trial.params


@pytest.mark.parametrize("objectives", [1, 2])
def test_proposals_keep_away_from_infeasible_trials_however_good_they_are(objectives):
    shares = []
    for form, violation in (("new", forbidden), ("none", None)):
        made = study(trials(objectives, form), objectives)
        shares.append(np.mean([forbidden(p) > 0 for p in proposals(made, 12, objectives, violation)]))
    assert shares[0] <= 0.25
    assert shares[1] >= 0.75


@pytest.mark.parametrize("objectives", [1, 2])
def test_the_old_form_of_constraints_is_the_same(objectives):
    asked = [study(trials(objectives, form), objectives).ask(SPACE).params for form in ("new", "list", "none")]
    assert asked[0] == asked[1]
    assert asked[0] != asked[2]


@pytest.mark.parametrize("objectives", [1, 2])
def test_order_of_storage_does_not_matter(objectives):
    imported = list(trials(objectives))
    asked = [study(order, objectives).ask(SPACE).params for order in (imported, imported[::-1])]
    assert asked[0] == asked[1]


@pytest.mark.parametrize("objectives", [1, 2])
def test_without_a_feasible_trial_the_violation_falls(objectives):
    def violation(parameters):
        return 0.1 + sum(max(0, v - 1) for v in parameters.values())

    made = study([], objectives)
    before = [violation(p) for p in layers.configurations(SPACE, 40)]
    for parameters, bound in zip(layers.configurations(SPACE, 40), before, strict=True):
        made.add_trial(
            create_trial(
                params=parameters,
                distributions=SPACE,
                values=values(parameters, objectives),
                constraints={"a": bound},
            )
        )
    after = [violation(p) for p in proposals(made, 16, objectives, violation)]
    assert np.mean(after) < np.mean(before) - np.std(before)
    assert min(after) < min(before)


def test_the_front_holds_feasible_observations_only():
    losses = np.array([[0.0, 0.0], [1.0, 3.0], [3.0, 1.0], [4.0, 4.0], [-9.0, -9.0]])
    violation = np.array([0.5, 0.0, 0.0, 0.0, 0.1])
    observed = Observations(losses, losses, losses, losses[:, 0], violation)
    assert observed.ranks.tolist() == [3, 0, 0, 1, 2]
    assert observed.take(np.array([4, 3])).ranks.tolist() == [1, 0]


@pytest.mark.parametrize("kind", ["known", "score"])
def test_the_surrogate_keeps_to_the_constraints(kind):
    """A bound on the mean budget, or a score that counts only below it: points beyond are of no use."""
    space = layers.space(12)

    def bound(parameters):
        return layers.mean_budget(parameters) - 150.0 if kind == "known" else 200.0 - layers.mean_budget(parameters)

    made = layers.study(space, exploration=0.0, structured=1.0)
    for p in layers.configurations(space, 50):
        made.add_trial(layers.finished(p, space, constraints={"a": bound(p)}))
    feasible = []
    for _ in range(12):
        trial = made.ask(space)
        feasible.append(bound(trial.params) <= 0)
        trial.set_constraint("a", bound(trial.params))
        trial.set_user_attr("likelihood", layers.likelihood(trial.params))
        made.tell(trial, [layers.mean_budget(trial.params), layers.score(trial.params)])
    assert np.mean(feasible) >= 0.5
