"""Where studies are kept and what their processes share: SQLite, PostgreSQL, or a journal file.

Processes of one search talk to each other through the database alone. What they must not do at the same time (claim a
trial, create a study) they do inside `SharedStorage.exclusive`: a file lock for SQLite and journals, an advisory lock
for PostgreSQL, both of which end with their process. A PostgreSQL server that is away is waited for.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

import optuna
import sqlalchemy
from filelock import FileLock, Timeout
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock, JournalStorage
from optuna.storages.journal._file import get_lock_file
from optuna.trial import FrozenTrial
from sqlalchemy.exc import SQLAlchemyError

from mosaic_opt.urls import KINDS, hidden

BUSY_SECONDS = 60  # how long a process waits for another to finish with the database
PATIENCE_SECONDS = 600  # how long a database server may be away
CONNECT_SECONDS = 10
_PAUSES = (0.5, 1, 2, 4, 8, 15)  # seconds between attempts; the last one again and again
# SQLSTATE classes and codes of a server that is down, starting, stopping or unreachable
_AWAY_STATES = ("08", "57P")

Exclusive = Callable[[str], AbstractContextManager[None]]
Answer = TypeVar("Answer")


class LockLost(RuntimeError):
    """The connection that held an exclusive lock broke: another process may have been inside at the same time."""


class SharedStorage(BaseStorage):
    """An Optuna storage with locks between processes, and patience where its server is away.

    Every method of `BaseStorage` is handed on to the storage it is made from.

    Args:
        inner: what keeps the studies.
        url: where that is, without a password.
        exclusive: gives a context that one process at a time is in, by name.
        patience: seconds that a server may be away for; 0 never waits.
    """

    def __init__(self, inner: BaseStorage, *, url: str, exclusive: Exclusive, patience: float = 0.0) -> None:
        self.inner = inner
        self.url = url
        self.patience = patience
        self.say: Callable[[str], None] = lambda text: None
        self.back = -math.inf  # when the server was last back, on time.monotonic's clock
        self._exclusive = exclusive

    @contextmanager
    def exclusive(self, name: str) -> Iterator[None]:
        """A context that one process at a time is in.

        Raises:
            LockLost: on leaving, where others may have been inside.
            StorageInternalError: if it cannot be entered within BUSY_SECONDS (files alone: a server's lock is waited
                for as long as its holder lives).
        """
        with self._exclusive(name):
            yield

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        """See BaseStorage. Tried again after a broken connection, a template with a `worker` is not stored twice."""
        attempts = 0

        def create() -> int:
            nonlocal attempts
            attempts += 1
            worker = template_trial and template_trial.user_attrs.get("worker")
            if attempts > 1 and worker:
                for trial in self.inner.get_all_trials(study_id, deepcopy=False):
                    if trial.user_attrs.get("worker") == worker:
                        return trial._trial_id
            return self.inner.create_new_trial(study_id, template_trial)

        return self.patiently(create)

    def patiently(self, call: Callable[[], Answer]) -> Answer:
        """The call's answer; tried again, with growing pauses, while the server is away."""
        since, attempt = time.monotonic(), 0
        while True:
            try:
                answer = call()
            except (StorageInternalError, SQLAlchemyError) as error:
                waited = time.monotonic() - since
                if not is_away(error) or waited >= self.patience:
                    raise
                if not attempt:
                    self.say(f"{self.url} is away ({reason(error)}): trying again for {self.patience:.0f} s")
                time.sleep(_PAUSES[min(attempt, len(_PAUSES) - 1)])
                attempt += 1
            else:
                if attempt:
                    self.back = time.monotonic()
                    self.say(f"{self.url} is back after {time.monotonic() - since:.0f} s")
                return answer


def _handed_on(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(BaseStorage, name))
    def method(self: SharedStorage, *args: Any, **kwargs: Any) -> Any:
        return self.patiently(lambda: getattr(self.inner, name)(*args, **kwargs))

    return method


for _name, _method in vars(BaseStorage).items():
    if callable(_method) and not _name.startswith("_") and _name not in vars(SharedStorage):
        setattr(SharedStorage, _name, _handed_on(_name))
