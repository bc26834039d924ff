"""`tinsmith run`: what was trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import click

from tinsmith.cli import shown
from tinsmith.cli.connect import Server
from tinsmith.cli.listing import DEFAULT_LIMIT, Listing, collect
from tinsmith.cli.options import Options
from tinsmith.cli.output import emit_json, emit_properties, emit_table

if TYPE_CHECKING:
    from tinsmith.types import Checkpoint, TrainingRun

PAGE_SIZE = 100


class Column(NamedTuple):
    title: str
    cell: Callable[[TrainingRun], str]


def _lora(run: TrainingRun) -> str:
    return f"Rank {run.lora_rank}" if run.is_lora and run.lora_rank is not None else shown.yes_no(run.is_lora)


def _status(run: TrainingRun) -> str:
    return "Failed" if run.corrupted else "OK"


COLUMNS = {
    "id": Column("Run ID", lambda run: run.training_run_id),
    "model": Column("Base Model", lambda run: run.base_model),
    "owner": Column("Owner", lambda run: run.model_owner),
    "lora": Column("LoRA", _lora),
    "updated": Column("Last Update", lambda run: shown.when(run.last_request_time)),
    "status": Column("Status", _status),
    "checkpoint": Column(
        "Last Checkpoint", lambda run: run.last_checkpoint.checkpoint_id if run.last_checkpoint else "N/A"
    ),
    "checkpoint_time": Column(
        "Checkpoint Time", lambda run: shown.when(run.last_checkpoint.time if run.last_checkpoint else None)
    ),
}
DEFAULT_COLUMNS = "id,model,lora,updated,status"


def _columns(ctx: click.Context, param: click.Parameter, value: str) -> list[Column]:
    names = [name.strip() for name in value.split(",") if name.strip()]
    unknown = [name for name in names if name not in COLUMNS]
    if unknown or not names:
        problem = f"There is no column {', '.join(unknown)}" if unknown else "No column is named"
        raise click.BadParameter(f"{problem}. The columns are: {', '.join(COLUMNS)}.", ctx, param)
    return [COLUMNS[name] for name in names]


@click.group()
def command() -> None:
    """List training runs."""


@command.command("list")
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=DEFAULT_LIMIT,
    show_default=True,
    metavar="N",
    help="How many runs to show; 0 for all.",
)
@click.option(
    "-c",
    "--columns",
    default=DEFAULT_COLUMNS,
    show_default=True,
    callback=_columns,
    metavar="NAMES",
    help=f"Columns of the table, separated by commas, from: {', '.join(COLUMNS)}.",
)
@click.pass_obj
def list_runs(options: Options, limit: int, columns: Sequence[Column]) -> None:
    """List training runs, the latest first."""
    with Server(options) as server:
        listing = _fetch(server, limit)
    if options.wants_json:
        emit_json({"runs": [run.model_dump(mode="json") for run in listing.items], **listing.counts})
    else:
        rows = [[column.cell(run) for column in columns] for run in listing.items]
        emit_table(listing.title("training run"), [column.title for column in columns], rows)


def _fetch(server: Server, limit: int) -> Listing[TrainingRun]:
    def page(size: int, offset: int) -> tuple[Sequence[TrainingRun], int]:
        answer = server.wait(server.rest.list_training_runs(limit=size, offset=offset))
        return answer.training_runs, answer.cursor.total_count

    return collect(page, limit=limit, page_size=PAGE_SIZE, label="Fetching training runs")


@command.command("info")
@click.argument("run_id")
@click.pass_obj
def info(options: Options, run_id: str) -> None:
    """Show one training run."""
    with Server(options) as server:
        run = server.wait(server.rest.get_training_run(run_id))
    if options.wants_json:
        emit_json(run.model_dump(mode="json"))
    else:
        emit_properties(f"Training Run: {run.training_run_id}", _properties(run))


def _properties(run: TrainingRun) -> list[tuple[str, str]]:
    rows = [
        ("Run ID", run.training_run_id),
        ("Base Model", run.base_model),
        ("Owner", run.model_owner),
        ("LoRA", shown.lora(run.is_lora, run.lora_rank)),
        ("Last Update", shown.when(run.last_request_time)),
        ("Status", _status(run)),
    ]
    rows += _checkpoint_rows("Last Training Checkpoint", run.last_checkpoint)
    rows += _checkpoint_rows("Last Sampler Checkpoint", run.last_sampler_checkpoint)
    if run.user_metadata:
        rows += [("Metadata", ""), *((f"  - {name}", value) for name, value in run.user_metadata.items())]
    return rows


def _checkpoint_rows(label: str, checkpoint: Checkpoint | None) -> list[tuple[str, str]]:
    if checkpoint is None:
        return []
    return [
        (label, checkpoint.checkpoint_id),
        ("  - Time", shown.when(checkpoint.time)),
        ("  - Path", checkpoint.tinker_path),
    ]
