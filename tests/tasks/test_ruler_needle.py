from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mosaic_opt.tasks import SPLITS, Needle
from mosaic_opt.tasks.ruler import needle as needles
from mosaic_opt.tasks.ruler import supply
from tests.tasks.test_ruler import UUID, ruler_task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]
OLD = ("niah_single_1", "niah_single_2", "niah_multikey_1")
NUMBER = r"\d{7}"
NEEDLE = re.compile(
    rf"The pass (?:number|code) for (\w+ \w+|{UUID}): ({NUMBER}|{UUID})\."  # key, value
)


def needle(name: str, **arguments: Any) -> Needle:
    task = ruler_task(name, **arguments)
    assert isinstance(task, Needle)
    return task


def decode(tokenizer: PreTrainedTokenizerFast, tokens: tuple[int, ...]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


@pytest.mark.parametrize("tokens", [301, 650])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", OLD)
def test_exact_length_of_the_prompt_as_one_string(
    tokenizer: PreTrainedTokenizerFast, name: str, split: str, tokens: int
) -> None:
    for example in needle(name, tokens=tokens).examples(tokenizer, split, 4):
        assert len(example.tokens) == tokens
        assert list(example.tokens) == tokenizer(example.prompt)["input_ids"]


@pytest.mark.parametrize("name", ["niah_multikey_1", "niah_multikey_3"])
def test_every_length_from_the_minimum_on(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    with pytest.raises(ValueError, match=r"tokens must be at least \d+") as caught:
        needle(name, tokens=20).examples(tokenizer, "test", 1)
    found = re.search(r"at least (\d+)", str(caught.value))
    assert found is not None
    minimum = int(found.group(1))
    with pytest.raises(ValueError, match=f"tokens must be at least {minimum} .*, got {minimum - 1}"):
        needle(name, tokens=minimum - 1).examples(tokenizer, "test", 1)
    for tokens in range(minimum, minimum + 10, 3):
        examples = needle(name, tokens=tokens).examples(tokenizer, "test", 3)
        assert [len(example.tokens) for example in examples] == [tokens] * 3


def test_haystack_goes_round_where_the_prompt_is_longer(tokenizer: PreTrainedTokenizerFast) -> None:
    (example,) = needle("niah_single_2", tokens=90_001).examples(tokenizer, "test", 1)
    assert len(example.tokens) == 90_001


@pytest.mark.parametrize("name", needles.NAMES)
def test_needles_stand_once_and_the_answers_belong_to_the_asked_keys(
    tokenizer: PreTrainedTokenizerFast, name: str
) -> None:
    task = needle(name)
    for example in task.examples(tokenizer, "selection", 15):
        context, question = example.prompt.rsplit("\n\n", 1)
        found = NEEDLE.findall(context)
        values = [value for _, value in found]
        own = [(key, value) for key, value in found if value in example.references]
        assert len(own) == len(example.references) == task.values * task.queries
        assert {value for _, value in own} == set(example.references)
        assert all(example.prompt.count(answer) == 1 for answer in example.references)
        assert len(set(values)) == len(values)
        asked = list(dict.fromkeys(key for _, key in sorted((example.references.index(v), k) for k, v in own)))
        assert len(asked) == task.queries
        assert sum(key in asked for key, _ in found) == len(own)
        assert all(question.count(key) == 2 for key in asked)
        assert question.endswith(":")
        assert not re.search(r"\d{7}", question) or task.key_kind == "uuid"
        if task.haystack == "needle":
            assert len(found) >= 2
        else:
            assert len(found) == task.keys * task.values
            assert len({key for key, _ in found}) == task.keys


def test_a_haystack_of_needles_is_full_of_them(tokenizer: PreTrainedTokenizerFast) -> None:
    """What is left for noise is less than a needle and a cut sentence."""
    for name in ("niah_multikey_2", "niah_multikey_3"):
        for example in needle(name, tokens=1024).examples(tokenizer, "test", 5):
            haystack = example.prompt.split("\n\n")[1]
            noise = NEEDLE.sub("", haystack).strip()
            longest = max(len(tokenizer(match.group())["input_ids"]) for match in NEEDLE.finditer(haystack))
            assert len(tokenizer(noise)["input_ids"]) < longest + 16
            keys = [key for key, _ in NEEDLE.findall(haystack)]
            assert len(set(keys)) == len(keys)


def test_long_haystacks_of_needles_repeat_keys_but_not_the_asked_one(tokenizer: PreTrainedTokenizerFast) -> None:
    (example,) = needle("niah_multikey_2", tokens=120_000).examples(tokenizer, "test", 1)
    found = NEEDLE.findall(example.prompt)
    assert len(example.tokens) == 120_000
    (asked,) = [key for key, value in found if value in example.references]
    assert [key for key, _ in found].count(asked) == 1


@pytest.mark.parametrize(
    ("name", "tokens", "digest"),
    [
        ("niah_single_1", 650, "f59b0776c00ec82c"),
        ("niah_single_2", 650, "ee2c590c9e3ee2b1"),
        ("niah_multikey_1", 650, "28dc3edaeab8dcdb"),
    ],
)
def test_prompts_stay_byte_identical(
    smollm2_tokenizer: PreTrainedTokenizerFast, name: str, tokens: int, digest: str
) -> None:
    """Recorded results belong to these prompts: a change here is a change of the benchmark."""
    task = needle(name, tokens=tokens)
    prompts = [example.prompt for split in SPLITS for example in task.examples(smollm2_tokenizer, split, 5)]
    assert hashlib.sha256("\0".join(prompts).encode()).hexdigest()[:16] == digest


def test_needles_stand_at_all_depths_and_in_no_fixed_order(tokenizer: PreTrainedTokenizerFast) -> None:
    examples = needle("niah_multikey_1").examples(tokenizer, "calibration", 100)
    depths = [example.prompt.index(f"{example.references[0]}.") / len(example.prompt) for example in examples]
    assert min(depths) < 0.25
    assert max(depths) > 0.8
    ranks = {[v for _, v in NEEDLE.findall(example.prompt)].index(example.references[0]) for example in examples}
    assert ranks == {0, 1, 2, 3}


def test_haystacks_begin_at_different_places(tokenizer: PreTrainedTokenizerFast) -> None:
    examples = needle("niah_single_2").examples(tokenizer, "calibration", 30)
    assert len({example.prompt.split("\n\n")[1][:60] for example in examples}) > 25


@pytest.mark.parametrize("name", ["niah_multikey_1", "niah_single_3"])
def test_answer_tokens_continue_the_prompt(
    tokenizer: PreTrainedTokenizerFast, tokenizer_with_bos: PreTrainedTokenizerFast, name: str
) -> None:
    for each in (tokenizer, tokenizer_with_bos):
        for example in needle(name).examples(each, "test", 8):
            for answer, reference in zip(example.answer_tokens, example.references, strict=True):
                assert len(answer) >= 1
                assert decode(each, example.tokens + answer) == f"{example.prompt} {reference}"
                assert list(example.tokens + answer) == each(f"{example.prompt} {reference}")["input_ids"]


def test_one_bos_where_the_tokenizer_adds_it(tokenizer_with_bos: PreTrainedTokenizerFast) -> None:
    for example in needle("niah_single_2", tokens=333).examples(tokenizer_with_bos, "test", 5):
        assert len(example.tokens) == 333
        assert example.tokens[0] == tokenizer_with_bos.bos_token_id
        assert example.tokens.count(tokenizer_with_bos.bos_token_id) == 1


def test_seed_changes_the_examples_but_not_the_partition(tokenizer: PreTrainedTokenizerFast) -> None:
    first = needle("niah_single_2", seed=0).examples(tokenizer, "test", 20)
    second = needle("niah_single_2", seed=1).examples(tokenizer, "test", 20)
    assert not {e.id for e in first} & {e.id for e in second}
    assert {int(e.references[0]) % 3 for e in first + second} == {int(first[0].references[0]) % 3}


@pytest.mark.parametrize("haystack", ["noise", "essay"])
def test_splits_share_no_sentence(haystack: str) -> None:
    parts = [set(supply.sentences(haystack, split)) for split in SPLITS]
    assert all(parts)
    assert len(set.union(*parts)) == sum(map(len, parts))


def test_partitions_cover_all_pairs_and_numbers() -> None:
    pairs = [set(supply.key_pairs(split)) for split in SPLITS]
    assert [len(part) for part in pairs] == [4800] * 3
    assert len(set.union(*pairs)) == 120 * 120
    ends = {supply.number(split, index) for split in SPLITS for index in (0, supply.NUMBERS_PER_SPLIT - 1)}
    assert ends == {"1000000", "1000001", "1000002", "9999997", "9999998", "9999999"}


def test_shipped_haystack_is_plain_prose() -> None:
    text = (ROOT / "mosaic_opt" / "tasks" / "data" / "haystack.txt").read_bytes()
    assert 300_000 <= len(text) <= 1_000_000
    assert text.isascii()
    paragraphs = text.decode().splitlines()
    assert len(set(paragraphs)) == len(paragraphs)
    assert not re.search(r"\d{5}|https?:|[{}|]|\t|  ", text.decode())
    assert all(re.search(r"""[.!?]["')]?$""", paragraph) for paragraph in paragraphs)


def test_smollm2_tokens(smollm2_tokenizer: PreTrainedTokenizerFast) -> None:
    """An answer is a space and seven digits; the question fits into an observation window of 32 tokens."""
    for example in needle("niah_multikey_1").examples(smollm2_tokenizer, "test", 10):
        assert len(example.tokens) == 650
        (answer,) = example.answer_tokens
        assert smollm2_tokenizer.convert_ids_to_tokens(list(answer)) == ["Ġ", *example.references[0]]
        question = "\n".join(example.prompt.split("\n")[-2:])
        assert len(smollm2_tokenizer(question)["input_ids"]) <= 32


def test_task_scores_by_its_metric(tokenizer: PreTrainedTokenizerFast) -> None:
    task = needle("niah_single_2")
    (example,) = task.examples(tokenizer, "test", 1)
    assert task.metric == "string_match_all"
    assert task.score(f" {example.references[0]}.", example) == 1.0
    assert task.score(" 7654321.", example) == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "cwe"}, r"name must be one of niah_single_1, .*, got 'cwe'"),
        ({"haystack": "poem"}, "haystack must be one of noise, essay, needle, got 'poem'"),
        ({"keys": 0}, "keys must be from 1 to 100 and whole, got 0"),
        ({"values": 1.5}, "values must be from 1 to 100 and whole, got 1.5"),
        ({"keys": 2, "queries": 3}, r"queries must be from 1 to 2 \(keys\), got 3"),
        ({"key_kind": "number"}, "key_kind must be one of word, uuid, got 'number'"),
        ({"value_kind": "word"}, "value_kind must be one of number, uuid, got 'word'"),
        ({"seed": -1}, "seed must be from 0 to 4294967295 and whole, got -1"),
        ({"protocol": "blind"}, "protocol must be one of question-aware, question-agnostic, got 'blind'"),
        ({"tokens": 0}, "tokens must be at least 1 and whole, got 0"),
        ({"new_tokens": 0}, "new_tokens must be at least 1 and whole, got 0"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Needle(**({"name": "niah_single_2", "haystack": "essay"} | arguments))


@pytest.mark.parametrize(
    ("split", "count", "message"),
    [
        ("train", 1, "split must be one of calibration, selection, test, got 'train'"),
        ("test", 0, "test must be from 1 to 1200 examples of niah_multikey_1, got 0"),
        ("test", 1201, "test must be from 1 to 1200 examples of niah_multikey_1, got 1201"),
    ],
)
def test_bad_requests(tokenizer: PreTrainedTokenizerFast, split: str, count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        needle("niah_multikey_1").examples(tokenizer, split, count)


def test_new_tokens_hold_the_answers(smollm2_tokenizer: PreTrainedTokenizerFast) -> None:
    """A uuid has at most 36 characters and a space; four numbers have commas between them."""
    for name in ("niah_single_2", "niah_multikey_3", "niah_multivalue"):
        task = needle(name, tokens=512)
        assert task.new_tokens == {1: 39 if task.value_kind == "uuid" else 9, 4: 39}[task.values * task.queries]
        made = Needle(name=name, haystack="essay", values=task.values, value_kind=task.value_kind)
        assert made.new_tokens == (task.new_tokens if task.queries == 1 else 9)
        for example in task.examples(smollm2_tokenizer, "test", 10):
            answer = f" {', '.join(example.references[:-1])} and {example.references[-1]}".replace("  and", "")
            assert len(smollm2_tokenizer(answer)["input_ids"]) <= task.new_tokens