SharedStorage.__abstractmethods__ = frozenset()


def open_storage(url: str) -> SharedStorage:
    """Open a study database, and create what it lacks.

    SQLite is opened in WAL mode with a busy timeout, so that readers never block writers. Processes that open a new
    database at the same moment create its tables one after the other, which Optuna does not see to.

    Args:
        url: sqlite:///FILE (local disks), postgresql://USER:PASSWORD@HOST/DATABASE, or journal:///FILE (network
            file systems without a server).

    Raises:
        ValueError: if it cannot be opened or written, or was written by another major version of Optuna.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    kind, _, place = url.partition(":///")
    if kind in ("sqlite", "journal") and "?" in place:
        raise ValueError(f"storage.url must be {KINDS}, without options after a question mark; got {hidden(url)!r}")
    try:
        if kind == "sqlite" and place:
            return _sqlite(url, Path(place))
        if kind == "journal" and place:
            return _journal(url, Path(place))
        if re.match(r"postgresql(\+psycopg)?://", url):
            return _postgresql(url)
    except (OSError, sqlite3.Error, SQLAlchemyError, StorageInternalError, ImportError, RuntimeError) as error:
        raise ValueError(f"storage {hidden(url)} cannot be opened for writing: {reason(error)}") from error
    raise ValueError(f"storage.url must be {KINDS}; got {hidden(url)!r}")


def is_away(error: BaseException | None) -> bool:
    """Whether an error (or what caused it) says that a database server cannot be reached at the moment."""
    while error is not None:
        if isinstance(error, sqlalchemy.exc.DBAPIError) and not isinstance(error.orig, sqlite3.Error):
            state = getattr(error.orig, "sqlstate", None)
            if error.connection_invalidated or (state or "").startswith(_AWAY_STATES):
                return True
            if isinstance(error, sqlalchemy.exc.OperationalError) and state is None:
                return True
        error = error.__cause__
    return False


def reason(error: BaseException) -> str:
    """The first line of what went wrong at the bottom, without passwords."""
    while isinstance(error, StorageInternalError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, sqlalchemy.exc.DBAPIError) and error.orig is not None:
        error = error.orig
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return hidden(lines[0]) if lines else type(error).__name__


def _sqlite(url: str, path: Path) -> SharedStorage:
    exclusive = _file_locks(path)
    with exclusive("tables"):
        with sqlite3.connect(path, timeout=BUSY_SECONDS) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("CREATE TABLE IF NOT EXISTS mosaic_probe (x)")
            connection.execute("DROP TABLE mosaic_probe")
        connection.close()
        storage = RDBStorage(url, engine_kwargs={"connect_args": {"timeout": BUSY_SECONDS}})
    sqlalchemy.event.listen(storage.engine, "connect", _fast_sync)
    storage.engine.dispose()  # connections made before the listener are not reused
    return _shared(storage, url, exclusive)


def _fast_sync(connection: Any, record: Any) -> None:
    connection.execute("PRAGMA synchronous=NORMAL")


def _journal(url: str, path: Path) -> SharedStorage:
    exclusive = _journal_locks(path)
    lock = JournalFileOpenLock(str(path))
    inner = JournalStorage(_JournalFile(str(path), lock_obj=lock))
    return SharedStorage(inner, url=url, exclusive=exclusive)  # type: ignore[abstract]


class _JournalFile(JournalFileBackend):
    """Optuna's journal, of which a write that failed or was killed half way leaves nothing behind."""

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """See JournalFileBackend.

        Raises:
            OSError: naming the file, if it cannot be written.
        """
        left = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()
        with get_lock_file(self._lock), open(self._file_path, "r+b", buffering=0) as file:
            whole = _end_of_lines(file)
            file.seek(whole)
            file.truncate()
            try:
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            except OSError as error:
                with suppress(OSError):
                    file.truncate(whole)
                raise OSError(error.errno, error.strerror, self._file_path) from error


