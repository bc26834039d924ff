"""The store of a server of yours, for commands that work on it whether the server runs or not."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinsmith.cli.errors import CommandFailed

if TYPE_CHECKING:
    from tinsmith.server.store import Store


def place_options(function: Callable[..., None]) -> Callable[..., None]:
    """Where the server keeps its state, as `tinsmith serve` was told."""

    @click.option(
        "--state",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="FOLDER",
        help="As for `tinsmith serve`.",
    )
    @click.option("--database", default="", metavar="URL", help="As for `tinsmith serve`.")
    @wraps(function)
    def with_options(*arguments: Any, **options: Any) -> None:
        function(*arguments, **options)

    return with_options


def keys_command(words: str, state: Path | None, database: str) -> str:
    """A command about the keys of the same server, to be pasted; the database's URL may hold a password."""
    place = f" --state {shlex.quote(str(state))}" if state else ""
    return f"tinsmith keys {words}{place}{' --database URL' if database else ''}"


@contextmanager
def opened_store(state: Path | None, database: str, *, may_create: bool = False) -> Iterator[Store]:
    from tinsmith.errors import MissingExtraError

    try:
        from tinsmith.server.config import DATABASE_FILE
        from tinsmith.server.store import StoreUnavailableError
        from tinsmith.server.store.reserve import is_full
    except ImportError as error:
        raise MissingExtraError(error.name or "sqlalchemy", "server", "Looking into the state of a server") from error
    file = (state or Path.home() / ".tinsmith").absolute() / DATABASE_FILE
    if not database and not may_create and not file.exists():
        raise CommandFailed(
            f"{file.parent} is no server's state folder.", remedy="Give the --state or --database of `tinsmith serve`."
        )
    try:
        with closing(_opened(database or f"sqlite:///{file}")) as store:
            yield store
    except StoreUnavailableError as error:
        if not is_full(error):
            raise
        raise CommandFailed(
            f"The disk of {file.parent} is full: nothing can be written.",
            remedy="Make room there and run the command again.",
        ) from error


def _opened(url: str) -> Store:
    from tinsmith.errors import ConfigError
    from tinsmith.server.store import Store, StoreUnavailableError
    from tinsmith.server.store.reserve import is_full

    try:
        return Store(url)
    except StoreUnavailableError as error:
        if is_full(error):
            raise
        reason = str(error.orig).strip().partition("\n")[0]
        raise ConfigError(f"The database cannot be opened: {reason}. Check --state or --database.") from error
