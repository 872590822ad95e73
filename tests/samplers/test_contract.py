"""Optuna's own contract tests for samplers."""

import pytest
from optuna.testing.pytest_samplers import (
    BasicSamplerTestCase,
    MultiObjectiveSamplerTestCase,
    RelativeSamplerTestCase,
)

from mosaic_opt.samplers import MosaicSampler, PaperSampler


class TestContract(BasicSamplerTestCase, RelativeSamplerTestCase, MultiObjectiveSamplerTestCase):
    @pytest.fixture(params=[1, 10], ids=["classifier", "startup"])
    def sampler(self, request):
        return lambda: MosaicSampler(seed=0, n_startup_trials=request.param)


@pytest.mark.slow
class TestPaperContract(BasicSamplerTestCase, RelativeSamplerTestCase, MultiObjectiveSamplerTestCase):
    @pytest.fixture
    def sampler(self):
        return lambda: PaperSampler(seed=0, n_startup_trials=1)


class TestPaperStartup(BasicSamplerTestCase, MultiObjectiveSamplerTestCase):
    """Its random trials are independent, not joint: the relative cases do not apply."""

    @pytest.fixture
    def sampler(self):
        return lambda: PaperSampler(seed=0, n_startup_trials=10)
