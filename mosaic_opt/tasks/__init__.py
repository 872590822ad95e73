"""Tasks: examples and metrics, one file a benchmark."""

from mosaic_opt.tasks.base import SPLITS, Example, Task
from mosaic_opt.tasks.ruler import Needle

__all__ = ["SPLITS", "Example", "Needle", "Task"]
