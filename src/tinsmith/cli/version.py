"""`tinsmith version`."""

from __future__ import annotations

import click

from tinsmith._version import __title__, __version__
from tinsmith.cli.options import Options
from tinsmith.cli.output import emit, emit_json


@click.command("version")
@click.pass_obj
def command(options: Options) -> None:
    """Show the version."""
    if options.wants_json:
        emit_json({"name": __title__, "version": __version__})
    else:
        emit(f"{__title__} {__version__}\n")
