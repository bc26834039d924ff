"""Which server leads: the one that runs the workers of a database. With PostgreSQL, others may stand by.

The lead is a lock that PostgreSQL holds for a connection. Who takes it writes down its name, and its workers work in
that name: before a worker takes, begins or puts back anything, it looks whether that is still the name of who leads, in
the same transaction. So what a worker does whose server was replaced without its knowing counts for nothing. Besides
that, every worker holds a lock of its own as long as it lives, and who takes the lead waits for the end of those before
it starts others.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any, NamedTuple

import sqlalchemy as sa

from tinsmith.server.store.database import Database
from tinsmith.server.store.schema import identity

_SHORT_PAUSE_SECONDS = 0.05

_LEAD, _NAME, _WORKERS = 0x74696E736D697469, 0x74696E736D69746A, 0x74696E736D69746B

_TAKE_LEAD = sa.select(sa.func.pg_try_advisory_lock(_LEAD))
_JOIN_WORKERS = sa.select(sa.func.pg_try_advisory_lock_shared(_WORKERS))
_LET_GO = sa.select(sa.func.pg_advisory_unlock_all())
_TAKE_WORKERS = sa.select(sa.func.pg_try_advisory_xact_lock(_WORKERS))
_END_SILENT = sa.text("""
    SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity JOIN pg_locks USING (pid)
    WHERE datname = current_database() AND usename = current_user
    AND locktype = 'advisory' AND granted AND objsubid = 1
    AND (classid::bigint << 32) + objid::bigint IN (:lead, :workers)
    AND state_change < clock_timestamp() - make_interval(secs => :seconds)
""").bindparams(lead=_LEAD, workers=_WORKERS)
_READ_NAME = sa.select(sa.func.pg_advisory_xact_lock_shared(_NAME))
_WRITE_NAME = sa.select(sa.func.pg_advisory_xact_lock(_NAME))


_kept_to_the_end: list[_SessionLock] = []
"""Python would close their connections as soon as nobody knows them any more, and a process ends some time later."""


class ReplacedError(Exception):
    """Others do the work of this process by now, so it must not work any more."""


class Leader(NamedTuple):
    name: str
    storage: str
    """Where its files lie; empty if they lie in a folder of its own."""


class Lead:
    """Of SQLite there is no lead to be had: one server uses the file, which has a lock beside it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = _SessionLock(database.engine, _TAKE_LEAD)
        self._workers_lock = _SessionLock(database.engine, _JOIN_WORKERS)
        self._name: str | None = None

    @property
    def can_be_shared(self) -> bool:
        """Whether servers on several machines can meet here."""
        return not self._database.is_sqlite

    def leader(self) -> Leader:
        """Who leads, or was the last to do so."""
        query = sa.select(identity.c.used_by, identity.c.storage)
        found = self._database.first(query, lambda row: Leader(row.used_by or "", row.storage))
        assert found is not None
        return found

    # For a server

    def take(self, name: str, storage: str = "") -> bool:
        """Leads in this name, which nobody had before, if nobody else leads."""
        if not self._lock.take():
            return False
        values = {"used_by": name, "storage": storage}

        def write(connection: sa.Connection) -> None:
            connection.execute(_WRITE_NAME)  # whoever works in another name has ended its transaction
            connection.execute(identity.update().values(values))

        self._database.write(write)
        self.work_for(name)
        return True

    def is_ours(self) -> bool:
        """The lock ends with its connection, and is taken again. If another server led in between, it is lost."""
        self._lock.take()
        return self.leader().name == self._name

    def give_up(self) -> None:
        self._name = None
        self._lock.release()

    def close(self) -> None:
        self.give_up()
        self._workers_lock.release()

    def workers_are_gone(self) -> bool:
        """Those of all who led before."""
        return self._database.write(lambda connection: bool(connection.scalar(_TAKE_WORKERS)), durable=False)

    def end_silent(self, seconds: float) -> int:
        """Ends the connections of a leader and of workers that let theirs rest for so long, and says how many.

        They use them every second; who does not is stopped as a whole, and would keep its lock for as long as that
        lasts. What it does when it goes on counts for nothing.
        """
        query = _END_SILENT.bindparams(seconds=seconds)
        return int(self._database.read(lambda connection: connection.scalar(query)) or 0)

    # For whoever works in the name of one

    def work_for(self, name: str) -> None:
        self._name = name

    def check(self, connection: sa.Connection) -> None:
        """A `ReplacedError` if it is not in our name that is worked now, to the end of this transaction."""
        if self._name is not None:
            connection.execute(_READ_NAME)
            leader = connection.scalar(sa.select(identity.c.used_by))
            if leader != self._name:
                raise ReplacedError(f"another server runs the workers of this database now: {leader}")

    def hold_as_worker(self) -> None:
        """Nobody else starts workers before this process has ended."""
        _kept_to_the_end.append(self._workers_lock)
        while not self._workers_lock.take():  # somebody is looking whether there are any
            time.sleep(_SHORT_PAUSE_SECONDS)
        self._database.write(self.check, durable=False)

    def keep_as_worker(self) -> None:
        """To be called every second, in case that the connection was lost."""
        with suppress(sa.exc.SQLAlchemyError):  # the database is away, as others will say
            self._workers_lock.take()


class _SessionLock:
    """PostgreSQL keeps it for as long as the connection lasts, which therefore is not one of the pool.

    If the machine of its holder is gone, the database notices within a minute (`postgres.py`), and gives it to another.
    """

    def __init__(self, engine: sa.Engine, take: sa.Select[Any]) -> None:
        self._engine = engine
        self._take = take
        self._connection: sa.Connection | None = None
        self._is_held = self._had = False
        self._one_at_a_time = threading.Lock()

    def take(self) -> bool:
        """Whether it is ours now. May be asked again at any time, to take it once more if it was lost.

        Who never had it is not told at once: after an outage, who had it comes first.
        """
        with self._one_at_a_time:
            if self._connection is None:
                self._connection = self._connect()
            try:
                if not self._is_held:
                    self._is_held = self._had = bool(self._connection.scalar(self._take))
                else:
                    self._connection.scalar(sa.select(1))
            except sa.exc.SQLAlchemyError:
                self._release()
                if not self._had:
                    raise
                self._connection = self._connect()
                self._is_held = bool(self._connection.scalar(self._take))
            return self._is_held

    def release(self) -> None:
        """Others can have it when this returns, and not only when the database sees that the connection has ended."""
        with self._one_at_a_time:
            self._had = False
            if self._connection is not None and self._is_held:
                with suppress(sa.exc.SQLAlchemyError):  # then it is lost with the connection
                    self._connection.execute(_LET_GO)
            self._release()

    def _release(self) -> None:
        connection, self._connection, self._is_held = self._connection, None, False
        if connection is not None:
            connection.close()

    def _connect(self) -> sa.Connection:
        connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        connection.detach()
        return connection
