"""A haystack as a ring of sentences, and prompts of exactly the wished length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from mosaic_opt.tasks.ruler.prompts import Prompt

RESERVE = 16  # tokens kept for the cut sentence at the haystack's end, which makes the length exact
ATTEMPTS = 256  # places where that cut sentence may begin


class Passage:
    """A haystack's sentences, tokenised once; indices past the end begin again.

    fillers: sentences that the cut one at the end is taken from; by default the haystack's own.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        sentences: Sequence[str],
        fillers: Sequence[str] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.sentences = sentences
        texts = [f" {sentence}" for sentence in sentences]
        ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        self.counts: NDArray[np.int64] = np.array([len(row) for row in ids])
        words = [sentence.split() for sentence in fillers or sentences]
        self.words = [word for row in words for word in row]
        self.first_word: NDArray[np.int64] = np.cumsum([0] + [len(row) for row in words[:-1]])

    def count(self, index: int) -> int:
        """Tokens of one sentence with the space before it."""
        return int(self.counts[index % len(self.sentences)])

    def run(self, first: int, number: int) -> list[str]:
        return [self.sentences[i % len(self.sentences)] for i in range(first, first + number)]

    def cut(self, sentence: int, shift: int, tokens: int) -> str | None:
        """Words from `shift` words after the sentence's start on, with a full stop: exactly `tokens` tokens.

        Returns None where no number of words has that many. Binary search: a word has at least one token.
        """
        start = int(self.first_word[sentence % len(self.first_word)]) + shift
        low, high = 1, tokens
        while low <= high:
            middle = (low + high) // 2
            words = [self.words[i % len(self.words)] for i in range(start, start + middle)]
            text = " ".join(words).rstrip(".,;:!?-\"'(") + "."
            found = count_tokens(self.tokenizer, text)
            if found == tokens:
                return text
            low, high = (middle + 1, high) if found < tokens else (low, middle - 1)
        return None


def exact_prompt(
    passage: Passage,
    write: Callable[[list[str]], Prompt],
    measure: Callable[[Prompt], tuple[list[int], int]],
    first: int,
    length: int,
) -> tuple[Prompt, list[int]]:
    """A prompt of exactly `length` tokens, and its token ids.

    write: the prompt with these haystack sentences.
    measure: the prompt's token ids and its length.
    first: index of the haystack's first sentence.
    Whole sentences are chosen by their token counts; the rest is a run of words cut to the missing number
    of tokens. Where no cut has that number, or its tokens merge with their neighbours, the run begins one
    word further on.
    Raises ValueError where ATTEMPTS runs have not reached the length.
    """
    missing = length - measure(write([]))[1]
    whole = 0
    while missing - passage.count(first + whole) >= RESERVE // 2:
        missing -= passage.count(first + whole)
        whole += 1
    for shift in range(ATTEMPTS):
        while missing < RESERVE // 2 and whole > 0:
            whole -= 1
            missing += passage.count(first + whole)
        cut = passage.cut(first + whole, shift, missing)
        if cut is None:
            continue
        prompt = write([*passage.run(first, whole), cut])
        ids, found = measure(prompt)
        if found == length:
            return prompt, ids
        missing += length - found
    raise ValueError(f"tokens must be a length that the tokenizer can reach, got {length}")


def count_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """Tokens of a text after a space, without special tokens."""
    return len(tokenizer(f" {text}", add_special_tokens=False, verbose=False)["input_ids"])
