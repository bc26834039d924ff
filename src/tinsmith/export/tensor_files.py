"""Safetensors files in blocks: whatever the size of a tensor, only a small part of it is in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from tinsmith.errors import InvalidInputError
from tinsmith.export.files import NewFile
from tinsmith.export.numbers import SIZES, Floats, to_floats

BLOCK_BYTES = 8 * 2**20

_MOST_HEAD_BYTES = 16 * 2**20
"""Those of the largest models have one or two; what is larger was made to fill a memory."""


class StoredTensor(NamedTuple):
    """A tensor in a file, not read yet."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    def read(self, start: int, size: int) -> bytes:
        with self.file.open("rb") as file:
            file.seek(self.offset + start)
            return file.read(size)

    def blocks(self) -> Iterator[bytes]:
        for start in range(0, self.num_bytes, BLOCK_BYTES):
            yield self.read(start, min(BLOCK_BYTES, self.num_bytes - start))

    def equals(self, other: StoredTensor) -> bool:
        """Whether the numbers are the same, whatever their format."""
        if self.shape != other.shape or not {self.dtype, other.dtype} <= SIZES.keys():
            return False
        pieces = range(0, math.prod(self.shape), BLOCK_BYTES)
        return all(np.array_equal(self._some(start), other._some(start)) for start in pieces)

    def _some(self, start: int) -> Floats:
        size = SIZES[self.dtype]
        return to_floats(self.read(start * size, min(BLOCK_BYTES * size, self.num_bytes - start * size)), self.dtype)

    def floats(self) -> Floats:
        """All of it, so for small ones."""
        return to_floats(self.read(0, self.num_bytes), self.dtype).reshape(self.shape)


class NewTensor(NamedTuple):
    """A tensor to be written, made block by block."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    blocks: Callable[[], Iterator[bytes]]

    @classmethod
    def copy(cls, tensor: StoredTensor) -> NewTensor:
        return cls(tensor.dtype, tensor.shape, tensor.num_bytes, tensor.blocks)


def read_head(file: Path) -> dict[str, StoredTensor]:
    """The tensors that a file announces, in the order in which they lie there; one cut short is refused."""
    entries, start = _entries(file)
    found = {name: StoredTensor(file, each.dtype, each.shape, start + each.start, each.size) for name, each in entries}
    size, announced = file.stat().st_size, max((each.offset + each.num_bytes for each in found.values()), default=start)
    if size < announced:
        raise InvalidInputError(f"{file.name} has {size} bytes, but its head announces {announced}. Fetch it again.")
    return dict(sorted(found.items(), key=lambda item: item[1].offset))


# Far beyond any model: the product of more, or of larger ones, can take minutes in which no other thread runs.
_Length = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
_Shape = Annotated[tuple[_Length, ...], msgspec.Meta(max_length=8)]
_Offset = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _Entry(msgspec.Struct):
    dtype: str
    shape: _Shape
    data_offsets: tuple[_Offset, _Offset]

    def __post_init__(self) -> None:
        expected = math.prod(self.shape) * SIZES[self.dtype] if self.dtype in SIZES else max(0, self.size)
        if self.size != expected:
            raise ValueError(f"{list(self.shape)} in {self.dtype} do not take the bytes {list(self.data_offsets)}")

    @property
    def start(self) -> int:
        return self.data_offsets[0]

    @property
    def size(self) -> int:
        return self.data_offsets[1] - self.data_offsets[0]


def _entries(file: Path) -> tuple[list[tuple[str, _Entry]], int]:
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        head = opened.read(size) if size < min(file.stat().st_size, _MOST_HEAD_BYTES) else b""
    try:
        raw = msgspec.json.decode(head, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        return [(name, msgspec.json.decode(entry, type=_Entry)) for name, entry in raw.items()], 8 + size
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        raise InvalidInputError(f"{file.name} is not a safetensors file: {error}. Fetch it again.") from error


def tensors_file(name: str, tensors: Mapping[str, NewTensor]) -> NewFile:
    """A safetensors file of these tensors, in this order."""
    head = _head(tensors)
    return NewFile(name, len(head) + sum(each.num_bytes for each in tensors.values()), partial(_content, head, tensors))


def _content(head: bytes, tensors: Mapping[str, NewTensor]) -> Iterator[bytes]:
    yield head
    for tensor in tensors.values():
        yield from tensor.blocks()


def _head(tensors: Mapping[str, NewTensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.num_bytes
        entries[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (start, end)}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # the numbers begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text
