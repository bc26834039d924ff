"""What may leave the machine: texts without credentials, errors without the user's data."""

from __future__ import annotations

import re
import traceback
from collections.abc import Collection, Iterator, Mapping

from tinsmith.errors import APIConnectionError, APIStatusError, RequestFailedError

_HIDDEN = "[redacted]"
_MIN_SECRET_LENGTH = 4
_MAX_SCANNED = 8000
_MAX_TEXT = 2000
_MAX_FRAMES = 40
_MAX_CHAIN = 5
WITHHELD = "(withheld: the text may quote the user's data)"

_LABELLED = re.compile(
    r"""((?:authorization|cookie|api[-_]?key|token(?!s|iz)|secret|password|jwt|credential)[\w-]{0,40}
        (?:\\*["']\s*[:,]\s*|\s*[:=]\s*))
        (?:b?"(?:[^"\\]|\\.)*"?|b?'(?:[^'\\]|\\.)*'?|[^\n]+)""",
    re.VERBOSE | re.IGNORECASE,
)
_PATTERNS = (
    (_LABELLED, rf"\1{_HIDDEN}"),
    (re.compile(r"\bbearer\s+[^\s\"',]+", re.IGNORECASE), f"Bearer {_HIDDEN}"),
    (re.compile(r"\btml-[^\s\"'<>,;)\]}]+"), _HIDDEN),
    (re.compile(r"\beyJ[\w-]+(?:\.[\w-]*)*"), _HIDDEN),
    (re.compile(r"(?<=://)[^/\s@\"']+@"), f"{_HIDDEN}@"),
)
# Signed links. The query is optional so that every link matches as a whole: text of many links stays linear.
_LINK = re.compile(r"(https?://[^\s?#\"']*)(\?[^\s#\"']+)?")
_NUMBERS = re.compile(r"(?<![\w.])(?:[-+]?\d[\d.eE+-]*[,;\s]+){7,}[-+]?\d[\d.eE+-]*")


def redact(text: str, secrets: Collection[str] = ()) -> str:
    """The text without the given secrets, and without whatever looks like a credential."""
    text = hide_known(text, secrets)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return _LINK.sub(lambda link: f"{link[1]}?{_HIDDEN}" if link[2] else link[0], text)


def hide_known(text: str, secrets: Collection[str]) -> str:
    """The text without the given secrets; very short ones would tear holes into ordinary words."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _MIN_SECRET_LENGTH:
            text = text.replace(secret, _HIDDEN)
    return text


def fit_to_send(text: str, secrets: Collection[str]) -> str:
    """Known secrets go first, so that no cut can leave half of one."""
    text = redact(hide_known(text, secrets)[:_MAX_SCANNED])
    text = _NUMBERS.sub("[numbers]", text)[:_MAX_TEXT]
    return text.encode(errors="replace").decode()  # JSON cannot carry half a surrogate pair


def server_text(error: BaseException) -> str | None:
    """What the server or the network said; None for other errors, whose text may quote prompts or local values."""
    if isinstance(error, APIStatusError):
        detail = _detail(error.body)
        return f"Error code: {error.status_code}" + (f" - {detail}" if detail else "")
    if isinstance(error, RequestFailedError | APIConnectionError):
        return error.message
    return None


def _detail(body: object) -> str | None:
    """The sentence in an error answer. Its other parts are left: validation errors echo the request."""
    if isinstance(body, Mapping):
        body = next((body[key] for key in ("detail", "error", "message") if isinstance(body.get(key), str)), None)
    return body if isinstance(body, str) else None


def places_of(error: BaseException) -> str | None:
    """A traceback of file, line and function; source lines would show literals, and whole paths the user's name."""
    lines: list[str] = []
    for link in causes_of(error):
        lines.append(type(link).__name__)
        frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(link.__traceback__)][-_MAX_FRAMES:]
        lines.extend(f"  {_short_path(code.co_filename)}:{line} in {code.co_name}" for code, line in frames)
    return "\n".join(lines) if error.__traceback__ else None


def _short_path(path: str) -> str:
    return "/".join(path.replace("\\", "/").split("/")[-3:])


def causes_of(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    for _ in range(_MAX_CHAIN):  # a chain may be a circle
        if link is None:
            return
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
