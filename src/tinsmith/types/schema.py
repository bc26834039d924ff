"""The JSON schema of all types, in one document. `python -m tinsmith.types.schema` prints it."""

from __future__ import annotations

import sys
import typing
from typing import Any

import msgspec

from tinsmith import types
from tinsmith.types._codecs import codec_for


def json_schema() -> dict[str, Any]:
    """A document with a definition for every public type; the types refer to each other by `$ref`."""
    definitions: dict[str, Any] = {}

    def define(cls: Any) -> dict[str, Any]:
        name = cls.__name__
        if name not in definitions:
            definitions[name] = {}  # reserves the name while the class is described, should it refer to itself
            definitions[name] = cls.json_schema(define)
        return {"$ref": f"#/$defs/{name}"}

    for name in types.__all__:
        public = getattr(types, name)
        if hasattr(public, "json_schema"):
            define(public)
        elif not (isinstance(public, type) and issubclass(public, Warning)):
            definitions[name] = _alias_schema(public, define)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Tinker API types",
        "$defs": dict(sorted(definitions.items())),
    }


def _alias_schema(alias: Any, define: Any) -> dict[str, Any]:
    members = typing.get_args(alias)
    if members and all(hasattr(member, "json_schema") for member in members):
        return {"anyOf": [define(member) for member in members]}
    return codec_for(alias, strict=False).schema(define)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(json_schema()), indent=2) + b"\n")
