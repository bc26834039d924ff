"""GGUF files: their metadata, and their tensors as float32.

Only the tensor formats of the embedded model are decoded: F32, Q4_1 and Q8_0.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_MAGIC = b"GGUF\x03\0\0\0"  # with the version of the format
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class Tensor:
    shape: tuple[int, ...]
    kind: int
    data: memoryview

    def dequantised(self) -> NDArray[np.float32]:
        form = _FORMATS[self.kind]
        blocks = np.frombuffer(self.data, dtype=np.uint8).reshape(-1, form.bytes_per_block)
        return form.decode(blocks).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class GGUF:
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def read_gguf(data: bytes) -> GGUF:
    """Read a whole file that is in memory; the tensors are views of it, decoded when asked."""
    cursor = _Cursor(memoryview(data))
    if cursor.take(8) != _MAGIC:
        raise ValueError("not a GGUF file of version 3")
    num_tensors, num_entries = cursor.number("Q"), cursor.number("Q")
    metadata = {cursor.text(): cursor.value(cursor.number("I")) for _ in range(num_entries)}
    heads = {cursor.text(): _Head.read(cursor) for _ in range(num_tensors)}
    alignment = metadata.get("general.alignment", 32)
    body = cursor.data[-(-cursor.at // alignment) * alignment :]
    return GGUF(metadata, {name: head.tensor(body) for name, head in heads.items()})


class _Cursor:
    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.at = 0

    def take(self, count: int) -> memoryview:
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, code: str) -> Any:
        return self.numbers(1, code)[0]

    def numbers(self, count: int, code: str) -> tuple[Any, ...]:
        form = f"<{count}{code}"
        return struct.unpack(form, self.take(struct.calcsize(form)))

    def text(self) -> str:
        return str(self.take(self.number("Q")), "utf-8")

    def value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            return self.number(_NUMBERS[kind])
        item_kind, count = self.number("I"), self.number("Q")
        if item_kind in _NUMBERS:
            return list(self.numbers(count, _NUMBERS[item_kind]))
        return [self.value(item_kind) for _ in range(count)]


class _Head(NamedTuple):
    shape: tuple[int, ...]
    kind: int
    offset: int

    @classmethod
    def read(cls, cursor: _Cursor) -> _Head:
        shape = cursor.numbers(cursor.number("I"), "Q")[::-1]  # the file lists the fastest axis first
        return cls(shape, cursor.number("I"), cursor.number("Q"))

    def tensor(self, body: memoryview) -> Tensor:
        form = _FORMATS[self.kind]
        num_bytes = prod(self.shape) // form.weights_per_block * form.bytes_per_block
        return Tensor(self.shape, self.kind, body[self.offset : self.offset + num_bytes])


# --- formats: [blocks, bytes] -> [blocks, weights] -------------------------------------------------------------------


def _f32(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return blocks.view("<f4")


def _q4_1(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Scale and minimum in float16, then 16 bytes: the low halves of all are 16 weights, the high ones 16 more."""
    packed = blocks[:, 4:]
    weights = np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)
    weights *= _float16_at(blocks, 0)
    weights += _float16_at(blocks, 2)
    return weights


def _q8_0(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The scale in float16, then 32 signed bytes."""
    weights = blocks[:, 2:].view(np.int8).astype(np.float32)
    weights *= _float16_at(blocks, 0)
    return weights


def _float16_at(blocks: NDArray[np.uint8], at: int) -> NDArray[np.float32]:
    return blocks[:, at : at + 2].copy().view("<f2").astype(np.float32)


class _Format(NamedTuple):
    weights_per_block: int
    bytes_per_block: int
    decode: Callable[[NDArray[np.uint8]], NDArray[np.float32]]


_FORMATS = {0: _Format(1, 4, _f32), 3: _Format(32, 20, _q4_1), 8: _Format(32, 34, _q8_0)}
