"""`tinsmith keys`: who may use a server of yours. Works on the server's database, whether it runs or not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinsmith.cli import shown
from tinsmith.cli.confirm import check_can_ask, confirm
from tinsmith.cli.errors import CommandFailed
from tinsmith.cli.options import Options
from tinsmith.cli.output import emit, emit_json, emit_table, note
from tinsmith.cli.server_store import keys_command, opened_store, place_options

if TYPE_CHECKING:
    from tinsmith.server.store.records import ApiKey, NewEvent


@click.group()
def command() -> None:
    """Make, list and revoke the API keys of a server of yours.

    A server that has keys takes no others. One without keys, which can be reached from its own machine only, takes any
    until its first key is made.
    """


@command.command("create")
@click.argument("name")
@click.option(
    "--owner",
    metavar="OWNER",
    help="Whose runs and checkpoints it opens: those of another key's owner, or 'local' for what was made before there "
    "were keys. A new owner by default.",
)
@click.option("--note", "remark", default="", metavar="TEXT", help="To remember what it is for.")
@place_options
@click.pass_obj
def create(options: Options, name: str, owner: str | None, remark: str, state: Path | None, database: str) -> None:
    """Make a key and print it. This is the only time it can be seen."""
    with opened_store(state, database, may_create=True) as store:
        owners = {key.owner for key in store.keys.all()}
        _check_owner(owner, owners, keys_command("list", state, database))
        made = store.keys.create(owner or "", name, remark, address=_command_line())
    if not owners:
        note(
            "This is the first key: from now on the server takes no others. What was made before opens with: "
            + keys_command("create NAME --owner local", state, database)
        )
    if options.wants_json:
        emit_json({**_shown(made.key), "key": made.plain})
    else:
        note(
            f"Key {made.key.key_id}, {made.key.name!r}, opens what belongs to {made.key.owner}. Keep it; it is not "
            "shown again."
        )
        emit(f"{made.plain}\n")


@command.command("list")
@click.option("--owner", metavar="OWNER", help="Only the keys of this owner.")
@place_options
@click.pass_obj
def list_keys(options: Options, owner: str | None, state: Path | None, database: str) -> None:
    """List the keys, revoked ones included."""
    with opened_store(state, database) as store:
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
    emit_table(
        f"{len(rows)} {'key' if len(rows) == 1 else 'keys'}",
        ("Key ID", "Name", "Owner", "Ends In", "Note", "Created", "Revoked"),
        rows,
    )


@command.command("revoke")
@click.argument("key", metavar="KEY")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@place_options
def revoke(key: str, yes: bool, state: Path | None, database: str) -> None:
    """Refuse a key, given by its number or its name, from now on. A running server does so at once."""
    if not yes:
        check_can_ask()
    shows_them = keys_command("list", state, database)
    with opened_store(state, database) as store:
        found = _named(key, store.keys.all(), shows_them)
        if found is None or found.revoked:
            store.audit.record(_refused(key, found))
        if found is None:
            which = "with that name" if key.startswith("tml-") else key  # a key itself is not repeated
            raise CommandFailed(f"There is no key {which}.", remedy=f"`{shows_them}` shows those there are.")
        if found.revoked:
            raise CommandFailed(f"Key {found.key_id}, {found.name!r}, was revoked before.")
        if not yes:
            confirm(f"Key {found.key_id}, {found.name!r} of {found.owner}, will be refused for ever.", "Revoke it?")
        store.keys.revoke(found.key_id, address=_command_line())


def _named(wanted: str, keys: Sequence[ApiKey], shows_them: str) -> ApiKey | None:
    """A number is that of a key, whatever the names are. Keys of several owners, and revoked ones, may share a name."""
    if (number := _number(wanted)) is not None:
        return next((key for key in keys if key.key_id == number), None)
    named = [key for key in keys if key.name == wanted]
    found = [key for key in named if not key.revoked] or named[:1]
    if len(found) > 1:
        numbers = ", ".join(str(key.key_id) for key in found)
        raise CommandFailed(
            f"{len(found)} keys have the name {wanted!r}: {numbers}.",
            remedy=f"Give the number of the one you mean; `{shows_them}` tells whose they are.",
        )
    return found[0] if found else None


def _number(wanted: str) -> int | None:
    """If it is one that a database can hold."""
    return int(wanted) if wanted.isdecimal() and len(wanted) <= 18 else None


def _check_owner(owner: str | None, known: set[str], shows_them: str) -> None:
    """A mistyped one would get a key that opens nothing, and lock out whoever is given it."""
    from tinsmith.server.store import LOCAL_OWNER

    if owner is None or owner in {*known, LOCAL_OWNER}:
        return
    raise CommandFailed(
        f"There is no owner {owner!r}.",
        remedy=f"`{shows_them}` shows those there are. Without --owner, the key gets a new one.",
    )


def _command_line() -> str:
    from tinsmith.server.audit import command_line

    return command_line()


def _refused(wanted: str, key: ApiKey | None) -> NewEvent:
    """A name that is none is left out: it may be a key itself."""
    from tinsmith.server.store.records import NewEvent

    owner, key_id = (key.owner, key.key_id) if key else ("", _number(wanted))
    return NewEvent(
        owner=owner,
        event="key_revoke",
        outcome="refused",
        key_id=key_id,
        address=_command_line(),
        details={"reason": "it was revoked before" if key else "there is no such key"},
    )


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
