"""Why something was refused or has failed, for the operator: in the log and the audit trail, which quote no requests.

The texts for clients quote what was sent. So of those only the kind is told here, and what it is about: a limit by its
name in the metrics, a field of the request, or the words before anything is quoted.
"""

from __future__ import annotations

import re

from tinsmith.errors import APIStatusError, InvalidInputError

LIMITS = ("open_requests", "incoming_bytes", "queued", "records", "models", "checkpoint_bytes", "conversions")
"""By the names that errors have in `limit`, and metrics as a label."""

_IN_WORDS = (401, 403, 404)
"""Statuses whose texts begin with words of ours."""

_CANNOT_WORK = 503
"""The status whose texts are all of ours: they tell of the server, and not of the request."""

_WORDS = re.compile(r"(?:(?!tinker:)[\w ,-])*")
_FIELD = re.compile(r"\w+")


def reason(error: APIStatusError | InvalidInputError) -> str:
    if (limit := limit_of(error)) is not None:
        return limit
    kind = type(error).__name__
    if isinstance(error, InvalidInputError):
        field = _FIELD.match(error.field or "")
        return f"{kind}: {field[0]}" if field else kind
    if error.status_code == _CANNOT_WORK:
        return error.message
    words = _words(error.message) if error.status_code in _IN_WORDS else ""
    return words or kind


def limit_of(error: Exception) -> str | None:
    """The limit that something was refused for."""
    limit: str | None = getattr(error, "limit", None)
    return limit


def _words(text: str) -> str:
    found = _WORDS.match(text)
    return found[0].strip() if found else ""
