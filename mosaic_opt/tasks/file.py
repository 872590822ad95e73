"""Task over rows of the user's own, or of any benchmark whose metric is one of METRICS (RULER's files, say)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from mosaic_opt.tasks import ruler
from mosaic_opt.tasks.base import PROTOCOLS, Example, require_one_of, require_text
from mosaic_opt.tasks.metrics import METRICS, has_code_line
from mosaic_opt.tasks.readers import Record, read_rows, require_classes
from mosaic_opt.tasks.rows import Row, RowTask


class RowsFile(RowTask):
    """Rows of a file, a folder or a data set of the hub.

    path: see `readers.read_rows`, which has the formats, too.
    tokens: most tokens of a prompt.
    metric: a key of METRICS; None: the one that all rows name, or that RULER has for their tasks.
    subset: the rows of this task alone, where rows name theirs, or their file, folder or configuration has its name;
        RULER's own files name none.
    name: shown in reports; None: the subset, or the file's name.
    new_tokens: generation limit; None: each row's max_new_tokens, or 64.
    protocol, chat, allow_overlap: see `RowTask`.
    """

    def __init__(
        self,
        *,
        path: str,
        tokens: int,
        metric: str | None = None,
        subset: str | None = None,
        name: str | None = None,
        new_tokens: int | None = None,
        protocol: str = PROTOCOLS[0],
        chat: bool = False,
        allow_overlap: bool = False,
    ) -> None:
        require_text("path", path)
        require_text("subset", subset, optional=True)
        require_text("name", name, optional=True)
        if metric is not None:
            require_one_of("metric", metric, METRICS)
        super().__init__(
            name=name or subset or Path(path).stem,
            metric=metric or "",
            tokens=tokens,
            new_tokens=new_tokens,
            protocol=protocol,
            chat=chat,
            allow_overlap=allow_overlap,
        )
        self.path = path
        self.subset = subset or ""

    @property
    def metric(self) -> str:
        """Name of the metric; reads the rows where it was not given."""
        return self._metric or self._metric_of_rows

    @metric.setter
    def metric(self, value: str) -> None:
        self._metric = value

    @cached_property
    def _records(self) -> list[Record]:
        return read_rows(self.path, task=self.subset, named=True)

    @cached_property
    def _metric_of_rows(self) -> str:
        found = {record.metric or ruler.METRICS.get(record.task, "") for record in self._records}
        if len(found) != 1 or "" in found:
            named = ", ".join(sorted(name or "none" for name in found))
            raise ValueError(
                f"metric must be given, one of {', '.join(METRICS)}, unless all rows of {self.path} name the same; "
                f"they name {named}"
            )
        return found.pop()

    def rows(self) -> list[Row]:
        """See RowTask; ValueError for data that cannot be read or leaves the metric open."""
        if self.metric == "classification":
            require_classes(self._records)
        return list(self._records)

    def score(self, prediction: str, example: Example) -> float:
        return METRICS[self.metric](prediction, example.references, example.classes)

    def settled(self, prediction: str, example: Example, reach: Sequence[float]) -> bool:
        """See Task; can tell for RULER's string matches and for code similarity."""
        if self.metric in ("string_match_all", "string_match_part"):
            return ruler.settled(prediction, example.references, reach, metric=self.metric)
        return self.metric == "code_similarity" and has_code_line(prediction)
