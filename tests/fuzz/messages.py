"""Protobuf messages bent by their own description, so that every field of every level has its turn."""

from __future__ import annotations

from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tests.fuzz import values

_SIZES = {
    FieldDescriptor.CPPTYPE_INT32: (32, True),
    FieldDescriptor.CPPTYPE_ENUM: (32, True),
    FieldDescriptor.CPPTYPE_INT64: (64, True),
    FieldDescriptor.CPPTYPE_UINT32: (32, False),
    FieldDescriptor.CPPTYPE_UINT64: (64, False),
}


def mutate(message: Message, random: Random) -> Message:
    """A copy with one field wrong, or at least unusual, at any depth."""
    copy = type(message)()
    copy.CopyFrom(message)
    _bend(random.choice(_parts(copy)), random)
    return copy


def tampered(random: Random, body: bytes) -> bytes:
    """An encoded message with something no encoder writes."""
    match random.randrange(6):
        case 0:
            return body + _tag(random.choice([0, 1, 2, 99, 2**28]), random.randrange(8)) + random.randbytes(4)
        case 1:
            return body + body
        case 2:
            return body + _tag(3, 2) + b"\xff\xff\xff\xff\x0f"  # a datum of 4 GiB
        case 3:
            return body + _tag(2, 0) + b"\xff" * random.choice([9, 10, 11]) + b"\x01"
        case 4:
            depth = random.choice([50, 101, 3000])
            return body + _tag(1000, 3) * depth + _tag(1000, 4) * depth
    return values.data(random, body)


def _tag(number: int, kind: int) -> bytes:
    value, encoded = number << 3 | kind, bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


def _parts(message: Message) -> list[Message]:
    """The message and all that is in it."""
    found = [message]
    for field, value in message.ListFields():
        if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            for part in _inner(field, value):
                found += _parts(part)
    return found


def _inner(field: FieldDescriptor, value: Any) -> list[Message]:
    if _is_map(field):
        is_message = field.message_type.fields_by_name["value"].cpp_type == FieldDescriptor.CPPTYPE_MESSAGE
        return list(value.values()) if is_message else []
    return list(value)[:3] if field.is_repeated else [value]


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _bend(message: Message, random: Random) -> None:
    field = random.choice(message.DESCRIPTOR.fields)
    if random.random() < 0.15:
        message.ClearField(field.name)
    elif _is_map(field):
        _bend_map(getattr(message, field.name), field, random)
    elif field.is_repeated:
        _bend_repeated(getattr(message, field.name), field, random)
    elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        getattr(message, field.name).SetInParent()
    else:
        setattr(message, field.name, _scalar(field, getattr(message, field.name), random))


def _bend_map(entries: Any, field: FieldDescriptor, random: Random) -> None:
    value = field.message_type.fields_by_name["value"]
    for name in (_speakable(values.text(random, "weights")) for _ in range(random.choice([1, 1, 200]))):
        if value.cpp_type != FieldDescriptor.CPPTYPE_MESSAGE:
            entries[name] = _scalar(value, 0.0, random)
        elif entries:
            entries[name].CopyFrom(entries[min(entries)])
        else:
            entries[name].SetInParent()


def _bend_repeated(items: Any, field: FieldDescriptor, random: Random) -> None:
    count = random.choice([1, 2, 30, 1000])
    if field.cpp_type != FieldDescriptor.CPPTYPE_MESSAGE:
        items.extend(_scalar(field, 0, random) for _ in range(count))
    elif items and random.random() < 0.7:
        items.extend([items[0]] * count)
    else:
        items.add()


def _scalar(field: FieldDescriptor, old: Any, random: Random) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return values.data(random, old)
        case FieldDescriptor.CPPTYPE_STRING:
            return _speakable(values.text(random, old))
        case FieldDescriptor.CPPTYPE_BOOL:
            return not old
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return values.double(random)
    bits, signed = _SIZES[field.cpp_type]
    return values.integer(random, bits, signed=signed)


def _speakable(text: str) -> str:
    """Half characters cannot be encoded here; the bytes of a body are bent elsewhere."""
    return text.encode("utf-8", "replace").decode()
