"""What pages and report of a study of 2,000 trials cost.

    python -m analysis.benchmarks.report_cost [--trials 2000] [--layers 30]

Prints the seconds to draw the study's pages and the share of a search's time that updating them may take, the seconds
until its page in optuna-dashboard is there (every plot, headless Chromium), and the seconds in which `mosaic report`
makes the report, with its size.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from mosaic_opt.report.dashboard import PAUSE_SECONDS, SHARE, draw
from mosaic_opt.storage import open_storage
from mosaic_opt.study import load_study
from tests.browser import chromium, served
from tests.searches import Bench, search

SHOWN = "[id^='user-defined-plot:mosaic-'].js-plotly-plot"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--layers", type=int, default=30)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        storage = open_storage(f"sqlite:///{folder}/mosaic.db")
        search(storage, "s", trials=options.trials, bench=Bench(layers=options.layers), sampler="random")
        times = []
        for _ in range(3):
            start = time.perf_counter()
            draw(storage, "s")
            times.append(time.perf_counter() - start)
        again = max(PAUSE_SECONDS, times[-1] / SHARE)
        print(f"pages drawn in {times[-1]:.2f} s, at most every {again:.0f} s: {times[-1] / again:.1%} of the time")
        print(f"study page open after {page_seconds(folder, load_study(storage, 's')._study_id):.1f} s")
        start = time.perf_counter()
        command = [sys.executable, "-m", "mosaic_opt", "report", "study=s", f"output={folder}"]
        path = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        seconds = time.perf_counter() - start
        print(f"report made in {seconds:.1f} s, {Path(path).stat().st_size / 2**20:.1f} MiB")


def page_seconds(folder: Path, study_id: int) -> float:
    """Seconds until a study's page shows all seven plots, the second time it is opened."""
    with served(folder) as address:
        for _ in range(2):
            with chromium(folder) as browser:
                start = time.perf_counter()
                browser.get(f"{address}/dashboard/studies/{study_id}")
                WebDriverWait(browser, 120).until(lambda b: len(b.find_elements(By.CSS_SELECTOR, SHOWN)) >= 7)
                seconds = time.perf_counter() - start
    return seconds


if __name__ == "__main__":
    main()
