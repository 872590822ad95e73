"""The `mosaic` command: a verb, then Hydra overrides. The only importer of hydra."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mosaic_opt.model import ModelSource

if TYPE_CHECKING:
    from mosaic_opt.stages import Bench
    from mosaic_opt.study import Plan
    from mosaic_opt.tasks import Task

VERBS = {
    "search": (
        "find allocations for one model, task and eviction method: all four stages",
        "mosaic search task=niah_multikey_1 trials=300",
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
    "dashboard": ("open optuna-dashboard on the study database", "mosaic dashboard port=8080"),
}
SPLIT_NAMES = ("calibration", "selection", "test")
PARTS = ("model", "task", "eviction", "sampler", "levels", *SPLIT_NAMES, "tokens", "seed", "cap", "race")

_EVALUATED = {"model", "task", "eviction", *SPLIT_NAMES, "tokens", "seed", "cap", "batch_size", "output"}
_EVALUATED |= {"prefill_for", "device_gib", "host_gib"}
_EVICTED = {"model", "eviction", "allocation", "new_tokens", "hold_budget"}
_REQUIRED = {
    "evaluate": _EVALUATED | {"allocation", "split"},
    "search": _EVALUATED
    | {"sampler", "storage", "study", "levels", "trials", "winner", "ladder", "budgets", "refine_trials", "race"},
    "generate": _EVICTED | {"prompt_file", "chat", "plain"},
    "tasks": {"tokens", "seed"},
    "baseline": _EVALUATED - {"task", *SPLIT_NAMES} | {"tasks", "split", "examples", "budgets", "table"},
    "bench": _EVICTED | {"lengths", "batches", "budget", "repeats", "seed"},
}
_RANGES = {
    **dict.fromkeys(SPLIT_NAMES, (1, 10**6)),
    "tokens": (1, 10**7),
    "seed": (0, 2**32 - 1),
    "batch_size": (1, 10**6),
    "cap": (1, 10**7),
    "device_gib": (0, 10**6),
    "host_gib": (0, 10**6),
    "new_tokens": (1, 10**6),
    "budget": (1, 10**7),
    "budgets": (1, 10**7),
    "examples": (1, 10**6),
    "repeats": (1, 1000),
    "lengths": (1, 10**7),
    "batches": (1, 10**4),
}
_NULLABLE = {"cap", "budget"}
_LISTS = ("lengths", "batches", "budgets")
_SWITCHES = ("hold_budget", "chat", "plain")

_interrupts: list[int] = []  # signals that asked this process to stop


class UserError(Exception):
    """Something the user can mend: one line, exit code 2."""


def main() -> None:
    """Entry point of `mosaic` and `python -m mosaic_opt`."""
    arguments = sys.argv[1:]
    verb = arguments[0] if arguments else "help"
    if verb not in VERBS and verb not in ("-h", "--help", "help"):
        _fail(f"unknown verb {verb!r}; verbs are {', '.join(VERBS)} (mosaic --help)")
    if verb not in VERBS or {"-h", "--help"} & set(arguments):
        try:
            _print(_usage() if verb not in VERBS else _settings(verb))
        except UserError as error:
            _fail(str(error))
        return
    sys.argv = [f"mosaic {verb}", *arguments[1:]]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # exceptions reach us; we print them
    _interrupts.clear()
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)
    failed: list[str] = []
    started: list[bool] = []
    try:
        job = _reporting(globals()[verb], failed, started)
        hydra.main(config_path="pkg://mosaic_opt.conf", config_name=verb, version_base="1.3")(job)()
    except BaseException as error:
        if _interrupts:  # an interrupt may land inside a library that turns it into an error of its own
            _stopped(resumes=verb in ("search", "evaluate"))
        # a ValueError before any job is Hydra's reading of the command line; a job's is a fault of ours
        if isinstance(error, (HydraException, OmegaConfBaseException)) or (
            isinstance(error, ValueError) and not started
        ):
            _fail(_one_line(error))
        raise
    sys.exit(2 if failed else 0)


def _reporting(
    job: Callable[[DictConfig], None], failed: list[str], started: list[bool]
) -> Callable[[DictConfig], None]:
    """The job, its user errors printed and collected, so that the other jobs of a multirun go on."""

    def run(config: DictConfig) -> None:
        started.append(True)
        try:
            job(config)
        except (UserError, OmegaConfBaseException, OSError, ValueError) as error:
            if _interrupts or (isinstance(error, ValueError) and not _is_users(error)):
                raise
            print(f"mosaic: {_one_line(error)}", file=sys.stderr)
            failed.append(str(error))

    return run


def _is_users(error: ValueError) -> bool:
    """Whether this is the user's to mend although it came up while a job was running."""
    from mosaic_opt.eviction import UnsupportedModel

    return isinstance(error, UnsupportedModel | OmegaConfBaseException)


