"""Kinds of arguments. What does not fit is a usage error, before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import click


class Number(click.FloatRange):
    """Within bounds, and neither infinite nor `nan`, which would be within any."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number.", param, ctx)
        return number


class CheckpointPath(click.ParamType):  # type: ignore[type-arg]  # generic only in later releases of click
    name = "path"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from tinsmith.errors import InvalidInputError
        from tinsmith.types import ParsedCheckpointTinkerPath

        try:
            ParsedCheckpointTinkerPath.from_tinker_path(value)
        except InvalidInputError as error:
            self.fail(str(error), param, ctx)
        return value


class UtcTime(click.ParamType):  # type: ignore[type-arg]
    """A date or a time in ISO 8601; without a zone it is UTC."""

    name = "time"

    def convert(self, value: str | datetime, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r} is no time. One looks like 2026-01-31 or 2026-01-31T08:00:00Z.", param, ctx)
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


CHECKPOINT_PATH = CheckpointPath()
UTC_TIME = UtcTime()


def sampling_options(*, max_tokens: int, temperature: float) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """How a model draws its tokens, with the defaults of a command."""
    options = [
        click.option(
            "--max-tokens",
            type=click.IntRange(min=1),
            default=max_tokens,
            show_default=True,
            metavar="N",
            help="When to stop at the latest.",
        ),
        click.option(
            "--temperature",
            type=Number(min=0),
            default=temperature,
            show_default=True,
            metavar="X",
            help="0 takes the likeliest token every time.",
        ),
        click.option(
            "--top-p",
            type=Number(min=0, max=1),
            default=1.0,
            show_default=True,
            metavar="P",
            help="Only the likeliest tokens that together have this probability.",
        ),
        click.option("--seed", type=int, metavar="N", help="The same seed gives the same text."),
    ]

    def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return with_options
