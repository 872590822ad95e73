"""Settings of the `mosaic` command: checked, and made into objects. With `verbs` and `__main__` the only importer of
hydra."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mosaic_opt.model import ModelSource
from mosaic_opt.urls import KINDS, URL_VARIABLE, hidden

if TYPE_CHECKING:
    from mosaic_opt.allocation import Allocation
    from mosaic_opt.eviction import EvictionMethod
    from mosaic_opt.stages import Bench
    from mosaic_opt.tasks import Task

SPLIT_NAMES = ("calibration", "selection", "test")
PARTS = ("model", "task", "eviction", "sampler", "levels", *SPLIT_NAMES, "tokens", "seed", "cap", "race")

FORMAT = 3  # of what studies hold; one that this code cannot read has another, and is refused

_EVALUATED = {"model", "task", *SPLIT_NAMES, "tokens", "seed", "cap", "batch_size", "output"}
_EVALUATED |= {"prefill_for", "device_gib", "host_gib"}
_EVICTED = {"model", "allocation", "new_tokens", "hold_budget"}
_REQUIRED = {
    "evaluate": _EVALUATED | {"allocation", "split"},
    "search": _EVALUATED
    | {
        "eviction",
        "sampler",
        "storage",
        "study",
        "levels",
        "trials",
        "winner",
        "ladder",
        "budgets",
        "refine_trials",
        "race",
        "workers",
    },
    "generate": _EVICTED | {"prompt_file", "chat", "plain"},
    "tasks": {"tokens", "seed"},
    "baseline": _EVALUATED - {"task", *SPLIT_NAMES}
    | {"eviction", "tasks", "protocol", "split", "examples", "budgets", "table"},
    "worker": {"study", "storage", "output", "device", "batch_size", "device_gib", "host_gib"},
    "report": {"study", "storage", "output"},
    "plan": {"model", "context", "batch", "memory", "budget", "result"},
    "compare": _EVALUATED - {*SPLIT_NAMES, "prefill_for"} | {"allocations", "split", "examples"},
    "export": {"allocation", "format", "prompt_tokens", "to"},
    "dashboard": {"port", "host", "allow_anyone", "storage", "output"},
    "studies": {"action", "study", "to", "force", "storage", "output"},
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
    "context": (1, 10**9),
    "batch": (1, 10**6),
    "prompt_tokens": (1, 10**7),
    "examples": (1, 10**6),
    "repeats": (1, 1000),
    "workers": (1, 256),
    "port": (1, 65535),
    "lengths": (1, 10**7),
    "batches": (1, 10**4),
}
_NULLABLE = {"cap", "budget", "prompt_tokens"}
_UNSET = {  # without a default: what is wanted
    "allocation": "a list of budgets, uniform:N, or a JSON file (allocation=...)",
    "allocations": "two or more of what allocation= takes (allocations=[a.json,b.json])",
}
_INHERITED = {"batch_size", "device_gib", "host_gib"}  # of a worker: null takes what the study has
_LISTS = ("lengths", "batches", "budgets")
_SWITCHES = ("hold_budget", "chat", "plain", "force", "allow_anyone")
ACTIONS = ("list", "delete", "rename", "copy")


class UserError(Exception):
    """Something the user can mend: one line, exit code 2."""


def checked(config: DictConfig, verb: str | None = None) -> dict[str, Any]:
    """The settings as plain values, those that no constructor checks checked here.

    verb: whose settings they are; None: of the verb that runs.

    Raises:
        ValueError: for a setting that is missing, of the wrong kind or out of range.
    """
    settings: Any = OmegaConf.to_container(config, resolve=True)
    verb = verb or str(HydraConfig.get().job.config_name)
    required = _REQUIRED[verb]
    nullable = _NULLABLE | _INHERITED if verb == "worker" else _NULLABLE
    missing = sorted(required - set(settings))
    if missing:
        raise ValueError(f"settings must hold {', '.join(missing)}; it was removed")
    for name, wanted in _UNSET.items():
        if settings.get(name) == "???":
            raise ValueError(f"{name} is required: {wanted}")
    for name, (least, most) in _RANGES.items():
        value = settings.get(name)
        if name not in settings or (name in nullable and value is None):
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
    if "output" in required and (verb != "baseline" or settings["output"] is not None):
        if not isinstance(settings["output"], str) or not settings["output"].strip():
            raise ValueError(f"output must be a folder; got {settings['output']!r}")
        Path(settings["output"]).mkdir(parents=True, exist_ok=True)
    return settings


def checked_split(given: Any) -> str:
    if given not in SPLIT_NAMES:
        raise ValueError(f"split must be one of {', '.join(SPLIT_NAMES)}; got {given!r}")
    return str(given)


def choices(group: str) -> list[str]:
    """Names of the files of a group of the configuration."""
    folder = resources.files("mosaic_opt.conf") / group
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))


def checked_names(given: Any, setting: str) -> list[str]:
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise ValueError(f"{setting} must be a list of names; got {given!r}")
    return given


def require_choice(group: str, name: str) -> None:
    """Raise ValueError, with the names most like it, unless the group of the configuration has a file so named."""
    require_known(group, name, choices(group))


def require_known(setting: str, name: Any, known: Sequence[str]) -> None:
    """Raise ValueError, with the names most like it, unless a name is one of those known."""
    if name not in known:
        near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.4)
        shown = f"{', '.join(near or known)}{' ...' if near else ''}" if known else "one that is there (none is)"
        raise ValueError(f"{setting} must be one of {shown}; got {name!r}")


def named(group: str, name: str, config: DictConfig, **settings: Any) -> Any:
    """The object of a group's file, its references to other settings taken from `config`.

    settings: of the file's, to be set; those that are None stay.

    Raises:
        ValueError: for an unknown name, with those most like it, or an unknown setting.
    """
    require_choice(group, name)
    text = (resources.files("mosaic_opt.conf") / group / f"{name}.yaml").read_text(encoding="utf-8")
    content: Any = OmegaConf.create(text)
    for key, value in settings.items():
        if key not in content:
            raise ValueError(f"{name} must be given settings of its own, some of {', '.join(content)}; got {key!r}")
        if value is not None:
            content[key] = value
    content._set_parent(config)
    return instantiate(content)


def named_tasks(given: Any, setting: str, protocol: Any, config: DictConfig) -> dict[str, Task]:
    """Tasks by name, in order; an entry is a name, or a mapping of `task` (the name) and settings of that task.

    A task may come more than once, if each time under a `name` of its own.

    protocol: of all tasks; None: each task's own.

    Raises:
        ValueError: for anything else, an empty list, a name that comes twice, or a mixture.
    """
    entries = [{"task": entry} if isinstance(entry, str) else entry for entry in given] if given else None
    if not isinstance(given, list) or not entries or not all(isinstance(e, dict) and "task" in e for e in entries):
        raise ValueError(f"{setting} must be a list of at least one name (or {{task: name, ...}}); got {given!r}")
    names = [str(entry.get("name") or entry["task"]) for entry in entries]
    if len(set(names)) < len(names) or "mixture" in {entry["task"] for entry in entries}:
        raise ValueError(f"{setting} must be different names and no mixture; got {', '.join(names)}")
    made = {}
    for name, entry in zip(names, entries, strict=True):
        own = {str(key): value for key, value in entry.items() if key != "task"}
        made[name] = named("task", str(entry["task"]), config, **{"protocol": protocol, **own})
    return made


def configured_task(config: DictConfig) -> Task:
    """The task; the members of a mixture are made from their own files."""
    if "tasks" not in config.task:
        return instantiate(config.task)
    settings: Any = OmegaConf.to_container(config.task, resolve=True)
    protocol = settings.pop("protocol", None)
    members = named_tasks(settings.pop("tasks"), "task.tasks", protocol, config)
    return instantiate(settings, tasks=list(members.values()))


def methods_for(allocations: Sequence[Allocation], config: DictConfig) -> list[EvictionMethod]:
    """An eviction method for each: as configured, else as its file says, else as the first file that says one, else
    snapkv."""
    from mosaic_opt.eviction import method_of

    if "eviction" in config:
        return [instantiate(config.eviction)] * len(allocations)
    said = [one.about.get("eviction") for one in allocations]
    usual = next((described for described in said if described), None)
    default = method_of(usual) if usual else named("eviction", "snapkv", config)
    return [method_of(described) if described else default for described in said]


def configured_bench(
    config: DictConfig,
    source: ModelSource,
    counts: dict[str, int],
    watch: Any,
    *,
    method: EvictionMethod,
    task: Task | None = None,
    prefill_for: Sequence[EvictionMethod] | None = None,
) -> Bench:
    """The bench as configured. task, prefill_for: None makes those of the configuration."""
    from mosaic_opt.stages import Bench

    if prefill_for is None:
        others = OmegaConf.to_container(config, resolve=True)["prefill_for"]  # type: ignore[index,call-overload]
        prefill_for = [named("eviction", name, config) for name in checked_names(others, "prefill_for")]
    return Bench(
        model=source,
        task=task or configured_task(config),
        method=method,
        prefill_for=prefill_for,
        counts=counts,
        ranked=None if config.output is None else Path(config.output) / "ranked",
        cap=config.cap,
        batch_size=config.batch_size,
        device_bytes=config.device_gib * 2**30,
        host_bytes=config.host_gib * 2**30,
        watch=watch,
    )


def fingerprint_of(config: DictConfig, source: ModelSource) -> dict[str, Any]:
    """What a study is made from, as far as it is known before anything is loaded."""
    from mosaic_opt.study import versions

    settings = OmegaConf.to_container(config, resolve=True)
    assert isinstance(settings, dict)
    parts = {key: settings[key] for key in PARTS if key != "model"}
    return {**parts, "model": source.fingerprint, "versions": versions(), "format": FORMAT}


def default_name(config: DictConfig) -> str:
    """Choices of model, task and eviction, and a hash of every setting that makes the study."""
    settings = OmegaConf.to_container(config, resolve=True)
    assert isinstance(settings, dict)
    parts = json.dumps({key: settings[key] for key in PARTS}, sort_keys=True)
    choices = HydraConfig.get().runtime.choices
    labels = "-".join(str(choices[group]) for group in ("model", "task", "eviction"))
    return f"{labels}-{hashlib.sha256(parts.encode()).hexdigest()[:8]}"


def require_name(name: Any, setting: str = "study") -> None:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,150}", name):
        raise ValueError(f"{setting} must be a name of letters, digits, '.', '_' and '-'; got {name!r}")


def storage_url(config: DictConfig) -> str:
    """Where the studies are. Raises ValueError where nothing says so."""
    url = config.storage.url
    if not isinstance(url, str):
        raise ValueError(f"storage.url must be {KINDS}: set {URL_VARIABLE} in the environment; got {url!r}")
    return url


def setting(name: str, text: str) -> str:
    """An override of the command line that gives a setting this text, whatever stands in it."""
    escaped = re.sub(r"(\\*)'", r"\1\1\'", str(text))
    trailing = re.search(r"\\*$", escaped)[0]  # type: ignore[index]
    return f"{name}='{escaped}{trailing}'"


def recorded(config: DictConfig) -> dict[str, Any]:
    """The settings as they are stored with a study, and the command that gave them; without a password."""
    settings: Any = OmegaConf.to_container(config, resolve=True)
    settings["storage"]["url"] = hidden(str(settings["storage"]["url"]))
    job = HydraConfig.get()
    command = shlex.join(["mosaic", str(job.job.config_name), *job.overrides.task])
    return {"command": hidden(command), **settings}


@contextmanager
def user_errors() -> Iterator[None]:
    """Inside, a ValueError or OSError is the user's to mend; elsewhere it is a fault of ours."""
    try:
        yield
    except (ValueError, OSError, OmegaConfBaseException) as error:
        raise UserError(one_line(error)) from error
    except HydraException as error:  # instantiate wraps what a constructor raised
        cause = error.__cause__
        raise UserError(one_line(cause if isinstance(cause, ValueError) else error)) from error


def one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    return hidden("; ".join(line for line in lines if line)) or type(error).__name__
