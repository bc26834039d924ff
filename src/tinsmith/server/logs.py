"""Log lines of all processes of the server: for people, or one JSON object each for programs.

Whatever comes from outside cannot end a line, or look like another one: control characters are written as escapes, and
the lines of a traceback are marked. Prompts and tokens are never logged. Errors that quote the value they stumbled
over, which may be one of those, are named without their text.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TextIO, TypeAlias

import msgspec
from google.protobuf.message import DecodeError

from tinsmith.errors import InvalidInputError

if TYPE_CHECKING:
    from tinsmith.server.store.records import Job

LogFormat: TypeAlias = Literal["text", "json"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]

FIELDS = (
    "request_id",
    "model_id",
    "session_id",
    "base_model",
    "owner",
    "key_id",
    "address",
    "method",
    "route",
    "status",
    "seconds",
    "reason",
)
"""What a line may say besides its message; given as `extra`, or by `about` for all lines of a request."""

_LONGEST_MESSAGE = 4000
_LONGEST_VALUE = 200
_PLAIN = re.compile(r"[\w.:/@+{}-]+", re.ASCII)
_IN_MESSAGE = ("method", "route", "status")
"""What people read in the message of a line about a request."""
_QUOTING_ERRORS = (InvalidInputError, LookupError, ValueError, TypeError, msgspec.MsgspecError, DecodeError)

_about: ContextVar[dict[str, object] | None] = ContextVar("about", default=None)


def configure(
    style: LogFormat = "text", level: LogLevel = "info", stream: TextIO | None = None, **constants: str
) -> None:
    """Log to standard error, or to `stream`, from now on; `constants` are fields of every line.

    Libraries speak of trouble only.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonLines(constants) if style == "json" else _TextLines(constants))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("tinsmith").setLevel(level.upper())
    logging.captureWarnings(True)


def log_what_ends_us() -> None:
    """An error that ends this process is a log line like others."""

    def last_words(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        logging.getLogger(__name__).critical("This process ends.", exc_info=(kind, error, trace))

    sys.excepthook = last_words


@contextmanager
def one_request() -> Iterator[None]:
    """All lines until the end of it are about one request."""
    token = _about.set({})
    try:
        yield
    finally:
        _about.reset(token)


def about(**fields: object) -> None:
    """What the request is about, as far as is known by now."""
    known = _about.get()
    if known is not None:
        known.update(fields)


def of_job(job: Job) -> dict[str, object]:
    """The fields of a line about a job."""
    return {name: getattr(job, name) for name in ("request_id", "model_id", "session_id", "owner")}


def printable(text: str, longest: int = _LONGEST_VALUE) -> str:
    """On one line, and not too long."""
    if len(text) > longest:
        text = f"{text[: longest // 2]}...{text[-longest // 2 :]}"
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class _Lines(logging.Formatter):
    def __init__(self, constants: Mapping[str, str]) -> None:
        super().__init__()
        self._constants = constants

    def _fields(self, record: logging.LogRecord) -> dict[str, Any]:
        given = {**self._constants, **(_about.get() or {}), **record.__dict__}
        return {name: _shown(given[name]) for name in FIELDS if given.get(name) is not None}

    def _time(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class _TextLines(_Lines):
    def format(self, record: logging.LogRecord) -> str:
        message = printable(record.getMessage(), _LONGEST_MESSAGE)
        parts = [self._time(record), record.name, record.levelname, message]
        fields = self._fields(record).items()
        parts += [f"{name}={_quoted(value)}" for name, value in fields if name not in _IN_MESSAGE]
        return "\n    | ".join([" ".join(parts), *(printable(line) for line in _trace(record))])


class _JsonLines(_Lines):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self._time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": printable(record.getMessage(), _LONGEST_MESSAGE),
            **self._fields(record),
        }
        if trace := _trace(record):
            line["traceback"] = [printable(each) for each in trace]
        return json.dumps(line)  # with escapes for all that is not ASCII


def _shown(value: object) -> object:
    if isinstance(value, float):
        return round(value, 6)
    return value if isinstance(value, int) else printable(str(value))


def _quoted(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def _trace(record: logging.LogRecord) -> list[str]:
    """Where an error came from, and the errors before it: the first one first."""
    error = record.exc_info[1] if record.exc_info else None
    lines: list[str] = []
    for each in reversed(_chain(error)):
        lines.append("Traceback (most recent call last):")
        lines += [line for frame in traceback.format_tb(each.__traceback__) for line in frame.splitlines()]
        lines.append(_named(each))
    return lines


def _chain(error: BaseException | None) -> list[BaseException]:
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return chain


def _named(error: BaseException) -> str:
    name = type(error).__qualname__
    if isinstance(error, _QUOTING_ERRORS):
        return f"{name} (its text may quote a request, and is not logged)"
    return f"{name}: {error}"
