"""Calls of tools in what a model wrote, in the form that the templates of Qwen and Hermes ask for.

<tool_call>{"name": ..., "arguments": {...}}</tool_call>
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

_BEGIN = re.compile(r"<tool_call>\s*(?=\{)")
_END = re.compile(r"(?<=\})\s*</tool_call>")


class _Call(msgspec.Struct):
    name: str
    arguments: dict[str, Any] = {}


def find(text: str, identity: str) -> tuple[str, list[dict[str, Any]]]:
    """The text around the calls, and the calls; all of it is text if one of them cannot be read."""
    around: list[str] = []
    told: list[dict[str, Any]] = []
    place = 0
    # Not as one pattern, which would look for the end anew from every beginning.
    while (begin := _BEGIN.search(text, place)) and (end := _END.search(text, begin.end())):
        try:
            call = msgspec.json.decode(text[begin.end() : end.start()], type=_Call)
            told.append(_told(call, f"call_{identity}_{len(told)}"))
        except (msgspec.DecodeError, RecursionError):
            return text, []
        around.append(text[place : begin.start()])
        place = end.end()
    return "".join([*around, text[place:]]).strip() if told else text, told


def _told(call: _Call, identity: str) -> dict[str, Any]:
    arguments = msgspec.json.encode(call.arguments).decode()
    return {"id": identity, "type": "function", "function": {"name": call.name, "arguments": arguments}}
