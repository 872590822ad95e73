"""Classifier-guided sampler for Optuna: one or more objectives, integer, float and categorical parameters."""

from .mosaic import MosaicSampler

__all__ = ["MosaicSampler"]
