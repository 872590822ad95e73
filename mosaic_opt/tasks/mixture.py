"""Several tasks measured as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mosaic_opt.tasks.base import Example, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Mixture(Task):
    """Examples of several tasks in turn, each scored by its own task.

    tasks: at least one, of different names and the same protocol.
    name: shown in reports.

    A mixture cannot be in another. `tokens` and `new_tokens` are the largest of the tasks'; every example has
    its own.
    Raises ValueError for anything but such tasks.
    """

    def __init__(self, *, tasks: Sequence[Task], name: str = "mixture") -> None:
        if not isinstance(tasks, Sequence) or not all(isinstance(task, Task) for task in tasks):
            raise ValueError(f"tasks must be a list of tasks, got {tasks!r}")
        names = [task.name for task in tasks]
        if not tasks or len(set(names)) < len(names):
            raise ValueError(f"tasks must be at least one, of different names, got {', '.join(names) or 'none'}")
        protocols = {task.protocol for task in tasks}
        if len(protocols) > 1:
            listed = ", ".join(f"{task.protocol} in {task.name}" for task in tasks)
            raise ValueError(f"protocol must be the same in all tasks of a mixture, got {listed}")
        super().__init__(
            name=name,
            metric=f"mean of {', '.join(dict.fromkeys(task.metric for task in tasks))}",
            tokens=max(task.tokens for task in tasks),
            new_tokens=max(task.new_tokens for task in tasks),
            protocol=tasks[0].protocol,
        )
        self.category = " + ".join(dict.fromkeys(task.category for task in tasks))
        self.allow_overlap = any(task.allow_overlap for task in tasks)
        self.tasks = tuple(tasks)
        self._by_name = dict(zip(names, tasks, strict=True))

    def examples(self, tokenizer: PreTrainedTokenizerBase, split: str, count: int) -> list[Example]:
        """See Task; `count` must be a multiple of the number of tasks, so that all weigh the same."""
        if count < 1 or count % len(self.tasks):
            raise ValueError(f"count must be a multiple of {len(self.tasks)}, the number of tasks, got {count}")
        parts = [task.examples(tokenizer, split, count // len(self.tasks)) for task in self.tasks]
        return [example for turn in zip(*parts, strict=True) for example in turn]

    def score(self, prediction: str, example: Example) -> float:
        return self._by_name[example.task].score(prediction, example)

    def settled(self, prediction: str, example: Example, reach: Sequence[float]) -> bool:
        return self._by_name[example.task].settled(prediction, example, reach)
