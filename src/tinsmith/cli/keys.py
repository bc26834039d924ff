"""`tinsmith keys`: who may use a server of yours. Works on the server's database, whether it runs or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinsmith.cli import shown
from tinsmith.cli.confirm import check_can_ask, confirm
from tinsmith.cli.errors import CommandFailed
from tinsmith.cli.options import Options
from tinsmith.cli.output import emit, emit_json, emit_table, note

if TYPE_CHECKING:
    from tinsmith.server.store import Store
    from tinsmith.server.store.records import ApiKey


@click.group()
def command() -> None:
    """Make, list and revoke the API keys of a server of yours.

    A server that has keys takes no others. One without keys, which can be reached from its own machine only, takes any
    until its first key is made.
    """


def _place_options(function: Callable[..., None]) -> Callable[..., None]:
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


@command.command("create")
@click.argument("name")
@click.option(
    "--owner",
    metavar="OWNER",
    default="",
    help="Whose runs and checkpoints it opens: those of another key's owner, or 'local' for what was made before there "
    "were keys. A new owner by default.",
)
@click.option("--note", "remark", default="", metavar="TEXT", help="To remember what it is for.")
@_place_options
@click.pass_obj
def create(options: Options, name: str, owner: str, remark: str, state: Path | None, database: str) -> None:
    """Make a key and print it. This is the only time it can be seen."""
    with _opened(state, database, may_create=True) as store:
        is_first = not store.keys.all()
        made = store.keys.create(owner, name, remark)
    if is_first:
        note("This is the first key: from now on the server takes no others.")
    if options.wants_json:
        emit_json({**_shown(made.key), "key": made.plain})
    else:
        note(
            f"Key {made.key.key_id}, {name!r}, opens what belongs to {made.key.owner}. Keep it; it is not shown again."
        )
        emit(f"{made.plain}\n")


@command.command("list")
@click.option("--owner", metavar="OWNER", help="Only the keys of this owner.")
@_place_options
@click.pass_obj
def list_keys(options: Options, owner: str | None, state: Path | None, database: str) -> None:
    """List the keys, revoked ones included."""
    with _opened(state, database) as store:
        found = store.keys.all(owner)
    if options.wants_json:
        emit_json({"keys": [_shown(key) for key in found]})
        return
    rows = [
        [
            str(key.key_id),
            key.name,
            key.owner,
            f"...{key.hint}",
            key.note,
            shown.when(key.created),
            shown.when(key.revoked) if key.revoked else "No",
        ]
        for key in found
    ]
    emit_table(f"{len(rows)} keys", ("Key ID", "Name", "Owner", "Ends In", "Note", "Created", "Revoked"), rows)


@command.command("revoke")
@click.argument("key_id", type=int)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@_place_options
def revoke(key_id: int, yes: bool, state: Path | None, database: str) -> None:
    """Refuse a key from now on. A running server does so within seconds."""
    if not yes:
        check_can_ask()
    with _opened(state, database) as store:
        key = next((key for key in store.keys.all() if key.key_id == key_id), None)
        if key is None:
            raise CommandFailed(f"There is no key {key_id}.", remedy="`tinsmith keys list` shows those there are.")
        if key.revoked:
            raise CommandFailed(f"Key {key_id}, {key.name!r}, was revoked before.")
        if not yes:
            confirm(f"Key {key_id}, {key.name!r} of {key.owner}, will be refused for ever.", "Revoke it?")
        store.keys.revoke(key_id)


def _shown(key: ApiKey) -> dict[str, Any]:
    return {
        "key_id": key.key_id,
        "name": key.name,
        "owner": key.owner,
        "note": key.note,
        "hint": key.hint,
        "created": _iso(key.created),
        "revoked": _iso(key.revoked),
    }


def _iso(moment: Any) -> str | None:
    return None if moment is None else moment.isoformat().replace("+00:00", "Z")


@contextmanager
def _opened(state: Path | None, database: str, *, may_create: bool = False) -> Iterator[Store]:
    from tinsmith.errors import ConfigError, MissingExtraError

    try:
        from tinsmith.server.config import DATABASE_FILE
        from tinsmith.server.store import Store, StoreUnavailableError
    except ImportError as error:
        raise MissingExtraError(error.name or "sqlalchemy", "server", "Managing the keys of a server") from error
    file = (state or Path.home() / ".tinsmith").absolute() / DATABASE_FILE
    if not database and not may_create and not file.exists():
        raise CommandFailed(
            f"{file.parent} is no server's state folder.", remedy="Give the --state or --database of `tinsmith serve`."
        )
    try:
        store = Store(database or f"sqlite:///{file}")
    except StoreUnavailableError as error:
        reason = str(error.orig).strip().partition("\n")[0]
        raise ConfigError(f"The database cannot be opened: {reason}. Check --state or --database.") from error
    try:
        yield store
    finally:
        store.close()
