"""`tinsmith model`: what can be trained and sampled."""

from __future__ import annotations

import click

from tinsmith.cli import shown
from tinsmith.cli.connect import Server
from tinsmith.cli.errors import CommandFailed
from tinsmith.cli.options import Options
from tinsmith.cli.output import emit_json, emit_table


@click.group()
def command() -> None:
    """List the base models of a server."""


@command.command("list")
@click.argument("substring", default="")
@click.pass_obj
def list_models(options: Options, substring: str) -> None:
    """List the base models, or those whose name contains SUBSTRING in any case."""
    with Server(options) as server, server.patience():
        models = server.service.get_server_capabilities().supported_models
    found = [model for model in models if substring.lower() in (model.model_name or "").lower()]
    if not found:
        names = ", ".join(model.model_name or "(unnamed)" for model in models)
        wanted = f"whose name contains {substring!r}" if substring else "for this account"
        raise CommandFailed(
            f"There is no model {wanted} at {server.config.base_url}.", remedy=f"There are: {names}" if names else ""
        )
    if options.wants_json:
        emit_json({"models": [model.model_dump(mode="json") for model in found]})
        return
    rows = [
        [
            model.model_name or "N/A",
            str(model.max_context_length or "N/A"),
            shown.yes_no(model.trainable),
            shown.yes_no(model.sampleable),
        ]
        for model in found
    ]
    emit_table("", ("Model", "Max Context", "Trainable", "Sampleable"), rows)
