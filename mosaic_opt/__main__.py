"""The `mosaic` command: a verb, then Hydra overrides."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from importlib import resources
from typing import Any, NoReturn, TextIO, cast

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from mosaic_opt import verbs
from mosaic_opt.settings import UserError, one_line, require_choice
from mosaic_opt.urls import URL_VARIABLE, hidden

VERBS = {
    "search": (
        "find allocations for one model, task and eviction method: all four stages",
        "mosaic search task=niah_multikey_1 trials=300",
    ),
    "worker": (
        "help with a study that is being searched, from this or another machine",
        "mosaic worker study=NAME storage=postgresql",
    ),
    "studies": (
        "list the searches of a database as JSON, or delete, rename or copy one",
        "mosaic studies action=rename study=OLD to=NEW",
    ),
    "evaluate": (
        "measure one allocation on a split; JSON on stdout",
        "mosaic evaluate allocation=uniform:256 split=test",
    ),
    "tasks": (
        "list every task: category, metric, examples, and whether its data is here; JSON on stdout",
        "mosaic tasks > tasks.json",
    ),
    "baseline": (
        "full-cache and uniform scores of a model on several tasks, with what eviction costs; JSON on stdout",
        "mosaic baseline tasks=[niah_single_2,next_line] budgets=[96,192]",
    ),
    "generate": (
        "continue a prompt with and without eviction, side by side; JSON on stdout",
        "mosaic generate allocation=result.json prompt_file=prompt.txt",
    ),
    "bench": (
        "time prefill, scoring and decoding, and count KV bytes, for full, uniform and a given allocation",
        "mosaic bench allocation=result.json lengths=[1024,4096] batches=[1,4]",
    ),
    "report": (
        "write one HTML file about a search, or all of a database, with figures and tables beside it",
        "mosaic report study=NAME",
    ),
    "plan": (
        "say what a model's KV cache needs and what fits into a memory, from its configuration alone",
        "mosaic plan model=llama3_8b context=32768 batch=8 memory=16GiB budget=1024",
    ),
    "compare": (
        "hold allocations against each other: layer by layer, by shape, and on the same examples; JSON on stdout",
        "mosaic compare allocations=[uniform:128,refined-128.json]",
    ),
    "export": (
        "write an allocation as kvpress, LU-KV, TensorRT-LLM, KVCache-Factory, CSV or plain JSON take it",
        "mosaic export allocation=refined-128.json format=kvpress prompt_tokens=4096",
    ),
    "dashboard": ("open optuna-dashboard on the study database", "mosaic dashboard port=8080"),
}

_interrupts: list[int] = []  # signals that asked this process to stop


def main() -> None:
    """Entry point of `mosaic` and `python -m mosaic_opt`."""
    arguments = sys.argv[1:]
    verb = arguments[0] if arguments else "help"
    if verb not in VERBS and verb not in ("-h", "--help", "help"):
        _fail(f"unknown verb {verb!r}; verbs are {', '.join(VERBS)} (mosaic --help)")
    if verb not in VERBS or {"-h", "--help"} & set(arguments):
        try:
            verbs.put(_usage() if verb not in VERBS else _settings(verb))
        except UserError as error:
            _fail(str(error))
        return
    try:
        _require_choices(arguments[1:])
        _require_method(verb, arguments[1:])
        _require_no_password(arguments[1:])
    except ValueError as error:
        _fail(str(error))
    sys.argv = [f"mosaic {verb}", *arguments[1:]]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions reach us; we print them
    _interrupts.clear()
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)
    started: list[bool] = []
    try:
        job = _reporting(getattr(verbs, verb), started)
        with redirect_stderr(cast(TextIO, _Discreet(sys.stderr))):
            hydra.main(config_path="pkg://mosaic_opt.conf", config_name=verb, version_base="1.3")(job)()
    except BaseException as error:
        if _interrupts:  # an interrupt may land inside a library that turns it into an error of its own
            _stopped(resumes=verb in ("search", "worker", "evaluate", "compare", "baseline"))
        if isinstance(error, JobFailed):
            if not started:  # the job ran in another process, whose standard error may be a file
                _fail(f"a job failed: {error}")
            sys.exit(2)
        # a ValueError before any job is Hydra's reading of the command line; a job's is a fault of ours
        if isinstance(error, (HydraException, OmegaConfBaseException)) or (
            isinstance(error, ValueError) and not started
        ):
            _fail(one_line(error))
        raise
    sys.exit(0)


def _require_choices(arguments: list[str]) -> None:
    """Raise ValueError for a name that a group of the configuration does not have; Hydra would list them all."""
    groups = [file.name for file in resources.files("mosaic_opt.conf").iterdir() if file.is_dir()]
    for argument in arguments:
        group, _, given = argument.partition("=")
        if group in groups and re.fullmatch(r"[\w.,-]+", given):
            for name in given.split(","):
                require_choice(group, name)


def _require_method(verb: str, arguments: list[str]) -> None:
    """Raise ValueError for settings of an eviction method where the allocation's file chooses it."""
    if verb not in ("evaluate", "generate", "bench", "compare") or any(a.startswith("eviction=") for a in arguments):
        return
    for argument in arguments:
        if argument.lstrip("+").startswith("eviction."):
            raise ValueError(
                f"eviction must be chosen (eviction=NAME) where its settings are given; got {argument!r}"
            )


