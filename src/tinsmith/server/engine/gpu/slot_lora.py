"""What adapters add to the rows of a decode step, each row its own: two kernels for a layer, whatever their number.

    AdapterSlots    adapters on the device, each in a slot: a row of addresses, one for every matrix
    SlotLora        which rows of one batch use which slot, in tiles; stands in for `LoraRows`

A tile is up to 16 neighbouring rows of one adapter. The first kernel multiplies them with A, in splits of the input so
that the whole GPU takes part; the second adds up the splits, multiplies with B, and adds to the output. All that
changes from batch to batch lies in tensors on the device, so a captured graph serves any set of adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.server.engine.adapters import FrozenAdapter
from tinsmith.server.engine.lora import Segment
from tinsmith.server.engine.model import ModelShape
from tinsmith.server.engine.products import Matrix
from tinsmith.server.engine.steps import Turn
from tinsmith.server.engine.transfer import upload_array

TILE_ROWS = 16
_MAX_PARTS = 3
_COLUMNS = 1 + _MAX_PARTS  # addresses of A and of the B of each part
_INPUTS_AT_ONCE = 128
_OUTPUTS_AT_ONCE = 128
_GATED_AT_ONCE = 128
# One or two for every multiprocessor of a large GPU.
_ENOUGH_PROGRAMS = 256


class AdapterSlots:
    """Where the matrices of adapters lie; an adapter keeps its slot while it is in use and the room lasts."""

    def __init__(self, shape: ModelShape, num_slots: int, device: torch.device) -> None:
        self.names = {name: index for index, name in enumerate(site_names(shape))}
        self.addresses = torch.zeros(num_slots, len(self.names), _COLUMNS, dtype=torch.int64, device=device)
        self.ranks = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.scales = torch.zeros(num_slots, dtype=torch.float32, device=device)
        self._slots: WeakKeyDictionary[FrozenAdapter, int] = WeakKeyDictionary()

    def place(self, adapters: Sequence[FrozenAdapter]) -> list[int]:
        """A slot for each; those of adapters that are not among these may be taken over."""
        new = [adapter for adapter in adapters if adapter not in self._slots]
        if new:
            used = {self._slots[adapter] for adapter in adapters if adapter in self._slots}
            free = iter(slot for slot in range(len(self.ranks)) if slot not in used)
            taken = dict(zip(new, free, strict=False))
            for other in [other for other, slot in self._slots.items() if slot in taken.values()]:
                del self._slots[other]
            self._slots.update(taken)
            self._write(taken)
        return [self._slots[adapter] for adapter in adapters]

    def _write(self, taken: Mapping[FrozenAdapter, int]) -> None:
        slots = upload_array(np.array(list(taken.values())), self.ranks.device)
        self.addresses[slots] = upload_array(np.stack([self._row(adapter) for adapter in taken]), self.ranks.device)
        self.ranks[slots] = upload_array(np.array([adapter.spec.rank for adapter in taken]), self.ranks.device)
        scales = np.array([adapter.spec.scale for adapter in taken], np.float32)
        self.scales[slots] = upload_array(scales, self.ranks.device)

    def _row(self, adapter: FrozenAdapter) -> npt.NDArray[np.int64]:
        row = np.zeros((len(self.names), _COLUMNS), np.int64)
        for name, site in adapter.sites.items():
            matrices = [site.a, *site.b]
            row[self.names[name], : len(matrices)] = [matrix.data_ptr() for matrix in matrices]
        return row


def site_names(shape: ModelShape) -> list[str]:
    """Of every layer that an adapter can have a part in."""
    modules = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    return [*(f"layers.{index}.{module}" for index in range(shape.num_layers) for module in modules), "lm_head"]


def tiles_of(segments: Sequence[Segment], slots: Mapping[FrozenAdapter, int]) -> npt.NDArray[np.int64]:
    """First row, row after the last, and slot of every tile; rows of the base model have the slot -1."""
    tiles = [
        (first, min(first + TILE_ROWS, end), slots[adapter] if isinstance(adapter, FrozenAdapter) else -1)
        for start, end, adapter in segments
        for first in range(start, end, TILE_ROWS)
    ]
    return np.array(tiles, np.int64).reshape(-1, 3)


class SlotLora:
    """The adapters of one batch. Tiles beyond those in use are empty: their first row is their end."""

    def __init__(self, slots: AdapterSlots, tiles: Tensor, max_rank: int, shape: ModelShape) -> None:
        self.slots = slots
        self.tiles = tiles  # int64 [tiles, 3]
        self.max_rank: int = max(triton.next_power_of_2(max_rank), 16)  # tl.dot wants 16 at least
        self._parts = _parts(shape)

    def linear(self, x: Tensor, matrix: Matrix, name: str) -> Tensor:
        """x W^T + b + scale * (x A^T) B^T, by the adapter of each row: [N, in] -> [N, out]"""
        y = matrix.product(x)
        self._expand(y, *self._shrunk(x, name))
        return y

    def gated_silu(self, x: Tensor, gate_up: Matrix, name: str) -> Tensor:
        """silu(gate) * up; what adapters add to the two is added where they are read, and never written: [N, F]"""
        y = gate_up.product(x)
        inner, addresses, (width, _) = self._shrunk(x, name)
        gated = torch.empty(len(x), width, dtype=x.dtype, device=x.device)
        _expand_gated_silu[len(self.tiles), triton.cdiv(width, _GATED_AT_ONCE)](
            y, gated, addresses, self.slots.ranks, self.tiles, inner, len(x), addresses.stride(0),
            WIDTH=width, SPLITS=len(inner), MAX_RANK=self.max_rank, BLOCK_N=_GATED_AT_ONCE, TILE=TILE_ROWS, num_warps=4,
        )  # fmt: skip
        return gated

    def turned_heads(
        self,
        x: Tensor,
        qkv: Matrix,
        name: str,
        num_q: int,
        num_kv: int,
        weight: Tensor | None,
        eps: Tensor,
        turn: Turn | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, normed and turned; what adapters add is added on the way: [N, heads, D] each"""
        y = qkv.product(x)
        inner, addresses, _ = self._shrunk(x, name)
        turned = torch.empty(
            len(x), num_q + 2 * num_kv, y.shape[1] // (num_q + 2 * num_kv), dtype=x.dtype, device=x.device
        )
        cos, sin = turn or (None, None)
        _expand_turned_heads[len(self.tiles), num_q + 2 * num_kv](
            y, turned, addresses, self.slots.ranks, self.tiles, inner, weight, eps, cos, sin, len(x),
            addresses.stride(0), NUM_Q=num_q, NUM_KV=num_kv, HALF=turned.shape[2] // 2, HAS_NORM=weight is not None,
            HAS_TURN=turn is not None, SPLITS=len(inner), MAX_RANK=self.max_rank, TILE=TILE_ROWS, num_warps=4,
        )  # fmt: skip
        q, k, v = torch.split_with_sizes(turned, [num_q, num_kv, num_kv], dim=1)
        return q, k, v

    def _shrunk(self, x: Tensor, name: str) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """scale * x A^T in splits, where the matrices lie, and how many outputs each part has."""
        outs = self._parts[name.rpartition(".")[2]]
        addresses = self.slots.addresses[:, self.slots.names[name]]
        splits = self._num_splits(len(outs), x.shape[1])
        inner = torch.empty(splits, len(x), len(outs), self.max_rank, dtype=torch.float32, device=x.device)
        self._shrink(x, addresses, inner)
        return inner, addresses, outs

    def _num_splits(self, num_parts: int, num_in: int) -> int:
        """Enough for every multiprocessor, and no more: whoever adds them up reads all of them."""
        enough = triton.cdiv(_ENOUGH_PROGRAMS, len(self.tiles) * num_parts * (self.max_rank // self._rank_block))
        splits: int = max(min(enough, triton.cdiv(num_in, _INPUTS_AT_ONCE)), 1)
        return splits

    @property
    def _rank_block(self) -> int:
        return min(self.max_rank, 32)

    def _shrink(self, x: Tensor, addresses: Tensor, inner: Tensor) -> None:
        splits, num_rows, num_parts, _ = inner.shape
        num_in = x.shape[1]
        _shrink[len(self.tiles), num_parts * (self.max_rank // self._rank_block), splits](
            x, addresses, self.slots.ranks, self.slots.scales, self.tiles, inner,
            num_rows, num_in, x.stride(0), addresses.stride(0),
            PARTS=num_parts, MAX_RANK=self.max_rank, BLOCK_R=self._rank_block, BLOCK_K=_INPUTS_AT_ONCE,
            PER_SPLIT=triton.cdiv(num_in, splits * _INPUTS_AT_ONCE) * _INPUTS_AT_ONCE, TILE=TILE_ROWS, num_warps=4,
        )  # fmt: skip

    def _expand(self, y: Tensor, inner: Tensor, addresses: Tensor, outs: tuple[int, ...]) -> None:
        splits, num_rows, num_parts, _ = inner.shape
        num_blocks = sum(triton.cdiv(out, _OUTPUTS_AT_ONCE) for out in outs)
        _expand[len(self.tiles), num_blocks](
            y, addresses, self.slots.ranks, self.tiles, inner, num_rows, y.stride(0), addresses.stride(0),
            *outs, *[0] * (_MAX_PARTS - num_parts), SPLITS=splits, PARTS=num_parts, MAX_RANK=self.max_rank,
            BLOCK_N=_OUTPUTS_AT_ONCE, TILE=TILE_ROWS, num_warps=4,
        )  # fmt: skip


def _parts(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Outputs of the projections of each kind of layer."""
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        "qkv_proj": (q, kv, kv),
        "o_proj": (shape.hidden_size,),
        "gate_up_proj": (shape.intermediate_size, shape.intermediate_size),
        "down_proj": (shape.hidden_size,),
        "lm_head": (shape.vocab_size,),
    }


@triton.jit
def _shrink(
    x, addresses, ranks, scales, tiles, inner, num_rows, num_in, x_stride, address_stride,
    PARTS: tl.constexpr, MAX_RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    PER_SPLIT: tl.constexpr, TILE: tl.constexpr,
) -> Any:  # fmt: skip
    """inner[split, row, part, r] = scale * sum of x[row, k] A[part, r, k] over the k of the split."""
    tile = tiles + tl.program_id(0) * 3
    start, end, slot = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    part = tl.program_id(1) // (MAX_RANK // BLOCK_R)
    r = tl.program_id(1) % (MAX_RANK // BLOCK_R) * BLOCK_R + tl.arange(0, BLOCK_R)
    split = tl.program_id(2)
    address = tl.load(addresses + slot * address_stride, mask=slot >= 0, other=0)
    if (start < end) & (address != 0):
        rank = tl.load(ranks + slot)
        a = address.to(tl.pointer_type(x.dtype.element_ty))
        rows = start + tl.arange(0, TILE)
        is_row, is_rank = rows < end, r < rank
        total = tl.zeros([TILE, BLOCK_R], tl.float32)
        for first in range(split * PER_SPLIT, min((split + 1) * PER_SPLIT, num_in), BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            is_input = k < num_in
            x_tile = tl.load(
                x + rows[:, None] * x_stride + k[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0
            )
            a_tile = tl.load(
                a + (part * rank + r)[None, :] * num_in + k[:, None],
                mask=is_rank[None, :] & is_input[:, None],
                other=0.0,
            )
            total += tl.dot(x_tile, a_tile, input_precision="ieee")
        to = ((split * num_rows + rows)[:, None] * PARTS + part) * MAX_RANK + r[None, :]
        tl.store(inner + to, total * tl.load(scales + slot), mask=is_row[:, None])


@triton.jit
def _low_rank(
    part, PARTS: tl.constexpr, address, rank, inner, num_rows, rows, is_row, columns, is_column, dtype,
    SPLITS: tl.constexpr, MAX_RANK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What an adapter adds to these rows and columns of one part: [TILE, columns]"""
    r = tl.arange(0, MAX_RANK)
    total = tl.zeros([TILE, MAX_RANK], tl.float32)
    for split in range(SPLITS):
        at = ((split * num_rows + rows)[:, None] * PARTS + part) * MAX_RANK + r[None, :]
        total += tl.load(inner + at, mask=is_row[:, None], other=0.0)
    b = address.to(tl.pointer_type(dtype))
    is_there = is_column[None, :] & (r < rank)[:, None]
    b_tile = tl.load(b + columns[None, :] * rank + r[:, None], mask=is_there, other=0.0)
    return tl.dot(total.to(dtype), b_tile, input_precision="ieee")


@triton.jit
def _expand(
    y, addresses, ranks, tiles, inner, num_rows, y_stride, address_stride,
    OUT0: tl.constexpr, OUT1: tl.constexpr, OUT2: tl.constexpr,
    SPLITS: tl.constexpr, PARTS: tl.constexpr, MAX_RANK: tl.constexpr, BLOCK_N: tl.constexpr, TILE: tl.constexpr,
) -> Any:  # fmt: skip
    """y[row, column] += sum of inner[row, part, r] B[part, column, r]; blocks of columns never cross a part."""
    tile = tiles + tl.program_id(0) * 3
    start, end, slot = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    block = tl.program_id(1)
    blocks0: tl.constexpr = (OUT0 + BLOCK_N - 1) // BLOCK_N
    blocks1: tl.constexpr = (OUT1 + BLOCK_N - 1) // BLOCK_N
    in_second, in_third = block >= blocks0, block >= blocks0 + blocks1
    part = in_second.to(tl.int32) + in_third.to(tl.int32)
    out = tl.where(in_third, OUT2, tl.where(in_second, OUT1, OUT0))
    before = tl.where(in_third, OUT0 + OUT1, tl.where(in_second, OUT0, 0))
    first = (block - tl.where(in_third, blocks0 + blocks1, tl.where(in_second, blocks0, 0))) * BLOCK_N
    address = tl.load(addresses + slot * address_stride + 1 + part, mask=slot >= 0, other=0)
    if (start < end) & (address != 0):
        rows = start + tl.arange(0, TILE)
        columns = first + tl.arange(0, BLOCK_N)
        is_row, is_column = rows < end, columns < out
        to = y + rows[:, None] * y_stride + before + columns[None, :]
        is_there = is_row[:, None] & is_column[None, :]
        added = _low_rank(
            part, PARTS, address, tl.load(ranks + slot), inner, num_rows, rows, is_row, columns, is_column,
            y.dtype.element_ty, SPLITS, MAX_RANK, TILE,
        )  # fmt: skip
        tl.store(to, tl.load(to, mask=is_there, other=0.0).to(tl.float32) + added, mask=is_there)


@triton.jit
def _expand_gated_silu(
    y, gated, addresses, ranks, tiles, inner, num_rows, address_stride,
    WIDTH: tl.constexpr, SPLITS: tl.constexpr, MAX_RANK: tl.constexpr, BLOCK_N: tl.constexpr, TILE: tl.constexpr,
) -> Any:  # fmt: skip
    tile = tiles + tl.program_id(0) * 3
    start, end, slot = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if start < end:
        rows = start + tl.arange(0, TILE)
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_row, is_column = rows < end, columns < WIDTH
        is_there = is_row[:, None] & is_column[None, :]
        places = rows[:, None] * (2 * WIDTH) + columns[None, :]
        gate = tl.load(y + places, mask=is_there, other=0.0).to(tl.float32)
        up = tl.load(y + places + WIDTH, mask=is_there, other=0.0).to(tl.float32)
        table = addresses + slot * address_stride
        of_gate = tl.load(table + 1, mask=slot >= 0, other=0)
        if of_gate != 0:
            of_up, rank = tl.load(table + 2), tl.load(ranks + slot)
            gate += _low_rank(
                0, 2, of_gate, rank, inner, num_rows, rows, is_row, columns, is_column, y.dtype.element_ty,
                SPLITS, MAX_RANK, TILE,
            )  # fmt: skip
            up += _low_rank(
                1, 2, of_up, rank, inner, num_rows, rows, is_row, columns, is_column, y.dtype.element_ty,
                SPLITS, MAX_RANK, TILE,
            )  # fmt: skip
        result = gate / (1 + tl.exp(-gate)) * up
        tl.store(gated + rows[:, None] * WIDTH + columns[None, :], result, mask=is_there)


@triton.jit
def _expand_turned_heads(
    y, turned, addresses, ranks, tiles, inner, weight, eps, cos, sin, num_rows, address_stride,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr, HAS_TURN: tl.constexpr,
    SPLITS: tl.constexpr, MAX_RANK: tl.constexpr, TILE: tl.constexpr,
) -> Any:  # fmt: skip
    """One head of the rows of a tile; values get what the adapter adds, and are neither normed nor turned."""
    tile = tiles + tl.program_id(0) * 3
    start, end, slot = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    head = tl.program_id(1)
    part = (head >= NUM_Q).to(tl.int32) + (head >= NUM_Q + NUM_KV).to(tl.int32)
    in_part = head - tl.where(part == 2, NUM_Q + NUM_KV, tl.where(part == 1, NUM_Q, 0))
    if start < end:
        rows = start + tl.arange(0, TILE)
        pair = tl.arange(0, HALF)
        is_row, always = rows < end, pair < HALF
        places = (rows * (NUM_Q + 2 * NUM_KV) + head)[:, None] * (2 * HALF) + pair[None, :]
        first = tl.load(y + places, mask=is_row[:, None], other=0.0).to(tl.float32)
        second = tl.load(y + places + HALF, mask=is_row[:, None], other=0.0).to(tl.float32)
        address = tl.load(addresses + slot * address_stride + 1 + part, mask=slot >= 0, other=0)
        if address != 0:
            rank, columns = tl.load(ranks + slot), in_part * (2 * HALF) + pair
            first += _low_rank(
                part, 3, address, rank, inner, num_rows, rows, is_row, columns, always, y.dtype.element_ty,
                SPLITS, MAX_RANK, TILE,
            )  # fmt: skip
            second += _low_rank(
                part, 3, address, rank, inner, num_rows, rows, is_row, columns + HALF, always, y.dtype.element_ty,
                SPLITS, MAX_RANK, TILE,
            )  # fmt: skip
        if part < 2:
            if HAS_NORM:
                squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
                factor = tl.rsqrt(squares / (2 * HALF) + tl.load(eps))[:, None]
                first = first * factor * tl.load(weight + head * (2 * HALF) + pair)[None, :]
                second = second * factor * tl.load(weight + head * (2 * HALF) + HALF + pair)[None, :]
            if HAS_TURN:
                angles = rows[:, None] * HALF + pair[None, :]
                c = tl.load(cos + angles, mask=is_row[:, None], other=0.0)
                s = tl.load(sin + angles, mask=is_row[:, None], other=0.0)
                first, second = first * c - second * s, second * c + first * s
        tl.store(turned + places, first, mask=is_row[:, None])
        tl.store(turned + places + HALF, second, mask=is_row[:, None])
