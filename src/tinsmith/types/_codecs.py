"""How a value of a given type hint is checked, written to JSON and described by a schema.

Plain values, and lists and dicts of them, are left to msgspec as a whole. Only what holds one of our own classes (known
by its `from_builtins`) is walked here.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import EnumType
from functools import cache, cached_property
from math import isfinite
from typing import Annotated, Any, Literal

import msgspec

from tinsmith.errors import InvalidTypeError

Define = Callable[[type], dict[str, Any]]
"""Registers a class in a schema document and returns the reference to it."""


_IN_BOX = re.compile(r" - at (`key` in )?`\$\.value([^`]*)`\Z")
"""The place at the end of an error message, as seen from the box that the value was put into."""


class Codec:
    """A plain value: msgspec checks it, and it is its own JSON form (bytes and times become text when encoded)."""

    def __init__(self, hint: Any, *, strict: bool = False) -> None:
        self.hint = hint
        self.free_form = strict and _holds(hint, Any)
        self.finite = strict and (self.free_form or _holds(hint, float))

    def load(self, value: object) -> Any:
        """The value as its type wants it, from Python or from decoded JSON; raises `msgspec.ValidationError`."""
        try:
            loaded = self._convert(value)
        except msgspec.ValidationError:
            # Numpy, torch and the like are looked at only here, so that plain Python stays fast.
            loaded = self._convert(_plain(value))
        if self.free_form:
            loaded = _jsonable(loaded)
        if self.finite and not _is_finite(loaded):
            raise msgspec.ValidationError("must be finite, not NaN or infinity")
        return loaded

    def _convert(self, value: object) -> Any:
        try:
            return msgspec.convert({"value": value}, self._box).value
        except msgspec.ValidationError as error:
            raise msgspec.ValidationError(_IN_BOX.sub(_without_box, str(error))) from None

    @cached_property
    def _box(self) -> type[Any]:
        """A class with a field of this hint, because a class is analysed only once.

        A bare hint is looked up at each call by its hash, which `typing` computes in Python, and msgspec ignores what
        is raised there: a Ctrl-C that came at that moment would be lost.
        """
        return msgspec.defstruct("Box", [("value", self.hint)])

    def dump(self, value: Any, nulls: bool) -> Any:
        """The value for a JSON encoder; `nulls` also writes fields that are `None`."""
        return value

    def schema(self, define: Define) -> dict[str, Any]:
        if isinstance(self.hint, EnumType):
            return {"enum": [member.value for member in typing.cast("typing.Iterable[Any]", self.hint)]}
        return msgspec.json.schema(self.hint)


class Nested(Codec):
    """One of our own classes."""

    def load(self, value: object) -> Any:
        return value if isinstance(value, self.hint) else self.hint.from_builtins(value)

    def dump(self, value: Any, nulls: bool) -> Any:
        return value.to_builtins(nulls=nulls)

    def schema(self, define: Define) -> dict[str, Any]:
        return define(self.hint)


class Tagged(Codec):
    """One of several of our classes, told apart by a field such as `type`, or by their fields if that is left out.

    A class whose tag is any text takes the tags that nobody else has.
    """

    def __init__(self, classes: Sequence[Any]) -> None:
        super().__init__(tuple(classes))
        tags = {cls: _tag_of(cls) for cls in classes}
        self.tag = next((tag[0] for tag in tags.values() if tag), "type")
        self.by_value = {tag[1]: cls for cls, tag in tags.items() if tag}
        self.open = next((cls for cls, tag in tags.items() if not tag and self.tag in cls.__struct_fields__), None)

    def load(self, value: object) -> Any:
        if isinstance(value, self.hint):
            return value
        if not isinstance(value, Mapping):
            names = " | ".join(cls.__name__ for cls in self.hint)
            raise msgspec.ValidationError(f"Expected `{names}`, got `{type(value).__name__}`")
        return self._class_for(value).from_builtins(value)

    def _class_for(self, value: Mapping[str, Any]) -> Any:
        tag = value.get(self.tag)
        if isinstance(tag, str):
            found = self.by_value.get(tag, self.open)
        else:
            found = next((cls for cls in self.hint if _fits(cls, value)), None)
        if found:
            return found
        legal = ", ".join(map(repr, self.by_value))
        raise msgspec.ValidationError(f"{self.tag!r} must be one of {legal}, not {tag!r}")

    def dump(self, value: Any, nulls: bool) -> Any:
        return value.to_builtins(nulls=nulls)

    def schema(self, define: Define) -> dict[str, Any]:
        return {"anyOf": [define(cls) for cls in self.hint]}


class Listed(Codec):
    """A list whose items need a codec of their own."""

    def __init__(self, hint: Any, item: Codec) -> None:
        super().__init__(hint)
        self.item = item

    def load(self, value: object) -> Any:
        return [self.item.load(entry) for entry in super().load(value)]

    def dump(self, value: Any, nulls: bool) -> Any:
        return [self.item.dump(entry, nulls) for entry in value]

    def schema(self, define: Define) -> dict[str, Any]:
        return {**msgspec.json.schema(self.hint), "items": self.item.schema(define)}


class Keyed(Listed):
    """The same for a dict with text keys."""

    def load(self, value: object) -> Any:
        return {key: self.item.load(entry) for key, entry in Codec.load(self, value).items()}

    def dump(self, value: Any, nulls: bool) -> Any:
        return {key: self.item.dump(entry, nulls) for key, entry in value.items()}

    def schema(self, define: Define) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": self.item.schema(define)}


class Choice(Codec):
    """The first option that fits: something of ours or `None`, or several lists, which msgspec cannot tell apart."""

    def __init__(self, hint: Any, options: Sequence[Codec]) -> None:
        super().__init__(hint)
        self.options = options
        self.nullable = type(None) in typing.get_args(hint)

    def load(self, value: object) -> Any:
        if value is None and self.nullable:
            return None
        for option in self.options[:-1]:
            try:
                return option.load(value)
            except msgspec.ValidationError:
                continue
        return self.options[-1].load(value)

    def dump(self, value: Any, nulls: bool) -> Any:
        # Several options are always plain, so that any of them dumps as the first one does.
        return None if value is None else self.options[0].dump(value, nulls)

    def schema(self, define: Define) -> dict[str, Any]:
        schemas = [option.schema(define) for option in self.options]
        flat = [each for schema in schemas for each in schema.get("anyOf", [schema])]
        return {"anyOf": [*flat, {"type": "null"}] if self.nullable else flat}


def codec_for(hint: Any, *, strict: bool) -> Codec:
    """The codec of a type hint. A strict one refuses NaN, infinity and free-form data that has no JSON form."""
    bare, notes = (hint.__origin__, hint.__metadata__) if hasattr(hint, "__metadata__") else (hint, ())
    if _is_ours(bare):
        return Nested(bare)
    if typing.get_origin(bare) in (typing.Union, types.UnionType):
        return _union_codec(bare, strict)
    args = typing.get_args(bare)
    if not any(map(_holds_ours, args)):
        return Codec(hint, strict=strict)
    item = codec_for(args[-1], strict=strict)
    if issubclass(typing.get_origin(bare), Mapping):
        return Keyed(_annotated(dict[str, Any], notes), item)
    return Listed(_annotated(list[Any], notes), item)


def _union_codec(hint: Any, strict: bool) -> Codec:
    members = [member for member in typing.get_args(hint) if member is not type(None)]
    if len(members) > 1 and all(map(_is_ours, members)):
        tagged = Tagged(members)
        return Choice(hint, [tagged]) if len(members) < len(typing.get_args(hint)) else tagged
    if any(map(_holds_ours, members)) or sum(map(_is_list, members)) > 1:
        return Choice(hint, [codec_for(member, strict=strict) for member in members])
    return Codec(hint, strict=strict)


# --- reading type hints ----------------------------------------------------------------------------------------------


def literals_of(hint: Any) -> tuple[Any, ...]:
    """The legal values of a literal, also inside `| None`, lists and annotations."""
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint)
    return tuple(value for arg in typing.get_args(hint) for value in literals_of(arg))


def _is_ours(hint: Any) -> bool:
    return isinstance(hint, type) and hasattr(hint, "from_builtins")


def _holds_ours(hint: Any) -> bool:
    return _is_ours(hint) or any(map(_holds_ours, typing.get_args(hint)))


def _holds(hint: Any, part: Any) -> bool:
    return hint is part or any(_holds(arg, part) for arg in typing.get_args(hint))


def _is_list(hint: Any) -> bool:
    origin = typing.get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Sequence)


def _annotated(hint: Any, notes: tuple[Any, ...]) -> Any:
    for note in notes:
        hint = Annotated[hint, note]
    return hint


def _tag_of(cls: Any) -> tuple[str, Any] | None:
    """The field that names the class on the wire, and its value: the one of these with exactly one legal value."""
    hints = typing.get_type_hints(cls)
    for name in ("type", "state", "event"):
        legal = literals_of(hints.get(name))
        if len(legal) == 1:
            return name, legal[0]
    return None


def _fits(cls: Any, value: Mapping[str, Any]) -> bool:
    return _required(cls) <= value.keys() <= set(cls.__struct_fields__)


@cache
def _required(cls: Any) -> frozenset[str]:
    return frozenset(info.name for info in msgspec.structs.fields(cls) if info.required)


# --- values ----------------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """Python's own values for what numpy and torch hold, lists for other sequences, ints for whole floats."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, float):
        return int(value) if value.is_integer() else float(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return [_plain(item) for item in value]
    return value


def _without_box(place: re.Match[str]) -> str:
    key, inside = place[1] or "", place[2]
    return f" - at {key}`${inside}`" if key or inside else ""


def _jsonable(value: Any) -> Any:
    """A copy of free-form data that is sure to have a JSON form."""
    try:
        return msgspec.to_builtins(value, enc_hook=plain_or_refuse)
    except TypeError as error:
        raise msgspec.ValidationError(str(error)) from None


def plain_or_refuse(value: Any) -> Any:
    """What msgspec calls for a value that it cannot write: numpy and torch give their numbers, others have none."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise InvalidTypeError(f"`{type(value).__name__}` has no JSON form", value=value)


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return isfinite(value)
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    return True
