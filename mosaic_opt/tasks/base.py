"""What every task gives: examples as exact token ids, and a score from 0 to 1."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPLITS = ("calibration", "selection", "test")
PROTOCOLS = ("question-aware", "question-agnostic")
LARGEST_SEED = 2**32 - 1


@dataclass(frozen=True)
class Example:
    """One prompt with its references.

    id: 16 hex digits of a sha256 over everything else but `prompt` and `truncated`.
    task: name of the task it belongs to.
    prompt: the text that was tokenised, question and answer prefix included.
    tokens: ids that are prefilled and compressed, exactly as fed to the model, with the tokenizer's own BOS, if it
        adds one.
    question: ids fed after the compression, before the answer; empty under the question-aware protocol.
    references: the answers, without leading space.
    answer_tokens: per reference, the token ids of the answer as it follows the prompt.
    new_tokens: generation limit.
    classes: names that a classification task's metric looks for.
    truncated: whether the data's prompt was longer and is cut.
    stop_tokens: ids that end this example's output, besides the model's own; where there are any, the output cannot
        begin with one of them or of the model's own.
    """

    id: str
    prompt: str
    tokens: tuple[int, ...]
    references: tuple[str, ...]
    answer_tokens: tuple[tuple[int, ...], ...]
    new_tokens: int
    task: str = ""
    question: tuple[int, ...] = ()
    classes: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    truncated: bool = False

    @property
    def length(self) -> int:
        """Tokens fed before the answer."""
        return len(self.tokens) + len(self.question)


class Task(ABC):
    """A set of examples, their metric and generation limit.

    name: shown in reports.
    metric: name of the metric behind `score`.
    tokens: prompt length in tokens of the model's tokenizer: exact for generated tasks, the most for others.
    new_tokens: generation limit in tokens; examples may have their own.
    protocol: `question-aware` (the question is part of the prompt that is compressed) or `question-agnostic` (the
        context is compressed, the question is fed after it).
    category: what kind of task it is, for tables.
    allow_overlap: whether splits may share examples; a result says so.

    Raises ValueError for a setting of another type or out of its range.
    """

    category = "own data"
    allow_overlap = False

    def __init__(self, *, name: str, metric: str, tokens: int, new_tokens: int, protocol: str = PROTOCOLS[0]) -> None:
        require_text("name", name)
        require_whole("tokens", tokens)
        require_whole("new_tokens", new_tokens)
        require_one_of("protocol", protocol, PROTOCOLS)
        self.name = name
        self.metric = metric
        self.tokens = tokens
        self.new_tokens = new_tokens
        self.protocol = protocol

    @abstractmethod
    def examples(self, tokenizer: PreTrainedTokenizerBase, split: str, count: int) -> list[Example]:
        """The first `count` examples of a split; a larger count begins with the same examples.

        split: one of SPLITS; no two splits share text or answers.
        """

    def sizes(self) -> dict[str, int | None]:
        """Examples that each split has; here None: a generator makes as many as are asked for."""
        return dict.fromkeys(SPLITS)

    @abstractmethod
    def score(self, prediction: str, example: Example) -> float:
        """Score of a generated text, from 0 to 1."""

    def settled(self, prediction: str, example: Example, reach: Sequence[float]) -> bool:
        """Whether no continuation of the text can change its score any more, so that decoding may stop.

        reach: for each reference, the most of its characters that the tokens still allowed can add.
        Here never; a task that can tell overrides this.
        """
        return False


class SeededTask(Task):
    """A task that draws its examples.

    seed: from 0 to LARGEST_SEED; another one gives other examples from the same splits.
    """

    def __init__(
        self, *, name: str, metric: str, tokens: int, seed: int, new_tokens: int, protocol: str = PROTOCOLS[0]
    ) -> None:
        super().__init__(name=name, metric=metric, tokens=tokens, new_tokens=new_tokens, protocol=protocol)
        require_whole("seed", seed, 0, LARGEST_SEED)
        self.seed = seed


def require_text(setting: str, value: object, *, optional: bool = False) -> None:
    """Raise ValueError unless a setting is a text that is not blank or, where optional, None."""
    if not (isinstance(value, str) and value.strip()) and not (optional and value is None):
        raise ValueError(f"{setting} must be a text, not blank{', or null' if optional else ''}, got {value!r}")


def require_whole(setting: str, value: object, least: int = 1, most: int | None = None) -> None:
    """Raise ValueError unless a setting is a whole number (true and false are none) in its range."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):  # type: ignore[operator]
        allowed = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{setting} must be {allowed} and whole, got {value!r}")


def require_bool(setting: str, value: object) -> None:
    """Raise ValueError unless a setting is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{setting} must be true or false, got {value!r}")


def require_one_of(setting: str, value: object, known: Collection[str]) -> None:
    """Raise ValueError unless a setting is one of the known texts."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{setting} must be one of {', '.join(known)}, got {value!r}")


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can hold a text: it has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_request(split: str, count: int, largest: int, name: str) -> None:
    """Raise ValueError unless `split` is one of SPLITS and 1 <= count <= largest, of the task of this name."""
    require_one_of("split", split, SPLITS)
    if not 1 <= count <= largest:
        raise ValueError(f"{split} must be from 1 to {largest} examples of {name}, got {count}")


