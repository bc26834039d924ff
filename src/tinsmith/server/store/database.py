"""The way to the database: connections, transactions, migrations. It knows nothing of the tables' meaning."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects import sqlite as sqlite_dialect

from tinsmith.errors import ConfigError, InvalidInputError, MissingExtraError
from tinsmith.server.store import postgres, schema
from tinsmith.server.store.reserve import Reserve, is_full

T = TypeVar("T")
Row: TypeAlias = Any
"""A row of a query. Its columns are known to the query alone; whoever asks turns it into a record at once."""

Work = Callable[[sa.Connection], T]

_BUSY_SECONDS = 30.0  # how long a process waits for the write lock of another one
_FIRST_PAUSE_SECONDS = 0.0001
_MAX_PAUSE_SECONDS = 0.002
_ATTEMPTS = 5
_COLLISIONS = {"40001", "40P01"}  # PostgreSQL's serialization failure and deadlock: nothing happened, try again
_PAUSED_TOO_LONG = "25P03"  # PostgreSQL has ended the transaction of a process that was stopped for minutes
_MIGRATION_LOCK = 0x74696E736D697468


def utc_now() -> datetime:
    return datetime.now(UTC)


class Database:
    """SQLite or PostgreSQL behind the same calls. All methods may be called from any thread."""

    def __init__(self, url: str, now: Callable[[], datetime] = utc_now) -> None:
        self.now = now
        self.engine = _open(url)
        self.is_sqlite = self.engine.dialect.name == "sqlite"
        self.reserve = Reserve(Path(self._sqlite_file).parent) if self.is_sqlite else None
        self._glances: list[sqlite3.Connection] = []
        # Threads of one process queue here, so that only processes have to try again and again (`_begin_sqlite`).
        self._writer: threading.Lock | nullcontext[None] = threading.Lock() if self.is_sqlite else nullcontext()
        try:
            self._with_reserve(self._migrate)
            if self.is_sqlite:
                _flush(Path(self._sqlite_file).parent)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for connection in self._glances:
            connection.close()
        self.engine.dispose()

    def read(self, work: Work[T]) -> T:
        """Run `work` on one snapshot of the data."""
        with _explained(), self.engine.connect() as connection:
            return work(connection)

    def first(self, query: sa.Select[Any], make: Callable[[Row], T]) -> T | None:
        """A record of the first row, if there is one."""
        row = self.read(lambda connection: connection.execute(query).first())
        return None if row is None else make(row)

    def all(self, query: sa.Select[Any], make: Callable[[Row], T]) -> list[T]:
        """A record of every row."""
        return [make(row) for row in self.read(lambda connection: connection.execute(query).all())]

    def glance(self, query: sa.Select[T]) -> Callable[[], T | None]:
        """A way to read one value in a few microseconds, from one thread at a time.

        It gives `None` where that would take longer: always, if the database is on the other side of a network.
        """
        if not self.is_sqlite:
            return lambda: None
        statement = str(query.compile(self.engine, compile_kwargs={"literal_binds": True}))
        connection = sqlite3.connect(self._sqlite_file, timeout=0, isolation_level=None, check_same_thread=False)
        self._glances.append(connection)

        def read() -> T | None:
            try:
                ((value,),) = connection.execute(statement).fetchall()
            except sqlite3.OperationalError:
                return None
            return cast(T, value)

        return read

    def write(self, work: Work[T], *, durable: bool = True, must_fit: bool = False) -> T:
        """Run `work` in a transaction; it is committed on return and undone on an exception.

        A durable one has reached the disk, so that it outlives a power cut. Without it, it outlives only this process;
        that is enough for whatever follows from durable facts and would be done again. What `must_fit` is written on
        a full disk too: what makes room, and what takes somebody's rights away.
        """
        result = self._with_reserve(lambda: self._write(work, durable)) if must_fit else self._write(work, durable)
        if durable and self.is_sqlite:
            # Not by SQLite itself, which would keep everybody else from writing while the disk is busy. What others
            # have written meanwhile comes later in the file, so it is there after a power cut only if this is.
            _flush(Path(f"{self._sqlite_file}-wal"))
        return result

    def _with_reserve(self, write: Callable[[], T]) -> T:
        while True:
            try:
                return write()
            except sa.exc.OperationalError as error:
                if self.reserve is None or not is_full(error) or not self.reserve.give_up_a_piece():
                    raise

    def _write(self, work: Work[T], durable: bool) -> T:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with _explained(), self._writer, self._transaction(durable) as connection:
                    return work(connection)
            except sa.exc.OperationalError as error:
                if getattr(error.orig, "sqlstate", None) not in _COLLISIONS or attempt == _ATTEMPTS:
                    raise
        raise AssertionError("the last attempt returns or raises")

    @property
    def _sqlite_file(self) -> str:
        return str(self.engine.url.database)

    def insert(self, table: sa.Table) -> sqlite_dialect.Insert | postgresql.Insert:
        """An insert that understands `on_conflict_do_nothing` and `on_conflict_do_update`."""
        return sqlite_dialect.insert(table) if self.is_sqlite else postgresql.insert(table)

    @contextmanager
    def _transaction(self, durable: bool) -> Iterator[sa.Connection]:
        with self.engine.connect() as connection:
            connection = connection.execution_options(tinsmith_write=True)
            with connection.begin():
                if not durable and not self.is_sqlite:
                    connection.exec_driver_sql("SET LOCAL synchronous_commit = off")
                yield connection

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """With PostgreSQL: of all who come here with this name, on whatever machine, one at a time.

        With SQLite all are on one machine, where locks are for those who need one. It keeps a connection, of which
        there are few, and who is alone needs another to get anything done: so it is for a few threads only.
        """
        if self.is_sqlite:
            yield
            return
        with _explained(), self.engine.connect() as connection, connection.begin():
            self.one_at_a_time(connection, name)
            yield

    def one_at_a_time(self, connection: sa.Connection, name: str) -> None:
        """Of all transactions that come here with this name, one, until it ends. With SQLite only one writes anyway."""
        if not self.is_sqlite:
            key = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(key)))

    def _migrate(self) -> None:
        if self.read(_revision) != schema.REVISION:
            self.write(self._upgrade)

    def _upgrade(self, connection: sa.Connection) -> None:
        if not self.is_sqlite:
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
        if _revision(connection) != schema.REVISION:
            from tinsmith.server.migrations import upgrade

            upgrade(connection)


def _revision(connection: sa.Connection) -> str | None:
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    return cast("str | None", connection.scalar(sa.text("SELECT version_num FROM alembic_version")))


def _open(url: str) -> sa.Engine:
    parsed = _parse(url)
    options: dict[str, Any] = {
        "json_serializer": _json,
        "json_deserializer": msgspec.json.decode,
        "hide_parameters": True,  # an error with the values of its statement would carry prompts and hashes into logs
    }
    if parsed.get_backend_name() == "postgresql":
        # A server that was restarted leaves dead connections in the pool; they are found before they are used.
        arguments = postgres.connect_arguments(parsed.query.keys())
        engine = sa.create_engine(parsed, pool_pre_ping=True, connect_args=arguments, **options)
        postgres.set_up(engine)
        return engine
    make_private(Path(parsed.database or ""))
    engine = sa.create_engine(parsed, connect_args={"timeout": _BUSY_SECONDS}, **options)
    sa.event.listen(engine, "connect", _prepare_sqlite)
    sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def _parse(url: str) -> sa.URL:
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError:
        raise ConfigError(f"{_hidden(url)} is not a database URL; {_EXAMPLES}") from None
    if parsed.get_backend_name() == "postgresql":
        _need_psycopg()
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.get_backend_name() != "sqlite":
        raise ConfigError(f"{parsed.get_backend_name()!r} is not a database Tinsmith knows; {_EXAMPLES}")
    if parsed.database in (None, "", ":memory:"):
        raise ConfigError(f"{url!r} names no file, but the server's processes meet in one; {_EXAMPLES}")
    return parsed


_EXAMPLES = "use sqlite:////absolute/path/tinsmith.db or postgresql://user:password@host/database."


def _hidden(url: str) -> str:
    """A URL that cannot be read may still hold a password."""
    return repr(url) if "@" not in url else "The given text (not shown, as it may hold a password)"


def _need_psycopg() -> None:
    try:
        import psycopg  # noqa: F401
    except ImportError:
        raise MissingExtraError("psycopg", "postgres", "A PostgreSQL database") from None


def make_private(file: Path) -> None:
    """The database file and its folder, if they are not there: it holds prompts, which are not for all to read.

    SQLite gives the files that it makes beside it the same mode.
    """
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Never opened if it is there: to close it would take SQLite's locks of this whole process away.
    with suppress(FileExistsError):
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))


def _prepare_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # transactions begin where `_begin_sqlite` says, not where the driver guesses
    _write_ahead(connection)
    for pragma in ("synchronous = NORMAL", "foreign_keys = ON", "journal_size_limit = 67108864"):
        connection.execute(f"PRAGMA {pragma}").close()


def _write_ahead(connection: Any) -> None:
    """Of several that make a new database do so at once, SQLite lets only one, and does not wait for the others."""
    end = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL").close()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                raise
            time.sleep(_FIRST_PAUSE_SECONDS)
        else:
            return


def _begin_sqlite(connection: sa.Connection) -> None:
    if connection.get_execution_options().get("tinsmith_write"):
        _take_write_lock(connection.connection.driver_connection)
    else:
        connection.exec_driver_sql("BEGIN")


def _take_write_lock(connection: Any) -> None:
    """At once, because a reader that becomes a writer later can find its snapshot outdated and fail.

    SQLite would wait for another process in steps of milliseconds, which is longer than most transactions take.
    """
    end, pause = time.monotonic() + _BUSY_SECONDS, _FIRST_PAUSE_SECONDS
    connection.execute("PRAGMA busy_timeout = 0").close()
    try:
        while True:
            try:
                connection.execute("BEGIN IMMEDIATE").close()
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)
    finally:
        connection.execute(f"PRAGMA busy_timeout = {round(1000 * _BUSY_SECONDS)}").close()


def _flush(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _json(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    if "\\u0000" in text:
        raise InvalidInputError("Text must not contain the character NUL (U+0000); remove it.", value=text)
    return text


@contextmanager
def _explained() -> Iterator[None]:
    """Turn what the database cannot hold into an error about the value, and every way of being away into one."""
    try:
        yield
    except sa.exc.TimeoutError as error:  # all connections were in use for long
        raise sa.exc.OperationalError(None, None, error) from error
    except (UnicodeEncodeError, OverflowError, sa.exc.StatementError) as error:
        cause = error.orig if isinstance(error, sa.exc.StatementError) else error
        if isinstance(cause, InvalidInputError):
            raise cause from None
        if isinstance(error, sa.exc.DataError) or isinstance(cause, UnicodeEncodeError | OverflowError):
            raise InvalidInputError(
                f"The database cannot store a value: {cause}. Text must be Unicode without NUL, numbers fit 64 bits."
            ) from None
        if isinstance(cause, Exception) and getattr(cause, "sqlstate", None) == _PAUSED_TOO_LONG:
            raise sa.exc.OperationalError(None, None, cause) from error
        raise
