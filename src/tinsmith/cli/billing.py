"""`tinsmith billing`: what was used. Servers that bill nobody have nothing to show, and some lack it altogether."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinsmith.cli.connect import Server
from tinsmith.cli.errors import CommandFailed
from tinsmith.cli.options import Options
from tinsmith.cli.output import emit, emit_json, emit_table
from tinsmith.cli.params import UTC_TIME

if TYPE_CHECKING:
    from tinsmith.types import BillingUsageResponse

STDOUT = "-"
USAGE_COLUMNS = (
    "bucket_start",
    "bucket_end",
    "base_model",
    "user_id",
    "user_name",
    "session_id",
    "project_id",
    "estimated_cost_usd",
    "effective_rate_usd_per_million_tokens",
    "effective_rate_usd_per_gigabyte_month",
    "type",
    "token_count",
    "cached",
    "count",
    "gigabyte_hours",
)
RATE = "effective_rate_usd_per_gigabyte_month"
STORAGE_COLUMNS = (
    RATE,
    "project_id",
    "org_user_urn",
    "user_email",
    "user_name",
    "checkpoint_count",
    "size_bytes",
    "size_gigabytes",
    "estimated_monthly_cost_usd",
)
TOKEN_RATE_TYPES = ("training", "sampling_prefill", "sampling_sample")

Record = Mapping[str, Any]


@click.group()
def command() -> None:
    """See what was used and what it costs."""


@command.command("usage")
@click.argument("starting_on", type=UTC_TIME)
@click.argument("ending_before", type=UTC_TIME)
@click.option("--csv", "csv_file", metavar="FILE", help="Write the rows as CSV instead; - for standard output.")
@click.option(
    "--sessions-csv",
    "sessions_file",
    metavar="FILE",
    help="Write the metadata of the sessions as CSV too, to be joined on session_id; - for standard output.",
)
@click.pass_obj
def usage(
    options: Options,
    starting_on: datetime,
    ending_before: datetime,
    csv_file: str | None,
    sessions_file: str | None,
) -> None:
    """Show the usage of every hour between two UTC hours, at most 14 days apart.

    Costs are estimates before credits, and empty while they are not known.
    """
    if csv_file == sessions_file == STDOUT:
        raise click.UsageError("--csv and --sessions-csv cannot both go to standard output.")
    with Server(options) as server, _explained(server):
        found = server.wait(server.admin.get_billing_usage(starting_on, ending_before))
    if sessions_file:
        _write_csv(sessions_file, ("session_id", "user_metadata"), _session_records(found))
    if csv_file:
        _write_csv(csv_file, USAGE_COLUMNS, [_flat(event) for event in found.model_dump(mode="json")["data"]])
    elif sessions_file != STDOUT:
        _show_usage(options, found)


def _show_usage(options: Options, found: BillingUsageResponse) -> None:
    document = found.model_dump(mode="json")
    if options.wants_json:
        emit_json(document)
    else:
        rows = [[_cell(record, column) for column in USAGE_COLUMNS] for record in map(_flat, document["data"])]
        emit_table(f"{len(rows)} hourly usage rows", USAGE_COLUMNS, rows)


def _flat(event: Record) -> Record:
    """One record of the columns above; the payload's fields depend on its type and stand beside the others."""
    return {**event, **event["event_info"]}


def _cell(record: Record, column: str) -> str:
    """What could have a value but has none yet is `null`; what cannot have one is empty."""
    value = record.get(column)
    if value is not None:
        return str(value)
    return "null" if column in _prices_of(record["type"]) else ""


def _prices_of(kind: str) -> Sequence[str]:
    if kind in TOKEN_RATE_TYPES:
        return ("estimated_cost_usd", "effective_rate_usd_per_million_tokens")
    return ("estimated_cost_usd", RATE) if kind == "storage" else ()


def _session_records(found: BillingUsageResponse) -> list[Record]:
    return [
        {"session_id": session_id, "user_metadata": json.dumps(session.user_metadata)}
        for session_id, session in found.sessions.items()
    ]


@command.command("checkpoint-storage")
@click.option("--project-id", metavar="PROJECT_ID", help="Only this project.")
@click.option("--csv", "csv_file", metavar="FILE", help="Write the rows as CSV instead; - for standard output.")
@click.pass_obj
def checkpoint_storage(options: Options, project_id: str | None, csv_file: str | None) -> None:
    """Show what the checkpoints take now, by project and owner, and what that costs in a month."""
    with Server(options) as server, _explained(server):
        found = server.wait(server.admin.get_current_checkpoint_storage_usage(project_id))
    document = found.model_dump(mode="json")
    records = [{RATE: document[RATE], **item} for item in document["data"]]
    if csv_file:
        _write_csv(csv_file, STORAGE_COLUMNS, records)
    elif options.wants_json:
        emit_json(document)
    else:
        rows = [[_text(record.get(column)) for column in STORAGE_COLUMNS] for record in records]
        emit_table("Current checkpoint storage", STORAGE_COLUMNS, rows)


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _write_csv(file: str, columns: Sequence[str], records: Sequence[Record]) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    if file == STDOUT:
        emit(text.getvalue())
    else:
        Path(file).write_text(text.getvalue(), encoding="utf-8")


@contextmanager
def _explained(server: Server) -> Iterator[None]:
    from tinsmith.errors import NotFoundError

    try:
        yield
    except NotFoundError as error:
        raise CommandFailed(
            f"The server at {server.config.base_url} has no billing.",
            remedy="Only the hosted service bills; choose it with --base-url.",
        ) from error