def search(config: DictConfig) -> None:
    """`mosaic search`: run or resume the four stages, or print the result that is there."""
    from mosaic_opt.study import Plan, check_fingerprint, open_storage, stored_study

    with _user_errors():
        numbers = _checked(config)
        plan = Plan(**{field: numbers[field] for field in Plan.__dataclass_fields__})
        plan.check_range(floor=1, prompt=config.tokens)
        name = config.study or _default_name(config)
        _require_name(name)
        source = instantiate(config.model)
        storage = open_storage(str(config.storage.url))
        folder = Path(config.output) / "results" / name
        folder.mkdir(parents=True, exist_ok=True)
        fingerprint = _fingerprint(config, source)
        stored = stored_study(storage, name)
        if stored is not None:
            check_fingerprint(stored, fingerprint)
    if stored is None or plan.key not in stored.user_attrs.get("finished", []):
        _run_search(config, plan, source, name, storage, fingerprint, folder)
    _show_result(config, plan, storage, name, folder)


def _run_search(
    config: DictConfig,
    plan: Plan,
    source: ModelSource,
    name: str,
    storage: Any,
    fingerprint: dict[str, Any],
    folder: Path,
) -> None:
    """Everything that needs the model, by one process at a time."""
    from filelock import FileLock, Timeout

    from mosaic_opt.report.terminal import TerminalWatch
    from mosaic_opt.stages import Search

    watch = TerminalWatch()
    try:
        with FileLock(folder / ".lock", timeout=0):
            with _user_errors():
                bench = _bench(config, source, plan.counts, watch)
                source.require_device()
                plan.check_range(floor=bench.method.floor, prompt=config.tokens)
                search = Search(
                    name=name,
                    plan=plan,
                    bench=bench,
                    sampler=instantiate(config.sampler),
                    storage=storage,
                    fingerprint=fingerprint,
                    user_attrs={"config": OmegaConf.to_container(config, resolve=True)},
                    watch=watch,
                )
            search.run()
    except Timeout:
        raise UserError(f"study {name!r} is being searched by another process") from None


def _show_result(config: DictConfig, plan: Plan, storage: Any, name: str, folder: Path) -> None:
    from mosaic_opt.report.result import result
    from mosaic_opt.report.terminal import print_result

    content = result(storage, name, winner=plan.winner, budgets=plan.budgets)
    text = json.dumps(content, indent=2)
    part = folder / f"result.json.{os.getpid()}.part"
    part.write_text(text, encoding="utf-8")
    part.replace(folder / "result.json")
    where = {
        "result": str(folder / "result.json"),
        "database": config.storage.url,
        "look at it": f"mosaic dashboard storage.url={config.storage.url}",
    }
    print_result(content, where)
    _print(text)


def evaluate(config: DictConfig) -> None:
    """`mosaic evaluate`: measure one allocation; one JSON object on stdout."""
    from mosaic_opt import allocation
    from mosaic_opt.report.terminal import TerminalWatch

    with _user_errors():
        _checked(config)
        given = config.allocation
        given = OmegaConf.to_container(given) if OmegaConf.is_list(given) else given
        split = _split(config.split)
        source = instantiate(config.model)
        bench = _bench(config, source, {split: config[split]}, TerminalWatch())
        wanted = allocation.parse(given, layers=bench.layers)
        if max(wanted.budgets) > bench.cap and config.cap is not None:
            raise ValueError(f"allocation budgets must be at most cap={bench.cap}; got {max(wanted.budgets)}")
        source.require_device()
    measurement = bench.measure(split)(wanted, complete=True)
    report = {
        "score": measurement.score,
        "log_likelihood": measurement.log_likelihood,
        "mean_budget": measurement.mean_budget,
        "realised_mean": measurement.realised_mean,
        "kv_bytes": measurement.kv_bytes,
        "split": split,
        "example_scores": measurement.scores,
        "outputs": measurement.outputs,
        "budgets": wanted.budgets,
        "seconds": measurement.seconds,
    }
    _print(json.dumps(report))


