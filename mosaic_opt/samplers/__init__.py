"""Classifier-guided samplers for Optuna: one or more objectives, integer, float and categorical parameters."""

from .mosaic import MosaicSampler
from .paper import PaperSampler

__all__ = ["MosaicSampler", "PaperSampler"]
