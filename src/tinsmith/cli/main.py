"""`tinsmith`: the command group. What a command needs is imported when it runs."""

from __future__ import annotations

from pathlib import Path

import click

from tinsmith._version import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tinsmith", message="%(prog)s %(version)s")
def main() -> None:
    """Both ends of the Tinker training API."""


@main.command()
@click.option("--model", "models", multiple=True, required=True, metavar="MODEL", help="Hub id, folder or NAME=FOLDER.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=8000, show_default=True, help="0 takes a free one.")
@click.option("--state", type=click.Path(path_type=Path, file_okay=False), help="Folder of all that must last.")
@click.option("--database", default="", metavar="URL", help="PostgreSQL URL; by default SQLite in the state folder.")
@click.option("--api-key", "api_keys", multiple=True, metavar="KEY", help="A key to accept; repeatable.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda", "mps"]), default="auto", show_default=True)
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16"]), default="auto", show_default=True)
def serve(
    models: tuple[str, ...],
    host: str,
    port: int,
    state: Path | None,
    database: str,
    api_keys: tuple[str, ...],
    device: str,
    dtype: str,
) -> None:
    """Serve the Tinker API on this machine."""
    import logging

    from tinsmith.errors import TinkerError
    from tinsmith.server.config import ServerConfig
    from tinsmith.server.main import serve as run
    from tinsmith.server.models import parse_source

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        config = ServerConfig(
            models=tuple(map(parse_source, models)),
            host=host,
            port=port,
            state=(state or Path.home() / ".tinsmith").absolute(),
            database=database,
            api_keys=api_keys,
            device=device,  # type: ignore[arg-type]
            dtype=dtype,  # type: ignore[arg-type]
        )
        run(config, on_ready=lambda address: click.echo(f"Tinsmith is ready at {address}"))
    except TinkerError as error:
        raise click.ClickException(str(error)) from error
