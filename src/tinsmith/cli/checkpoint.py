"""`tinsmith checkpoint`: what was saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from tinsmith.cli import shown
from tinsmith.cli.checkpoint_delete import delete
from tinsmith.cli.checkpoint_download import download
from tinsmith.cli.checkpoint_export import export
from tinsmith.cli.checkpoint_import import import_adapter
from tinsmith.cli.checkpoint_push import push_hf
from tinsmith.cli.connect import Server
from tinsmith.cli.errors import CommandFailed
from tinsmith.cli.listing import DEFAULT_LIMIT, Listing, collect
from tinsmith.cli.options import Options
from tinsmith.cli.output import emit_json, emit_properties, emit_table
from tinsmith.cli.params import CHECKPOINT_PATH

if TYPE_CHECKING:
    from tinsmith.types import Checkpoint, TrainingRun

PAGE_SIZE = 1000
COLUMNS = ("Checkpoint ID", "Type", "Size", "Public", "Created", "Expires", "Path")


@click.group()
def command() -> None:
    """List, share, download and delete checkpoints."""


for subcommand in (delete, download, export, import_adapter, push_hf):
    command.add_command(subcommand)


@command.command("list")
@click.option("--run-id", metavar="RUN_ID", help="Only the checkpoints of this training run.")
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    metavar="N",
    help=f"How many to show; 0 for all.  [default: {DEFAULT_LIMIT}, or all of a run]",
)
@click.pass_obj
def list_checkpoints(options: Options, run_id: str | None, limit: int | None) -> None:
    """List checkpoints, the latest first."""
    with Server(options) as server:
        if run_id is None:
            listing = _fetch_all(server, DEFAULT_LIMIT if limit is None else limit)
        else:
            found = server.wait(server.rest.list_checkpoints(run_id)).checkpoints
            listing = Listing(found[: limit or None], len(found))
    if options.wants_json:
        of_run = {} if run_id is None else {"run_id": run_id}
        checkpoints = [checkpoint.model_dump(mode="json") for checkpoint in listing.items]
        emit_json({**of_run, "checkpoints": checkpoints, **listing.counts})
    else:
        of_run_title = f" of run {run_id}" if run_id else ""
        emit_table(listing.title("checkpoint") + of_run_title, COLUMNS, map(_cells, listing.items))


def _fetch_all(server: Server, limit: int) -> Listing[Checkpoint]:
    def page(size: int, offset: int) -> tuple[Sequence[Checkpoint], int | None]:
        answer = server.wait(server.rest.list_user_checkpoints(limit=size, offset=offset))
        return answer.checkpoints, answer.cursor.total_count if answer.cursor else None

    return collect(page, limit=limit, page_size=PAGE_SIZE, label="Fetching checkpoints")


def _cells(checkpoint: Checkpoint) -> list[str]:
    return [
        checkpoint.checkpoint_id,
        checkpoint.checkpoint_type,
        shown.size(checkpoint.size_bytes),
        shown.yes_no(checkpoint.public),
        shown.when(checkpoint.time),
        shown.expiry(checkpoint.expires_at),
        checkpoint.tinker_path,
    ]


@command.command("info")
@click.argument("path", type=CHECKPOINT_PATH)
@click.pass_obj
def info(options: Options, path: str) -> None:
    """Show one checkpoint."""
    with Server(options) as server:
        checkpoint, run = _look_up(server, path)
    if options.wants_json:
        emit_json({**checkpoint.model_dump(mode="json"), "is_lora": run.is_lora, "lora_rank": run.lora_rank})
    else:
        emit_properties(f"Checkpoint: {checkpoint.checkpoint_id}", _properties(checkpoint, run))


def _look_up(server: Server, path: str) -> tuple[Checkpoint, TrainingRun]:
    """There is no way to ask for one checkpoint, so it is looked for among those of its run."""
    run_id = path.removeprefix("tinker://").partition("/")[0]
    # The run of somebody else, if the checkpoint was published.
    listed, asked = server.rest.list_checkpoints(run_id), server.rest.get_training_run(run_id, "accessible")
    run = server.wait(asked)
    found = [checkpoint for checkpoint in server.wait(listed).checkpoints if checkpoint.tinker_path == path]
    if not found:
        raise CommandFailed(
            "Resource not found",
            f"The training run {run_id} has no checkpoint {path}. It may have been deleted, or have expired.",
            f"See what it has: {server.program} checkpoint list --run-id {run_id}",
        )
    return found[0], run


def _properties(checkpoint: Checkpoint, run: TrainingRun) -> list[tuple[str, str]]:
    rows = [
        ("Checkpoint ID", checkpoint.checkpoint_id),
        ("Type", checkpoint.checkpoint_type),
        ("Tinker Path", checkpoint.tinker_path),
        ("Size", shown.size(checkpoint.size_bytes)),
        ("Public", shown.yes_no(checkpoint.public)),
        ("Created", shown.when(checkpoint.time)),
        ("Expires", shown.expiry(checkpoint.expires_at)),
        ("Training Run ID", run.training_run_id),
        ("LoRA", shown.lora(run.is_lora, run.lora_rank)),
    ]
    if checkpoint.user_metadata:
        rows += [("Metadata", ""), *((f"  - {name}", value) for name, value in checkpoint.user_metadata.items())]
    return rows


@command.command("publish")
@click.argument("path", type=CHECKPOINT_PATH)
@click.pass_obj
def publish(options: Options, path: str) -> None:
    """Let everybody who has the path read a checkpoint."""
    with Server(options) as server:
        server.wait(server.rest.publish_checkpoint_from_tinker_path(path))


@command.command("unpublish")
@click.argument("path", type=CHECKPOINT_PATH)
@click.pass_obj
def unpublish(options: Options, path: str) -> None:
    """Keep a checkpoint to its owner again."""
    with Server(options) as server:
        server.wait(server.rest.unpublish_checkpoint_from_tinker_path(path))


@command.command("set-ttl")
@click.argument("path", type=CHECKPOINT_PATH)
@click.option("--ttl", type=click.IntRange(min=1), metavar="SECONDS", help="How long from now: an hour to ten years.")
@click.option("--remove", is_flag=True, help="Keep it for ever.")
@click.pass_obj
def set_ttl(options: Options, path: str, ttl: int | None, remove: bool) -> None:
    """Say when a checkpoint expires, or that it does not."""
    if (ttl is not None) == remove:
        raise click.UsageError("Give either --ttl SECONDS or --remove.")
    with Server(options) as server:
        server.wait(server.rest.set_checkpoint_ttl_from_tinker_path(path, ttl))
