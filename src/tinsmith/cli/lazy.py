"""A group of commands whose modules are imported when they are used."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click

from tinsmith.cli.errors import did_you_mean


class LazyGroup(click.Group):
    """Knows of its commands only the name and one line of help; `PACKAGE.NAME` holds the rest as `command`."""

    def __init__(self, *arguments: Any, package: str, summaries: Mapping[str, str], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.package = package
        self.summaries = summaries

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.summaries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.summaries:
            return None
        command: click.Command = import_module(f"{self.package}.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Click looks for what may have been meant among commands that it has, and of these it has none."""
        name = args[0]
        if name not in self.summaries and not name.startswith("-") and not ctx.resilient_parsing:
            ctx.fail(f"No such command '{name}'. {did_you_mean(name, self.summaries)}".rstrip())
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(self.summaries.items()))
