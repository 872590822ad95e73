"""Token ids of texts that follow others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mosaic_opt.tasks.base import build_example, continuation, encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


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
