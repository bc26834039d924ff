"""Which database this is, and which server uses it: one at a time, for two would run the same jobs.

A state folder of its own does not keep a server from the database of another one, so the database has a lock too: with
SQLite a file beside it, with PostgreSQL a lock that the database holds for a connection.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import sqlalchemy as sa
from filelock import FileLock, Timeout

from tinsmith.errors import ConfigError
from tinsmith.server.store.database import Database
from tinsmith.server.store.schema import identity

log = logging.getLogger(__name__)

WAIT_SECONDS = 10.0
"""For the lock of a server that has just been killed."""
KEEP_SECONDS = 5.0
_LOOK_AGAIN_SECONDS = 0.1
_SERVER_LOCK = 0x74696E736D697469
# So that the database notices within a minute when the machine of a server is gone, and gives the lock to the next.
_KEEPALIVE = ("tcp_keepalives_idle = 20", "tcp_keepalives_interval = 10", "tcp_keepalives_count = 4")


class Identity:
    def __init__(self, database: Database) -> None:
        self._database = database

    def database_id(self) -> str:
        """Made with the database. A copy has the same."""
        return str(self._database.read(lambda connection: connection.scalar(sa.select(identity.c.database_id))))

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
        lock = _AdvisoryLock(self._database.engine)
        end = time.monotonic() + WAIT_SECONDS
        while not lock.take():
            if time.monotonic() > end:
                raise _refusal(f"this database: {self._used_by()}")
            time.sleep(_LOOK_AGAIN_SECONDS)
        try:
            self._database.write(lambda connection: connection.execute(identity.update().values(used_by=user)))
            with self._kept(lock, user):
                yield
        finally:
            lock.release()

    @contextmanager
    def _kept(self, lock: _AdvisoryLock, user: str) -> Iterator[None]:
        over = threading.Event()
        thread = threading.Thread(target=self._keep, args=(lock, user, over), name="sole use", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(KEEP_SECONDS)  # it may be waiting for a database that is away

    def _keep(self, lock: _AdvisoryLock, user: str, over: threading.Event) -> None:
        """The lock ends with its connection. If another server came in between, this one's models are out of date."""
        while not over.wait(KEEP_SECONDS):
            try:
                lock.take()
                other = self._used_by()
            except sa.exc.SQLAlchemyError:  # it is away, as others will say; once it is back, the lock is taken again
                continue
            if other != user:
                log.critical("Another server has begun to use this database, so this one stops: %s.", other)
                os.kill(os.getpid(), signal.SIGTERM)
                return

    def _used_by(self) -> str:
        return str(self._database.read(lambda connection: connection.scalar(sa.select(identity.c.used_by))))


@contextmanager
def _sole_use_of_file(file: str) -> Iterator[None]:
    lock = FileLock(f"{file}.lock")
    try:
        lock.acquire(timeout=WAIT_SECONDS)
    except Timeout:
        raise _refusal(f"the database {file}") from None
    try:
        yield
    finally:
        lock.release()


def _refusal(what: str) -> ConfigError:
    return ConfigError(f"Another server uses {what}. Stop it, or give each a database of its own, with --database.")


class _AdvisoryLock:
    """PostgreSQL keeps it for as long as the connection lasts, which therefore is not one of the pool."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._connection: sa.Connection | None = None

    def take(self) -> bool:
        """Whether it is ours now. May be asked again at any time, to take it once more if it was lost."""
        if not self._is_held():
            self.release()
            self._connection = self._connect()
        return self._connection is not None

    def release(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _is_held(self) -> bool:
        try:
            return self._connection is not None and self._connection.scalar(sa.select(1)) == 1
        except sa.exc.SQLAlchemyError:
            return False

    def _connect(self) -> sa.Connection | None:
        """A connection that holds the lock, if nobody else has one."""
        connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        connection.detach()
        with ExitStack() as unless_locked:
            unless_locked.callback(connection.close)
            for setting in _KEEPALIVE:
                connection.exec_driver_sql(f"SET {setting}")
            if not connection.scalar(sa.select(sa.func.pg_try_advisory_lock(_SERVER_LOCK))):
                return None
            unless_locked.pop_all()
        return connection
