"""The verbs of the `mosaic` command: a resolved configuration -> objects -> what is printed and stored."""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from mosaic_opt.model import ModelSource, require_fit
from mosaic_opt.settings import (
    ACTIONS,
    UserError,
    checked,
    checked_split,
    choices,
    configured_bench,
    configured_task,
    default_name,
    fingerprint_of,
    methods_for,
    named,
    named_tasks,
    one_line,
    recorded,
    require_known,
    require_name,
    setting,
    storage_url,
    user_errors,
)
from mosaic_opt.urls import hidden

if TYPE_CHECKING:
    from mosaic_opt.allocation import Allocation
    from mosaic_opt.stages import Bench
    from mosaic_opt.study import Plan


def search(config: DictConfig, verb: str | None = None) -> None:
    """`mosaic search`: run or resume the four stages, or print the result that is there.

    verb: whose settings `config` has; None: of the verb that runs.
    """
    from mosaic_opt.storage import open_storage
    from mosaic_opt.study import Plan, check_fingerprint, plan_record, stored_study

    with user_errors():
        numbers = checked(config, verb)
        plan = Plan(**{field: numbers[field] for field in Plan.__dataclass_fields__})
        plan.check_range(floor=1, prompt=config.tokens)
        name = config.study or default_name(config)
        require_name(name)
        source = instantiate(config.model)
        storage = open_storage(storage_url(config))
        folder = Path(config.output) / "results" / name
        folder.mkdir(parents=True, exist_ok=True)
        fingerprint = fingerprint_of(config, source)
        stored = stored_study(storage, name)
        if stored is not None:
            check_fingerprint(stored, fingerprint)
    run = stored is None or not plan_record(stored, plan.key).get("finished")
    if run:
        _run_search(config, plan, source, name, storage, fingerprint, folder)
    _show_result(config, plan, storage, name, folder, ran=run)


def _run_search(
    config: DictConfig,
    plan: Plan,
    source: ModelSource,
    name: str,
    storage: Any,
    fingerprint: dict[str, Any],
    folder: Path,
) -> None:
    """Everything that needs the model; other processes may do the same and share the work."""
    from mosaic_opt.report.dashboard import Pages
    from mosaic_opt.report.terminal import TerminalWatch
    from mosaic_opt.stages import Search
    from mosaic_opt.workers import workers

    pages = Pages(storage, name, lambda text: watch.say(text))
    watch = TerminalWatch(log=folder / "search.log", trial_done=pages.update)
    storage.say = watch.say
    with user_errors():
        bench = configured_bench(config, source, plan.counts, watch, method=instantiate(config.eviction))
        source.require_device()
        plan.check_range(floor=bench.method.floor, prompt=config.tokens)
        search = Search(
            name=name,
            plan=plan,
            bench=bench,
            sampler=instantiate(config.sampler),
            storage=storage,
            fingerprint=fingerprint,
            config=recorded(config),
            watch=watch,
        )
    settings = [setting("study", name), setting("output", config.output)]
    settings.append(f"host_gib={config.host_gib // config.workers}")
    with workers(config.workers, settings, url=storage_url(config), logs=folder, say=watch.say):
        search.run()


def worker(config: DictConfig) -> None:
    """`mosaic worker`: help with a study that is being searched, to its end."""
    from optuna import get_all_study_names

    from mosaic_opt.storage import open_storage
    from mosaic_opt.study import latest_plan, stored_study

    with user_errors():
        own = checked(config)
        require_name(config.study)
        storage = open_storage(storage_url(config))
        study = stored_study(storage, config.study)
        if study is None:
            require_known("study", config.study, get_all_study_names(storage))
        plan = latest_plan(study) if study else {}
        if not plan:
            raise ValueError(f"study must be one that `mosaic search` began; got {config.study!r}")
        settings = plan["config"]
        settings |= {"study": config.study, "output": own["output"], "storage": own["storage"], "workers": 1}
        settings |= {key: own[key] for key in ("batch_size", "device_gib", "host_gib") if own[key] is not None}
        if own["device"] is not None:
            settings["model"]["device"] = own["device"]
    search(OmegaConf.create(settings), verb="search")


