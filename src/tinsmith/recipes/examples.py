"""Reads training examples from JSONL, and refuses a file with a bad line as a whole, saying which and why."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tinsmith.errors import InvalidInputError

L = TypeVar("L")
T = TypeVar("T")

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_TOLD = 5
"""Bad lines that are shown; the rest is counted."""
_MAX_SHOWN = 60


class Example(NamedTuple):
    """One line of a file."""

    line: int
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    is_chat: bool = True
    """False for a prompt with its completion, which are told as a user's message and the answer."""


class ExampleFile(NamedTuple):
    path: Path
    sha256: str
    examples: list[Example]


class BadLine(Exception):
    """Why a line cannot be used: its field, the value, what it should be."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def read_examples(path: Path) -> ExampleFile:
    """All examples of a file. Blank lines count as lines, but hold nothing."""
    content = path.read_bytes()
    examples = check_each(path, _numbered_lines(content), _example)
    if not examples:
        raise InvalidInputError(
            f"{path} holds no example. Put one JSON object on each line, such as "
            '{"prompt": "...", "completion": "..."}.',
            field="data",
        )
    check_each(path, numbered(examples), lambda _, example: _check_same_kind(example, examples[0]))
    return ExampleFile(path, sha256(content).hexdigest(), examples)


def numbered(examples: Iterable[Example]) -> Iterator[tuple[int, Example]]:
    return ((example.line, example) for example in examples)


def check_each(path: Path, lines: Iterable[tuple[int, L]], check: Callable[[int, L], T]) -> list[T]:
    """What the check makes of each numbered line; one error for all that it refuses."""
    made, problems = [], []
    for number, line in lines:
        try:
            made.append(check(number, line))
        except BadLine as error:
            problems.append(f"{path}, line {number}: {error.reason}")
    if problems:
        told = problems[:MAX_TOLD]
        if len(problems) > MAX_TOLD:
            told.append(f"... and {len(problems) - MAX_TOLD} more lines.")
        raise InvalidInputError("\n".join(told), field="data")
    return made


def shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def _numbered_lines(content: bytes) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if line.strip():
            yield number, line


def _example(number: int, line: bytes) -> Example:
    record = _parse(line)
    has_messages, has_pair = "messages" in record, "prompt" in record or "completion" in record
    if has_messages == has_pair:
        found = ", ".join(map(shown, record)) or "none"
        raise BadLine(f'its keys are {found}; it must have "messages", or "prompt" and "completion". Rename the keys.')
    if has_pair:
        prompt, completion = (_text(record, key, key) for key in ("prompt", "completion"))
        pair = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        return Example(number, pair, is_chat=False)
    return Example(number, _messages(record["messages"]), _tools(record.get("tools")))


def _parse(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadLine(f"byte {error.start + 1} is no UTF-8. Save the file as UTF-8.") from error
    except (ValueError, RecursionError) as error:
        begin = shown(line.decode("utf-8", "replace"))
        raise BadLine(f"{begin} is not JSON ({error}). Put one whole JSON object on each line.") from error
    if not isinstance(record, dict):
        raise BadLine(f"{shown(record)} is not a JSON object. Put one object on each line, and no list around them.")
    return record


def _messages(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise BadLine(
            f'messages is {shown(messages)}; it must be a list such as [{{"role": "user", "content": "Hi"}}].'
        )
    for index, message in enumerate(messages):
        _check_message(f"messages[{index}]", message)
    if not any(message["role"] == "assistant" for message in messages):
        raise BadLine("messages has no message of the assistant, so there is nothing to learn. Add the answer.")
    if messages[0]["role"] == "assistant":
        raise BadLine('messages[0].role is "assistant"; put what it answers, or a system message, before it.')
    return messages


def _check_message(place: str, message: object) -> None:
    if not isinstance(message, dict):
        raise BadLine(f'{place} is {shown(message)}; it must be an object with "role" and "content".')
    if message.get("role") not in ROLES:
        role = f"is {shown(message['role'])}" if "role" in message else "is missing"
        raise BadLine(f"{place}.role {role}; it must be one of {', '.join(ROLES)}.")
    if message["role"] == "assistant":
        if not message.get("tool_calls"):
            _text(message, "content", f"{place}.content")
    elif not isinstance(message.get("content"), str):
        raise BadLine(_not_a_text(message, "content", f"{place}.content"))


def _text(record: dict[str, Any], key: str, place: str) -> str:
    """A text with something in it."""
    text = record.get(key)
    if not isinstance(text, str):
        raise BadLine(_not_a_text(record, key, place))
    if not text.strip():
        raise BadLine(f"{place} is {shown(text)}, which is empty. Write what is meant, or remove the line.")
    return text


def _not_a_text(record: dict[str, Any], key: str, place: str) -> str:
    return f"{place} is {shown(record[key]) if key in record else 'missing'}; it must be a text."


def _tools(tools: object) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadLine(f"tools is {shown(tools)}; it must be a list of JSON schemas.")
    return tools


def _check_same_kind(example: Example, first: Example) -> None:
    if example.is_chat != first.is_chat:
        kinds = {True: "messages", False: "a prompt and a completion"}
        raise BadLine(
            f"it holds {kinds[example.is_chat]}, but line {first.line} holds {kinds[first.is_chat]}. "
            "Put the two kinds into files of their own."
        )
