"""`tinsmith train`: whole training recipes."""

from __future__ import annotations

import click

from tinsmith.cli.train_sft import sft


@click.group()
def command() -> None:
    """Train a model on a file of examples."""


command.add_command(sft)
