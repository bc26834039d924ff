"""`tinsmith checkpoint delete`: one, several, or all of a run that fit."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

import click

from tinsmith.cli import shown
from tinsmith.cli.confirm import check_can_ask, confirm
from tinsmith.cli.connect import Server
from tinsmith.cli.failures import FAILED, explain
from tinsmith.cli.options import Options
from tinsmith.cli.output import emit, emit_json, note
from tinsmith.cli.params import CHECKPOINT_PATH, UTC_TIME
from tinsmith.cli.progress import Bar

if TYPE_CHECKING:
    from tinsmith.types import Checkpoint

TYPES = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
    "training": "training",
    "sampler": "sampler",
    "external": "external",
}
MAX_NAMED = 10
"""Paths that are named in the question; of more only the number is told."""


class Target(NamedTuple):
    path: str
    size_bytes: int | None = None


class Filters(NamedTuple):
    kind: str | None
    before: datetime | None
    after: datetime | None

    def let_pass(self, checkpoint: Checkpoint) -> bool:
        return (
            self.kind in (None, checkpoint.checkpoint_type)
            and (self.before is None or checkpoint.time < self.before)
            and (self.after is None or checkpoint.time > self.after)
        )


@click.command("delete")
@click.argument("paths", nargs=-1, type=CHECKPOINT_PATH)
@click.option("--run-id", metavar="RUN_ID", help="All checkpoints of this training run, or those the filters choose.")
@click.option("--type", "kind", type=click.Choice(list(TYPES)), help="Only those of this type.")
@click.option("--before", type=UTC_TIME, metavar="TIME", help="Only those made before this time (ISO 8601, UTC).")
@click.option("--after", type=UTC_TIME, metavar="TIME", help="Only those made after this time (ISO 8601, UTC).")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.pass_context
def delete(
    ctx: click.Context,
    paths: Sequence[str],
    run_id: str | None,
    kind: str | None,
    before: datetime | None,
    after: datetime | None,
    yes: bool,
) -> None:
    """Delete checkpoints for ever: those at PATHS, or those of a training run."""
    options: Options = ctx.obj
    filters = Filters(kind and TYPES[kind], before, after)
    if bool(paths) == bool(run_id):
        raise click.UsageError("Give either the paths of checkpoints or --run-id RUN_ID.")
    if any(filters) and not run_id:
        raise click.UsageError("--type, --before and --after choose among the checkpoints of a run: give --run-id.")
    if not yes:
        check_can_ask()
    with Server(options) as server:
        targets = _of_run(server, run_id, filters) if run_id else _named(server, paths, look_up=not yes)
        if targets and not yes:
            confirm(_summary(targets), "Delete for ever?")
        failed = _delete(server, [target.path for target in targets])
    _tell(options, len(targets) - len(failed), failed)
    if failed:
        ctx.exit(FAILED)


def _of_run(server: Server, run_id: str, filters: Filters) -> list[Target]:
    found = server.wait(server.rest.list_checkpoints(run_id)).checkpoints
    return [Target(each.tinker_path, each.size_bytes) for each in found if filters.let_pass(each)]


def _named(server: Server, paths: Sequence[str], *, look_up: bool) -> list[Target]:
    """Their sizes are looked up only for a person who decides by them."""
    unique = list(dict.fromkeys(paths))
    if not look_up:
        return [Target(path) for path in unique]
    runs = dict.fromkeys(path.removeprefix("tinker://").partition("/")[0] for path in unique)
    asked = [server.rest.list_checkpoints(run_id) for run_id in runs]
    sizes = {each.tinker_path: each.size_bytes for future in asked for each in server.wait(future).checkpoints}
    return [Target(path, sizes.get(path)) for path in unique]


def _summary(targets: Sequence[Target]) -> str:
    known = [target.size_bytes for target in targets if target.size_bytes is not None]
    total = shown.size(sum(known)) if known else "of unknown size"
    lines = [f"{_count(len(targets))} ({total}) will be deleted:"]
    lines += [f"  {target.path}" for target in targets[:MAX_NAMED]]
    if len(targets) > MAX_NAMED:
        lines.append(f"  and {len(targets) - MAX_NAMED} more")
    return "\n".join(lines)


def _delete(server: Server, paths: Sequence[str]) -> dict[str, str]:
    """Deletes all that can be deleted; gives the reasons why others could not be."""
    from tinsmith.errors import TinkerError

    running = {path: server.rest.delete_checkpoint_from_tinker_path(path) for path in paths}
    failed = {}
    with Bar() as bar:
        try:
            for done, (path, future) in enumerate(running.items(), start=1):
                try:
                    server.wait(future)
                except TinkerError as error:
                    failure = explain(error)
                    failed[path] = f"{failure.headline}. {failure.details}".strip()
                if len(paths) > 1:
                    bar.report("Deleting checkpoints", done, len(paths))
        except KeyboardInterrupt:
            deleted = sum(future.done() and future.exception() is None for future in running.values())
            note(f"At least {deleted} of {_count(len(paths))} were deleted. Run the command again for the others.")
            raise
    return failed


def _tell(options: Options, num_deleted: int, failed: dict[str, str]) -> None:
    if options.wants_json:
        reasons = [{"tinker_path": path, "error": error} for path, error in failed.items()]
        emit_json({"deleted_count": num_deleted, "failed": reasons})
    else:
        emit(f"Deleted {_count(num_deleted)}.\n")
    if failed:
        lines = [f"Error: {_count(len(failed))} could not be deleted", *(f"{p}: {why}" for p, why in failed.items())]
        note("\n".join(lines))


def _count(number: int) -> str:
    return f"{number} checkpoint{'' if number == 1 else 's'}"
