import numpy as np
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from mosaic_opt.samplers.space import Space

SPACE = {
    "whole": IntDistribution(2, 10, step=4),
    "log": IntDistribution(1, 1000, log=True),
    "real": FloatDistribution(1e-9, 1.0, log=True),
    "tenths": FloatDistribution(0.0, 1.0, step=0.1),
    "kind": CategoricalDistribution(["a", None, 3, False]),
}


def test_parameters_survive_the_round_trip():
    space = Space(SPACE)
    rows = space.parameters(space.box.sample(200, np.random.default_rng(0)))
    units, kept = space.units(rows)
    assert kept == list(range(200))
    for before, after in zip(rows, space.parameters(units), strict=True):
        assert list(before) == sorted(SPACE)
        space.check(after)
        assert [before[k] for k in ("whole", "log", "kind")] == [after[k] for k in ("whole", "log", "kind")]
        assert after["real"] == pytest.approx(before["real"], rel=1e-9)
        assert after["tenths"] == before["tenths"]
        assert [type(before[k]) for k in ("whole", "log", "real", "tenths")] == [int, int, float, float]


def test_foreign_parameters_are_left_out():
    space = Space(SPACE)
    good = {"whole": 6, "log": 7, "real": 0.5, "tenths": 0.3, "kind": None, "unrelated": 1}
    bad = [{**good, "whole": 11}, {**good, "kind": "z"}, {**good, "real": float("nan")}, {"whole": 6}]
    units, kept = space.units([*bad, good])
    assert kept == [4]
    assert units.shape == (1, 5)
    assert space.units([])[0].shape == (0, 5)


def test_an_empty_space_is_refused():
    with pytest.raises(ValueError, match="distributions must hold at least one parameter, got none"):
        Space({})