def _end_of_lines(file: FileIO) -> int:
    """Bytes up to the end of the last line that has one."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - 4096)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def _postgresql(url: str) -> SharedStorage:
    if re.search(r"[\s'\"]", url) or url.count("@") > 1:  # where a password in it would end could not be told
        raise ValueError("storage.url must have no spaces or quotes and one @: write %20, %27, %22 or %40")
    address = sqlalchemy.make_url(url).set(drivername="postgresql+psycopg")
    options = {"pool_pre_ping": True, "pool_size": 2, "connect_args": {"connect_timeout": CONNECT_SECONDS}}
    engine = sqlalchemy.create_engine(address, poolclass=sqlalchemy.NullPool, connect_args=options["connect_args"])
    exclusive = _advisory_locks(engine)
    try:
        with exclusive("tables"):
            storage = RDBStorage(address.render_as_string(hide_password=False), engine_kwargs=options)
    except SQLAlchemyError as error:
        if address.database and f'database "{address.database}" does not exist' in str(error):
            user = f"-U {address.username} " if address.username else ""
            command = f"createdb -h {address.host or 'localhost'} -p {address.port or 5432} {user}{address.database}"
            raise ValueError(f"database {address.database!r} does not exist; create it: {command}") from None
        raise
    shared = _shared(storage, hidden(url), exclusive, PATIENCE_SECONDS)
    shared._exclusive = _advisory_locks(engine, shared.patiently)
    return shared


def _shared(storage: RDBStorage, url: str, exclusive: Exclusive, patience: float = 0.0) -> SharedStorage:
    """The storage with Optuna's cache of finished trials.

    Raises:
        RuntimeError: if another major version of Optuna has made its tables: dates would mean other times.
    """
    with storage.engine.connect() as connection:
        made = str(connection.exec_driver_sql("SELECT library_version FROM version_info").scalar())
    if made.split(".")[0] != optuna.__version__.split(".")[0]:
        raise RuntimeError(f"Optuna {made} made it, this is Optuna {optuna.__version__}: choose a new database")
    # a trial's parameters are then written at once, at the end of its transaction, not before each of its queries
    storage.remove_session()
    storage.scoped_session.configure(autoflush=False)
    inner = optuna.storages.get_storage(storage)
    return SharedStorage(inner, url=url, exclusive=exclusive, patience=patience)  # type: ignore[abstract]


def _file_locks(path: Path) -> Exclusive:
    """Locks beside a file; the operating system frees those of a dead process."""
    folder = _lock_folder(path)

    @contextmanager
    def exclusive(name: str) -> Iterator[None]:
        try:
            with FileLock(folder / f"{name}.lock", timeout=BUSY_SECONDS):
                yield
        except Timeout:
            raise StorageInternalError(f"{path} is held by another process for {BUSY_SECONDS} s") from None

    return exclusive


def _journal_locks(path: Path) -> Exclusive:
    """Locks that hold over NFS; those of a dead process are broken after half a minute."""
    folder = _lock_folder(path)

    @contextmanager
    def exclusive(name: str) -> Iterator[None]:
        lock = JournalFileOpenLock(str(folder / name))
        lock.acquire()
        try:
            yield
        finally:
            lock.release()

    return exclusive


def _lock_folder(path: Path) -> Path:
    folder = path.with_name(f"{path.name}.locks")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _advisory_locks(
    engine: sqlalchemy.Engine, patiently: Callable[[Callable[[], Any]], Any] = lambda call: call()
) -> Exclusive:
    """Locks of a PostgreSQL server, each held by a connection of its own."""

    def locked(key: int) -> sqlalchemy.Connection:
        connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        try:
            connection.execute(sqlalchemy.text("SELECT pg_advisory_lock(:key)"), {"key": key})
        except BaseException:
            connection.close()
            raise
        return connection

    @contextmanager
    def exclusive(name: str) -> Iterator[None]:
        digest = hashlib.sha256(f"mosaic:{name}".encode()).digest()
        key = int.from_bytes(digest[:8], "big", signed=True)
        connection = patiently(lambda: locked(key))
        try:
            yield
            try:
                connection.execute(sqlalchemy.text("SELECT pg_advisory_unlock(:key)"), {"key": key})
            except SQLAlchemyError as error:
                raise LockLost(f"the lock {name!r} was lost: {reason(error)}") from error
        finally:
            connection.close()  # which frees the lock, too

    return exclusive