def _require_no_password(arguments: list[str]) -> None:
    """Raise ValueError for a password among a grid's settings, which Hydra writes into a file."""
    grid = {"-m", "--multirun"} & set(arguments)
    if grid and any(argument.startswith("storage.url=") and hidden(argument) != argument for argument in arguments):
        raise ValueError(
            "storage.url of a grid must have no password, as a grid writes down its settings: "
            f"put the URL into {URL_VARIABLE}"
        )


class _Discreet:
    """Standard error without passwords, which Hydra shows with a job's overrides, nor its word on failures."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if not text.startswith("Error executing job with overrides"):  # the error itself has been told
            self._stream.write(hidden(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class JobFailed(Exception):
    """A job ended with an error that the user can mend and has been told."""


def _reporting(job: Callable[[DictConfig], None], started: list[bool]) -> Callable[[DictConfig], None]:
    """The job, its user errors printed at once; Hydra raises the first one's exception when all jobs have run."""

    def run(config: DictConfig) -> None:
        started.append(True)
        try:
            job(config)
        except Exception as error:
            if _interrupts or not _is_users(error):
                raise
            print(f"mosaic: {one_line(error)}", file=sys.stderr)
            raise JobFailed(one_line(error)) from None

    return run


def _is_users(error: Exception) -> bool:
    """Whether this is the user's to mend, not a fault of ours."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError
    from torch import OutOfMemoryError

    from mosaic_opt.eviction import UnsupportedModel
    from mosaic_opt.storage import LockLost

    resources = (OSError, MemoryError, OutOfMemoryError, StorageInternalError, SQLAlchemyError, LockLost)
    return isinstance(error, (UserError, OmegaConfBaseException, UnsupportedModel, *resources))


def _interrupt(number: int, frame: Any) -> NoReturn:
    _interrupts.append(number)
    raise KeyboardInterrupt


def _stopped(*, resumes: bool) -> NoReturn:
    more = ": nothing finished is lost; the same command goes on from here" if resumes else ""
    print(f"\ninterrupted{more}", file=sys.stderr)
    sys.exit(130)


def _fail(message: str) -> NoReturn:
    print(f"mosaic: {hidden(message)}", file=sys.stderr)
    sys.exit(2)


def _usage() -> str:
    lines = ["usage: mosaic VERB [override ...]", ""]
    for verb, (meaning, example) in VERBS.items():
        lines += [f"  {verb:<10} {meaning}", f"  {'':<10}   {example}"]
    lines += ["", "mosaic VERB --help shows a verb's settings; -m runs a grid (task=a,b eviction=c,d)."]
    return "\n".join(lines)


def _settings(verb: str) -> str:
    """A verb's settings as its file explains them, and what can be chosen in each group."""
    meaning, example = VERBS[verb]
    folder = resources.files("mosaic_opt.conf")
    text = (folder / f"{verb}.yaml").read_text(encoding="utf-8")
    own = text.split("_self_", 1)[1].split("\nhydra:", 1)[0].strip()
    lines = [f"mosaic {verb}: {meaning}", f"  {example}", "", "settings (name=value) and their defaults:", own, ""]
    for group, chosen in re.findall(r"^  - (\w+): (\w+)$", text, flags=re.MULTILINE):
        names = {file.name.removesuffix(".yaml") for file in (folder / group).iterdir()} - {chosen}
        others = f"  (or {', '.join(sorted(names))})" if names else ""
        lines.append(f"{group}={chosen}{others}")
    lines.append("a choice's own settings: GROUP.NAME=value, see conf/GROUP/*.yaml; Hydra's flags: --hydra-help")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
