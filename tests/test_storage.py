"""Databases: SQLite, PostgreSQL (a real server) and journals; locks, patience, and what must not be shown."""

from __future__ import annotations

import multiprocessing
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import optuna
import pytest
import sqlalchemy
from optuna.trial import TrialState, create_trial

from mosaic_opt.storage import LockLost, SharedStorage, is_away, open_storage
from mosaic_opt.urls import hidden
from tests.postgres import PASSWORD

KINDS = ("sqlite", "journal", "postgresql")


@pytest.fixture(params=KINDS)
def url(request, tmp_path):
    """An empty database of each kind."""
    if request.param == "postgresql":
        server = request.getfixturevalue("postgres")
        return server.database(f"t{time.monotonic_ns()}")
    return f"{request.param}:///{tmp_path}/deep/er/study.db"


def test_every_method_is_handed_on(url):
    storage = open_storage(url)
    study = optuna.create_study(study_name="s", storage=storage, directions=["minimize", "maximize"])
    study.optimize(lambda trial: (trial.suggest_int("x", 0, 9), trial.suggest_float("y", 0, 1)), n_trials=3)
    study.enqueue_trial({"x": 1, "y": 0.5})
    study.set_user_attr("a", {"b": [1, None]})
    again = optuna.load_study(study_name="s", storage=open_storage(url))
    assert again.user_attrs == {"a": {"b": [1, None]}}
    assert [trial.params for trial in again.trials] == [trial.params for trial in study.trials]
    assert [trial.state for trial in again.trials] == [TrialState.COMPLETE] * 3 + [TrialState.WAITING]
    assert optuna.get_all_study_names(storage) == ["s"]
    optuna.delete_study(study_name="s", storage=storage)
    assert storage.get_all_studies() == []


def test_abstract_methods_all_have_a_body():
    for name in optuna.storages.BaseStorage.__abstractmethods__:
        assert getattr(SharedStorage, name) is not getattr(optuna.storages.BaseStorage, name)


def test_one_at_a_time(url):
    inside, most, done = [], [], []

    def enter(index):
        storage = open_storage(url)
        for _ in range(5):
            with storage.exclusive("s"):
                inside.append(index)
                most.append(len(inside))
                time.sleep(0.01)
                inside.remove(index)
        done.append(index)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(enter, range(4)))
    assert sorted(done) == [0, 1, 2, 3]
    assert set(most) == {1}


def test_other_names_do_not_wait(url):
    storage = open_storage(url)
    with storage.exclusive("a"), storage.exclusive("b"):
        pass


def _opened(url, barrier, results):
    barrier.wait()
    try:
        storage = open_storage(url)
        with storage.exclusive("s"):
            optuna.create_study(study_name="s", storage=storage, load_if_exists=True)
        results.put("")
    except BaseException as error:
        results.put(repr(error))


@pytest.mark.parametrize("count", [3, *[pytest.param(8, marks=pytest.mark.slow)] * 20])
def test_processes_that_start_at_once_on_an_empty_database(url, count):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(count), context.Queue()
    processes = [context.Process(target=_opened, args=(url, barrier, results)) for _ in range(count)]
    for process in processes:
        process.start()
    assert [results.get(timeout=120) for _ in processes] == [""] * count
    for process in processes:
        process.join()


def _hold(url, entered):
    with open_storage(url).exclusive("s"):
        entered.set()
        time.sleep(600)


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_killed_process_frees_its_lock(kind, tmp_path, request):
    url = f"sqlite:///{tmp_path}/s.db" if kind == "sqlite" else request.getfixturevalue("postgres").database("killed")
    storage = open_storage(url)
    context = multiprocessing.get_context("spawn")
    entered = context.Event()
    process = context.Process(target=_hold, args=(url, entered))
    process.start()
    assert entered.wait(60)
    process.kill()
    process.join()
    with storage.exclusive("s"):
        pass


def test_sqlite_is_in_wal_mode_with_a_busy_timeout(tmp_path):
    storage = open_storage(f"sqlite:///{tmp_path}/study.db")
    with sqlite3.connect(f"{tmp_path}/study.db") as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    with storage.inner._backend.engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 1
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 60_000


def test_a_server_that_is_away_is_waited_for(postgres):
    storage = open_storage(postgres.database("restarted"))
    study = optuna.create_study(study_name="s", storage=storage)
    said = []
    storage.say = said.append
    postgres.stop()
    thread = threading.Timer(2, postgres.start)
    thread.start()
    study.set_user_attr("a", 1)
    thread.join()
    assert study.user_attrs == {"a": 1}
    assert "is away" in said[0]
    assert "is back" in said[-1]
    assert PASSWORD not in "".join(said)


def test_a_lock_lost_in_a_restart_is_told(postgres):
    storage = open_storage(postgres.database("lost"))
    lock = storage.exclusive("s")
    lock.__enter__()
    postgres.stop()
    postgres.start()
    with pytest.raises(LockLost):
        lock.__exit__(None, None, None)
    with storage.exclusive("s"):
        pass


