"""`tinsmith audit`: who did what on a server of yours. Works on the server's database, whether it runs or not."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinsmith.cli.errors import CommandFailed
from tinsmith.cli.options import Options
from tinsmith.cli.output import emit_json, emit_table, note
from tinsmith.cli.params import UTC_TIME
from tinsmith.cli.server_store import keys_command, opened_store, place_options

if TYPE_CHECKING:
    from tinsmith.server.store import Store
    from tinsmith.server.store.records import AuditEvent

_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_SPAN = re.compile(rf"(\d{{1,5}})([{''.join(_UNITS)}])")


class Since(click.ParamType):  # type: ignore[type-arg]  # generic only in later releases of click
    """A span of time up to now, or a time."""

    name = "since"

    def convert(self, value: str | datetime, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, str) and (span := _SPAN.fullmatch(value)):
            return datetime.now(UTC) - timedelta(**{_UNITS[span[2]]: int(span[1])})
        try:
            return UTC_TIME.convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{value!r} is no time. Give 90m, 12h, 7d or 4w, or a date such as 2026-01-31.", param, ctx)


@click.command("audit")
@click.option(
    "--since",
    type=Since(),
    default="7d",
    show_default=True,
    metavar="SPAN",
    help="From when on: 90m, 12h, 7d, 4w, or a time such as 2026-01-31.",
)
@click.option("--key", "key_name", metavar="NAME", help="Only what was done with, or to, keys of this name or number.")
@click.option("--owner", metavar="OWNER", help="Only what concerns this owner.")
@click.option(
    "--limit", type=click.IntRange(min=1), default=1000, show_default=True, metavar="N", help="The latest so many."
)
@place_options
@click.pass_obj
def command(
    options: Options,
    since: datetime,
    key_name: str | None,
    owner: str | None,
    limit: int,
    state: Path | None,
    database: str,
) -> None:
    """See who did what on a server of yours.

    The newest comes first. An operation on a model is there twice: when it was accepted, with the key and the address
    that it came from, and when it was done or has failed.
    """
    with opened_store(state, database) as store:
        names = {key.key_id: key.name for key in store.keys.all()}
        key_ids = None if key_name is None else _key_ids(store, key_name, keys_command("list", state, database))
        found = store.audit.trail(since=since, key_ids=key_ids, owner=owner, limit=limit)
    if len(found) == limit:
        note(f"There may be more than these {limit}; give a later --since or a higher --limit.")
    if options.wants_json:
        emit_json({"events": [_shown(event, names) for event in found]})
        return
    rows = [
        [
            event.time.strftime("%Y-%m-%d %H:%M:%S"),
            event.event,
            _outcome(event),
            _object(event),
            names.get(event.key_id or 0, str(event.key_id or "")),
            event.owner,
            event.address or "",
        ]
        for event in found
    ]
    emit_table(
        f"{len(rows)} {'event' if len(rows) == 1 else 'events'}",
        ("Time (UTC)", "Event", "Outcome", "What", "Key", "Owner", "From"),
        rows,
    )


def _key_ids(store: Store, name: str, shows_them: str) -> list[int]:
    found = [key.key_id for key in store.keys.all() if name in (key.name, str(key.key_id))]
    if not found:
        raise CommandFailed(f"There is no key {name!r}.", remedy=f"`{shows_them}` shows those there are.")
    return found


def _outcome(event: AuditEvent) -> str:
    reason = event.details.get("reason")
    return f"{event.outcome} ({reason})" if reason else event.outcome


def _object(event: AuditEvent) -> str:
    details = event.details
    named = [details[name] for name in ("session_id", "run_id", "kind", "name") if name in details]
    return event.tinker_path or event.model_id or "/".join(map(str, named))


def _shown(event: AuditEvent, names: dict[int, str]) -> dict[str, Any]:
    return {
        "time": event.time.isoformat().replace("+00:00", "Z"),
        "event": event.event,
        "outcome": event.outcome,
        "owner": event.owner,
        "key_id": event.key_id,
        "key": names.get(event.key_id or 0),
        "address": event.address,
        "model_id": event.model_id,
        "tinker_path": event.tinker_path,
        "details": event.details,
    }
