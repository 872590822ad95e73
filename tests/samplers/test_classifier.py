import warnings

import numpy as np
import pytest

from mosaic_opt.samplers.classifier import Classifier, _balanced


def problem(count=200):
    features = np.random.default_rng(0).normal(size=(count, 6)) * [1, 10, 100, 1, 1, 0] + 5
    return features, features[:, 0] + features[:, 1] / 10 > 6.5


def test_learns_and_ignores_scale_and_constant_columns():
    features, labels = problem()
    probability = Classifier(seed=0).fit(features[:150], labels[:150]).predict_proba(features[150:])
    assert probability.shape == (50,)
    assert np.mean((probability > 0.5) == labels[150:]) > 0.85


def test_same_seed_same_prediction():
    features, labels = problem()
    a, b = (Classifier(seed=3).fit(features, labels).predict_proba(features) for _ in range(2))
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("label", [False, True])
def test_one_class_is_constant(label):
    features, labels = problem()
    classifier = Classifier(seed=0).fit(features, np.full(len(labels), label))
    assert (classifier.predict_proba(features) == label).all()
    assert not (classifier.fit(features, labels).predict_proba(features) == label).all()


def test_classes_weigh_the_same():
    labels = np.array([True, False, False, False])
    weights = _balanced(labels, np.array([5.0, 1.0, 1.0, 2.0]))
    np.testing.assert_allclose(weights, [2.0, 0.5, 0.5, 1.0])


def test_no_convergence_warning():
    features, labels = problem()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Classifier(seed=0, iterations=1).fit(features, labels)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="seed must be at least 0, got -1"):
        Classifier(seed=-1)
    with pytest.raises(ValueError, match="iterations must be at least 1, got 0"):
        Classifier(seed=0, iterations=0)
    with pytest.raises(ValueError, match="same length"):
        Classifier(seed=0).fit(np.zeros((3, 1)), np.zeros(2, dtype=bool))