def tasks(config: DictConfig) -> None:
    """`mosaic tasks`: every task that can be chosen; a JSON list on stdout."""
    from mosaic_opt.report.terminal import print_tasks

    with _user_errors():
        _checked(config)
        rows = [_described(name, _named("task", name, config)) for name in _choices("task") if name != "mixture"]
    print_tasks(rows)
    _print(json.dumps(rows))


def _described(name: str, task: Task) -> dict[str, Any]:
    """A task as a row of `mosaic tasks`; `missing` says what its data lacks, if anything."""
    row = {"task": name, "category": task.category, "protocol": task.protocol, "new_tokens": task.new_tokens}
    try:
        return {**row, "metric": task.metric, "examples": task.sizes(), "missing": None}
    except ValueError as error:
        return {**row, "metric": None, "examples": None, "missing": _one_line(error)}


def baseline(config: DictConfig) -> None:
    """`mosaic baseline`: full-cache and uniform scores over a set of tasks; a JSON list on stdout."""
    from mosaic_opt.allocation import uniform
    from mosaic_opt.report.baseline import baseline_row, baseline_table, markdown
    from mosaic_opt.report.terminal import TerminalWatch, print_table

    with _user_errors():
        settings = _checked(config)
        split, watch = _split(settings["split"]), TerminalWatch()
        source = instantiate(config.model)
        counts = {split: settings["examples"]}
        benches = {
            name: _bench(config, source, counts, watch, task=_named("task", name, config))
            for name in _names(settings["tasks"], "tasks", least=1)
        }
        source.require_device()
        table = settings["table"] if settings["table"] is None else Path(settings["table"])
        if table is not None and not os.access(table.parent, os.W_OK):
            raise ValueError(f"table must be a file in a folder that can be written; got {settings['table']!r}")
        for bench in benches.values():
            _ = bench.examples  # so that a task that cannot be made is told at once
    rows = []
    for name, bench in benches.items():
        measure = bench.measure(split)
        scores = {budget: measure(uniform(bench.layers, budget)).scores for budget in settings["budgets"]}
        lengths = [len(example.tokens) for example in bench.examples[split]]
        described = {
            "task": name,
            "category": bench.task.category,
            "metric": bench.task.metric,
            "protocol": bench.task.protocol,
            "prompt_tokens": sum(lengths) / len(lengths),
        }
        rows.append(baseline_row(bench.evaluator(split).full_scores(), scores, **described))
        bench.release(split)
    headings, cells = baseline_table(rows)
    print_table(headings, cells)
    if table is not None:
        table.write_text(markdown(headings, cells), encoding="utf-8")
    _print(json.dumps(rows))


def generate(config: DictConfig) -> None:
    """`mosaic generate`: a prompt continued with and without eviction; one JSON object on stdout."""
    from mosaic_opt import generation
    from mosaic_opt.model import stop_tokens
    from mosaic_opt.report.terminal import print_generations

    with _user_errors():
        settings = _checked(config)
        source, cut = _live(config)
        source.require_device()
        prompt = source.encode(_prompt(settings["prompt_file"]), chat=settings["chat"])
        generation.require_fit(source.config, len(prompt), settings["new_tokens"])
    model = source.load()
    stops = sorted(stop_tokens(model, source.tokenizer))
    report: dict[str, Any] = {"prompt_tokens": len(prompt), "budgets": cut.allocation.budgets}
    for name, way in (("plain", None), ("evicted", cut)) if settings["plain"] else (("evicted", cut),):
        made = generation.generate(model, prompt[None], new_tokens=settings["new_tokens"], cut=way, stop_tokens=stops)
        report[name] = {
            "text": source.tokenizer.decode(made.tokens[0], skip_special_tokens=True),
            "new_tokens": len(made.tokens[0]),
            "tokens_per_second": made.tokens_per_second,
            "prefill_seconds": made.prefill_seconds,
            "scoring_seconds": made.scoring_seconds,
            "kv_bytes": made.kv_bytes,
        }
    print_generations(report)
    _print(json.dumps(report))


def bench(config: DictConfig) -> None:
    """`mosaic bench`: times and bytes of full cache, uniform and a given allocation; a JSON list on stdout."""
    from mosaic_opt import allocation, generation
    from mosaic_opt.report.terminal import print_bench

    with _user_errors():
        settings = _checked(config)
        source, cut = _live(config)
        source.require_device()
        mean = settings["budget"] or round(cut.allocation.mean)
        for length in settings["lengths"]:
            generation.require_fit(source.config, length, settings["new_tokens"])
    cuts = {
        "full": None,
        "uniform": generation.Cut(cut.method, allocation.uniform(len(cut.allocation), mean), cut.hold_budget),
        "given": cut,
    }
    numbers = {name: settings[name] for name in ("lengths", "batches", "new_tokens", "repeats", "seed")}
    rows = generation.bench(source.load(), cuts, **numbers)
    print_bench(rows)
    _print(json.dumps(rows))


