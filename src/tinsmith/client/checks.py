"""Checks of arguments that go into a URL or decide what is sent, made before anything is."""

from __future__ import annotations

from collections.abc import Mapping

from tinsmith.errors import InvalidInputError, InvalidTypeError
from tinsmith.types import ParsedCheckpointTinkerPath


def check_text(field: str, value: object) -> str:
    """A text that is not empty."""
    if not isinstance(value, str):
        raise InvalidTypeError(f"{field} is {value!r}; it must be a text.", field=field, value=value)
    if not value.strip():
        raise InvalidInputError(f"{field} is empty.", field=field, value=value)
    return value


def check_id(field: str, value: object) -> str:
    """An id that stands for one part of a URL."""
    text = check_text(field, value)
    if "/" in text or text in (".", ".."):
        raise InvalidInputError(
            f"{field} is {text!r}, which is no id: ids hold no slash. Calls that take a tinker:// path have names "
            "that end in _by_tinker_path or _from_tinker_path.",
            field=field,
            value=text,
        )
    return text


def check_metadata(value: object) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidTypeError(
            f"user_metadata is {value!r}; it must be a dictionary of texts.", field="user_metadata", value=value
        )
    return dict(value)


def check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        legal = ", ".join(map(repr, choices))
        raise InvalidInputError(f"{field} is {value!r}; it must be one of {legal}.", field=field, value=value)


def check_count(field: str, value: object, minimum: int = 0) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidTypeError(f"{field} is {value!r}; it must be a whole number.", field=field, value=value)
    if value < minimum:
        raise InvalidInputError(f"{field} is {value}; it must be at least {minimum}.", field=field, value=value)


def parse_checkpoint_path(field: str, value: object) -> ParsedCheckpointTinkerPath:
    """A `tinker://` path in its parts, none of them empty."""
    text = check_text(field, value)
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(text)
    if not parsed.training_run_id or parsed.checkpoint_id.endswith("/"):
        raise InvalidInputError(
            f"{field} is {text!r}, which lacks a run or a name; a checkpoint path looks like "
            "tinker://<run>/<kind>/<name>.",
            field=field,
            value=text,
        )
    return parsed
