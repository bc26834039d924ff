"""Asks before something is destroyed."""

from __future__ import annotations

import sys

import click

from tinsmith.cli.errors import CommandFailed
from tinsmith.cli.output import note


def check_can_ask() -> None:
    """Without a terminal there is nobody to ask, so the answer must come with the command."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise click.UsageError("This cannot be undone, and there is no terminal to ask at: add --yes if you mean it.")


def confirm(summary: str, question: str) -> None:
    """Goes on only after a yes. The question is not part of the output, so it goes to stderr."""
    note(summary)
    sys.stderr.write(f"{question} [y/N]: ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandFailed("Nothing was done, because the answer was not yes.")
