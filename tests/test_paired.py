import numpy as np
import pytest
from scipy.stats import norm

from mosaic_opt.paired import hopeless, shrunk


def simulate(rng, *, candidates, examples, spread):
    """0/1 scores of candidates and of a reference on examples of unequal difficulty, and the true gains."""
    ability = rng.normal(1, spread, candidates)
    difficulty = rng.normal(0, 1.2, examples)
    scores = ability[:, None] + difficulty + 0.6 * rng.normal(size=(candidates, examples)) > 0
    reference = 1 + difficulty + 0.6 * rng.normal(size=examples) > 0
    true = norm.cdf(np.append(ability, 1.0) / np.hypot(1.2, 0.6))
    return scores.astype(float), reference.astype(float), true[:-1] - true[-1]


@pytest.mark.parametrize(("candidates", "spread"), [(8, 0.05), (20, 0.3), (8, 1.0)])
def test_the_chosen_ones_expected_gain_is_honest_and_as_good_a_choice(candidates, spread):
    """The raw mean of the chosen is too high by far; the shrunk one is not, and chooses as well."""
    rng = np.random.default_rng(0)
    raw_bias, bias, raw_regret, regret = [], [], [], []
    for _ in range(600):
        scores, reference, true = simulate(rng, candidates=candidates, examples=32, spread=spread)
        raw, gains = (scores - reference).mean(axis=1), shrunk(scores, reference)
        naive, chosen = raw.argmax(), np.lexsort((raw, gains.round(9)))[-1]
        raw_bias.append(raw[naive] - true[naive])
        bias.append(gains[chosen] - true[chosen])
        raw_regret.append(true.max() - true[naive])
        regret.append(true.max() - true[chosen])
    assert np.mean(raw_bias) > 0.01
    assert abs(np.mean(bias)) < np.mean(raw_bias) / 2
    assert np.mean(regret) < np.mean(raw_regret) + 0.002


def test_a_certain_difference_is_kept_and_noise_is_not():
    rng = np.random.default_rng(1)
    reference = rng.random(200)
    certain = np.stack([reference + 0.1, reference, reference - 0.1])
    np.testing.assert_allclose(shrunk(certain, reference), [0.1, 0.0, -0.1], atol=1e-12)
    noise = reference + rng.normal(0, 1, size=(30, 200))
    raw = (noise - reference).mean(axis=1)
    assert np.ptp(shrunk(noise, reference)) < np.ptp(raw) / 3
    assert shrunk(noise, reference).mean() == pytest.approx(raw.mean(), abs=0.005)


@pytest.mark.parametrize(("scores", "expected"), [([[1.0, 0.0]], [0.5]), ([[1.0], [0.0]], [1.0, 0.0])])
def test_one_candidate_or_one_example_stays_as_measured(scores, expected):
    np.testing.assert_allclose(shrunk(scores, np.zeros(len(scores[0]))), expected)


@pytest.mark.parametrize("scores", [[], [1.0, 0.0], [[], []]])
def test_scores_must_be_a_table(scores):
    with pytest.raises(ValueError, match="scores must have shape"):
        shrunk(scores, [0.0, 0.0])


def test_who_loses_every_example_is_hopeless_and_who_may_still_win_is_not():
    assert hopeless(np.zeros(8), np.ones(8), 16)
    assert not hopeless(np.zeros(2), np.ones(2), 16)
    assert not hopeless([1, 0, 1, 0], [0, 1, 1, 0], 16)
    assert not hopeless(np.ones(8), np.zeros(8), 16)
    assert hopeless([0.0], [1.0], 1)  # nothing is left to be measured


def test_hopeless_candidates_hardly_ever_win_in_the_end():
    rng = np.random.default_rng(0)
    stopped, wrong = 0, 0
    for _ in range(4000):
        scores, rival, _ = simulate(rng, candidates=1, examples=32, spread=1.0)
        if hopeless(scores[0, :8], rival[:8], 32):
            stopped += 1
            wrong += scores[0].sum() > rival.sum()
    assert stopped > 200
    assert wrong / stopped < 0.02


def test_scores_of_other_examples_are_refused():
    with pytest.raises(ValueError, match=r"reference must have shape \(2,\), one an example, got \(3,\)"):
        shrunk([[1.0, 0.0]], [0.0, 0.0, 1.0])
    with pytest.raises(ValueError, match=r"same length, at most 2, got shapes \(3,\) and \(3,\)"):
        hopeless(np.zeros(3), np.ones(3), 2)
    with pytest.raises(ValueError, match=r"same length, at most 9, got shapes \(3,\) and \(1,\)"):
        hopeless(np.zeros(3), [1.0], 9)
