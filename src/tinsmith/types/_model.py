"""What all types share: checking at the door, JSON in and out, JSON schema, and a short repr.

`Request` is strict: unknown fields and wrong values are refused when the object is made.
`Response` is lenient: unknown fields are kept in `extra`, and values are checked when they come from the wire.

Both are msgspec structs. msgspec alone can neither keep unknown fields nor hold its union tag in an ordinary field, so
a small plan per class, made from its type hints on first use, says how each field is loaded and dumped. Plain values
and lists of them go to msgspec as a whole: a list of 100,000 token ids is checked in C.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, NamedTuple, Self, TypeVar, cast, dataclass_transform

import msgspec

from tinsmith.errors import InvalidInputError, InvalidTypeError
from tinsmith.types._brief import brief
from tinsmith.types._codecs import Codec, Define, codec_for, literals_of

T = TypeVar("T")

_SEND_NULL = "None is sent as null"
SendNull = Annotated[T, _SEND_NULL]
"""Marks a field whose `None` has a meaning on the wire; everywhere else `None` is left out."""

_SECRET = "shown to nobody"
Secret = Annotated[T, _SECRET]
"""Marks a credential: its value appears in no repr and in no error."""


class _DataclassFields:
    """Lets `dataclasses.replace`, `fields` and `asdict` take a class for a dataclass, which code may expect of some.

    Made on use: importing dataclasses takes as long as importing half of these types.
    """

    def __get__(self, instance: object, owner: type[Model]) -> dict[str, Any]:
        from dataclasses import fields, make_dataclass

        like = make_dataclass(owner.__name__, [name for name in owner.__struct_fields__ if not name.startswith("_")])
        return {field.name: field for field in fields(like)}


def pass_for_dataclass(cls: type) -> None:
    type.__setattr__(cls, "__dataclass_fields__", _DataclassFields())


class ModelMeta(msgspec.StructMeta):
    """Makes every type frozen and keyword-only, and turns a bad call into an error that says what is wrong with it."""

    positional: bool
    """Whether the fields may be given by position. Such a class takes no field it does not know, even as a response."""

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> ModelMeta:
        options = {"frozen": True, "kw_only": True, **options}
        cls = super().__new__(mcls, name, bases, namespace, **options)
        cls.positional = not options["kw_only"]
        if cls.positional:
            pass_for_dataclass(cls)
        return cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except InvalidInputError:
            raise
        except TypeError as error:
            return _explain_call(cast("type[Model]", cls), args, kwargs, error)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class Model(msgspec.Struct, metaclass=ModelMeta, frozen=True):
    """The base of `Request` and `Response`."""

    aliases: ClassVar[Mapping[str, str]] = {}
    """Other names under which fields are accepted."""

    @classmethod
    def from_builtins(cls, value: object) -> Self:
        """The object for decoded JSON: a mapping of field names to values."""
        return cls(**_fields_of(cls, value))

    def to_builtins(self, *, nulls: bool = False) -> dict[str, Any]:
        """A mapping ready for a JSON encoder. `nulls` also writes the fields that are `None`."""
        out = {}
        for field in plan_of(type(self)).values():
            value = getattr(self, field.name)
            if value is not None:
                out[field.name] = field.codec.dump(value, nulls)
            elif nulls or field.send_null:
                out[field.name] = None
        return out

    @classmethod
    def json_schema(cls, define: Define) -> dict[str, Any]:
        """The JSON schema of this class; `define` gives the references to other classes."""
        fields = plan_of(cls).values()
        schema: dict[str, Any] = {
            "title": cls.__name__,
            "type": "object",
            "properties": {field.name: field.schema(define) for field in fields},
        }
        required = [field.name for field in fields if field.default is msgspec.NODEFAULT]
        if required:
            schema["required"] = required
        if issubclass(cls, Request):
            schema["additionalProperties"] = False
        return schema

    def model_dump(self, *, mode: str = "python", exclude_none: bool = False) -> dict[str, Any]:
        """All fields as a dict; with `mode="json"` times and bytes become text."""
        dumped = self.to_builtins(nulls=not exclude_none)
        return cast("dict[str, Any]", msgspec.to_builtins(dumped)) if mode == "json" else dumped

    def model_dump_json(self, *, exclude_none: bool = False) -> str:
        return msgspec.json.encode(self.to_builtins(nulls=not exclude_none)).decode()

    @classmethod
    def model_validate(cls, value: object) -> Self:
        return value if isinstance(value, cls) else cls.from_builtins(value)

    @classmethod
    def model_validate_json(cls, data: bytes | str) -> Self:
        try:
            value = msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            raise InvalidInputError(f"This is not JSON: {error}", field=cls.__name__, value=data) from None
        return cls.from_builtins(value)

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self:
        """A copy with some fields replaced; a `Request` checks them."""
        return type(self)(**{**msgspec.structs.asdict(self), **(update or {})})

    def __repr__(self) -> str:
        shown = [f"{name}={field.shown(getattr(self, name))}" for name, field in plan_of(type(self)).items()]
        return f"{type(self).__name__}({', '.join(shown)})"


class Request(Model):
    """Something we send. Every value is checked when the object is made."""

    def __post_init__(self) -> None:
        for field in plan_of(type(self)).values():
            value = getattr(self, field.name)
            if value is not field.default:
                loaded = field.load(value)
                if loaded is not value:
                    msgspec.structs.force_setattr(self, field.name, loaded)


class Response(Model):
    """Something a server sends. Fields this version does not know are kept in `extra`."""

    # Pairs instead of a dict, so that responses can be hashed.
    _extra: tuple[tuple[str, Any], ...] = ()

    @property
    def extra(self) -> Mapping[str, Any]:
        """What the server sent beyond the fields above."""
        return MappingProxyType(dict(self._extra))

    @classmethod
    def from_builtins(cls, value: object) -> Self:
        plan = plan_of(cls)
        given = _fields_of(cls, value)
        known = {name: plan[name].load(item) for name, item in given.items() if name in plan}
        return cls(_extra=_unknown_pairs(plan, given), **known)

    def __repr__(self) -> str:
        text = super().__repr__()
        return f"{text[:-1]}, extra={brief(dict(self._extra))})" if self._extra else text


# --- one field -------------------------------------------------------------------------------------------------------


class Field(NamedTuple):
    """How one field of one class goes in and out."""

    owner: str
    name: str
    hint: Any
    codec: Codec
    default: Any
    send_null: bool
    secret: bool

    def load(self, value: object) -> Any:
        try:
            return self.codec.load(value)
        except msgspec.ValidationError as error:
            raise self._refusal(value, str(error)) from None

    def _refusal(self, value: object, reason: str) -> InvalidInputError:
        legal = literals_of(self.hint)
        if legal and "Invalid enum value" in reason:
            reason = f"must be one of {', '.join(map(repr, legal))}"
        else:
            reason = reason[0].lower() + _in_python_words(reason[1:])
        kind = InvalidTypeError if ", got `" in reason else InvalidInputError
        where = f"{self.owner}.{self.name}"
        text = f"{where}: {reason}. The value given is {self.shown(value)}"
        return kind(text, field=where, value=None if self.secret else value)

    def shown(self, value: object) -> str:
        return "<secret>" if self.secret and value is not None else brief(value)

    def schema(self, define: Define) -> dict[str, Any]:
        schema = self.codec.schema(define)
        if self.default is msgspec.NODEFAULT:
            return schema
        default = self.codec.dump(self.default, nulls=True) if self.default is not None else None
        return {**schema, "default": default}


def _in_python_words(reason: str) -> str:
    """msgspec speaks of JSON: arrays, null, and paths from a root."""
    for word, ours in (("array", "list"), ("null", "None"), (" - at `$", " at `")):
        reason = reason.replace(word, ours)
    return reason


@cache
def plan_of(cls: type[Model]) -> Mapping[str, Field]:
    """The fields of a class, in order. Made on first use, so that importing the types stays cheap."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {
        info.name: Field(
            owner=cls.__name__,
            name=info.name,
            hint=hints[info.name],
            codec=codec_for(hints[info.name], strict=issubclass(cls, Request)),
            default=info.default if info.default_factory is msgspec.NODEFAULT else info.default_factory(),
            send_null=_SEND_NULL in getattr(hints[info.name], "__metadata__", ()),
            secret=_SECRET in getattr(hints[info.name], "__metadata__", ()),
        )
        for info in msgspec.structs.fields(cls)
        if not info.name.startswith("_")
    }


