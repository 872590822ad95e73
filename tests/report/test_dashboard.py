"""The study pages in a real browser, served by `mosaic dashboard`."""

import io
import json
import urllib.request

import matplotlib.image
import numpy as np
import optuna
import pytest
from optuna_dashboard import get_note
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from mosaic_opt.report import dashboard
from mosaic_opt.report.dashboard import Pages, draw, publish
from mosaic_opt.storage import open_storage
from mosaic_opt.study import load_study, parts_of
from tests.browser import chromium, errors, served
from tests.searches import HOSTILE, Bench, search


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A database with a whole search, one that runs, and an infeasible trial in a stage-4 study; pages drawn."""
    folder = tmp_path_factory.mktemp("dashboard")
    storage = open_storage(f"sqlite:///{folder}/mosaic.db")
    search(storage, "whole")
    running = search(storage, "half", stop=9)
    running.study.ask(running.objective.space)
    refined = load_study(storage, next(name for name in parts_of(storage, "whole") if "refine-48" in name))
    template = refined.trials[0]
    template.system_attrs = {"constraints": [5.0], "constraints:mean_budget": 5.0}
    refined.add_trial(template)
    for name in ("whole", "half"):
        draw(storage, name)
    (folder / "result.json").write_text('{"a": 1}')
    publish(storage, "whole", [folder / "result.json"], folder / "artifacts")
    (folder / "result.json").write_text('{"a": 2}')
    publish(storage, "whole", [folder / "result.json"], folder / "artifacts")
    return folder


@pytest.fixture(scope="module")
def address(folder):
    with served(folder) as where:
        yield where


def summaries(address):
    with urllib.request.urlopen(f"{address}/api/studies") as answer:
        return {study["study_name"]: study["study_id"] for study in json.load(answer)["study_summaries"]}


# points of the traces of infeasible trials in the history of a study's page
DRAWN = """
const history = document.querySelector('#plot-history.js-plotly-plot');
return (history ? history.data : []).filter(d => d.name.startsWith('Infeasible Trial')).map(d => d.x.length);
"""


def plots(browser):
    """The custom plots that are drawn."""
    return browser.find_elements(By.CSS_SELECTOR, "[id^='user-defined-plot:mosaic-'].js-plotly-plot")


@pytest.mark.parametrize(("name", "count"), [("whole", 7), ("half", 4), ("whole-refine-48", 1)])
def test_study_pages_show_the_plots_without_an_error(address, tmp_path, name, count):
    ids = summaries(address)
    study = next(one for one in ids if one == name or ("refine" in name and one.startswith(name)))
    with chromium(tmp_path) as browser:
        browser.get(f"{address}/dashboard/studies/{ids[study]}")
        WebDriverWait(browser, 120).until(lambda b: len(plots(b)) >= count)
        for place in plots(browser):
            browser.execute_script("arguments[0].scrollIntoView()", place)
            pixels = matplotlib.image.imread(io.BytesIO(place.screenshot_as_png))[:, :, :3]
            assert (np.ptp(pixels, axis=2) > 0.2).mean() > 0.001, "no colours are drawn"
        assert errors(browser) == []


def test_infeasible_trials_are_marked(folder, address, tmp_path):
    ids = summaries(address)
    name = next(name for name in ids if "refine-48" in name)
    with urllib.request.urlopen(f"{address}/api/studies/{ids[name]}?after=0") as answer:
        trials = json.load(answer)["trials"]
    assert [trial["constraints"] for trial in trials] == [[0.0]] * 6 + [[5.0]]
    with chromium(tmp_path) as browser:
        browser.get(f"{address}/dashboard/studies/{ids[name]}")
        WebDriverWait(browser, 60).until(lambda b: b.execute_script(DRAWN) == [1])


def test_artifacts_can_be_downloaded(folder, address):
    study = load_study(open_storage(f"sqlite:///{folder}/mosaic.db"), "whole")
    (meta,) = optuna.artifacts.get_all_artifact_meta(study)
    assert meta.filename == "result.json"
    with urllib.request.urlopen(f"{address}/artifacts/{study._study_id}/{meta.artifact_id}") as answer:
        assert json.load(answer) == {"a": 2}


def test_names_cannot_inject_markup_into_notes(tmp_path):
    storage = open_storage(f"sqlite:///{tmp_path}/s.db")
    search(storage, "x", bench=Bench(task=HOSTILE), method=HOSTILE, command="a ``` <b>")
    draw(storage, "x")
    for name in parts_of(storage, "x"):
        note = get_note(load_study(storage, name))
        assert "\\<img src\\=x" in note
        assert "<img" not in note.replace("\\<img", "")
        assert "](" not in note.replace("\\]\\(", "")
    fence = get_note(load_study(storage, "x")).split("\n\n")[3]
    assert fence == "````\na ``` <b>\n````"


def test_updates_take_a_small_share_of_the_time(monkeypatch):
    now, drawn = [0.0], []

    def slow(storage, name):
        drawn.append(now[0])
        now[0] += 3.0

    monkeypatch.setattr(dashboard.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(dashboard, "draw", slow)
    pages = Pages(None, "x", pytest.fail)
    while now[0] < 3000:
        now[0] += 0.5
        pages.update()
    assert 5 < len(drawn) < 3000 * 0.02 / 3.0
    assert drawn[0] == pytest.approx(dashboard.PAUSE_SECONDS)


def test_pages_that_cannot_be_drawn_end_nothing(monkeypatch, tmp_path):
    said = []
    monkeypatch.setattr(dashboard, "PAUSE_SECONDS", 0)
    Pages(open_storage(f"sqlite:///{tmp_path}/s.db"), "none", said.append).update()
    assert "the pages of none were not drawn" in said[0]


def test_notes_are_written_once(tmp_path):
    storage = open_storage(f"sqlite:///{tmp_path}/s.db")
    search(storage, "x", stop=9)
    study = load_study(storage, "x")
    for _ in range(2):
        draw(storage, "x")
    attributes = storage.get_study_system_attrs(study._study_id)
    versions = [value for key, value in attributes.items() if key.startswith("dashboard:note_ver")]
    assert versions == [1]
