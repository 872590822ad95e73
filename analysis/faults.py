"""Kills the processes of a search, and restarts its database, and counts what was lost.

    python -m analysis.faults [--storages sqlite postgresql] [--trials 200] [--kills 20] [--workers 4] [--seed 0]

Several processes share one search of the tiny random model, all four stages. Whenever the number of trials done
passes one of `kills` random thresholds, a process is killed with SIGKILL (mostly one amid a trial, else any, which
may be starting) and replaced, by the same `mosaic search` or by `mosaic worker`. PostgreSQL (a server of its own, on
loopback) is stopped for a while in the middle. In the end every claim of `checked` has to hold, or the script fails;
the summary goes to analysis/results/faults.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import optuna
from optuna.trial import TrialState

from mosaic_opt.report.baseline import markdown
from mosaic_opt.report.result import result
from mosaic_opt.storage import open_storage
from mosaic_opt.study import completed, copy_search, decided, latest_plan, load_study, parts_of
from tests.postgres import Server

STUDY = "faults"
LEVELS = [32, 48, 64, 96, 128, 192, 256]
BUDGETS = [64, 96]
REFINE_TRIALS = 20
SETTINGS = [
    "model=random", "tokens=640", "calibration=16", "selection=8", "test=8", f"levels={LEVELS}".replace(" ", ""),
    f"budgets={BUDGETS}".replace(" ", ""), f"refine_trials={REFINE_TRIALS}",
]  # fmt: skip
AWAY_SECONDS = 15  # that the server is stopped for
LIMIT_SECONDS = 3000
COLUMNS = (
    "storage", "workers", "kills", "restarts", "trials interrupted", "done again", "stage 1", "stage 4", "selection",
    "test", "evaluated twice", "left running", "equals its re-computation", "minutes",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--storages", nargs="+", default=["sqlite", "postgresql"], choices=["sqlite", "postgresql"])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "faults.md")
    options = parser.parse_args()
    rows = []
    for kind in options.storages:
        with tempfile.TemporaryDirectory(prefix="mosaic-faults-") as folder:
            server = Server() if kind == "postgresql" else None
            try:
                rows.append(Storm(kind, options, Path(folder), server).run())
            finally:
                if server:
                    server.remove()
        print(json.dumps(rows[-1]), flush=True)
    command = " ".join(["python -m analysis.faults", *sys.argv[1:]])
    table = markdown(COLUMNS, [[str(row[column]) for column in COLUMNS] for row in rows])
    options.output.write_text(f"`{command}`\n\n{table}", encoding="utf-8")


class Storm:
    """One search with everything that happens to it."""

    def __init__(self, kind: str, options: argparse.Namespace, folder: Path, server: Server | None) -> None:
        self.kind, self.options, self.folder, self.server = kind, options, folder, server
        self.url = server.database(STUDY) if server else f"sqlite:///{folder}/mosaic.db"
        self.random = random.Random(options.seed)
        self.started = 0
        where = [f"output={folder}", f"storage={kind}"]
        self.search = ["search", *SETTINGS, *where, f"trials={options.trials}"]
        self.worker = ["worker", f"study={STUDY}", *where]

    def run(self) -> dict[str, object]:
        """Let it happen; gives the summary.

        Raises:
            AssertionError: if something is not as it should be.
        """
        begin = time.monotonic()
        running = [self.start(self.search, f"study={STUDY}") for _ in range(self.options.workers)]
        try:
            restarts = self.happen(running)
        finally:
            for process in running:
                process.kill()
        for process in running:
            assert process.returncode == 0, (process.args, process.returncode)
        minutes = round((time.monotonic() - begin) / 60, 1)
        return {
            "storage": self.kind, "workers": self.options.workers, "kills": self.options.kills, "restarts": restarts,
            **self.checked(), "minutes": minutes,
        }  # fmt: skip

    def start(self, command: list[str], *more: str) -> subprocess.Popen[bytes]:
        self.started += 1
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MOSAIC_STORAGE_URL": self.url}
        with (self.folder / f"process-{self.started}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "mosaic_opt", *command, *more],
                env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log,
            )  # fmt: skip

    def happen(self, running: list[subprocess.Popen[bytes]]) -> int:
        """Kill, replace and restart until every process has ended by itself; gives the number of restarts."""
        deadline = time.monotonic() + LIMIT_SECONDS
        expected = self.options.trials + 80  # of all stages, about
        moments = sorted(self.random.sample(range(1, expected), self.options.kills))
        restart_at = expected // 2 if self.server else None
        storage = open_storage(self.url)
        while any(process.poll() is None for process in running):
            assert time.monotonic() < deadline, "it takes too long"
            done = sum(len(decided(load_study(storage, name))) for name in self.studies(storage))
            if moments and done >= moments[0]:
                time.sleep(self.random.random() / 5)
                moments.pop(0)
                victim = self.victim(running, storage)
                running.remove(victim)
                victim.kill()
                victim.wait()
                again = self.random.choice((self.worker, [*self.search, f"study={STUDY}"]))
                running.append(self.start(again))
            if restart_at and done >= restart_at:
                assert self.server
                restart_at = None
                self.server.stop()
                time.sleep(AWAY_SECONDS)
                self.server.start()
            time.sleep(0.1)
        assert not moments, f"{len(moments)} kills never came"
        return int(self.server is not None and restart_at is None)

    def victim(
        self, running: list[subprocess.Popen[bytes]], storage: optuna.storages.BaseStorage
    ) -> subprocess.Popen[bytes]:
        studies = [load_study(storage, name) for name in self.studies(storage)]
        trials = [trial for study in studies for trial in study.get_trials(states=(TrialState.RUNNING,))]
        busy = {trial.user_attrs["worker"][1] for trial in trials if "worker" in trial.user_attrs}
        held = [process for process in running if process.pid in busy]
        return self.random.choice(held if held and self.random.random() < 0.8 else running)

    def studies(self, storage: optuna.storages.BaseStorage) -> list[str]:
        return parts_of(storage, STUDY) if STUDY in optuna.get_all_study_names(storage) else []

    def checked(self) -> dict[str, object]:
        """What the database holds; every number that must be exact is asserted."""
        storage = open_storage(self.url)
        done: Counter[str] = Counter()
        interrupted = again = twice = left = 0
        for name in parts_of(storage, STUDY):
            study = load_study(storage, name)
            trials = study.get_trials(deepcopy=False)
            left += sum(trial.state in (TrialState.RUNNING, TrialState.WAITING) for trial in trials)
            points = [tuple(sorted(trial.params.items())) for trial in completed(study)]
            twice += len(points) - len(set(points))
            done[study.user_attrs["stage"]] += len(points)
            failed = {trial.number for trial in trials if trial.state == TrialState.FAIL}
            assert all(trials[number].user_attrs.get("interrupted") for number in failed), f"{name}: a trial failed"
            interrupted += len(failed)
            retried = [trial for trial in trials if "retry_of" in trial.user_attrs]
            assert sorted(trial.user_attrs["retry_of"] for trial in retried) == sorted(failed), f"{name}: retries"
            assert all(trial.params == trials[trial.user_attrs["retry_of"]].params for trial in retried)
            again += len(retried)
        assert not twice, f"{twice} configurations were evaluated twice"
        assert not left, f"{left} trials are left running or waiting"
        assert done["search"] == self.options.trials, f"{done['search']} trials of stage 1"
        refined = [name for name in parts_of(storage, STUDY) if "-refine-" in name]
        assert len(refined) == len(BUDGETS), f"stage 4 ran as {refined}"
        assert done["refine"] == len(BUDGETS) * REFINE_TRIALS, f"{done['refine']} trials of stage 4"
        return {
            "trials interrupted": interrupted, "done again": again, "stage 1": done["search"],
            "stage 4": done["refine"], "selection": done["selection"], "test": done["test"],
            "evaluated twice": twice, "left running": left, "equals its re-computation": self.recomputed(storage),
        }  # fmt: skip

    def recomputed(self, storage: optuna.storages.BaseStorage) -> str:
        """Take from a copy all that stages 2 to 4 concluded, and search on: nothing is measured, all is the same."""
        copy_search(storage, STUDY, "again")
        study = load_study(storage, "again")
        key = study.user_attrs["plan"]
        study.set_user_attr(f"plan:{key}", {"config": latest_plan(study)["config"]})
        assert self.start(self.search, "study=again").wait() == 0
        old, new = (result(storage, name) for name in (STUDY, "again"))
        for key in ("winner", "winners", "rows", "selection_gain", "uniform_curve"):
            assert old[key] == new[key], f"{key} differs"
        shown = json.loads((self.folder / "results" / STUDY / "result.json").read_text(encoding="utf-8"))
        assert shown["rows"] == json.loads(json.dumps(old["rows"])), "result.json says something else"
        counts = [[sum(states.values()) for states in content["trials"].values()] for content in (old, new)]
        assert counts[0] == counts[1], "something was measured again"
        return "yes"


if __name__ == "__main__":
    main()
