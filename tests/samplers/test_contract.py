"""Optuna's own contract tests for samplers."""

import pytest
from optuna.testing.pytest_samplers import (
    BasicSamplerTestCase,
    MultiObjectiveSamplerTestCase,
    RelativeSamplerTestCase,
)

from mosaic_opt.samplers import MosaicSampler


class TestContract(BasicSamplerTestCase, RelativeSamplerTestCase, MultiObjectiveSamplerTestCase):
    @pytest.fixture(params=[1, 10], ids=["classifier", "startup"])
    def sampler(self, request):
        return lambda: MosaicSampler(seed=0, n_startup_trials=request.param)
