"""How a command that fails says so: a headline, the details, what to do next, and the exit code."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
import traceback
from collections.abc import Mapping
from typing import NamedTuple

import click

from tinsmith.cli import INTERRUPTED
from tinsmith.cli.errors import ClosedPipe, CommandFailed
from tinsmith.cli.output import abandon_stdout, note
from tinsmith.errors import (
    APIConnectionError,
    APIError,
    APIStatusError,
    APITimeoutError,
    RequestFailedError,
    TinkerError,
)

FAILED = 1
CLOSED_PIPE = 141
"""What shells report for a program that a closed pipe ended."""

_MAX_SHOWN = 1000
_KEY = re.compile(r"\b(tml-|eyJ)[\w.-]{4,}")

_UNREACHABLE = "Check that the server runs and that --base-url (or TINKER_BASE_URL) names it."
_HOW_TO_GIVE_A_KEY = (
    "Give one with --api-key or TINKER_API_KEY, or store it with `tinsmith auth login`. "
    "A server of your own that has no keys takes any that starts with 'tml-'. "
    "To work on this machine alone, without a key: --base-url local, or TINKER_BASE_URL=local."
)


class Failure(NamedTuple):
    headline: str
    details: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        return "\n".join(filter(None, self))


_BY_STATUS = {
    400: ("Invalid request", "Check the arguments of the command."),
    401: ("Authentication failed", "Check the key: --api-key, TINKER_API_KEY or `tinsmith auth login`."),
    402: ("Billing issue", "Check the billing of the account."),
    403: ("Permission denied", "The key is good, but it may not do this. Check who owns the thing."),
    404: ("Resource not found", "Check the id or path. What belongs to another account is not found either."),
    409: ("API error (status 409)", "Look at how things stand: it may be so already."),
    422: ("Invalid data provided", "Check the arguments of the command."),
    429: ("Rate limit exceeded", "Wait a little and run the command again."),
}


def report(error: BaseException) -> int:
    """Tells on stderr why the command ended, and gives the exit code."""
    _drop_what_cannot_be_written()
    if isinstance(error, ClosedPipe):
        return CLOSED_PIPE
    if isinstance(error, click.Abort | KeyboardInterrupt | EOFError):
        note("Interrupted.")
        return INTERRUPTED
    if isinstance(error, click.ClickException):
        shown = io.StringIO()
        error.show(shown)
        note(_without_keys(shown.getvalue().rstrip("\n")))
        return error.exit_code
    if os.environ.get("TINKER_LOG") == "debug":
        note(_without_keys("".join(traceback.format_exception(error)).rstrip("\n")))
    note(_without_keys(f"Error: {explain(error)}"))
    return FAILED


def explain(error: BaseException) -> Failure:
    if isinstance(error, CommandFailed):
        return Failure(error.headline, error.details, error.remedy)
    if isinstance(error, TinkerError):  # before OSError: some of them are that too
        return _explain_sdk(error)
    if isinstance(error, OSError):
        return _explain_system(error)
    if isinstance(error, ModuleNotFoundError) and error.name:
        remedy = "Install it with: pip install 'tinsmith[cli]' (from a checkout: pip install '.[cli]')"
        return Failure(f"The package {error.name!r} is missing", remedy=remedy)
    return Failure(
        "Unexpected error occurred",
        f"{type(error).__name__}: {error}",
        "This is a fault of the program. Run it again with TINKER_LOG=debug to see where, and please report it.",
    )


def _explain_sdk(error: TinkerError) -> Failure:
    if isinstance(error, APIStatusError):
        return _explain_status(error)
    if isinstance(error, APITimeoutError):
        return Failure("Request timeout", str(error), f"{_UNREACHABLE} --timeout gives it more time.")
    if isinstance(error, APIConnectionError):
        return Failure("Connection failed", str(error), _UNREACHABLE)
    if isinstance(error, APIError):
        return Failure("API error occurred", str(error), _UNREACHABLE)
    if isinstance(error, RequestFailedError):
        return Failure("The server accepted the request, but it failed there", str(error))
    if str(error) == _no_key_message():
        return Failure("No API key", remedy=_HOW_TO_GIVE_A_KEY)
    return Failure(str(error))  # which says what is wrong and what to do


def _no_key_message() -> str:
    from tinsmith.client.config import NO_KEY

    return NO_KEY


def _explain_status(error: APIStatusError) -> Failure:
    status = error.status_code
    headline, remedy = _BY_STATUS.get(status, (f"API error (status {status})", "Check the arguments of the command."))
    if status >= 500:
        headline = "Internal server error"
        remedy = "Run the command again. If it keeps failing, the log of the server says more."
    asked = f" ({' '.join(error.request)})" if error.request else ""
    return Failure(headline, f"The server answered with status {status}: {_said(error.body)}{asked}", remedy)


def _said(body: object) -> str:
    """What the server gave as its reason, in its own words."""
    detail = body.get("detail", body) if isinstance(body, Mapping) else body
    if detail is None:
        return "no reason given"
    text = detail if isinstance(detail, str) else json.dumps(detail, default=str)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _explain_system(error: OSError) -> Failure:
    place = f": {error.filename}" if error.filename else ""
    remedies = {
        errno.ENOSPC: "Make room and run the command again.",
        errno.EDQUOT: "Make room and run the command again.",
        errno.EACCES: "Choose another place, or change the permissions of this one.",
        errno.EROFS: "Choose another place; this one is read-only.",
    }
    return Failure(f"{error.strerror or error}{place}", remedy=remedies.get(error.errno or 0, ""))


def _without_keys(text: str) -> str:
    """A key may have come in as an argument where none belongs, and be quoted in the complaint about it."""
    return _KEY.sub(r"\1...", text)


def _drop_what_cannot_be_written() -> None:
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        abandon_stdout()
