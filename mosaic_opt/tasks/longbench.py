"""LongBench v1 (Bai et al., 2024, arXiv:2308.14508): its 21 data sets, their scores, and the task over them.

Data and prompts are read from where the user has them (see `readers`). LongBench-E is the same with rows spread
evenly over three ranges of length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from mosaic_opt.tasks.base import PROTOCOLS, Example, encode, require_one_of, require_text
from mosaic_opt.tasks.metrics import METRICS, has_code_line
from mosaic_opt.tasks.readers import read_rows, require_classes
from mosaic_opt.tasks.rows import Row, RowTask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Rules(NamedTuple):
    """How LongBench runs and scores one data set.

    Attributes:
        category: LongBench's.
        metric: a key of METRICS.
        new_tokens: generation limit.
        chat: whether the prompt is a turn of the model's chat template.
        first_line: whether the score sees the prediction's first line alone (after leading newlines).
        stop_at_newline: whether a newline ends the output.
        extended: whether LongBench-E has the data set.
    """

    category: str
    metric: str
    new_tokens: int
    chat: bool = True
    first_line: bool = False
    stop_at_newline: bool = False
    extended: bool = False


DATASETS = {
    "narrativeqa": Rules("single-document QA", "f1", 128),
    "qasper": Rules("single-document QA", "f1", 128, extended=True),
    "multifieldqa_en": Rules("single-document QA", "f1", 64, extended=True),
    "multifieldqa_zh": Rules("single-document QA", "f1_zh", 64),
    "hotpotqa": Rules("multi-document QA", "f1", 32, extended=True),
    "2wikimqa": Rules("multi-document QA", "f1", 32, extended=True),
    "musique": Rules("multi-document QA", "f1", 32),
    "dureader": Rules("multi-document QA", "rouge_l_zh", 128),
    "gov_report": Rules("summarisation", "rouge_l", 512, extended=True),
    "qmsum": Rules("summarisation", "rouge_l", 512),
    "multi_news": Rules("summarisation", "rouge_l", 512, extended=True),
    "vcsum": Rules("summarisation", "rouge_l_zh", 512),
    "trec": Rules("few-shot", "classification", 64, chat=False, first_line=True, extended=True),
    "triviaqa": Rules("few-shot", "f1", 32, chat=False, first_line=True, extended=True),
    "samsum": Rules("few-shot", "rouge_l", 128, chat=False, first_line=True, stop_at_newline=True, extended=True),
    "lsht": Rules("few-shot", "classification", 64, chat=False, first_line=True),
    "passage_count": Rules("synthetic", "count", 32, extended=True),
    "passage_retrieval_en": Rules("synthetic", "retrieval", 32, extended=True),
    "passage_retrieval_zh": Rules("synthetic", "retrieval_zh", 32),
    "lcc": Rules("code", "code_similarity", 64, chat=False, extended=True),
    "repobench-p": Rules("code", "code_similarity", 64, chat=False, extended=True),
}
# Ranges of a row's `length` in LongBench-E.
BUCKETS = {"0-4k": range(4000), "4-8k": range(4000, 8000), "8k+": range(8000, 2**63), "all": range(2**63)}


def score(task: str, prediction: str, answers: Sequence[str], all_classes: Sequence[str] | None = None) -> float:
    """LongBench's score of one prediction, from 0 to 1: the best over the answers.

    task: a key of DATASETS.
    answers: at least one.
    all_classes: the class names of trec and lsht; None: the answers alone count as classes.
    """
    _check_name(task)
    if isinstance(answers, str) or not answers:
        raise ValueError(f"answers must be a list of at least one text, got {answers!r}")
    rules = DATASETS[task]
    if rules.first_line:
        prediction = prediction.lstrip("\n").partition("\n")[0]
    return METRICS[rules.metric](prediction, answers, tuple(all_classes or ()))


class LongBench(RowTask):
    """One of LongBench's data sets.

    name: a key of DATASETS.
    path: where its rows are, see `readers.read_rows`: LongBench's folder, a file, or a data set of the hub.
    tokens: most tokens of a prompt.
    new_tokens, chat: None takes LongBench's own.
    protocol, allow_overlap: see `RowTask`.
    bucket: None reads LongBench; a key of BUCKETS reads LongBench-E's rows of that length.
    """

    def __init__(
        self,
        *,
        name: str,
        path: str,
        tokens: int,
        new_tokens: int | None = None,
        protocol: str = PROTOCOLS[0],
        chat: bool | None = None,
        allow_overlap: bool = False,
        bucket: str | None = None,
    ) -> None:
        _check_name(name)
        rules = DATASETS[name]
        require_text("path", path)
        known = isinstance(bucket, str) and bucket in BUCKETS and rules.extended
        if bucket is not None and not known:
            allowed = f"null or one of {', '.join(BUCKETS)}" if rules.extended else "null, for LongBench-E lacks it,"
            raise ValueError(f"bucket of {name} must be {allowed}; got {bucket!r}")
        super().__init__(
            name=name,
            metric=rules.metric,
            tokens=tokens,
            new_tokens=rules.new_tokens if new_tokens is None else new_tokens,
            protocol=protocol,
            chat=rules.chat if chat is None else chat,
            allow_overlap=allow_overlap,
        )
        self.path = path
        self.bucket = bucket
        self.category = rules.category

    def rows(self) -> list[Row]:
        """See RowTask; ValueError for data that cannot be read, lacks a length, or has no row of the bucket."""
        records = read_rows(self.path, task=self.name, extended=self.bucket is not None)
        if self.metric == "classification":
            require_classes(records)
        if self.bucket is None:
            return list(records)
        rows = [record for record in records if record.length in BUCKETS[self.bucket]]
        if not rows:
            raise ValueError(f"bucket must be one that rows of {self.path} are in, got {self.bucket!r}")
        return list(rows)

    def stop_tokens(self, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
        """The token of a newline where LongBench stops at it (an output cannot begin with it, see `Example`)."""
        if not DATASETS[self.name].stop_at_newline:
            return ()
        return (encode(tokenizer, "\n", special=False)[-1],)

    def score(self, prediction: str, example: Example) -> float:
        return score(self.name, prediction, example.references, example.classes)

    def settled(self, prediction: str, example: Example, reach: Sequence[float]) -> bool:
        """Whether the line that the score looks at is complete; never where it looks at the whole text."""
        if DATASETS[self.name].first_line:
            return "\n" in prediction.lstrip("\n")
        return self.metric == "code_similarity" and has_code_line(prediction)


def _check_name(name: str) -> None:
    require_one_of("name of a LongBench task", name, DATASETS)
