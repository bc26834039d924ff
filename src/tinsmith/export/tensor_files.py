"""Safetensors files in blocks: whatever the size of a tensor, only a small part of it is in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tinsmith.errors import InvalidInputError
from tinsmith.export.numbers import Floats, to_floats

BLOCK_BYTES = 8 * 2**20


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
    found = {name: _stored(file, start, entry) for name, entry in entries.items() if name != "__metadata__"}
    size, announced = file.stat().st_size, max((each.offset + each.num_bytes for each in found.values()), default=start)
    if size < announced:
        raise InvalidInputError(f"{file} has {size} bytes, but its head announces {announced}. Fetch it again.")
    return dict(sorted(found.items(), key=lambda item: item[1].offset))


def _entries(file: Path) -> tuple[dict[str, Any], int]:
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        head = opened.read(size) if size < file.stat().st_size else b""
    try:
        entries: dict[str, Any] = json.loads(head)
    except ValueError as error:
        raise InvalidInputError(f"{file} is not a safetensors file: {error}. Fetch it again.") from error
    return entries, 8 + size


def _stored(file: Path, start: int, entry: Mapping[str, Any]) -> StoredTensor:
    first, last = entry["data_offsets"]
    return StoredTensor(file, entry["dtype"], tuple(entry["shape"]), start + first, last - first)


def write_tensors(
    file: Path, tensors: Mapping[str, NewTensor], on_bytes: Callable[[int], None] = lambda num_bytes: None
) -> None:
    """A new file, on the disk when this returns; `on_bytes` hears the size of every block written."""
    with file.open("wb") as opened:
        opened.write(_head(tensors))
        for tensor in tensors.values():
            for block in tensor.blocks():
                opened.write(block)
                on_bytes(len(block))
        opened.flush()
        os.fsync(opened.fileno())


def _head(tensors: Mapping[str, NewTensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.num_bytes
        entries[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (start, end)}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # the numbers begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text
