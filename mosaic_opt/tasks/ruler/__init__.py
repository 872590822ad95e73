"""RULER's 13 tasks (Hsieh et al., 2024, arXiv:2404.06654), from a generator and wording of our own."""

from mosaic_opt.tasks.ruler.documents import DocumentQuestions
from mosaic_opt.tasks.ruler.metric import METRICS, NEW_TOKENS, score, settled
from mosaic_opt.tasks.ruler.needle import Needle
from mosaic_opt.tasks.ruler.variables import VariableTracking
from mosaic_opt.tasks.ruler.words import CommonWords, FrequentWords

__all__ = [
    "METRICS",
    "NEW_TOKENS",
    "CommonWords",
    "DocumentQuestions",
    "FrequentWords",
    "Needle",
    "VariableTracking",
    "score",
    "settled",
]
