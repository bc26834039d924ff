"""Every error that either half raises, in one tree.

::

    TinkerError
    ├── APIError                            the server, or the way to it
    │   ├── APIStatusError                  an answer with a status of 400 or more; also a ValueError
    │   │   ├── BadRequestError             400
    │   │   ├── AuthenticationError         401
    │   │   ├── BillingError                402
    │   │   ├── PermissionDeniedError       403
    │   │   ├── NotFoundError               404
    │   │   ├── ConflictError               409
    │   │   ├── RequestExpiredError         410: the server no longer knows this request
    │   │   ├── UnprocessableEntityError    422
    │   │   ├── RateLimitError              429
    │   │   └── InternalServerError         500 and above
    │   ├── APIResponseValidationError      an answer that is not what the API promises; also a ValueError
    │   └── APIConnectionError              no answer
    │       └── APITimeoutError             no answer in time; also a TimeoutError
    │           └── NoProgressError         nothing finished for `progress_timeout` seconds
    ├── RequestFailedError                  the server accepted the request, and it failed there
    ├── InvalidInputError                   refused before anything was sent; also a ValueError
    │   └── InvalidTypeError                the same for a value of the wrong type; also a TypeError
    ├── ConfigError                         missing key, bad key, bad URL, bad setting; also a ValueError
    ├── ClientClosedError                   used after close(); also a RuntimeError
    ├── ForkedProcessError                  used in a forked child; also a RuntimeError
    ├── WouldDeadlockError                  a blocking call where it can never return; also a RuntimeError
    ├── PendingLimitError                   `max_pending` samples are waiting already; also a RuntimeError
    ├── UnconfirmedOperationError           the training order is unknown after a lost answer; also a RuntimeError
    ├── UnsupportedByServerError            the server ignored or lacks what was asked for; also a RuntimeError
    ├── TokenizerError                      a tokenizer could not be found or loaded; also a RuntimeError
    ├── MissingExtraError                   an optional package is not installed; also an ImportError
    └── StreamAlreadyConsumed               a stream can be read once

A message says what happened, with which value, and what to do next. All of them survive pickling.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tinsmith.types import RequestErrorCategory


class RequestSummary(NamedTuple):
    """Which call an error belongs to. Headers and bodies are left out: they hold keys and prompts."""

    method: str
    url: str


class ResponseSummary(NamedTuple):
    """What the server answered, without the body (see `APIError.body`)."""

    status_code: int
    headers: Mapping[str, str]
    request: RequestSummary | None = None


def _rebuild(cls: type[TinkerError], args: tuple[Any, ...], state: dict[str, Any]) -> TinkerError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class TinkerError(Exception):
    """The root of the tree: `except TinkerError` catches whatever Tinsmith raises."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))


class APIError(TinkerError):
    """Something between us and the server went wrong."""

    def __init__(self, message: str, request: RequestSummary | None = None, *, body: object | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.request = request
        self.body = body


class APIStatusError(APIError, ValueError):
    """The server answered with a status of 400 or more.

    It is a ValueError too because code written for other clients catches that while it waits for results.
    """

    def __init__(
        self, message: str, response: ResponseSummary, body: object | None = None, *, retry_after: float | None = None
    ) -> None:
        super().__init__(message, response.request, body=body)
        self.response = response
        self.status_code = response.status_code
        self.retry_after = retry_after
        """Seconds the server asked us to wait, if it said so."""


class BadRequestError(APIStatusError):
    """400: the server cannot make sense of the request."""


class AuthenticationError(APIStatusError):
    """401: the key is missing, wrong or revoked."""


class BillingError(APIStatusError):
    """402: the account cannot pay for this."""


class PermissionDeniedError(APIStatusError):
    """403: the key may not do this."""


class NotFoundError(APIStatusError):
    """404: no such thing, or it belongs to someone else."""


class ConflictError(APIStatusError):
    """409: the request contradicts the present state."""


class RequestExpiredError(APIStatusError):
    """410: the server no longer knows this request; submit it again."""


class UnprocessableEntityError(APIStatusError):
    """422: well-formed, but a value is not acceptable."""


class RateLimitError(APIStatusError):
    """429: too much at once."""


class InternalServerError(APIStatusError):
    """500 and above: the server failed."""


STATUS_ERRORS: Mapping[int, type[APIStatusError]] = {
    400: BadRequestError,
    401: AuthenticationError,
    402: BillingError,
    403: PermissionDeniedError,
    404: NotFoundError,
    409: ConflictError,
    410: RequestExpiredError,
    422: UnprocessableEntityError,
    429: RateLimitError,
}


def status_error_class(status: int) -> type[APIStatusError]:
    """The class for a status; the same one is raised by the server and caught by the user."""
    if status >= 500:
        return InternalServerError
    return STATUS_ERRORS.get(status, APIStatusError)


class APIResponseValidationError(APIError, ValueError):
    """The server's answer does not have the promised form."""

    def __init__(self, response: ResponseSummary, body: object | None = None, message: str | None = None) -> None:
        super().__init__(message or "The answer does not have the form this API promises.", response.request, body=body)
        self.response = response
        self.status_code = response.status_code


class APIConnectionError(APIError):
    """No answer came: refused, reset, unreachable, cut off."""

    def __init__(self, request: RequestSummary | None = None, message: str = "Connection error.") -> None:
        super().__init__(message, request)


class APITimeoutError(APIConnectionError, TimeoutError):
    """No answer came in time."""

    def __init__(self, request: RequestSummary | None = None, message: str = "Request timed out.") -> None:
        super().__init__(request, message)


class NoProgressError(APITimeoutError):
    """Nothing finished for as long as `RetryConfig.progress_timeout` allows."""


class RequestFailedError(TinkerError):
    """The server accepted the request and then reported that it failed."""

    def __init__(self, message: str, request_id: str, category: RequestErrorCategory) -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id
        self.category = category


class InvalidInputError(TinkerError, ValueError):
    """A value was refused before anything was sent."""

    def __init__(self, message: str, *, field: str | None = None, value: object = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.value = _shown(value)


class InvalidTypeError(InvalidInputError, TypeError):
    """A value has the wrong type."""


class ConfigError(TinkerError, ValueError):
    """A setting is missing or malformed."""


class ClientClosedError(TinkerError, RuntimeError):
    """The client was closed; create a new ServiceClient."""


class ForkedProcessError(TinkerError, RuntimeError):
    """The process was forked after Tinsmith had started its threads; those do not exist in the child."""


class WouldDeadlockError(TinkerError, RuntimeError):
    """A blocking call was made where it could never return."""


class PendingLimitError(TinkerError, RuntimeError):
    """As many samples as `max_pending` allows are waiting already."""


class UnconfirmedOperationError(TinkerError, RuntimeError):
    """An earlier training operation was sent but never confirmed, so the model's state is not known."""


class UnsupportedByServerError(TinkerError, RuntimeError):
    """The server ignored an option or lacks an endpoint."""


class TokenizerError(TinkerError, RuntimeError):
    """A tokenizer could not be found or loaded."""


class MissingExtraError(TinkerError, ImportError):
    """An optional package is needed for this."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}. Install it with: pip install 'tinsmith[{extra}]' "
            f"(from a checkout: pip install '.[{extra}]')"
        )


class StreamAlreadyConsumed(TinkerError):
    """A stream can be read once; keep what you need from the first pass."""


def _shown(value: object) -> str:
    """A short text of a value: whole objects would make errors heavy and unpicklable."""
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."
