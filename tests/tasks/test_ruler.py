from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mosaic_opt.tasks import SPLITS, Needle, ruler
from mosaic_opt.tasks.base import build_example, stable_generator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]
TASKS: dict[str, dict[str, Any]] = {
    "niah_single_1": {"haystack": "noise", "keys": 1},
    "niah_single_2": {"haystack": "essay", "keys": 1},
    "niah_multikey_1": {"haystack": "essay", "keys": 4},
}
NEEDLE = re.compile(ruler.NEEDLE.replace(".", r"\.").format(key=r"(\w+ \w+)", value=r"(\d{7})"))


def needle(name: str, **arguments: Any) -> Needle:
    return Needle(name=name, **(TASKS.get(name, {}) | arguments))


def decode(tokenizer: PreTrainedTokenizerFast, tokens: tuple[int, ...]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


@pytest.mark.parametrize("tokens", [300, 301, 511, 650, 1024])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", TASKS)
def test_exact_length_of_the_prompt_as_one_string(
    tokenizer: PreTrainedTokenizerFast, name: str, split: str, tokens: int
) -> None:
    for example in needle(name, tokens=tokens).examples(tokenizer, split, 12):
        assert len(example.tokens) == tokens
        assert list(example.tokens) == tokenizer(example.prompt)["input_ids"]


@pytest.mark.parametrize("name", TASKS)
def test_every_length_from_the_minimum_on(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    with pytest.raises(ValueError, match=r"tokens must be at least \d+") as caught:
        needle(name, tokens=20).examples(tokenizer, "test", 1)
    found = re.search(r"at least (\d+)", str(caught.value))
    assert found is not None
    minimum = int(found.group(1))
    with pytest.raises(ValueError, match=f"tokens must be at least {minimum} .*, got {minimum - 1}"):
        needle(name, tokens=minimum - 1).examples(tokenizer, "test", 1)
    for tokens in range(minimum, minimum + 10):
        examples = needle(name, tokens=tokens).examples(tokenizer, "test", 3)
        assert [len(example.tokens) for example in examples] == [tokens] * 3


def test_haystack_goes_round_where_the_prompt_is_longer(tokenizer: PreTrainedTokenizerFast) -> None:
    (example,) = needle("niah_single_2", tokens=90_001).examples(tokenizer, "test", 1)
    assert len(example.tokens) == 90_001


@pytest.mark.parametrize("name", TASKS)
def test_needles_stand_once_and_the_answer_belongs_to_the_asked_key(
    tokenizer: PreTrainedTokenizerFast, name: str
) -> None:
    keys_of_split = set(ruler._key_pairs("selection"))
    for example in needle(name).examples(tokenizer, "selection", 30):
        found = NEEDLE.findall(example.prompt)
        keys, values = [key for key, _ in found], [value for _, value in found]
        assert len(found) == TASKS[name]["keys"]
        assert len(set(keys)) == len(keys)
        assert set(keys) <= keys_of_split
        assert len(set(values)) == len(values)
        (answer,) = example.references
        assert re.fullmatch(r"[1-9]\d{6}", answer)
        assert example.prompt.count(answer) == 1
        asked = keys[values.index(answer)]
        assert example.prompt.endswith(
            f"\n\n{ruler.QUESTION.format(key=asked)}\n{ruler.ANSWER_PREFIX.format(key=asked)}"
        )
        assert re.findall(r"\d{5,}", example.prompt) == values


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


@pytest.mark.parametrize("name", TASKS)
def test_answer_tokens_continue_the_prompt(
    tokenizer: PreTrainedTokenizerFast, tokenizer_with_bos: PreTrainedTokenizerFast, name: str
) -> None:
    for each in (tokenizer, tokenizer_with_bos):
        for example in needle(name).examples(each, "test", 8):
            ((answer,), (reference,)) = (example.answer_tokens, example.references)
            assert len(answer) >= 1
            assert decode(each, example.tokens + answer) == f"{example.prompt} {reference}"
            assert list(example.tokens + answer) == each(f"{example.prompt} {reference}")["input_ids"]


def test_one_bos_where_the_tokenizer_adds_it(tokenizer_with_bos: PreTrainedTokenizerFast) -> None:
    for example in needle("niah_single_2", tokens=333).examples(tokenizer_with_bos, "test", 5):
        assert len(example.tokens) == 333
        assert example.tokens[0] == tokenizer_with_bos.bos_token_id
        assert example.tokens.count(tokenizer_with_bos.bos_token_id) == 1


@pytest.mark.parametrize("name", TASKS)
def test_more_examples_begin_with_fewer(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    task = needle(name)
    assert task.examples(tokenizer, "test", 20)[:10] == task.examples(tokenizer, "test", 10)


def test_seed_changes_the_examples_but_not_the_partition(tokenizer: PreTrainedTokenizerFast) -> None:
    first = needle("niah_single_2", seed=0).examples(tokenizer, "test", 20)
    second = needle("niah_single_2", seed=1).examples(tokenizer, "test", 20)
    assert not {e.id for e in first} & {e.id for e in second}
    assert {int(e.references[0]) % 3 for e in first + second} == {int(first[0].references[0]) % 3}


def test_same_examples_in_another_process(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    program = (
        "import json, sys\n"
        "from transformers import PreTrainedTokenizerFast\n"
        "from mosaic_opt.tasks import Needle\n"
        "tokenizer = PreTrainedTokenizerFast.from_pretrained(sys.argv[1])\n"
        "task = Needle(name='niah_multikey_1', haystack='essay', keys=4)\n"
        "examples = task.examples(tokenizer, 'selection', 5)\n"
        "print(json.dumps([[e.id, e.prompt, e.tokens, e.answer_tokens] for e in examples]))\n"
    )
    here = needle("niah_multikey_1").examples(tokenizer, "selection", 5)
    expected = json.loads(json.dumps([[e.id, e.prompt, e.tokens, e.answer_tokens] for e in here]))
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", program, str(tmp_path)]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) == expected


@pytest.mark.parametrize("name", TASKS)
def test_splits_share_no_example_key_or_value(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    found: list[tuple[str, str]] = []
    identities: list[str] = []
    for split in SPLITS:
        for example in needle(name).examples(tokenizer, split, 40):
            found += NEEDLE.findall(example.prompt)
            identities.append(example.id)
    assert len(set(identities)) == len(identities)
    assert len({key for key, _ in found}) == len(found)
    assert len({value for _, value in found}) == len(found)


@pytest.mark.parametrize("haystack", ruler.HAYSTACKS)
def test_splits_share_no_sentence(haystack: str) -> None:
    parts = [set(ruler._sentences(haystack, split)) for split in SPLITS]
    assert all(parts)
    assert len(set.union(*parts)) == sum(map(len, parts))


def test_partitions_cover_all_pairs_and_numbers() -> None:
    pairs = [set(ruler._key_pairs(split)) for split in SPLITS]
    assert [len(part) for part in pairs] == [4800] * 3
    assert len(set.union(*pairs)) == 120 * 120
    ends = {ruler._value(split, index) for split in SPLITS for index in (0, ruler.VALUES_PER_SPLIT - 1)}
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


@pytest.mark.parametrize(
    ("task", "prediction", "references", "expected"),
    [
        ("niah_single_1", " 1234567.", ["1234567"], 1.0),
        ("niah_single_1", " 123456", ["1234567"], 0.0),
        ("niah_single_1", "", ["1234567"], 0.0),
        ("niah_single_1", "The answer IS Amber", ["amber"], 1.0),
        ("niah_single_1", "123\x004567", ["1234567"], 0.0),
        ("vt", "one\ttwo", ["one\ntwo"], 1.0),
        ("niah_multivalue", "11 and 22", ["11", "22", "33", "44"], 0.5),
        ("niah_multiquery", "nothing", ["11", "22"], 0.0),
        ("cwe", "a b", ["A", "B", "C"], 2 / 3),
        ("qa_1", "in Paris", ["London", "paris"], 1.0),
        ("qa_2", "in Rome", ["London", "Paris"], 0.0),
    ],
)
def test_score(task: str, prediction: str, references: list[str], expected: float) -> None:
    assert ruler.score(task, prediction, references) == pytest.approx(expected)


def test_task_scores_by_its_metric() -> None:
    task = needle("niah_single_2")
    assert task.metric == "string_match_all"
    assert task.score(" 1234567.", ["1234567"]) == 1.0
    assert task.score(" 7654321.", ["1234567"]) == 0.0


def test_description_is_json_and_tells_tasks_apart() -> None:
    variants = [
        needle("niah_single_1"),
        needle("niah_single_2"),
        needle("niah_multikey_1"),
        needle("niah_single_2", tokens=651),
        needle("niah_single_2", seed=1),
        needle("niah_single_2", new_tokens=13),
    ]
    described = [json.dumps(task.describe(), sort_keys=True) for task in variants]
    assert len(set(described)) == len(variants)
    assert needle("niah_single_2").describe() == variants[1].describe()
    assert re.fullmatch(r"[0-9a-f]{64}", variants[1].describe()["haystack_sha256"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"name": "needle", "haystack": "essay", "keys": 1},
            r"name must be one of niah_single_1, .*, got 'needle'",
        ),
        ({"haystack": "poem"}, "haystack must be one of noise, essay, got 'poem'"),
        ({"keys": 0}, "keys must be at least 1, got 0"),
        ({"tokens": 0}, "tokens must be at least 1 and whole, got 0"),
        ({"new_tokens": 0}, "new_tokens must be at least 1 and whole, got 0"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        needle(**({"name": "niah_single_2"} | arguments))


@pytest.mark.parametrize(
    ("split", "count", "message"),
    [
        ("train", 1, "split must be one of calibration, selection, test, got 'train'"),
        ("test", 0, "count must be from 1 to 1200, got 0"),
        ("test", 1201, "count must be from 1 to 1200, got 1201"),
    ],
)
def test_bad_requests(tokenizer: PreTrainedTokenizerFast, split: str, count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        needle("niah_multikey_1").examples(tokenizer, split, count)


def test_bad_scores() -> None:
    with pytest.raises(ValueError, match=r"task must be one of .*, got 'niah'"):
        ruler.score("niah", "text", ["text"])
    for references in ([], [""]):
        with pytest.raises(ValueError, match="references must be non-empty texts"):
            ruler.score("niah_single_1", "text", references)


def test_answer_that_would_change_the_prompts_tokens_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="tokenizer must keep the prompt's tokens"):
        build_example(tokenizer, "The code is", ["1234567"], tokens=[0, 1, 2])
    for references in ([], [""], [" 12"]):
        with pytest.raises(ValueError, match="references must be non-empty texts without outer spaces"):
            build_example(tokenizer, "The code is", references)


def test_stable_generator_depends_on_all_parts() -> None:
    parts: list[tuple[int, str, int]] = [(0, "test", 1), (0, "test", 2), (1, "test", 1)]
    draws = {int(stable_generator(*each).integers(2**62)) for each in parts}
    assert len(draws) == 3
    assert int(stable_generator(0, "test", 1).integers(2**62)) in draws


def test_import_stays_light() -> None:
    program = "import sys, mosaic_opt.tasks; print({'torch', 'transformers'} & set(sys.modules))"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("text", "reach", "expected"),
    [
        ("it is 1234567.", 0, True),  # found
        ("it is 1234", 3, False),  # can still be completed
        ("it is 1234", 2, True),
        ("it is 9", 7, False),  # can still begin anew
        ("it is 9", 6, True),
        ("it is 1", 6, False),
        ("", float("inf"), False),
    ],
)
def test_a_score_is_settled_when_found_or_out_of_reach(text, reach, expected):
    assert ruler.settled(text, ["1234567"], [reach]) is expected
    assert not ruler.settled(text, ["1234567", "x"], [reach, float("inf")])
