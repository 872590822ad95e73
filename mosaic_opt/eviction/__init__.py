"""Eviction methods (one file a paper) and their live form: `with attach(model, SnapKV(), allocation): ...`"""

from mosaic_opt.eviction.adakv import AdaKV
from mosaic_opt.eviction.attach import Eviction, Report, attach, fitting_layers, require_skip
from mosaic_opt.eviction.attention import UnsupportedModel, evictable_layers
from mosaic_opt.eviction.base import EvictionMethod, PromptStates, Ranking
from mosaic_opt.eviction.described import apply, kv_shape, method_of
from mosaic_opt.eviction.expected_attention import ExpectedAttention
from mosaic_opt.eviction.h2o import H2O
from mosaic_opt.eviction.keydiff import KeyDiff
from mosaic_opt.eviction.l2norm import L2Norm
from mosaic_opt.eviction.snapkv import SnapKV
from mosaic_opt.eviction.streamingllm import StreamingLLM
from mosaic_opt.eviction.tova import TOVA

__all__ = [
    "H2O",
    "TOVA",
    "AdaKV",
    "Eviction",
    "EvictionMethod",
    "ExpectedAttention",
    "KeyDiff",
    "L2Norm",
    "PromptStates",
    "Ranking",
    "Report",
    "SnapKV",
    "StreamingLLM",
    "UnsupportedModel",
    "apply",
    "attach",
    "evictable_layers",
    "fitting_layers",
    "kv_shape",
    "method_of",
    "require_skip",
]
