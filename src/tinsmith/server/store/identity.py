"""Which database this is, what it signs with, and which server has it for itself.

Two servers would run the same jobs. A state folder of its own does not keep a server from the database of another one,
so the database has a lock too: with SQLite a file beside it, with PostgreSQL the lead (`leading.py`).
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa
from filelock import FileLock, Timeout

from tinsmith.errors import ConfigError
from tinsmith.server.store.database import Database
from tinsmith.server.store.leading import Lead
from tinsmith.server.store.schema import identity

log = logging.getLogger(__name__)

WAIT_SECONDS = 10.0
"""For the lock of a server that has just been killed."""
KEEP_SECONDS = 5.0
_END_SECONDS = 5.0
_LOOK_AGAIN_SECONDS = 0.1


class Identity:
    def __init__(self, database: Database, lead: Lead) -> None:
        self._database = database
        self._lead = lead

    def database_id(self) -> str:
        """Made with the database. A copy has the same."""
        return str(self._database.read(lambda connection: connection.scalar(sa.select(identity.c.database_id))))

    def secret(self, made: str) -> str:
        """What was made here once, by whoever came first: from then on it stays."""
        update = sa.update(identity).where(identity.c.secret.is_(None)).values(secret=made)

        def write(connection: sa.Connection) -> str:
            connection.execute(update)
            return str(connection.scalar(sa.select(identity.c.secret)))

        return self._database.write(write)

    @contextmanager
    def sole_use(self, user: str) -> Iterator[None]:
        """`user` says which server this is, to people and to others who want the database; no two have the same."""
        if self._database.is_sqlite:
            taking = _sole_use_of_file(str(self._database.engine.url.database))
        else:
            taking = self._sole_use_of_postgres(user)
        with taking:
            yield

    @contextmanager
    def _sole_use_of_postgres(self, user: str) -> Iterator[None]:
        end = time.monotonic() + WAIT_SECONDS
        while not self._lead.take(user):
            if time.monotonic() > end:
                raise in_use(
                    f"this database: {self._lead.leader().name}", "give all of them the same --storage, to share it"
                )
            time.sleep(_LOOK_AGAIN_SECONDS)
        try:
            with self._kept():
                yield
        finally:
            self._lead.give_up()

    @contextmanager
    def _kept(self) -> Iterator[None]:
        over = threading.Event()
        thread = threading.Thread(target=self._keep, args=(over,), name="sole use", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(_END_SECONDS)  # it may be waiting for a database that is away

    def _keep(self, over: threading.Event) -> None:
        """If another server came in between, this one's models are out of date."""
        while not over.wait(KEEP_SECONDS):
            try:
                is_ours, leader = self._lead.is_ours(), self._lead.leader().name
            except sa.exc.SQLAlchemyError:  # it is away, as others will say; once it is back, the lock is taken again
                continue
            if not is_ours:
                log.critical("Another server has begun to use this database, so this one stops: %s.", leader)
                os.kill(os.getpid(), signal.SIGTERM)
                return


@contextmanager
def _sole_use_of_file(file: str) -> Iterator[None]:
    lock = FileLock(f"{file}.lock")
    try:
        lock.acquire(timeout=WAIT_SECONDS)
    except Timeout:
        raise in_use(f"the database {file}", "share one in PostgreSQL, with the same --storage for all") from None
    try:
        yield
    finally:
        lock.release()


def in_use(what: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"Another server uses {what}. Stop it, give each a database of its own with --database, or {remedy}."
    )
