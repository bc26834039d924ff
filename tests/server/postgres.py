"""A real PostgreSQL for tests: from Debian's packages, in a folder of its own, reached through a Unix socket."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import psycopg
from psycopg import sql

from tests.support.debian import install

_PACKAGES = Path("/usr/lib/postgresql")
_USER = "postgres"  # made by the Debian package; the programs refuse to run as root
_START_SECONDS = 30.0


class Postgres:
    def __init__(self) -> None:
        self._programs = _find_programs()
        self._as_user: dict[str, Any] = {"user": _USER, "group": _USER} if os.geteuid() == 0 else {}
        self.folder = Path(tempfile.mkdtemp(prefix="tinsmith-postgres-"))
        if self._as_user:
            shutil.chown(self.folder, _USER, _USER)
        self._data = self.folder / "data"
        self._log = self.folder / "log"
        self._numbers = itertools.count(1)
        self._process: subprocess.Popen[bytes] | None = None
        self._run("initdb", "-D", self._data, "-U", _USER, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.folder)

    def start(self) -> None:
        settings = ("listen_addresses=", f"unix_socket_directories={self.folder}", "fsync=off", "max_connections=200")
        options = [word for setting in settings for word in ("-c", setting)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [self._programs / "postgres", "-D", self._data, *options], stdout=log, stderr=log, **self._as_user
            )
        self._wait_until_ready()

    def stop(self) -> None:
        """End the server as a crash would, cutting the connections it has."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(timeout=_START_SECONDS)
            self._process = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "it is not running"
        return self._process.pid

    def new_database(self) -> str:
        """The URL of a fresh database."""
        name = f"test_{next(self._numbers)}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return self.url(name)

    def url(self, database: str) -> str:
        return f"postgresql://{_USER}@/{database}?host={self.folder}"

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                psycopg.connect(self.url("postgres")).close()
            except psycopg.OperationalError:
                if time.monotonic() > deadline or self._process is None or self._process.poll() is not None:
                    raise RuntimeError(f"PostgreSQL did not start:\n{self._log.read_text()}") from None
                time.sleep(0.02)
            else:
                return

    def _run(self, program: str, *arguments: str | Path) -> None:
        subprocess.run([self._programs / program, *arguments], check=True, capture_output=True, **self._as_user)


def _find_programs() -> Path:
    if not _installed():
        install("postgresql")
    return _installed()[-1]


def _installed() -> list[Path]:
    """The program folders of all installed versions, the newest last."""
    return sorted((path.parent for path in _PACKAGES.glob("*/bin/initdb")), key=lambda path: int(path.parent.name))
