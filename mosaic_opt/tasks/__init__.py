"""Tasks: examples and metrics, one file a benchmark."""

from mosaic_opt.tasks.base import SPLITS, Example, Task
from mosaic_opt.tasks.code import HumanEval, NextLine
from mosaic_opt.tasks.file import RowsFile
from mosaic_opt.tasks.longbench import LongBench
from mosaic_opt.tasks.mixture import Mixture
from mosaic_opt.tasks.passages import PassageCounting, PassageRetrieval
from mosaic_opt.tasks.ruler import CommonWords, DocumentQuestions, FrequentWords, Needle, VariableTracking

__all__ = [
    "SPLITS",
    "CommonWords",
    "DocumentQuestions",
    "Example",
    "FrequentWords",
    "HumanEval",
    "LongBench",
    "Mixture",
    "Needle",
    "NextLine",
    "PassageCounting",
    "PassageRetrieval",
    "RowsFile",
    "Task",
    "VariableTracking",
]
