import csv
import io
from html.parser import HTMLParser
from pathlib import Path

import axe_core_python
import matplotlib.image
import numpy as np
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from mosaic_opt.report import page
from mosaic_opt.report.page import comparisons, write_report
from mosaic_opt.report.view import View
from mosaic_opt.storage import open_storage
from tests.browser import chromium, errors
from tests.searches import HOSTILE, Bench, search

AXE = Path(axe_core_python.__file__).with_name("axe.min.js")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The views of three searches (whole, half, one full of markup) and the folder of their report."""
    folder = tmp_path_factory.mktemp("page")
    storage = open_storage(f"sqlite:///{folder}/s.db")
    search(storage, "whole")
    search(storage, "half", stop=9)
    search(storage, HOSTILE, bench=Bench(task=HOSTILE, text=HOSTILE), command=HOSTILE, method=HOSTILE)
    views = [View.of(storage, name) for name in ("whole", "half", HOSTILE)]
    write_report(views, HOSTILE, folder / "report")
    return views, folder / "report"


class Tags(HTMLParser):
    """Counts tags, gathers attributes."""

    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_data(self, data):
        self.text.append(data)


def test_nothing_in_a_name_or_an_answer_becomes_markup(report):
    _, folder = report
    page = Tags()
    page.feed((folder / "report.html").read_text(encoding="utf-8"))
    assert page.tags.count("script") == 2
    assert page.tags.count("img") == page.tags.count("figure") == 7 + 4 + 7
    assert "onerror" not in page.attributes
    assert "javascript:" not in "".join(page.attributes)
    text = "".join(page.text)
    assert text.count(HOSTILE) >= 3  # title, name, command, answers: shown as they are


def test_figures_and_tables_lie_beside_the_page(report):
    views, folder = report
    files = {path.name for path in (folder / "figures").iterdir()}
    assert {"1-whole-front.png", "1-whole-front.svg", "2-half-front.png", "1-whole-layers-48.svg"} <= files
    assert len(files) == 2 * 18
    with (folder / "tables" / "1-whole-result.csv").open(newline="") as file:
        headings, *rows = csv.reader(file)
    assert headings[:3] == ["mean budget", "allocation", "score"]
    assert [row[2] for row in rows] == [f"{100 * row['score']:.1f}" for row in views[0].result["rows"]]
    headings, rows = comparisons(views)["Cache that the winners' shapes give to the same layers"]
    assert rows[0][1] == rows[1][2] == "100 %"
    assert comparisons(views[:2]) == {}


def test_an_earlier_report_stands_until_the_new_one_is_complete(report, tmp_path, monkeypatch):
    views, _ = report
    write_report(views[1:2], "first", tmp_path)
    before = (tmp_path / "report.html").read_text(encoding="utf-8")
    (tmp_path / ".new").mkdir()  # of a process that was killed
    (tmp_path / ".new" / "figures").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(page, "_described", lambda view: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_report(views[1:2], "second", tmp_path)
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == before
    assert list((tmp_path / "figures").iterdir())
    write_report(views[1:2], "third", tmp_path)
    assert "third" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not (tmp_path / ".new").exists()


def test_a_half_finished_search_says_what_is_missing(report):
    _, folder = report
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert text.count("The search has not come to its end: it is in stage &#39;search&#39;") == 1


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_is_drawn_without_a_network_and_accessible(report, width, dark, tmp_path):
    _, folder = report
    with chromium(tmp_path, width=width, dark=dark) as browser:
        browser.get(f"file://{folder}/report.html")
        WebDriverWait(browser, 120).until(lambda b: b.execute_script("return document.documentElement.dataset.drawn"))
        assert errors(browser) == []
        assert browser.execute_script("return document.documentElement.dataset.drawn") == "18"
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        for figure in browser.find_elements(By.CSS_SELECTOR, ".live"):
            pixels = matplotlib.image.imread(io.BytesIO(figure.screenshot_as_png))[:, :, :3]
            assert (np.ptp(pixels, axis=2) > 0.2).mean() > 0.001, "no colours are drawn"
            assert (pixels[2, 2].mean() < 0.3) == dark
        if width < 1280:
            return
        browser.execute_script(AXE.read_text(encoding="utf-8"))
        found = browser.execute_async_script("axe.run().then(arguments[0])")
        assert [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found["violations"]] == []