class _Breaking:
    """A storage whose first answer is lost on its way although the trial is stored."""

    def __init__(self, inner):
        self.inner, self.broken = inner, False

    def create_new_trial(self, study_id, template_trial=None):
        made = self.inner.create_new_trial(study_id, template_trial)
        if not self.broken:
            self.broken = True
            raise sqlalchemy.exc.OperationalError("commit", {}, Exception("connection lost"))
        return made

    def get_all_trials(self, study_id, **options):
        return self.inner.get_all_trials(study_id, **options)


def test_a_trial_whose_answer_was_lost_is_not_stored_twice():
    inner = optuna.storages.InMemoryStorage()
    study_id = inner.create_new_study([optuna.study.StudyDirection.MINIMIZE], "s")
    storage = SharedStorage(_Breaking(inner), url="x", exclusive=None, patience=60)
    template = create_trial(state=TrialState.WAITING, user_attrs={"worker": ["m", 1, 2.0, 3]})
    assert storage.create_new_trial(study_id, template) == inner.get_all_trials(study_id)[0]._trial_id
    assert len(inner.get_all_trials(study_id)) == 1


def test_only_a_missing_server_is_waited_for():
    locked = sqlalchemy.exc.OperationalError("x", {}, sqlite3.OperationalError("database is locked"))
    assert not is_away(locked)
    wrapped = optuna.exceptions.StorageInternalError("x")
    wrapped.__cause__ = sqlalchemy.exc.OperationalError("x", {}, Exception("server closed the connection"))
    assert is_away(wrapped)
    assert not is_away(ValueError("x"))


def test_unusable_servers(postgres):
    good = postgres.database("good")
    open_storage(good)
    for url, message in [
        (postgres.url("none"), "database 'none' does not exist; create it: createdb -h 127.0.0.1 -p"),
        (postgres.url("good", "wrong-password"), "password authentication failed"),
        (f"postgresql://u:{PASSWORD}@127.0.0.1:1/good", "connection"),
    ]:
        with pytest.raises(ValueError, match=message) as caught:
            open_storage(url)
        assert PASSWORD not in str(caught.value)
        assert "wrong-password" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:////proc/none/x.db", "sqlite:///", "nonsense", "postgresql+nodriver://u:secret@h/d",
        "mysql://u:secret@h/d", "sqlite:///x.db?timeout=3", "journal:///x?y", "journal:////proc/none/x", "postgresql://u:secret@nohost.invalid/d",
    ],
)  # fmt: skip
def test_unusable_storages(url):
    with pytest.raises(ValueError, match="storage") as caught:
        open_storage(url)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


FULL = """
import resource, signal, sys, optuna
from mosaic_opt.storage import open_storage
study = optuna.load_study(study_name="s", storage=open_storage(sys.argv[1]))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
size = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, size + 100))  # a file may not grow further: as on a full disk
study.set_user_attr("long", "x" * 1000)
"""


def test_a_journal_outlives_a_full_disk_and_a_torn_write(tmp_path):
    file = tmp_path / "s.log"
    study = optuna.create_study(study_name="s", storage=open_storage(f"journal:///{file}"))
    before = file.read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", FULL, f"journal:///{file}", str(len(before))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"File too large: '{file}'" in done.stderr
    assert file.read_bytes() == before
    with file.open("ab") as journal:
        journal.write(b"x" * 5000)  # a process was killed while it wrote
    study.set_user_attr("a", 1)
    assert optuna.load_study(study_name="s", storage=open_storage(f"journal:///{file}")).user_attrs == {"a": 1}


def test_a_file_that_is_no_database(tmp_path):
    path = tmp_path / "x.db"
    path.write_text("this is not a database" * 100)
    with pytest.raises(ValueError, match="cannot be opened"):
        open_storage(f"sqlite:///{path}")
    assert path.read_text().startswith("this is not")


def test_another_major_version_of_optuna_is_refused(tmp_path):
    url = f"sqlite:///{tmp_path}/study.db"
    open_storage(url)
    with sqlite3.connect(tmp_path / "study.db") as connection:
        connection.execute("UPDATE version_info SET library_version = '4.5.0'")
    with pytest.raises(ValueError, match=r"Optuna 4\.5\.0 made it, this is Optuna 5\..*: choose a new database"):
        open_storage(url)


def test_passwords_are_hidden_wherever_they_stand():
    text = "[x] storage.url=postgresql://me:pa55@h/d and postgresql+psycopg://you:w%40rd@h:5432/d?x=1, sqlite:///a"
    shown = hidden(text)
    assert "pa55" not in shown
    assert "w%40rd" not in shown
    assert "postgresql://me:***@h/d" in shown
    assert Path(shown).name.endswith("a")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:sla/secret@h/d", "postgresql://u:s@secret@h/d", "postgresql://h/d?user=u&password=secret",
        "postgresql://h/d?sslpassword=secret&x=1", "postgresql://u:a secret@h/d",
    ],
)  # fmt: skip
def test_passwords_of_any_form_are_hidden(url):
    if " " not in url:
        assert "secret" not in hidden(f"a {url} b")
    with pytest.raises(ValueError, match="storage") as caught:
        open_storage(url)
    assert "secret" not in str(caught.value)