def _live(config: DictConfig) -> tuple[ModelSource, Any]:
    """The model's source and the eviction (`generation.Cut`) of a live verb, checked without its weights."""
    from mosaic_opt import allocation
    from mosaic_opt.eviction import evictable_layers, fitting_layers
    from mosaic_opt.generation import Cut

    source = instantiate(config.model)
    method = instantiate(config.eviction)
    given = OmegaConf.to_container(config, resolve=True)["allocation"]  # type: ignore[index,call-overload]
    wanted = allocation.parse(given, layers=len(evictable_layers(source.config)))
    fitting_layers(source.config, method, wanted)
    return source, Cut(method, wanted, config.hold_budget)


def _prompt(file: Any) -> str:
    """The prompt's text, from a file or standard input."""
    if file is not None and (not isinstance(file, str) or not Path(file).is_file()):
        raise ValueError(f"prompt_file must be a readable text file; got {file!r}")
    where = f"prompt_file {file!r}" if file else "standard input"
    try:
        text = Path(file).read_text(encoding="utf-8") if file else sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 text: {error}") from error
    if not text.strip():
        raise ValueError(f"{where} holds no prompt: give some text")
    return text


def dashboard(config: DictConfig) -> None:
    """`mosaic dashboard`: optuna-dashboard on the configured database, on loopback."""
    from optuna_dashboard import run_server

    from mosaic_opt.study import open_storage

    with _user_errors():
        if isinstance(config.port, bool) or not isinstance(config.port, int) or not 1 <= config.port <= 65535:
            raise ValueError(f"port must be between 1 and 65535; got {config.port!r}")
        storage = open_storage(str(config.storage.url))
    for number in (signal.SIGTERM, signal.SIGINT):
        # a request may swallow the exception that `_interrupt` raises; there is nothing to save here
        if signal.getsignal(number) == _interrupt:
            signal.signal(number, lambda *_: os._exit(130))
    print(f"http://127.0.0.1:{config.port}/dashboard  (Ctrl-C ends it)", file=sys.stderr)
    try:
        run_server(storage, host="127.0.0.1", port=config.port)
    except OSError as error:
        raise UserError(f"port {config.port} cannot be used: {error.strerror}; choose another with port=") from None


def _checked(config: DictConfig) -> dict[str, Any]:
    """The settings as plain values, those that no constructor checks checked here.

    Raises:
        ValueError: for a setting that is missing, of the wrong kind or out of range.
    """
    settings: Any = OmegaConf.to_container(config, resolve=True)
    required = _REQUIRED[str(HydraConfig.get().job.config_name)]
    missing = sorted(required - set(settings))
    if missing:
        raise ValueError(f"settings must hold {', '.join(missing)}; it was removed")
    if settings.get("allocation") == "???":
        raise ValueError("allocation is required: a list of budgets, uniform:N, or a JSON file (allocation=...)")
    for name, (least, most) in _RANGES.items():
        value = settings.get(name)
        if name not in settings or (name in _NULLABLE and value is None):
            continue
        several = name in _LISTS
        if several and (not isinstance(value, list) or not value):
            raise ValueError(f"{name} must be a list such as [512]; got {value!r}")
        for number in value if several else [value]:
            if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
                raise ValueError(f"{name} must be a whole number between {least} and {most}; got {number!r}")
    for name in _SWITCHES:
        if name in settings and not isinstance(settings[name], bool):
            raise ValueError(f"{name} must be true or false; got {settings[name]!r}")
    if "output" in required:
        if not isinstance(settings["output"], str) or not settings["output"].strip():
            raise ValueError(f"output must be a folder; got {settings['output']!r}")
        Path(settings["output"]).mkdir(parents=True, exist_ok=True)
    return settings


def _split(given: Any) -> str:
    if given not in SPLIT_NAMES:
        raise ValueError(f"split must be one of {', '.join(SPLIT_NAMES)}; got {given!r}")
    return str(given)


def _choices(group: str) -> list[str]:
    """Names of the files of a group of the configuration."""
    folder = resources.files("mosaic_opt.conf") / group
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))


