"""`tinsmith backup`: a copy of a server's state."""

from __future__ import annotations

from pathlib import Path

import click

from tinsmith.cli import shown
from tinsmith.cli.errors import CommandFailed
from tinsmith.cli.options import Options
from tinsmith.cli.output import emit_json, emit_properties
from tinsmith.cli.progress import Bar


@click.command("backup")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--state",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="As for `tinsmith serve`.",
)
@click.option("--force", is_flag=True, help="Replace FOLDER if it is not empty, once the new copy is complete.")
@click.pass_obj
def command(options: Options, folder: Path, state: Path | None, force: bool) -> None:
    """Copy the state of a server of yours to FOLDER, while it works or not.

    The copy is of one moment, and `tinsmith serve --state FOLDER` goes on from there. On one disk it shares its files
    with the original, so copy it to another one. A database in PostgreSQL is not part of it: stop the server and use
    `pg_dump`. A state whose files lie in a storage of objects cannot be copied so.
    """
    from tinsmith.errors import MissingExtraError
    from tinsmith.export import new_folder

    try:
        from tinsmith.server.backup import back_up
        from tinsmith.server.config import DATABASE_FILE
        from tinsmith.server.storage import storage_of
    except ImportError as error:
        raise MissingExtraError(error.name or "sqlalchemy", "server", "Copying the state of a server") from error
    source, target = (state or Path.home() / ".tinsmith").absolute(), folder.expanduser().absolute()
    if url := storage_of(source):
        raise CommandFailed(
            f"The files of {source} lie in {url}, which this command does not copy.",
            remedy="Stop the server, copy the folder (all but cache/) and what lies under that URL, with the tools of "
            "the storage, and a database in PostgreSQL with pg_dump; then start it again.",
        )
    if not (source / DATABASE_FILE).exists():
        raise CommandFailed(
            f"{source} holds no {DATABASE_FILE}.",
            remedy="Give the --state of `tinsmith serve`. With PostgreSQL, stop the server, copy the folder, and use "
            "pg_dump for the database.",
        )
    if target.is_relative_to(source):
        raise CommandFailed(f"{target} lies within {source}.", remedy="Choose a folder elsewhere.")
    with new_folder(target, force=force) as copy, Bar(counts_bytes=True) as bar:
        known = back_up(source, copy, bar.report)
        size = sum(file.stat().st_size for file in copy.rglob("*") if file.is_file())
    result = {
        "state": str(source),
        "destination": str(target),
        "checkpoints": len(known.checkpoints),
        "models": len(known.snapshots),
        "size_bytes": size,
    }
    if options.wants_json:
        emit_json(result)
        return
    rows = [
        ("State", str(source)),
        ("Copied to", str(target)),
        ("Checkpoints", str(len(known.checkpoints))),
        ("Models in training", str(len(known.snapshots))),
        ("Total Size", shown.size(size)),
    ]
    emit_properties("Backup", rows)
