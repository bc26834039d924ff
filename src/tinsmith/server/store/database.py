"""The way to the database: connections, transactions, migrations. It knows nothing of the tables' meaning."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from tinsmith.errors import ConfigError, InvalidInputError, MissingExtraError
from tinsmith.server.store import schema

T = TypeVar("T")
Row: TypeAlias = Any
"""A row of a query. Its columns are known to the query alone; whoever asks turns it into a record at once."""

Work = Callable[[sa.Connection], T]

_BUSY_SECONDS = 30.0  # how long a process waits for the write lock of another one
_ATTEMPTS = 5
_COLLISIONS = {"40001", "40P01"}  # PostgreSQL's serialization failure and deadlock: nothing happened, try again
_MIGRATION_LOCK = 0x74696E736D697468


def utc_now() -> datetime:
    return datetime.now(UTC)


class Database:
    """SQLite or PostgreSQL behind the same calls. All methods may be called from any thread."""

    def __init__(self, url: str, now: Callable[[], datetime] = utc_now) -> None:
        self.now = now
        self.engine = _open(url)
        self.is_sqlite = self.engine.dialect.name == "sqlite"
        # Threads of one process queue here: SQLite's own way to wait for its write lock is to sleep and look again.
        self._writer: threading.Lock | nullcontext[None] = threading.Lock() if self.is_sqlite else nullcontext()
        try:
            self._migrate()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
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

    def write(self, work: Work[T], *, durable: bool = True) -> T:
        """Run `work` in a transaction; it is committed on return and undone on an exception.

        A durable one has reached the disk, so that it outlives a power cut. Without it, it outlives only this process;
        that is enough for whatever follows from durable facts and would be done again.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with _explained(), self._writer, self._transaction(durable) as connection:
                    return work(connection)
            except sa.exc.OperationalError as error:
                if getattr(error.orig, "sqlstate", None) not in _COLLISIONS or attempt == _ATTEMPTS:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def insert(self, table: sa.Table) -> sqlite.Insert | postgresql.Insert:
        """An insert that understands `on_conflict_do_nothing` and `on_conflict_do_update`."""
        return sqlite.insert(table) if self.is_sqlite else postgresql.insert(table)

    @contextmanager
    def _transaction(self, durable: bool) -> Iterator[sa.Connection]:
        with self.engine.connect() as connection:
            connection = connection.execution_options(tinsmith_write=True, tinsmith_durable=durable)
            with connection.begin():
                if not durable and not self.is_sqlite:
                    connection.exec_driver_sql("SET LOCAL synchronous_commit = off")
                yield connection

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
        return sa.create_engine(parsed, pool_pre_ping=True, **options)
    Path(parsed.database or "").parent.mkdir(parents=True, exist_ok=True)
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


def _prepare_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None  # transactions begin where `_begin_sqlite` says, not where the driver guesses
    for pragma in ("journal_mode = WAL", "foreign_keys = ON", "journal_size_limit = 67108864"):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin_sqlite(connection: sa.Connection) -> None:
    options = connection.get_execution_options()
    if not options.get("tinsmith_write"):
        connection.exec_driver_sql("BEGIN")
        return
    level = "FULL" if options["tinsmith_durable"] else "NORMAL"
    if connection.info.get("synchronous") != level:
        connection.exec_driver_sql(f"PRAGMA synchronous = {level}")
        connection.info["synchronous"] = level
    # Taking the write lock at once: a reader that becomes a writer later can find its snapshot outdated and fail.
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _json(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    if "\\u0000" in text:
        raise InvalidInputError("Text must not contain the character NUL (U+0000); remove it.", value=text)
    return text


@contextmanager
def _explained() -> Iterator[None]:
    """Turn what the database cannot hold into an error about the value."""
    try:
        yield
    except (UnicodeEncodeError, OverflowError, sa.exc.StatementError) as error:
        cause = error.orig if isinstance(error, sa.exc.StatementError) else error
        if isinstance(cause, InvalidInputError):
            raise cause from None
        if isinstance(error, sa.exc.DataError) or isinstance(cause, UnicodeEncodeError | OverflowError):
            raise InvalidInputError(
                f"The database cannot store a value: {cause}. Text must be Unicode without NUL, numbers fit 64 bits."
            ) from None
        raise
