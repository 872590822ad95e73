"""Variable tracking, common words and coded words: what their haystacks hold."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from mosaic_opt.tasks import SPLITS, CommonWords, FrequentWords, VariableTracking
from mosaic_opt.tasks.ruler import supply
from mosaic_opt.tasks.ruler.words import counts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def parts(prompt: str) -> tuple[str, str, str]:
    """The solved example with its question, the haystack, the question."""
    pieces = prompt.split("\n\n")
    assert len(pieces) == 5
    return "\n\n".join(pieces[1:3]), pieces[3], pieces[4]


@pytest.mark.parametrize("tokens", [512, 4096])
def test_the_chain_stands_in_its_order(tokenizer: PreTrainedTokenizerFast, tokens: int) -> None:
    for example in VariableTracking(tokens=tokens).examples(tokenizer, "selection", 8):
        solved, haystack, question = parts(example.prompt)
        statements = re.findall(r"Let ([A-Z]{5}) = (\w{5})\.", haystack)
        names = [name for name, _ in statements]
        assert tuple(names) == example.references
        assert [given for _, given in statements[1:]] == names[:-1]
        value = statements[0][1]
        assert re.fullmatch(r"[1-9]\d{4}", value)
        assert question.count(value) == 2
        assert [haystack.count(name) for name in names] == [2, 2, 2, 2, 1]
        assert not any(name in solved for name in names)
        assert value not in solved


def test_the_solved_chain_is_right(tokenizer: PreTrainedTokenizerFast) -> None:
    for example in VariableTracking().examples(tokenizer, "test", 10):
        solved, _, question = parts(example.prompt)
        statements = re.findall(r"Let ([A-Z]{5}) = (\w{5})\.", solved)
        assert [given for _, given in statements[1:]] == [name for name, _ in statements[:-1]]
        answer = ", ".join(name for name, _ in statements)
        value = re.search(r"\d{5}", question)
        assert value is not None
        assert solved.endswith(f"{question.replace(value.group(), statements[0][1])} {answer}.")


def test_statements_stand_at_all_depths(tokenizer: PreTrainedTokenizerFast) -> None:
    depths = []
    for example in VariableTracking().examples(tokenizer, "calibration", 40):
        _, haystack, _ = parts(example.prompt)
        depths += [match.start() / len(haystack) for match in re.finditer("Let", haystack)]
    assert min(depths) < 0.05
    assert max(depths) > 0.9
    assert 0.35 < sum(depths) / len(depths) < 0.65


@pytest.mark.parametrize(("tokens", "times"), [(1024, (6, 1)), (4095, (6, 1)), (4096, (30, 3))])
def test_ten_words_are_common(tokenizer: PreTrainedTokenizerFast, tokens: int, times: tuple[int, int]) -> None:
    for example in CommonWords(tokens=tokens).examples(tokenizer, "selection", 5):
        solved, haystack, _ = parts(example.prompt)
        entries = re.findall(r"(\d+)\. ([a-z]+)", haystack)
        assert [int(place) for place, _ in entries] == list(range(1, len(entries) + 1))
        found = Counter(word for _, word in entries)
        assert {word for word, count in found.items() if count == times[0]} == set(example.references)
        assert set(found.values()) == set(times)
        assert len(example.references) == 10
        others = [word for word in found if word not in example.references]
        others += re.findall(r"[a-z]+", solved.partition("Question:")[0])
        assert not any(answer in word for answer in example.references for word in others)
        assert not any(a in b for a in example.references for b in example.references if a != b)
        assert not any(answer in solved for answer in example.references)


def test_the_solved_list_is_right(tokenizer: PreTrainedTokenizerFast) -> None:
    for example in CommonWords(tokens=1024).examples(tokenizer, "test", 10):
        solved, _, question = parts(example.prompt)
        listed, _, answered = solved.partition("\n\n")
        found = Counter(re.findall(r"[a-z]+", listed))
        answer = answered.removeprefix(f"{question} ").rstrip(".").split(", ")
        assert len(answer) == 10
        assert set(answer) == {word for word, count in found.items() if count == max(found.values())}
        assert min(found.values()) < max(found.values())


def test_common_words_end_with_the_vocabulary(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match=r"tokens must be at most \d+ for cwe, got 200000"):
        CommonWords(tokens=200_000).examples(tokenizer, "test", 1)


@pytest.mark.parametrize("tokens", [512, 1024, 4096])
def test_coded_words_have_their_ranks(tokenizer: PreTrainedTokenizerFast, tokens: int) -> None:
    for example in FrequentWords(tokens=tokens).examples(tokenizer, "selection", 5):
        haystack = example.prompt.split("\n\n")[1]
        ranked = Counter(haystack.split()).most_common()
        assert ranked[0][0] == "..."
        assert tuple(word for word, _ in ranked[1:4]) == example.references
        assert len({count for _, count in ranked[:5]}) == 5
        assert all(re.fullmatch("[a-z]{6}", word) for word, _ in ranked[1:])
        assert 0.55 < ranked[0][1] / len(haystack.split()) < 0.7


def test_counts_follow_the_zeta_distribution() -> None:
    for words in (73, 74, 100, 999, 5000, 80_000):
        found = counts(words)
        assert found[0] == int(words * 0.6079271018540267)
        assert found[1:4] == [int(words * 0.6079271018540267 / k**2) for k in (2, 3, 4)]
        assert sum(found) <= words
        assert found[-1] >= 1
    assert all(a > b > c > d > e for a, b, c, d, e in (counts(words)[:5] for words in range(73, 3000)))


def test_letters_and_vocabulary_are_split() -> None:
    from mosaic_opt.tasks.base import stable_generator

    drawn = [supply.letters(split, stable_generator(0), 2, 225) for split in SPLITS]
    assert all(len(set(words)) == 225 for words in drawn)
    assert len(set.union(*map(set, drawn))) == 675
    words = [supply.vocabulary(split) for split in SPLITS]
    assert len(set.union(*map(set, words))) == sum(map(len, words)) > 8000


@pytest.mark.parametrize(
    ("task", "arguments", "message"),
    [
        (VariableTracking, {"name": "cwe"}, "name must be vt, got 'cwe'"),
        (VariableTracking, {"hops": 0}, "hops must be from 1 to 100 and whole, got 0"),
        (CommonWords, {"name": "fwe"}, "name must be cwe, got 'fwe'"),
        (FrequentWords, {"name": "vt"}, "name must be fwe, got 'vt'"),
        (FrequentWords, {"seed": "a"}, "seed must be from 0 to 4294967295 and whole, got 'a'"),
    ],
)
def test_bad_arguments(task: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task(**arguments)
