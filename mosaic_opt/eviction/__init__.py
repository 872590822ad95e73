"""Eviction methods (one file a paper) and their live form: `with attach(model, SnapKV(), allocation): ...`"""

from mosaic_opt.eviction.attach import attach
from mosaic_opt.eviction.base import EvictionMethod
from mosaic_opt.eviction.snapkv import SnapKV

__all__ = ["EvictionMethod", "SnapKV", "attach"]
