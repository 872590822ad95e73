"""Every shipped sampler file makes a sampler out of a seed."""

from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf
from optuna.samplers import BaseSampler

FILES = sorted((Path(__file__).parents[2] / "conf" / "sampler").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_file_instantiates(path):
    config = OmegaConf.merge({"seed": 7}, {"sampler": OmegaConf.load(path)})
    assert isinstance(instantiate(config.sampler)(), BaseSampler)


def test_the_rivals_are_there():
    assert {path.stem for path in FILES} >= {"mosaic", "tpe", "nsga2", "random"}