def _names(given: Any, setting: str, *, least: int = 0) -> list[str]:
    if not isinstance(given, list) or len(given) < least or not all(isinstance(name, str) for name in given):
        raise ValueError(f"{setting} must be a list of {'at least one name' if least else 'names'}; got {given!r}")
    return given


def _named(group: str, name: str, config: DictConfig) -> Any:
    """The object of a group's file, its references to other settings taken from `config`.

    Raises:
        ValueError: for an unknown name, with those most like it.
    """
    known = _choices(group)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        raise ValueError(f"{group} must be one of {', '.join(near or known)}{' ...' if near else ''}; got {name!r}")
    text = (resources.files("mosaic_opt.conf") / group / f"{name}.yaml").read_text(encoding="utf-8")
    settings = OmegaConf.create(text)
    settings._set_parent(config)
    return instantiate(settings)


def _task(config: DictConfig) -> Task:
    """The task; the members of a mixture are names of tasks."""
    if "tasks" not in config.task:
        return instantiate(config.task)
    settings = OmegaConf.to_container(config.task, resolve=True)
    assert isinstance(settings, dict)
    names = _names(settings["tasks"], "task.tasks", least=1)
    return instantiate({**settings, "tasks": [_named("task", name, config) for name in names]}, _convert_="all")


def _bench(
    config: DictConfig, source: ModelSource, counts: dict[str, int], watch: Any, *, task: Task | None = None
) -> Bench:
    from mosaic_opt.stages import Bench

    others = OmegaConf.to_container(config, resolve=True)["prefill_for"]  # type: ignore[index,call-overload]
    return Bench(
        model=source,
        task=task or _task(config),
        method=instantiate(config.eviction),
        prefill_for=[_named("eviction", name, config) for name in _names(others, "prefill_for")],
        counts=counts,
        ranked=Path(config.output) / "ranked",
        cap=config.cap,
        batch_size=config.batch_size,
        device_bytes=config.device_gib * 2**30,
        host_bytes=config.host_gib * 2**30,
        watch=watch,
    )


def _fingerprint(config: DictConfig, source: ModelSource) -> dict[str, Any]:
    """What a study is made from, as far as it is known before anything is loaded."""
    from mosaic_opt.study import versions

    settings = OmegaConf.to_container(config, resolve=True)
    assert isinstance(settings, dict)
    parts = {key: settings[key] for key in PARTS if key != "model"}
    return {**parts, "model": source.fingerprint, "versions": versions()}


def _default_name(config: DictConfig) -> str:
    """Choices of model, task and eviction, and a hash of every setting that makes the study."""
    settings = OmegaConf.to_container(config, resolve=True)
    assert isinstance(settings, dict)
    parts = json.dumps({key: settings[key] for key in PARTS}, sort_keys=True)
    choices = HydraConfig.get().runtime.choices
    labels = "-".join(str(choices[group]) for group in ("model", "task", "eviction"))
    return f"{labels}-{hashlib.sha256(parts.encode()).hexdigest()[:8]}"


def _require_name(name: Any) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,150}", name):
        raise ValueError(f"study must be a name of letters, digits, '.', '_' and '-'; got {name!r}")


@contextmanager
def _user_errors() -> Iterator[None]:
    """Inside, a ValueError or OSError is the user's to mend; elsewhere it is a fault of ours."""
    try:
        yield
    except (ValueError, OSError, OmegaConfBaseException) as error:
        raise UserError(_one_line(error)) from error
    except HydraException as error:  # instantiate wraps what a constructor raised
        cause = error.__cause__
        raise UserError(_one_line(cause if isinstance(cause, ValueError) else error)) from error


def _print(text: str) -> None:
    """Write to standard output.

    Raises:
        UserError: if nobody reads it, or it cannot be written.
    """
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter fails again at its end
        raise UserError(f"standard output cannot be written: {error.strerror}") from None


def _interrupt(number: int, frame: Any) -> NoReturn:
    _interrupts.append(number)
    raise KeyboardInterrupt


def _stopped(*, resumes: bool) -> NoReturn:
    more = ": nothing finished is lost; the same command goes on from here" if resumes else ""
    print(f"\ninterrupted{more}", file=sys.stderr)
    sys.exit(130)


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    return "; ".join(line for line in lines if line) or type(error).__name__


def _fail(message: str) -> NoReturn:
    print(f"mosaic: {message}", file=sys.stderr)
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
