"""What adapters add to the rows of a decode step, each row its own, at the cost of few and short kernels.

    AdapterSlots    adapters on the device, each in a slot: a row of addresses, one for every matrix
    SlotLora        which rows of one batch use which slot, in tiles; stands in for `LoraRows`

A few adapters are laid, with their A, below each frozen matrix: then one product computes x W^T and x A^T for all of
them, and a row takes what is its own. For more adapters, or large ones, a kernel multiplies each row with its own A, in
splits of the input so that the whole GPU takes part. What follows multiplies with B where the output is read next. A
tile is up to 16 neighbouring rows of one adapter.

All that changes from batch to batch lies in tensors on the device, so a captured graph serves any set of adapters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.server.engine.adapters import FrozenAdapter
from tinsmith.server.engine.gpu.early import early, wait_for_others
from tinsmith.server.engine.gpu.rooms import NUM_UNITS, UNIT, layers_of, make_rooms, parts_of
from tinsmith.server.engine.lora import Segment
from tinsmith.server.engine.model import ModelShape, Transformer
from tinsmith.server.engine.products import Matrix
from tinsmith.server.engine.steps import Turn
from tinsmith.server.engine.transfer import upload_array

TILE_ROWS = 16
_MAX_PARTS = 3
_COLUMNS = 1 + _MAX_PARTS  # addresses of A and of the B of each part
_INPUTS_AT_ONCE = 128
_OUTPUTS_AT_ONCE = 128
_GATED_AT_ONCE = 64
# One or two for every multiprocessor of a large GPU.
_ENOUGH_PROGRAMS = 256


class AdapterSlots:
    """Where the matrices of adapters lie; an adapter keeps its place while it is in use and the room lasts."""

    def __init__(self, model: Transformer, num_slots: int) -> None:
        device = model.device
        self.names = {name: index for index, name in enumerate(site_names(model.shape))}
        self.addresses = torch.zeros(num_slots, len(self.names), _COLUMNS, dtype=torch.int64, device=device)
        self.ranks = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.scales = torch.zeros(num_slots, dtype=torch.float32, device=device)
        self.units = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._slots: WeakKeyDictionary[FrozenAdapter, int] = WeakKeyDictionary()
        self._settled: WeakKeyDictionary[FrozenAdapter, range] = WeakKeyDictionary()
        make_rooms(model)
        self._rooms = {name: matrix.below for name, matrix in layers_of(model)}

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

    def settle(self, adapters: Sequence[FrozenAdapter]) -> int:
        """Lay the A of all of these below the frozen matrices; how many units are in use then, 0 if they do not fit."""
        needed = {adapter: triton.cdiv(adapter.spec.rank, UNIT) for adapter in adapters}
        if sum(needed.values()) > NUM_UNITS:
            return 0
        if any(adapter not in self._settled for adapter in adapters):
            self._settled.clear()
            first = 0
            for adapter, count in needed.items():
                self._settled[adapter] = range(first, first + count)
                self._copy(adapter, first)
                first += count
        begins = np.array([self._settled[adapter].start for adapter in adapters])
        slots = upload_array(np.array(self.place(adapters)), self.units.device)
        self.units[slots] = upload_array(begins, self.units.device)
        return max(self._settled[adapter].stop for adapter in adapters)

    def _copy(self, adapter: FrozenAdapter, first: int) -> None:
        sites = {name: site for name, site in adapter.sites.items() if name in self._rooms}
        begins = {name: len(site.b) * UNIT * first for name, site in sites.items()}
        torch._foreach_copy_(
            [self._rooms[name][begins[name] : begins[name] + len(site.a)] for name, site in sites.items()],
            [site.a for site in sites.values()],
        )

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


class Ranks(NamedTuple):
    """What the kernels know of the ranks of a batch."""

    padded: int
    """The largest, as tl.dot wants it."""
    divisor: int

    @classmethod
    def of(cls, ranks: Sequence[int]) -> Ranks:
        return cls(max(triton.next_power_of_2(max(ranks)), 16), math.gcd(16, *ranks))


class SlotLora:
    """The adapters of one batch. Tiles beyond those in use are empty: their first row is their end.

    With `units`, their A lie below the frozen matrices, so many units of them; else they are multiplied apart.
    """

    def __init__(self, slots: AdapterSlots, tiles: Tensor, ranks: Ranks, units: int, shape: ModelShape) -> None:
        self.slots = slots
        self.tiles = tiles  # int64 [tiles, 3]
        self.max_rank, self._divisor = ranks
        self.units = units
        self._parts = parts_of(shape)

    def linear(self, x: Tensor, matrix: Matrix, name: str) -> Tensor:
        """x W^T + b + scale * (x A^T) B^T, by the adapter of each row: [N, in] -> [N, out]"""
        outs = self._outs(name)
        y, inner = self._products(x, matrix, name)
        result = torch.empty(len(x), matrix.shape[0], dtype=x.dtype, device=x.device)
        num_blocks = sum(triton.cdiv(out, _OUTPUTS_AT_ONCE) for out in outs)
        _expand[len(self.tiles), num_blocks](
            y, result, *self._tables(name), inner, len(x), *_strides(y, inner),
            *outs, *[0] * (_MAX_PARTS - len(outs)), BLOCK_N=_OUTPUTS_AT_ONCE, **self._options(outs, inner),
        )  # fmt: skip
        return result

    def gated_silu(self, x: Tensor, gate_up: Matrix, name: str) -> Tensor:
        """silu(gate) * up; what adapters add to the two is added where they are read, and never written: [N, F]"""
        outs = self._outs(name)
        y, inner = self._products(x, gate_up, name)
        gated = torch.empty(len(x), outs[0], dtype=x.dtype, device=x.device)
        _expand_gated_silu[len(self.tiles), triton.cdiv(outs[0], _GATED_AT_ONCE)](
            y, gated, *self._tables(name), inner, len(x), *_strides(y, inner),
            WIDTH=outs[0], BLOCK_N=_GATED_AT_ONCE, **self._options(outs, inner),
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
        y, inner = self._products(x, qkv, name)
        num_heads = num_q + 2 * num_kv
        turned = torch.empty(len(x), num_heads, qkv.shape[0] // num_heads, dtype=x.dtype, device=x.device)
        cos, sin = turn or (None, None)
        _expand_turned_heads[len(self.tiles), num_heads](
            y, turned, *self._tables(name), inner, weight, eps, cos, sin, len(x), *_strides(y, inner),
            NUM_Q=num_q, NUM_KV=num_kv, HALF=turned.shape[2] // 2, HAS_NORM=weight is not None,
            HAS_TURN=turn is not None, **self._options(self._outs(name), inner),
        )  # fmt: skip
        q, k, v = torch.split_with_sizes(turned, [num_q, num_kv, num_kv], dim=1)
        return q, k, v

    def _products(self, x: Tensor, matrix: Matrix, name: str) -> tuple[Tensor, Tensor]:
        """x W^T, and x A^T of the adapters: [N, units of all parts], or [splits, N, parts, rank] in float32"""
        if self.units and matrix.has_room:
            y = matrix.product_with_rows_below(x, len(self._outs(name)) * UNIT * self.units)
            return y, y[:, matrix.shape[0] :]
        return matrix.product(x), self._shrunk(x, name)

    def _outs(self, name: str) -> tuple[int, ...]:
        return self._parts[name.rpartition(".")[2]]

    def _tables(self, name: str) -> tuple[Tensor, ...]:
        addresses = self.slots.addresses[:, self.slots.names[name]]
        return addresses, self.slots.ranks, self.slots.scales, self.slots.units, self.tiles

    def _options(self, outs: tuple[int, ...], inner: Tensor) -> dict[str, int]:
        return {
            "ADDRESS_STRIDE": self.slots.addresses.stride(0), "PARTS": len(outs), "MAX_RANK": self.max_rank,
            "DIVISOR": self._divisor, "SPLITS": len(inner) if inner.dim() == 4 else 0, "UNIT": UNIT, "TILE": TILE_ROWS,
            "num_warps": 4, **early(inner.device),
        }  # fmt: skip

    def _shrunk(self, x: Tensor, name: str) -> Tensor:
        num_parts, num_in, rank_block = len(self._outs(name)), x.shape[1], min(self.max_rank, 32)
        num_blocks = num_parts * (self.max_rank // rank_block)
        # Enough for every multiprocessor, and no more: whoever adds them up reads all of them.
        enough = triton.cdiv(_ENOUGH_PROGRAMS, len(self.tiles) * num_blocks)
        splits = max(min(enough, triton.cdiv(num_in, _INPUTS_AT_ONCE)), 1)
        inner = torch.empty(splits, len(x), num_parts, self.max_rank, dtype=torch.float32, device=x.device)
        addresses, ranks, _, _, tiles = self._tables(name)
        _shrink[len(tiles), num_blocks, splits](
            x, addresses, ranks, tiles, inner, len(x), num_in, x.stride(0), addresses.stride(0),
            PARTS=num_parts, MAX_RANK=self.max_rank, BLOCK_R=rank_block, BLOCK_K=_INPUTS_AT_ONCE,
            PER_SPLIT=triton.cdiv(num_in, splits * _INPUTS_AT_ONCE) * _INPUTS_AT_ONCE, TILE=TILE_ROWS, num_warps=4,
            **early(x.device),
        )  # fmt: skip
        return inner


def _strides(y: Tensor, inner: Tensor) -> tuple[int, int]:
    return y.stride(0), inner.stride(0)


@triton.jit
def _shrink(
    x, addresses, ranks, tiles, inner, num_rows, num_in, x_stride, address_stride,
    PARTS: tl.constexpr, MAX_RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    PER_SPLIT: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
) -> Any:  # fmt: skip
    """inner[split, row, part, r] = sum of x[row, k] A[part, r, k] over the k of the split."""
    wait_for_others(EARLY)
    tile = tiles + tl.program_id(0) * 3
    start, end, slot = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    part = tl.program_id(1) // (MAX_RANK // BLOCK_R)
    r = tl.program_id(1) % (MAX_RANK // BLOCK_R) * BLOCK_R + tl.arange(0, BLOCK_R)
    split = tl.program_id(2)
    address = tl.load(addresses + slot * address_stride, mask=slot >= 0, other=0)
    if (start < end) & (address != 0):
        rank = tl.load(ranks + slot)
        a = tl.multiple_of(address.to(tl.pointer_type(x.dtype.element_ty)), 16)
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
        tl.store(inner + to, total, mask=is_row[:, None])


@triton.jit
def _low_rank(
    part, address, slot, ranks, scales, units, inner, num_rows, inner_stride, rows, is_row, columns, is_column, dtype,
    PARTS: tl.constexpr, MAX_RANK: tl.constexpr, DIVISOR: tl.constexpr, SPLITS: tl.constexpr, UNIT: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """What an adapter adds to these rows and columns of one part: [TILE, columns]. No splits: x A^T lies in units."""
    # Without knowing what divides the rank, B would be loaded number by number.
    rank = tl.multiple_of(tl.load(ranks + slot), DIVISOR)
    b = tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)
    result = tl.zeros([TILE, columns.shape[0]], tl.float32)
    # Large ranks in float32 would not fit at once.
    at_once: tl.constexpr = 64 if MAX_RANK > 64 and dtype == tl.float32 else MAX_RANK
    for number in tl.range(MAX_RANK // at_once, num_stages=1):
        r = number * at_once + tl.arange(0, at_once)
        is_rank = r < rank
        total = tl.zeros([TILE, at_once], tl.float32)
        if SPLITS == 0:
            at = rows[:, None] * inner_stride + tl.load(units + slot) * (PARTS * UNIT) + part * rank + r[None, :]
            total += tl.load(inner + at, mask=is_row[:, None] & is_rank[None, :], other=0.0).to(tl.float32)
        else:
            for split in range(SPLITS):
                at = ((split * num_rows + rows)[:, None] * PARTS + part) * MAX_RANK + r[None, :]
                total += tl.load(inner + at, mask=is_row[:, None], other=0.0)
        is_there = is_column[None, :] & is_rank[:, None]
        b_tile = tl.load(b + columns[None, :] * rank + r[:, None], mask=is_there, other=0.0)
        result = tl.dot((total * tl.load(scales + slot)).to(dtype), b_tile, result, input_precision="ieee")
    return result


@triton.jit
def _expand(
    y, result, addresses, ranks, scales, units, tiles, inner, num_rows, y_stride, inner_stride,
    OUT0: tl.constexpr, OUT1: tl.constexpr, OUT2: tl.constexpr, BLOCK_N: tl.constexpr,
    ADDRESS_STRIDE: tl.constexpr, PARTS: tl.constexpr, MAX_RANK: tl.constexpr, DIVISOR: tl.constexpr,
    SPLITS: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
) -> Any:  # fmt: skip
    """y and what the adapters add to it; blocks of columns never cross a part."""
    wait_for_others(EARLY)
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
    if start < end:
        rows = start + tl.arange(0, TILE)
        columns = first + tl.arange(0, BLOCK_N)
        is_row, is_column = rows < end, columns < out
        is_there = is_row[:, None] & is_column[None, :]
        values = tl.load(y + rows[:, None] * y_stride + before + columns[None, :], mask=is_there, other=0.0)
        values = values.to(tl.float32)
        address = tl.load(addresses + slot * ADDRESS_STRIDE + 1 + part, mask=slot >= 0, other=0)
        if address != 0:
            values += _low_rank(
                part, address, slot, ranks, scales, units, inner, num_rows, inner_stride, rows, is_row, columns,
                is_column, y.dtype.element_ty, PARTS, MAX_RANK, DIVISOR, SPLITS, UNIT, TILE,
            )  # fmt: skip
        tl.store(result + rows[:, None] * (OUT0 + OUT1 + OUT2) + before + columns[None, :], values, mask=is_there)


@triton.jit
def _expand_gated_silu(
    y, gated, addresses, ranks, scales, units, tiles, inner, num_rows, y_stride, inner_stride,
    WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, ADDRESS_STRIDE: tl.constexpr, PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr, DIVISOR: tl.constexpr, SPLITS: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr,
    EARLY: tl.constexpr,
) -> Any:  # fmt: skip
    wait_for_others(EARLY)
    tile = tiles + tl.program_id(0) * 3
    start, end, slot = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if start < end:
        rows = start + tl.arange(0, TILE)
        columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_row, is_column = rows < end, columns < WIDTH
        is_there = is_row[:, None] & is_column[None, :]
        places = rows[:, None] * y_stride + columns[None, :]
        gate = tl.load(y + places, mask=is_there, other=0.0).to(tl.float32)
        up = tl.load(y + places + WIDTH, mask=is_there, other=0.0).to(tl.float32)
        table = addresses + slot * ADDRESS_STRIDE
        address = tl.load(table + 1, mask=slot >= 0, other=0)
        if address != 0:
            gate += _low_rank(
                0, address, slot, ranks, scales, units, inner, num_rows, inner_stride, rows, is_row, columns,
                is_column, y.dtype.element_ty, PARTS, MAX_RANK, DIVISOR, SPLITS, UNIT, TILE,
            )  # fmt: skip
            up += _low_rank(
                1, tl.load(table + 2), slot, ranks, scales, units, inner, num_rows, inner_stride, rows, is_row, columns,
                is_column, y.dtype.element_ty, PARTS, MAX_RANK, DIVISOR, SPLITS, UNIT, TILE,
            )  # fmt: skip
        result = gate / (1 + tl.exp(-gate)) * up
        tl.store(gated + rows[:, None] * WIDTH + columns[None, :], result, mask=is_there)


@triton.jit
def _expand_turned_heads(
    y, turned, addresses, ranks, scales, units, tiles, inner, weight, eps, cos, sin, num_rows, y_stride, inner_stride,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr, HAS_TURN: tl.constexpr,
    ADDRESS_STRIDE: tl.constexpr, PARTS: tl.constexpr, MAX_RANK: tl.constexpr, DIVISOR: tl.constexpr,
    SPLITS: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
) -> Any:  # fmt: skip
    """One head of the rows of a tile; values get what the adapter adds, and are neither normed nor turned."""
    wait_for_others(EARLY)
    tile = tiles + tl.program_id(0) * 3
    start, end, slot = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    head = tl.program_id(1)
    part = (head >= NUM_Q).to(tl.int32) + (head >= NUM_Q + NUM_KV).to(tl.int32)
    in_part = head - tl.where(part == 2, NUM_Q + NUM_KV, tl.where(part == 1, NUM_Q, 0))
    if start < end:
        rows = start + tl.arange(0, TILE)
        pair = tl.arange(0, HALF)
        is_row, always = rows < end, pair < HALF
        places = rows[:, None] * y_stride + head * (2 * HALF) + pair[None, :]
        first = tl.load(y + places, mask=is_row[:, None], other=0.0).to(tl.float32)
        second = tl.load(y + places + HALF, mask=is_row[:, None], other=0.0).to(tl.float32)
        address = tl.load(addresses + slot * ADDRESS_STRIDE + 1 + part, mask=slot >= 0, other=0)
        if address != 0:
            columns = in_part * (2 * HALF) + pair
            first += _low_rank(
                part, address, slot, ranks, scales, units, inner, num_rows, inner_stride, rows, is_row, columns,
                always, y.dtype.element_ty, PARTS, MAX_RANK, DIVISOR, SPLITS, UNIT, TILE,
            )  # fmt: skip
            second += _low_rank(
                part, address, slot, ranks, scales, units, inner, num_rows, inner_stride, rows, is_row, columns + HALF,
                always, y.dtype.element_ty, PARTS, MAX_RANK, DIVISOR, SPLITS, UNIT, TILE,
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
        to = turned + (rows * (NUM_Q + 2 * NUM_KV) + head)[:, None] * (2 * HALF) + pair[None, :]
        tl.store(to, first, mask=is_row[:, None])
        tl.store(to + HALF, second, mask=is_row[:, None])
