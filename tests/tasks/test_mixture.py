from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from mosaic_opt.tasks import Mixture, Needle, PassageCounting, PassageRetrieval

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from mosaic_opt.tasks import Example, Task


def parts() -> list[Task]:
    return [PassageRetrieval(tokens=500), PassageCounting(tokens=700, new_tokens=12)]


def test_examples_take_turns_and_keep_their_own_limits(tokenizer: PreTrainedTokenizerFast) -> None:
    tasks = parts()
    examples = Mixture(tasks=tasks).examples(tokenizer, "selection", 6)
    assert [e.task for e in examples] == ["passage_retrieval", "passage_counting"] * 3
    assert [e.new_tokens for e in examples] == [8, 12] * 3
    for offset, task in enumerate(tasks):
        assert examples[offset::2] == task.examples(tokenizer, "selection", 3)


def test_more_examples_begin_with_fewer(tokenizer: PreTrainedTokenizerFast) -> None:
    mixture = Mixture(tasks=parts())
    assert mixture.examples(tokenizer, "test", 8)[:4] == mixture.examples(tokenizer, "test", 4)


def test_limits_are_the_largest_and_the_metric_names_all() -> None:
    mixture = Mixture(tasks=[*parts(), PassageCounting(name="other", tokens=600)], name="both")
    assert (mixture.name, mixture.metric) == ("both", "mean of retrieval, count")
    assert (mixture.tokens, mixture.new_tokens, mixture.protocol) == (700, 12, "question-aware")


class _Named(Needle):
    """A task that answers with its name and the example's."""

    def __init__(self, name: str, seen: list[tuple[str, str, tuple[float, ...]]]) -> None:
        super().__init__(name=name, haystack="noise", keys=1)
        self.seen = seen

    def score(self, prediction: str, example: Example) -> float:
        return float(prediction == self.name == example.task)

    def settled(self, prediction: str, example: Example, reach: Any) -> bool:
        self.seen.append((self.name, prediction, tuple(reach)))
        return self.name == "niah_single_1"


def test_score_and_settled_are_those_of_the_examples_task(tokenizer: PreTrainedTokenizerFast) -> None:
    seen: list[tuple[str, str, tuple[float, ...]]] = []
    mixture = Mixture(tasks=[_Named("niah_single_1", seen), _Named("niah_single_2", seen)])
    first, second = mixture.examples(tokenizer, "test", 2)
    assert [mixture.score("niah_single_2", e) for e in (first, second)] == [0.0, 1.0]
    assert [mixture.settled("x", e, [2.0]) for e in (first, second)] == [True, False]
    assert seen == [("niah_single_1", "x", (2.0,)), ("niah_single_2", "x", (2.0,))]


@pytest.mark.parametrize("count", [0, 3, -2])
def test_count_is_a_multiple_of_the_tasks(tokenizer: PreTrainedTokenizerFast, count: int) -> None:
    with pytest.raises(ValueError, match=f"count must be a multiple of 2, the number of tasks, got {count}"):
        Mixture(tasks=parts()).examples(tokenizer, "test", count)


def test_tasks_have_different_names_and_one_protocol() -> None:
    with pytest.raises(ValueError, match="tasks must be at least one, of different names, got none"):
        Mixture(tasks=[])
    for tasks in (5, None, "vt", ["vt"]):
        with pytest.raises(ValueError, match="tasks must be a list of tasks, got"):
            Mixture(tasks=tasks)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="different names, got passage_counting, passage_counting"):
        Mixture(tasks=[PassageCounting(), PassageCounting()])
    with pytest.raises(
        ValueError, match=r"protocol must be the same .*, got question-aware in a, question-agnostic in"
    ):
        Mixture(tasks=[PassageCounting(name="a"), PassageCounting(protocol="question-agnostic")])