# --- calls -----------------------------------------------------------------------------------------------------------


def _fields_of(cls: type[Model], value: object) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    raise InvalidTypeError(f"A {cls.__name__} is an object, not {brief(value)}", field=cls.__name__, value=value)


def _unknown_pairs(known: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, value) for name, value in given.items() if name not in known)


def _explain_call(cls: type[Model], args: tuple[Any, ...], kwargs: dict[str, Any], error: TypeError) -> Any:
    """Why a class could not be called so: an unknown, a missing or a surplus argument."""
    if cls.aliases.keys() & kwargs.keys():
        return cls(*args, **{cls.aliases.get(name, name): value for name, value in kwargs.items()})
    names = [name for name in cls.__struct_fields__ if not name.startswith("_")]
    unknown = _unknown_pairs(dict.fromkeys(cls.__struct_fields__), kwargs)
    if unknown and issubclass(cls, Response) and not cls.positional:
        known = {name: value for name, value in kwargs.items() if name in cls.__struct_fields__}
        return cls(*args, _extra=unknown, **known)
    if unknown:
        # The value is left out: under a misspelt name it may be a credential.
        name = unknown[0][0]
        raise InvalidTypeError(
            f"{cls.__name__} has no field {name!r}. Its fields are: {', '.join(names)}", field=f"{cls.__name__}.{name}"
        ) from None
    missing = _missing(cls, len(args), kwargs)
    if missing:
        raise InvalidTypeError(
            f"{cls.__name__} needs {', '.join(missing)}", field=f"{cls.__name__}.{missing[0]}"
        ) from None
    raise InvalidTypeError(f"{cls.__name__}: {error}. Its fields are: {', '.join(names)}") from error


def _missing(cls: type[Model], positional: int, kwargs: Mapping[str, Any]) -> list[str]:
    infos = msgspec.structs.fields(cls)[positional:]
    return [info.name for info in infos if info.required and info.name not in kwargs]
