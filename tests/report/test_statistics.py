import numpy as np
import pytest

from mosaic_opt.report.statistics import cache_ratio, paired_gain, uniform_budget_for

CURVE = [(32.0, 0.0), (64.0, 0.2), (96.0, 0.2), (128.0, 0.6)]


def test_interval_covers_the_normal_approximation():
    rng = np.random.default_rng(0)
    scores, baseline = rng.random(400), rng.random(400)
    gain, low, high = paired_gain(scores.tolist(), baseline.tolist())
    error = np.std(scores - baseline) / 20
    assert gain == pytest.approx((scores - baseline).mean())
    assert (low, high) == pytest.approx((gain - 1.96 * error, gain + 1.96 * error), abs=error / 5)


def test_equal_scores_have_no_width():
    assert paired_gain([1, 0, 1], [1, 0, 1]) == (0.0, 0.0, 0.0)
    assert paired_gain([1, 1], [0, 0]) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(("scores", "baseline"), [([], []), ([1], [1, 2])])
def test_unpaired_scores_are_refused(scores, baseline):
    with pytest.raises(ValueError, match="paired"):
        paired_gain(scores, baseline)


@pytest.mark.parametrize(
    ("score", "budget"), [(0.0, 32.0), (0.1, 48.0), (0.2, 64.0), (0.4, 112.0), (0.6, 128.0), (0.61, None)]
)
def test_uniform_budget_is_linear_between_points(score, budget):
    found = uniform_budget_for(score, CURVE)
    assert found == (None if budget is None else pytest.approx(budget))


def test_uniform_budget_takes_the_first_crossing_of_a_curve_that_dips():
    assert uniform_budget_for(0.3, [(10, 0.0), (20, 0.4), (30, 0.2), (40, 0.5)]) == pytest.approx(17.5)


def test_ratio_counts_only_where_uniform_is_worth_something():
    assert cache_ratio(0.4, 56, CURVE, full=0.6) == pytest.approx(2.0)
    assert cache_ratio(0.1, 56, CURVE, full=1.0) is None
    assert cache_ratio(0.0, 56, CURVE, full=0.0) is None
    assert cache_ratio(0.7, 56, CURVE, full=0.6) is None
