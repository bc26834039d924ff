"""Calls of tools in what a model wrote, in the form that the templates of Qwen and Hermes ask for.

<tool_call>{"name": ..., "arguments": {...}}</tool_call>
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class _Call(msgspec.Struct):
    name: str
    arguments: dict[str, Any] = {}


def find(text: str, identity: str) -> tuple[str, list[dict[str, Any]]]:
    """The text around the calls, and the calls; all of it is text if one of them cannot be read."""
    try:
        calls = [msgspec.json.decode(found, type=_Call) for found in _CALL.findall(text)]
    except msgspec.DecodeError:
        return text, []
    if not calls:
        return text, []
    told = [_told(call, f"call_{identity}_{number}") for number, call in enumerate(calls)]
    return _CALL.sub("", text).strip(), told


def _told(call: _Call, identity: str) -> dict[str, Any]:
    arguments = msgspec.json.encode(call.arguments).decode()
    return {"id": identity, "type": "function", "function": {"name": call.name, "arguments": arguments}}
