"""Token ids of texts that follow others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from mosaic_opt.tasks import (
    CommonWords,
    DocumentQuestions,
    FrequentWords,
    HumanEval,
    LongBench,
    Mixture,
    Needle,
    NextLine,
    PassageCounting,
    PassageRetrieval,
    RowsFile,
    Task,
    VariableTracking,
)
from mosaic_opt.tasks.base import LARGEST_SEED, SeededTask, build_example, continuation, encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


MADE: list[Callable[..., Task]] = [
    CommonWords,
    FrequentWords,
    HumanEval,
    NextLine,
    PassageCounting,
    PassageRetrieval,
    VariableTracking,
    lambda **more: DocumentQuestions(**({"name": "qa_1"} | more)),
    lambda **more: LongBench(**({"name": "qasper", "path": "x", "tokens": 99} | more)),
    lambda **more: Mixture(**({"tasks": [PassageCounting()]} | more)),
    lambda **more: Needle(**({"name": "niah_single_1", "haystack": "noise"} | more)),
    lambda **more: RowsFile(**({"path": "x", "tokens": 99} | more)),
]


@pytest.mark.parametrize("make", MADE)
@pytest.mark.parametrize("name", [5, ["x"], True, ""])
def test_a_name_is_a_text(make: Callable[..., Task], name: Any) -> None:
    with pytest.raises(ValueError, match=r"^name .*must be .*, got "):
        make(name=name)


@pytest.mark.parametrize("make", [make for make in MADE if isinstance(make(), SeededTask)])
@pytest.mark.parametrize("seed", [-1, LARGEST_SEED + 1, 1.0, True, "1", None, [1]])
def test_a_seed_is_whole_and_in_its_range(make: Callable[..., Task], seed: Any) -> None:
    with pytest.raises(ValueError, match="seed must be from 0 to 4294967295 and whole, got "):
        make(seed=seed)
    assert isinstance(make(seed=LARGEST_SEED), SeededTask)


def test_the_generated_tasks_have_a_seed() -> None:
    assert sum(isinstance(make(), SeededTask) for make in MADE) == 8


@pytest.fixture(scope="module")
def sentencepiece() -> PreTrainedTokenizerFast:
    """Puts a space before every text, as Llama-2's does, and has a token of every character and of "\u2581Paris"."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    characters = [*map(chr, range(32, 127)), "\n", "\u2581"]
    vocabulary = {character: index for index, character in enumerate(dict.fromkeys(characters))}
    merges, piece = [], "\u2581"
    for character in "Paris":
        merges.append((piece, character))
        piece += character
        vocabulary[piece] = len(vocabulary)
    raw = Tokenizer(models.BPE(vocabulary, merges))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    raw.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=raw)


def test_continuations_have_no_space_of_the_tokenizers(sentencepiece: PreTrainedTokenizerFast) -> None:
    def pieces(ids: list[int]) -> list[str]:
        return list(sentencepiece.convert_ids_to_tokens(ids))

    assert pieces(encode(sentencepiece, " Paris")) == ["\u2581", "\u2581Paris"]
    assert pieces(continuation(sentencepiece, " Paris")) == ["\u2581Paris"]
    assert pieces(continuation(sentencepiece, "is")) == ["i", "s"]
    assert pieces(continuation(sentencepiece, "\n x")) == ["\n", "\u2581", "x"]
    example = build_example(sentencepiece, "Where? Paris or Rome.", ["Paris"], new_tokens=3, context=9, exact=False)
    assert pieces(list(example.answer_tokens[0])) == ["\u2581Paris"]
    assert pieces(list(example.question)) == [*"ris", "\u2581", *"or", "\u2581", *"Rome."]


def test_continuations_of_byte_tokenizers_are_their_tokens(smollm2_tokenizer: PreTrainedTokenizerFast) -> None:
    for text in (" Paris", "Paris", "\n\nQuestion", "    return x", " 12"):
        assert smollm2_tokenizer.decode(continuation(smollm2_tokenizer, text)) == text
