"""The memory of running sequences: keys and values of past tokens, in blocks that sequences share.

    Blocks        who uses which block, and which tokens an unused block still holds
    BlockTable    the blocks of one sequence, in the order of its tokens
    KvPool        the storage

A block whose last user left is not erased: as long as nobody needs the room, a later prompt with the same beginning
takes it over instead of computing it again.

Blocks are handed out side by side where possible, beginning at a multiple of a power of two. Then the tokens of a
sequence are one view of the pool, and those of many sequences are the rows of one strided view: attention on the CPU
reads them where they lie, in few calls. Nothing depends on it but speed.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import mmap
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinsmith.server.engine.model import ModelShape

Ints: TypeAlias = npt.NDArray[np.int64]

# The age of a block: when its last user left it, or one of these.
_FREE = -1
_IN_USE = np.iinfo(np.int64).max


class Blocks:
    """Reference counts, and the contents of unused blocks by the hash of the whole prefix that ends with them."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.references = np.zeros(num_blocks, np.int64)
        self._ages = np.full(num_blocks, _FREE, np.int64)
        self._keys: dict[int, bytes] = {}
        self._by_key: dict[bytes, int] = {}
        self._clock = 0

    @property
    def num_available(self) -> int:
        """Blocks that nobody refers to, whatever they hold."""
        return int(np.count_nonzero(self.references == 0))

    @property
    def num_cached(self) -> int:
        """Blocks whose contents can be found again."""
        return len(self._keys)

    def needed_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> Ints:
        """That many blocks for one new user, side by side if there is such a place; the longest unused go first."""
        if count > self.num_available:
            raise RuntimeError(f"{count} blocks were asked for, and {self.num_available} are available")
        blocks = self._place(count)
        for block in blocks.tolist():
            self._forget(block)
        self.references[blocks] = 1
        self._ages[blocks] = _IN_USE
        return blocks

    def share(self, blocks: Ints) -> None:
        """One more user of each."""
        self.references[blocks] += 1
        self._ages[blocks] = _IN_USE

    def release(self, blocks: Ints) -> None:
        """One user fewer. Of a prefix that nobody uses any more the end is dropped before the beginning."""
        if (self.references[blocks] < 1).any():
            raise RuntimeError("A block was released more often than it was taken")
        self.references[blocks] -= 1
        for block in blocks[::-1].tolist():
            if self.references[block] == 0:
                self._clock += 1
                self._ages[block] = self._clock if block in self._keys else _FREE

    def remember(self, keys: Sequence[bytes], blocks: Ints) -> None:
        """Let later prompts find these filled blocks. A prefix that is known already keeps its first block."""
        for key, block in zip(keys, blocks.tolist(), strict=True):
            if key not in self._by_key and block not in self._keys:
                self._by_key[key] = block
                self._keys[block] = key

    def find(self, keys: Sequence[bytes]) -> Ints:
        """The blocks that hold the beginning of a prefix, as far as it is known."""
        found = []
        for key in keys:
            if (block := self._by_key.get(key)) is None:
                break
            found.append(block)
        return np.array(found, np.int64)

    def _place(self, count: int) -> Ints:
        pitch = row_pitch(count)
        rows = self._ages[: self.num_blocks // pitch * pitch].reshape(-1, pitch)[:, :count].max(axis=1, initial=_FREE)
        if rows.size and rows.min() < _IN_USE:
            start = int(rows.argmin()) * pitch
            return np.arange(start, start + count)
        return np.sort(np.argsort(self._ages, kind="stable")[:count])

    def _forget(self, block: int) -> None:
        if (key := self._keys.pop(block, None)) is not None:
            del self._by_key[key]


def row_pitch(count: int) -> int:
    """The power of two that `count` blocks or tokens lie within, and at a multiple of which they begin."""
    return 1 << (count - 1).bit_length() if count else 1


def prefix_keys(owner: bytes, tokens: npt.NDArray[np.int32], block_size: int) -> list[bytes]:
    """For each full block a hash of all tokens up to its end, and of whose keys and values these are."""
    state = hashlib.blake2b(owner, digest_size=16)
    keys = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        state.update(tokens[start : start + block_size].tobytes())
        keys.append(state.digest())
    return keys


class BlockTable:
    """Where the tokens of one sequence lie: first in blocks that others may read too, then in its own."""

    def __init__(self, shared: Ints, own: Ints, block_size: int) -> None:
        self.blocks = blocks = np.concatenate([shared, own])
        self.slots: Ints = (blocks[:, None] * block_size + np.arange(block_size)).reshape(-1)
        """The place of each token of the sequence within the pool."""
        # What is shared is a run for itself even if its own blocks lie next to it: then all its readers have that run.
        breaks = {0, len(shared), len(blocks), *(np.flatnonzero(np.diff(blocks) != 1) + 1).tolist()}
        self._stretches = [
            (start * block_size, int(blocks[start]) * block_size, row_pitch(end - start) * block_size)
            for start, end in itertools.pairwise(sorted(breaks))
        ]

    def runs(self, num_tokens: int) -> list[Run]:
        """The first `num_tokens` tokens as stretches of consecutive slots."""
        ends = [*(first for first, _, _ in self._stretches[1:]), num_tokens]
        return [
            (slot, min(end, num_tokens) - first, pitch if slot % pitch == 0 else 0)
            for (first, slot, pitch), end in zip(self._stretches, ends, strict=True)
            if first < num_tokens
        ]


Run: TypeAlias = tuple[int, int, int]
"""First slot, number of tokens, and the pitch of the rows that it is one of (0: it fits in no row)."""


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU from the system, which makes them when they are first touched; torch would write them all now."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(size) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(size)


class KvPool:
    """Keys and values of every layer: [layer, key or value, slot, key/value head, size of a head]."""

    def __init__(self, shape: ModelShape, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        # Zeros, not whatever was there: what a mask hides still takes part in products, and NaN times zero is NaN.
        size = (shape.num_layers, 2, num_slots, shape.num_kv_heads, shape.head_dim)
        self.storage = _zeros(size, dtype, device)
        self.num_slots = num_slots
        self._layers = [tuple(layer.unbind()) for layer in self.storage.unbind()]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """All keys and values of one layer: two of [slot, key/value head, size of a head]."""
        keys, values = self._layers[layer]
        return keys, values

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """k and v are [T, key/value heads, size].

        A broken adapter may produce NaN. Its own sequence notices in the logits; its neighbours, behind whose tokens
        these lie, must not.
        """
        keys, values = self._layers[layer]
        keys.index_copy_(0, slots, torch.nan_to_num(k, nan=0.0, posinf=0.0, neginf=0.0))
        values.index_copy_(0, slots, torch.nan_to_num(v, nan=0.0, posinf=0.0, neginf=0.0))

    def rows(self, layer: int, start: int, pitch: int, num_rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of rows `pitch` slots apart, in place: two of [rows, key/value heads, length, size]."""
        keys, values = self._layers[layer]
        _, num_heads, size = keys.shape
        shape = (num_rows, num_heads, length, size)
        strides = (pitch * num_heads * size, size, num_heads * size, 1)
        offset = start * num_heads * size
        return (
            keys.as_strided(shape, strides, keys.storage_offset() + offset),
            values.as_strided(shape, strides, values.storage_offset() + offset),
        )

    def copy(self, source: Ints, target: Ints) -> None:
        """Copy tokens to other slots, in all layers."""
        moved = self.storage.index_select(2, torch.from_numpy(source).to(self.storage.device))
        self.storage.index_copy_(2, torch.from_numpy(target).to(self.storage.device), moved)
