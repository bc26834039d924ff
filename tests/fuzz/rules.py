"""What every answer must be like, whatever was asked."""

from __future__ import annotations

import json
from typing import Any

from tests.fuzz.world import KEY, OTHER_KEY, TOKEN, Answer, Case

MAX_REFUSAL_BYTES = 8192
SECRETS = tuple(secret.encode() for secret in (KEY, OTHER_KEY, TOKEN))
NO_ANSWER = Answer(0, {}, b"")
"""The connection was closed instead."""

NOT_HTTP = b"Invalid HTTP request received."
"""What the HTTP server says by itself, before the app is asked."""


def broken(case: Case, answer: Answer) -> str | None:
    """The rule that an answer breaks, if any."""
    if answer == NO_ANSWER:
        return None if lies_about_its_length(case) else "no answer"
    if answer.status >= 500:
        return f"status {answer.status}"
    if any(secret in answer.body for secret in SECRETS):
        return "a credential in the answer"
    if answer.status >= 400:
        return None if (answer.status, answer.body) == (400, NOT_HTTP) else _refusal(answer)
    return None if answer.status in (200, 204, 206) else f"status {answer.status}"


def lies_about_its_length(case: Case) -> bool:
    return any(name == "content-length" for name, _ in case.headers)


def _refusal(answer: Answer) -> str | None:
    """In words, of bearable length, and with a length of its own: some clients need that."""
    if len(answer.body) > MAX_REFUSAL_BYTES:
        return f"a refusal of {len(answer.body):,} bytes"
    if "content-encoding" in answer.headers or answer.headers.get("content-length") != str(len(answer.body)):
        return "a refusal without its length"
    try:
        said: Any = json.loads(answer.body)
    except ValueError:
        return "a refusal that is not JSON"
    if answer.status == 408 and said.get("type") == "try_again":
        return None
    said = said.get("error", said) if isinstance(said, dict) else {}  # in OpenAI's form, or in ours
    detail = said.get("message", said.get("detail")) if isinstance(said, dict) else None
    return None if isinstance(detail, str) and len(detail) > 10 else "a refusal without a reason"
