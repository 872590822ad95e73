"""A search's study pages in optuna-dashboard: notes, plots and artifacts."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import optuna
from optuna.artifacts import FileSystemArtifactStore, get_all_artifact_meta, upload_artifact
from optuna.storages import BaseStorage
from optuna_dashboard import get_note, save_note, save_plotly_graph_object

from mosaic_opt.claims import orderly, orderly_by_name
from mosaic_opt.objective import by_score, measured
from mosaic_opt.report.charts import Chart, charts_of, layer_bars
from mosaic_opt.report.interactive import figure
from mosaic_opt.report.page import what
from mosaic_opt.report.view import View
from mosaic_opt.study import feasible, load_study, parts_of

SHARE = 0.01  # of the time, at most, that a running search spends on its pages
PAUSE_SECONDS = 10  # between two updates, at least


class Pages:
    """Keeps a search's pages up to date while it runs."""

    def __init__(self, storage: BaseStorage, name: str, say: Callable[[str], None]) -> None:
        self.storage, self.name, self.say = storage, name, say
        self._next = time.monotonic() + PAUSE_SECONDS

    def update(self) -> None:
        """Draw the pages anew, if it is time to; a failure is told and ends nothing."""
        start = time.monotonic()
        if start < self._next:
            return
        try:
            draw(self.storage, self.name)
        except Exception as error:
            self.say(f"the pages of {self.name} were not drawn: {error!r}")
        end = time.monotonic()
        self._next = end + max(PAUSE_SECONDS, (end - start) / SHARE)


def draw(storage: BaseStorage, name: str) -> None:
    """Write notes and plots of a search's studies as they are now.

    One process at a time, as a plot is several writes.
    """
    with orderly_by_name(storage, f"{name}.pages"):
        _draw(storage, name)


def _draw(storage: BaseStorage, name: str) -> None:
    view = View.of(storage, name)
    main, *others = [load_study(storage, part) for part in parts_of(storage, name)]
    _note(main, _search_note(view))
    _plot(main, charts_of(view))
    for study in others:
        stage = study.user_attrs["stage"]
        if stage == "refine":
            budget = study.user_attrs["budget"]
            _note(study, f"Stage 4 of `{_code(name)}`: allocations of mean budget {budget}. {_escaped(what(view))}")
            _plot(study, _refined_charts(study, budget))
        else:
            _note(study, f"Measurements of `{_code(name)}` on the {stage} examples. {_escaped(what(view))}")


def publish(storage: BaseStorage, name: str, files: Iterable[Path], artifacts: Path) -> None:
    """Hang files on a search's page; one of the same name takes the place of what hangs there.

    Args:
        artifacts: folder of the artifacts of all studies of the database.
    """
    artifacts.mkdir(parents=True, exist_ok=True)
    store, study = FileSystemArtifactStore(str(artifacts)), load_study(storage, name)
    with orderly(study):
        there = {meta.filename: meta.artifact_id for meta in get_all_artifact_meta(study)}
        for path in files:
            if path.name in there:
                with path.open("rb") as file:
                    store.write(there[path.name], file)
            else:
                upload_artifact(artifact_store=store, file_path=str(path), study_or_trial=study)


def _search_note(view: View) -> str:
    lines = [
        f"**{_escaped(what(view))}**",
        f"Stage: {view.stage}. Stages: 1 this study; 2 `…-selection`; 4 `…-refine-…`; reported in `…-test`.",
        "Go on, or show the result again:",
        _fenced(str(view.config.get("command") or f"mosaic search study={view.name}")),
    ]
    made = [
        f"- {_escaped(key)}: {_escaped(str(value))}" for key, value in view.attributes.get("fingerprint", {}).items()
    ]
    return "\n\n".join([*lines, "Made from:", "\n".join(made)])


def _refined_charts(study: optuna.Study, budget: int) -> list[Chart]:
    trials = feasible(study)
    if not trials:
        return []
    first, best = trials[0], max(trials, key=by_score)
    text = "KV pairs kept in each layer by the rescaled winner (the first trial) and by the best trial so far."
    drawn = [
        ("rescaled winner", measured(first)["budgets"], "sky"),
        (f"best trial ({best.number})", measured(best)["budgets"], "blue"),
    ]
    return [layer_bars("layers", f"Layer budgets at a mean of {budget}", text, "tokens", drawn)]


def _plot(study: optuna.Study, charts: Iterable[Chart]) -> None:
    for chart in charts:
        save_plotly_graph_object(study, figure(chart), graph_object_id=f"mosaic-{chart.key}")


def _note(study: optuna.Study, text: str) -> None:
    if get_note(study) != text:
        save_note(study, text)


def _escaped(text: str) -> str:
    """Text in which Markdown sees nothing but letters."""
    return re.sub(r"([!-/:-@\[-`{-~])", r"\\\1", " ".join(text.split()))


def _fenced(text: str) -> str:
    """A block of code, whatever stands in it."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def _code(text: str) -> str:
    return text.replace("`", "'")
