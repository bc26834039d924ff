"""Which operation a training request was meant to be whose body cannot be read, or is too large to be read.

The client has used up a number for it. Unless the server does so too, every later operation of the model waits for it.
Official clients write the model and the number first, and so does ours: the beginning of a body tells them. Where they
come last, or cannot be made out, those who wait are told which number is missing.
"""

from __future__ import annotations

from typing import NamedTuple

_MODEL_ID, _SEQ_ID = 0x0A, 0x10
"""The tags of the first two fields of a `ForwardBackwardRequest`: field 1 with a length, and field 2 as a number."""

_MAX_NUMBER_BYTES = 5
_MAX_ID_BYTES = 1024


class Meant(NamedTuple):
    model_id: str
    seq_id: int


def meant_by(beginning: bytes) -> Meant | None:
    """What the first bytes of a message say; `None` if they do not."""
    try:
        return _ids(beginning)
    except (IndexError, UnicodeDecodeError):
        return None


def _ids(data: bytes) -> Meant | None:
    if data[0] != _MODEL_ID:
        return None
    length, start = _varint(data, 1)
    end = start + length
    if not 0 < length <= _MAX_ID_BYTES or data[end] != _SEQ_ID:
        return None
    number, _ = _varint(data, end + 1)
    return Meant(data[start:end].decode(), number) if 1 <= number < 2**31 else None


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """A number in groups of seven bits, the lowest first, and the place after it."""
    number = 0
    for shift in range(_MAX_NUMBER_BYTES):
        number |= (data[place + shift] & 0x7F) << 7 * shift
        if data[place + shift] < 0x80:
            return number, place + shift + 1
    raise IndexError
