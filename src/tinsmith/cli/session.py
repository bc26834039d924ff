"""`tinsmith session`: what happened in a session."""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tinsmith.cli import shown
from tinsmith.cli.connect import Server
from tinsmith.cli.options import Options
from tinsmith.cli.output import emit, emit_json, emit_properties, note
from tinsmith.cli.progress import Bar

if TYPE_CHECKING:
    from tinsmith.client.download import Progress
    from tinsmith.types import ExternalWeightsUrlsResponse

LINK_LIFETIME = timedelta(hours=1)


@click.group()
def command() -> None:
    """Export the timeline of a session."""


@command.command("export-trace")
@click.argument("session_id")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="The file to write; SESSION_ID.pftrace by default.",
)
@click.option("--url-only", is_flag=True, help="Print the link, good for about an hour, instead of fetching the file.")
@click.pass_obj
def export_trace(options: Options, session_id: str, output: Path | None, url_only: bool) -> None:
    """Fetch the timeline of a session, for https://ui.perfetto.dev."""
    note(f"Exporting the trace of session {session_id} ...")
    with Server(options) as server:
        if url_only:
            _show_url(options, session_id, server.wait(server.rest.export_session_trace(session_id)))
            return
        file = output or Path(f"{session_id}.pftrace")
        _fetch(server, session_id, file)
    num_bytes = file.stat().st_size
    if options.wants_json:
        emit_json({"session_id": session_id, "destination": str(file), "file_size_bytes": num_bytes})
    else:
        rows = [("Session ID", session_id), ("Saved to", str(file)), ("Size", shown.size(num_bytes))]
        emit_properties(f"Trace Export: {session_id}", rows)


def _show_url(options: Options, session_id: str, url: str) -> None:
    if options.wants_json:
        emit_json({"session_id": session_id, "url": url})
    else:
        emit(f"{url}\n")


def _fetch(server: Server, session_id: str, file: Path) -> None:
    """Beside its place first, so that an old file is replaced by a whole new one or not at all."""
    from tinsmith.client.download import download_files

    with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}-") as folder, Bar(counts_bytes=True) as bar:

        def on_progress(progress: Progress) -> None:
            bar.report("Fetching the trace", progress.file_bytes, progress.file_total_bytes)

        async def sign() -> ExternalWeightsUrlsResponse:
            return _links(file.name, await server.rest.export_session_trace_async(session_id))

        fetched = server.connection.run(
            lambda: download_files(server.connection, sign, Path(folder), label=session_id, on_progress=on_progress)
        )
        server.wait(fetched)[0].replace(file)


def _links(name: str, url: str) -> ExternalWeightsUrlsResponse:
    from tinsmith.types import ExternalWeightsUrlsResponse

    return ExternalWeightsUrlsResponse(urls={name: url}, expires=datetime.now(UTC) + LINK_LIFETIME)
