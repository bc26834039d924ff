"""Refusals in the form that clients of OpenAI's API read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from tinsmith.errors import APIStatusError, InvalidInputError, ResponseSummary
from tinsmith.server.routes._call import reply_plain, shortened

_TYPES: Mapping[int, str] = {401: "authentication_error", 429: "rate_limit_error"}
_CODES: Mapping[int, str] = {
    401: "invalid_api_key",
    404: "not_found",
    413: "request_too_large",
    429: "rate_limit_exceeded",
    503: "unavailable",
}
_NAMES = {"num_samples": "n", "base_model": "model", "sampling_session_id": "model", "tokens": "prompt"}
"""What our errors call it, and what it is called here."""


class Refused(APIStatusError):
    """A refusal that names the parameter it is about."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, ResponseSummary(status, {}), retry_after=retry_after)
        self.param = param
        self.code = code


def invalid(param: str, problem: str, code: str | None = None) -> Refused:
    return Refused(400, f"{param} {problem}", param, code)


def refusal(status: int, detail: str, error: Exception | None = None) -> Response:
    """What is not acceptable in a request is a 400 here, whatever it is elsewhere."""
    status = 400 if isinstance(error, InvalidInputError) else status
    return reply_plain(described(status, detail, error), status)


def described(status: int, detail: str, error: Exception | None = None) -> dict[str, Any]:
    return {
        "error": {
            "message": shortened(detail.replace("sampling_params.", "")),
            "type": "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error"),
            "param": error.param if isinstance(error, Refused) else _param(error),
            "code": (error.code if isinstance(error, Refused) else None) or _CODES.get(status),
        }
    }


def _param(error: Exception | None) -> str | None:
    if not isinstance(error, InvalidInputError) or error.field is None:
        return None
    name = error.field.rpartition(".")[2]
    return _NAMES.get(name, name)
