"""Writes `reference/names.md`: every public name with the first sentence of its docstring."""

import inspect
from pathlib import Path
from typing import Any

import tinsmith
from tinsmith import types

PAGE = Path(__file__).parent / "reference" / "names.md"
CLIENTS = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient")
INTRODUCTION = """# Public names

Everything in `tinsmith` is loaded on first use. Written by `python docs/names.py` from the docstrings.
"""


def render() -> str:
    clients = [_client(name) for name in CLIENTS]
    others = [name for name in tinsmith.__all__ if name not in CLIENTS]
    return "\n".join(
        [
            INTRODUCTION,
            "## Clients\n",
            *clients,
            "## Other names of `tinsmith`\n",
            _table(others, tinsmith),
            "## Names of `tinsmith.types`\n",
            _table(types.__all__, types),
        ]
    )


def _client(name: str) -> str:
    client = getattr(tinsmith, name)
    is_future = issubclass(client, tinsmith.APIFuture)
    waiting = {"result", "result_async", "cancel"}  # of what every future has, these are of use with a client
    members = [
        member
        for member in dir(client)
        if not member.startswith("_") and (member in waiting or not (is_future and hasattr(tinsmith.APIFuture, member)))
    ]
    rows = [
        f"| `{_call(member, getattr(client, member))}` | {_sentence(getattr(client, member))} |" for member in members
    ]
    return "\n".join([f"### {name}\n", _sentence(client) + "\n", "| member | |", "| --- | --- |", *rows, ""])


def _call(name: str, member: Any) -> str:
    if not callable(member):
        return name
    parameters = [each for each in inspect.signature(member).parameters if each not in ("self", "args", "kwargs")]
    return f"{name}({', '.join(parameters)})"


def _table(names: list[str], home: Any) -> str:
    rows = [f"| `{name}` | {_sentence(getattr(home, name))} | {_fields(getattr(home, name))} |" for name in names]
    return "\n".join(["| name | | fields |", "| --- | --- | --- |", *rows, ""])


def _fields(value: Any) -> str:
    names = getattr(value, "__struct_fields__", None) or getattr(value, "_fields", ())
    shown = [name for name in names if not name.startswith("_")]
    return f"`{' '.join(shown)}`" if shown else ""


def _sentence(value: Any) -> str:
    """The first sentence of a class's or function's own docstring; other values have none."""
    has_own = inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)
    text = value.__doc__ if has_own and getattr(value, "__module__", None) != "builtins" else None
    first = (text or "").strip().split("\n\n")[0].replace("\n", " ")
    return " ".join(first.split()).split(". ")[0].rstrip(".").replace(" | ", " or ")  # a bar ends a cell


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