def studies(config: DictConfig) -> None:
    """`mosaic studies`: list a database's searches as JSON, or delete, rename or copy one."""
    from mosaic_opt.report.studies import study_rows
    from mosaic_opt.report.terminal import print_studies
    from mosaic_opt.storage import open_storage
    from mosaic_opt.study import copy_search, delete_search, require_copyable

    with user_errors():
        checked(config)
        require_known("action", config.action, ACTIONS)
        storage = open_storage(storage_url(config))
        rows = study_rows(storage)
        if config.action == "list":
            print_studies(rows)
            put(json.dumps(rows))
            return
        known = {row["study"]: row for row in rows}
        require_known("study", config.study, list(known))
        what = f"{config.action} study {config.study}"
        if config.action in ("rename", "copy"):
            require_name(config.to, "to")
            require_copyable(storage, config.study, config.to)
            what += f" to {config.to}"
        _ask("{} ({done} trials done, {running} running)".format(what, **known[config.study]), config.force)
        if config.action in ("rename", "copy"):
            copy_search(storage, config.study, config.to)
        if config.action in ("rename", "delete"):
            delete_search(storage, config.study)
    print(f"done: {what}", file=sys.stderr)


def _ask(what: str, force: bool) -> None:
    """Raise ValueError unless the user wants it."""
    if force:
        return
    if not sys.stdin.isatty():
        raise ValueError(f"force must be true to {what} where nobody can be asked; got false")
    print(f"{what}? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ValueError("nothing was done")


def _show_result(config: DictConfig, plan: Plan, storage: Any, name: str, folder: Path, *, ran: bool) -> None:
    from mosaic_opt.report.dashboard import draw, publish
    from mosaic_opt.report.page import save_figures
    from mosaic_opt.report.result import allocations_of, result
    from mosaic_opt.report.terminal import print_result
    from mosaic_opt.report.view import View

    content = result(storage, name, plan.key)
    text = json.dumps(content, indent=2)
    _write(folder / "result.json", text)
    (folder / "allocations").mkdir(exist_ok=True)
    files = {folder / "allocations" / f"{name}.json": made for name, made in allocations_of(content).items()}
    for path, made in files.items():
        made.save(path)
    if ran:
        draw(storage, name)
        others = [folder / "result.json", folder / "search.log", *save_figures(View.of(storage, name), folder)]
        publish(storage, name, [*files, *others], _artifacts(config))
    where = {
        "result": str(folder / "result.json"),
        "allocations": str(folder / "allocations"),
        "database": hidden(storage_url(config)),
        "look at it": f"mosaic dashboard storage.url={hidden(storage_url(config))}",
    }
    print_result(content, where)
    put(text)


def _write(path: Path, text: str) -> None:
    """Write a file that nobody sees half written."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def evaluate(config: DictConfig) -> None:
    """`mosaic evaluate`: measure one allocation; one JSON object on stdout."""
    from mosaic_opt import allocation
    from mosaic_opt.ranked import evaluable_layers
    from mosaic_opt.report.terminal import TerminalWatch

    with user_errors():
        checked(config)
        given = config.allocation
        given = OmegaConf.to_container(given) if OmegaConf.is_list(given) else given
        split = checked_split(config.split)
        source = instantiate(config.model)
        layers, _ = evaluable_layers(source.config)
        wanted = allocation.parse(given, layers=len(layers))
        _require_same_model(wanted, source)
        (method,) = methods_for([wanted], config)
        bench = configured_bench(config, source, {split: config[split]}, TerminalWatch(), method=method)
        _require_measurable(wanted, bench, config)
        source.require_device()
    measurement = bench.measure(split)(wanted, complete=True)
    report = {
        "task": bench.task.name,
        "metric": bench.task.metric,
        "protocol": bench.task.protocol,
        "eviction": bench.method.describe(),
        "allow_overlap": bench.task.allow_overlap,
        "truncated": bench.truncated[split],
        "score": measurement.score,
        "task_scores": measurement.task_scores,
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
    put(json.dumps(report))


def _require_measurable(wanted: Allocation, bench: Bench, config: DictConfig) -> None:
    """Raise ValueError for another number of layers, or budgets over a cap that is configured; makes the examples."""
    wanted.require_layers(bench.layers)
    if max(wanted.budgets) > bench.cap and config.cap is not None:
        raise ValueError(f"allocation budgets must be at most cap={bench.cap}; got {max(wanted.budgets)}")


def compare(config: DictConfig) -> None:
    """`mosaic compare`: allocations beside each other; one JSON object on stdout."""
    from mosaic_opt.allocation import parse_several
    from mosaic_opt.report.comparison import comparison_rows, layer_table, summary_table
    from mosaic_opt.report.terminal import print_table

    with user_errors():
        settings = checked(config)
        given, split = settings["allocations"], settings["split"]
        if not isinstance(given, list) or len(given) < 2:
            raise ValueError(
                f"allocations must be a list of at least two (allocations=[a.json,b.json]); got {given!r}"
            )
        wanted = parse_several(given)
        benches = None if split is None else _compared_benches(config, wanted, checked_split(split))
    names = [str(one) for one in given]
    report: dict[str, Any] = {"split": split}
    if benches is None:
        rows = comparison_rows(names, wanted)
    else:
        scores = [bench.measure(split)(one, complete=True).scores for one, bench in zip(wanted, benches, strict=True)]
        rows = comparison_rows(names, wanted, scores)
        for row, bench in zip(rows, benches, strict=True):
            row["eviction"] = bench.method.describe()
        task = benches[0].task
        report |= {"task": task.name, "metric": task.metric, "protocol": task.protocol}
    for table in (layer_table(rows), summary_table(rows)):
        print_table(*table)
    put(json.dumps({**report, "rows": rows}))


def _compared_benches(config: DictConfig, wanted: list[Allocation], split: str) -> list[Bench]:
    """For each allocation the bench that measures it: one for each eviction method, all prefilled together."""
    from mosaic_opt.report.terminal import TerminalWatch

    source, task, watch = instantiate(config.model), configured_task(config), TerminalWatch()
    methods = methods_for(wanted, config)
    keys, counts = [str(method.describe()) for method in methods], {split: config.examples}
    benches = {
        key: configured_bench(config, source, counts, watch, task=task, method=method, prefill_for=methods)
        for key, method in dict(zip(keys, methods, strict=True)).items()
    }
    found = [benches[key] for key in keys]
    for one, bench in zip(wanted, found, strict=True):
        _require_same_model(one, source)
        _require_measurable(one, bench, config)
    source.require_device()
    return found


def tasks(config: DictConfig) -> None:
    """`mosaic tasks`: every task that can be chosen; a JSON list on stdout."""
    from mosaic_opt.report.terminal import print_tasks

    with user_errors():
        checked(config)
        rows = [_described(name, config) for name in choices("task") if name != "mixture"]
    print_tasks(rows)
    put(json.dumps(rows))


def _described(name: str, config: DictConfig) -> dict[str, Any]:
    """A task as a row of `mosaic tasks`; `missing` says what its data or settings lack, if anything."""
    row: dict[str, Any] = dict.fromkeys(("category", "protocol", "new_tokens", "metric", "examples", "missing"))
    try:
        with user_errors():
            task = named("task", name, config)
            row |= {"category": task.category, "protocol": task.protocol, "new_tokens": task.new_tokens}
            row |= {"metric": task.metric, "examples": task.sizes()}
    except UserError as error:
        row["missing"] = str(error)
    return {"task": name, **row}


def baseline(config: DictConfig) -> None:
    """`mosaic baseline`: full-cache and uniform scores over a set of tasks; a JSON list on stdout."""
    from mosaic_opt.report.baseline import BRIEF, baseline_table, markdown
    from mosaic_opt.report.terminal import TerminalWatch, print_table

    with user_errors():
        settings = checked(config)
        split, budgets, watch = checked_split(settings["split"]), settings["budgets"], TerminalWatch()
        source = instantiate(config.model)
        tasks = named_tasks(settings["tasks"], "tasks", settings["protocol"], config)
        counts = {split: settings["examples"]}
        method = instantiate(config.eviction)
        benches = {
            name: configured_bench(config, source, counts, watch, task=task, method=method)
            for name, task in tasks.items()
        }
        source.require_device()
        table = _writable(settings["table"], "table")
        for bench in benches.values():
            longest = bench.cap  # makes the examples, so that a task that cannot be made is told at once
            if config.cap is not None and max(budgets) > longest:
                raise ValueError(f"budgets must be at most cap={longest}; got {max(budgets)}")
    rows = [_baseline_row(name, bench, split, budgets) for name, bench in benches.items()]
    put(json.dumps(rows))
    print_table(*baseline_table(rows, BRIEF))
    if table is not None:
        table.write_text(markdown(*baseline_table(rows)), encoding="utf-8")


def _baseline_row(name: str, bench: Bench, split: str, budgets: list[int]) -> dict[str, Any]:
    from mosaic_opt.allocation import uniform
    from mosaic_opt.report.baseline import baseline_row

    measure = bench.measure(split)
    uniforms = {budget: measure(uniform(bench.layers, budget)).scores for budget in budgets}
    full = bench.evaluator(split).full_scores()
    examples = bench.examples[split]
    bench.release(split)
    return baseline_row(
        full,
        uniforms,
        task=name,
        category=bench.task.category,
        metric=bench.task.metric,
        protocol=bench.task.protocol,
        prompt_tokens=sum(example.length for example in examples) / len(examples),
        truncated=bench.truncated[split],
    )


def _writable(given: Any, setting: str) -> Path | None:
    """The path of a file that can be written; None where none is wanted."""
    if given is None:
        return None
    path = Path(str(given))
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"{setting} must be a file in a folder that can be written; got {given!r}")
    return path


def generate(config: DictConfig) -> None:
    """`mosaic generate`: a prompt continued with and without eviction; one JSON object on stdout."""
    from mosaic_opt import generation
    from mosaic_opt.model import stop_tokens
    from mosaic_opt.report.terminal import print_generations

    with user_errors():
        settings = checked(config)
        source, cut = _live(config)
        source.require_device()
        prompt = source.encode(_prompt(settings["prompt_file"]), chat=settings["chat"])
        require_fit(source.config, len(prompt), settings["new_tokens"])
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
    put(json.dumps(report))


def bench(config: DictConfig) -> None:
    """`mosaic bench`: times and bytes of full cache, uniform and a given allocation; a JSON list on stdout."""
    from mosaic_opt import allocation, generation
    from mosaic_opt.report.terminal import print_bench

    with user_errors():
        settings = checked(config)
        source, cut = _live(config)
        source.require_device()
        mean = settings["budget"] or round(cut.allocation.mean)
        for length in settings["lengths"]:
            require_fit(source.config, length, settings["new_tokens"])
    cuts = {
        "full": None,
        "uniform": generation.Cut(cut.method, allocation.uniform(len(cut.allocation), mean), cut.hold_budget),
        "given": cut,
    }
    numbers = {name: settings[name] for name in ("lengths", "batches", "new_tokens", "repeats", "seed")}
    rows = generation.bench(source.load(), cuts, **numbers)
    print_bench(rows)
    put(json.dumps(rows))


def _live(config: DictConfig) -> tuple[ModelSource, Any]:
    """The model's source and the eviction (`generation.Cut`) of a live verb, checked without its weights."""
    from mosaic_opt import allocation
    from mosaic_opt.eviction import evictable_layers, fitting_layers
    from mosaic_opt.generation import Cut

    source = instantiate(config.model)
    given = OmegaConf.to_container(config, resolve=True)["allocation"]  # type: ignore[index,call-overload]
    wanted = allocation.parse(given, layers=len(evictable_layers(source.config)))
    _require_same_model(wanted, source)
    (method,) = methods_for([wanted], config)
    fitting_layers(source.config, method, wanted)
    return source, Cut(method, wanted, config.hold_budget)


def _require_same_model(wanted: Allocation, source: ModelSource) -> None:
    """Raise ValueError for an allocation whose file says that it was made for other weights (in whatever dtype)."""
    model = wanted.about.get("model", {})
    meant, here = (str(text).rpartition(":")[0] for text in (model.get("fingerprint"), source.fingerprint))
    if meant and meant != here:
        raise ValueError(
            f"allocation must be for model {source.name!r} (fingerprint {here}), or be given as a list; "
            f"got one for {model['id']!r} ({meant})"
        )


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


def report(config: DictConfig) -> None:
    """`mosaic report`: an HTML file about one search or all of a database; its path on stdout."""
    from mosaic_opt.report.page import write_report
    from mosaic_opt.report.studies import study_rows
    from mosaic_opt.report.view import View
    from mosaic_opt.storage import open_storage

    with user_errors():
        settings = checked(config)
        storage = open_storage(storage_url(config))
        names = [row["study"] for row in study_rows(storage) if row["stage"]]
        if not names:
            raise ValueError(f"storage.url must hold a search (mosaic search); got {hidden(storage_url(config))!r}")
        wanted = settings["study"]
        if wanted != "all":
            require_name(wanted)
            require_known("study", wanted, names)
        views = [View.of(storage, name) for name in (names if wanted == "all" else [wanted])]
        folder = Path(settings["output"]) / "reports" / wanted
        path = write_report(views, f"Report on {'all searches' if wanted == 'all' else wanted}", folder)
    for view in views:
        if view.result is None:
            print(f"{view.name} has not come to its end: it is in stage {view.stage}", file=sys.stderr)
    put(str(path))


def plan(config: DictConfig) -> None:
    """`mosaic plan`: what a model's KV cache needs and what fits; one JSON object on stdout."""
    from mosaic_opt.allocation import parse_bytes
    from mosaic_opt.eviction import kv_shape
    from mosaic_opt.memory import expected_score, memory_plan
    from mosaic_opt.report.terminal import print_plan

    with user_errors():
        settings = checked(config)
        source = instantiate(config.model)
        model = {**kv_shape(source.outline), "element_bytes": source.element_bytes}
        result = _result_file(settings["result"], model)
        memory = None if settings["memory"] is None else parse_bytes(settings["memory"])
        given = {name: settings[name] for name in ("context", "batch")}
        floor = result["about"]["floor"] if result else 1
        found = memory_plan(model, mean=settings["budget"], memory=memory, floor=floor, **given)
        mean = settings["budget"] or found.get("fitting_mean")
        if result and mean is not None:
            found["expected"] = expected_score(result["rows"], mean)
    report = {"model": source.name, **model, **given, "memory": memory, "budget": settings["budget"], **found}
    print_plan(report)
    put(json.dumps(report))


def _result_file(path: Any, model: dict[str, Any]) -> dict[str, Any] | None:
    """A result.json for a model of this shape; None where none is given."""
    from mosaic_opt import allocation

    if path is None:
        return None
    try:
        content: Any = json.loads(Path(str(path)).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"result must be a result.json of mosaic search; got {path!r}: {one_line(error)}") from error
    if not isinstance(content, dict) or not {"rows", "about", "winner"} <= content.keys():
        raise ValueError(f"result must be a result.json of mosaic search; got {path!r}, which holds something else")
    winner = allocation.winner_of(content, str(path))
    winner.require_layers(len(model["layers"]))
    allocation.require_range("result about.floor", winner.about.get("floor"), 1, allocation.LARGEST)
    meant = winner.about.get("model", {})
    for name in ("layers", "windows", "kv_heads", "head_dim"):
        if meant.get(name) != model[name]:
            raise ValueError(f"result must be for a model with {name}={model[name]}; got one with {meant.get(name)}")
    return content


def export(config: DictConfig) -> None:
    """`mosaic export`: an allocation file in another tool's form, to a file or on stdout."""
    from mosaic_opt.allocation import Allocation
    from mosaic_opt.export import exported

    with user_errors():
        settings = checked(config)
        form, path = settings["format"], _writable(settings["to"], "to")
        if path is None and form == "lukv":
            raise ValueError("to must be a file for format lukv, which is no text; got None")
        made = exported(Allocation.load(str(settings["allocation"])), form, prompt_tokens=settings["prompt_tokens"])
        if path is not None:
            path.write_bytes(made)
    put(made.decode() if path is None else str(path))


def dashboard(config: DictConfig) -> None:
    """`mosaic dashboard`: optuna-dashboard on the configured database, on loopback."""
    from optuna.artifacts import FileSystemArtifactStore
    from optuna_dashboard import run_server

    from mosaic_opt.storage import open_storage

    with user_errors():
        settings = checked(config)
        host, port = str(settings["host"]), settings["port"]
        if not _is_loopback(host):
            if not settings["allow_anyone"]:
                raise ValueError(
                    f"host must be 127.0.0.1, or allow_anyone=true, as the dashboard asks nobody's name; got {host!r}"
                )
            print(f"no authentication: whoever reaches {host}:{port} may read and delete studies", file=sys.stderr)
        storage = open_storage(storage_url(config))
        artifacts = _artifacts(config)
        artifacts.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        # a request may swallow the exception that a signal raises; there is nothing to save here
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: os._exit(130))
    shown = f"[{host}]" if ":" in host else host
    print(f"http://{shown}:{port}/dashboard  (Ctrl-C ends it)", file=sys.stderr)
    try:
        run_server(storage, host=host, port=port, artifact_store=FileSystemArtifactStore(str(artifacts)))
    except OSError as error:
        raise UserError(f"port {port} cannot be used: {error.strerror}; choose another with port=") from None


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _artifacts(config: DictConfig) -> Path:
    """The folder of the artifacts of all studies."""
    return Path(config.output) / "artifacts"


def put(text: str) -> None:
    """Write to standard output.

    Raises:
        UserError: if nobody reads it, or it cannot be written.
    """
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter fails again at its end
        raise UserError(f"standard output cannot be written: {error.strerror}") from None