def stable_generator(*parts: str | int) -> np.random.Generator:
    """A random generator that depends on `parts` alone: the same in every process and on every machine."""
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest, "big"))


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, *, special: bool = True) -> list[int]:
    """Token ids of a text; `special`: with the special tokens that the tokenizer adds by itself to a whole prompt."""
    return list(tokenizer(prompt, add_special_tokens=special, verbose=False)["input_ids"])


def build_example(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    references: Sequence[str],
    *,
    new_tokens: int,
    task: str = "",
    tokens: Sequence[int] | None = None,
    context: int | None = None,
    special: bool = True,
    exact: bool = True,
    separator: str = " ",
    classes: Sequence[str] = (),
    stop_tokens: Sequence[int] = (),
    truncated: bool = False,
) -> Example:
    """An Example of a whole prompt.

    references: at least one; none empty and, if exact, none with outer spaces.
    tokens: `encode(tokenizer, prompt, special=special)` if it is known already.
    special: whether the tokenizer adds its special tokens; not to a prompt whose chat template has written them.
    context: number of the prompt's characters that are compressed before the rest is fed; None compresses all.
    exact: check that the answer tokens continue the prompt: `tokens + question + answer_tokens[i]` decodes to
        `prompt + separator + references[i]`. Otherwise they are those of " " + reference by itself, or of the
        reference where the prompt ends in white space.
    separator: white space between the prompt and an answer (exact only).
    Raises ValueError for bad references, for a context that is empty or the whole prompt, and (exact) where the
    prompt's last token would merge with an answer, or decoding changes the text.
    """
    if not references or any(not text.strip() or (exact and text != text.strip()) for text in references):
        raise ValueError(f"references must be non-empty texts without outer spaces, got {list(references)!r}")
    ids = encode(tokenizer, prompt, special=special) if tokens is None else list(tokens)
    if exact:
        answers = tuple(_exact_answer(tokenizer, prompt, ids, separator, text) for text in references)
    else:
        answers = tuple(_plain_answer(tokenizer, prompt, text) for text in references)
    compressed, question = (ids, []) if context is None else split_prompt(tokenizer, prompt, ids, context, special)
    content: dict[str, Any] = {
        "task": task,
        "tokens": tuple(compressed),
        "question": tuple(question),
        "references": tuple(references),
        "answer_tokens": answers,
        "new_tokens": new_tokens,
        "classes": tuple(classes),
        "stop_tokens": tuple(stop_tokens),
    }
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
    return Example(id=digest, prompt=prompt, truncated=truncated, **content)


def split_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str, ids: list[int], context: int, special: bool = True
) -> tuple[list[int], list[int]]:
    """Token ids of the first `context` characters, and of the rest; tokenised apart where a token spans both.

    White space at the cut goes to the side where no token spans both, if there is one.
    """
    if not 0 < context < len(prompt):
        raise ValueError(f"context must be from 1 to {len(prompt) - 1} characters of the prompt, got {context}")
    ends = (context, len(prompt[:context].rstrip()), len(prompt) - len(prompt[context:].lstrip()))
    for end in ends:
        first = encode(tokenizer, prompt[:end], special=special)
        if end and ids[: len(first)] == first and len(first) < len(ids):
            return first, ids[len(first) :]
    return encode(tokenizer, prompt[:context], special=special), continuation(tokenizer, prompt[context:])


def continuation(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text that follows another: without the space that SentencePiece puts before a text."""
    for before in ("\n", "x"):
        alone, joint = (encode(tokenizer, part, special=False) for part in (before, before + text))
        if joint[: len(alone)] == alone:
            return joint[len(alone) :]
    return encode(tokenizer, text, special=False)


def _plain_answer(tokenizer: PreTrainedTokenizerBase, prompt: str, reference: str) -> tuple[int, ...]:
    return tuple(continuation(tokenizer, reference.rstrip() if prompt[-1:].isspace() else f" {reference.strip()}"))


def _exact_answer(
    tokenizer: PreTrainedTokenizerBase, prompt: str, ids: list[int], separator: str, reference: str
) -> tuple[int, ...]:
    """Tokenises the answer after the prompt's last line (whole prompts are slow), then checks the whole."""
    line = prompt[prompt.rstrip().rfind("\n") + 1 :]
    alone = encode(tokenizer, line)
    joint = encode(tokenizer, f"{line}{separator}{reference}")
    answer = joint[len(alone) :]
    decoded = tokenizer.decode(ids + answer, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    if joint[: len(alone)] != alone or decoded != f"{prompt}{separator}{reference}":
        raise ValueError(
            f"tokenizer must keep the prompt's tokens when an answer follows and decode to the same text, "
            f"got another result for the answer {reference!r} after {prompt[-40:]!r}"
        )
    return tuple(answer)
