"""Kinds of arguments. What does not fit is a usage error, before anything is sent."""

from __future__ import annotations

from datetime import UTC, datetime

import click


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
