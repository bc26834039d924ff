"""`tinsmith checkpoint download`: the files of a checkpoint, whole or not at all under their own name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tinsmith.cli import shown
from tinsmith.cli.connect import Server
from tinsmith.cli.errors import CommandFailed
from tinsmith.cli.options import Options
from tinsmith.cli.output import emit_json, emit_properties, note
from tinsmith.cli.params import CHECKPOINT_PATH
from tinsmith.cli.progress import Bar

if TYPE_CHECKING:
    from tinsmith.client.download import Progress

UNFINISHED, REPLACED = ".part", ".old"


@click.command("download")
@click.argument("path", type=CHECKPOINT_PATH)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("."),
    metavar="FOLDER",
    help="Where to make the folder of the checkpoint; here by default.",
)
@click.option("--force", is_flag=True, help="Replace the folder if there is one, once the new one is complete.")
@click.pass_obj
def download(options: Options, path: str, output: Path, force: bool) -> None:
    """Fetch a training or exported checkpoint into a folder named after it.

    Run again after an interruption, it goes on where it stopped. A training checkpoint is loaded into a new run and
    exported for the time of the download; sampler weights cannot be fetched.
    """
    target = output / path.removeprefix("tinker://").replace("/", "_")
    if target.exists() and not (force and target.is_dir()):
        raise CommandFailed(
            f"{target} exists already.", remedy="Use --force to replace a folder, or --output for another place."
        )
    unfinished = target.with_name(target.name + UNFINISHED)
    if unfinished.exists():
        note(f"Going on with what is in {unfinished}.")
    try:
        with Server(options) as server:
            num_bytes = fetch(server, path, unfinished)
    except BaseException:
        if unfinished.exists():
            note(f"What has arrived is in {unfinished}; the same command goes on from there.")
        raise
    _put_in_place(unfinished, target)
    if options.wants_json:
        emit_json({"checkpoint_path": path, "destination": str(target), "file_size_bytes": num_bytes})
    else:
        rows = [("Checkpoint Path", path), ("Total Size", shown.size(num_bytes)), ("Downloaded to", str(target))]
        emit_properties(f"Checkpoint Download: {path}", rows)


def fetch(server: Server, path: str, folder: Path) -> int:
    """Fetches the files of a checkpoint into a folder; gives their size."""
    _check_exists(server, path)
    with server.patience() as stop_waiting, Bar(counts_bytes=True) as bar:

        def on_progress(progress: Progress) -> None:
            stop_waiting()
            label = f"{progress.file} ({progress.files_done + 1} of {progress.files_total})"
            bar.report(label, progress.file_bytes, progress.file_total_bytes)

        files = server.patient_service.download_checkpoint(path, folder, on_progress)
    return sum(file.stat().st_size for file in files)


def _check_exists(server: Server, path: str) -> None:
    """Asked of the server before anything is begun, and with little patience."""
    from tinsmith.types import ParsedCheckpointTinkerPath

    if ParsedCheckpointTinkerPath.from_tinker_path(path).checkpoint_type == "external":
        server.wait(server.rest.get_external_weights_urls(path))
    else:
        server.wait(server.rest.get_weights_info_by_tinker_path(path))


def _put_in_place(folder: Path, target: Path) -> None:
    """What was there before goes only when the new folder is complete."""
    replaced = target.with_name(target.name + REPLACED)
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    folder.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)
