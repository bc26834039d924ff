"""Low-rank products of many adapters at once: a batch of eight adapters costs what one of them costs.

    AddressBook    where the matrices of the adapters of a batch lie
    GroupedSite    what those adapters add to one layer, and the way back: an `Additions`

Kernels find the weights of a tile through a table of addresses on the device, so adapters stay where they are, of any
rank. Every sum is made in a fixed order.

Letters: T rows, P parts of a site, R the largest rank, padded; r the rank of one adapter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.server.engine.gpu import card
from tinsmith.server.engine.lora import Site
from tinsmith.server.engine.transfer import upload, upload_array

_ROWS = 32
"""Rows of a tile: few enough that a few thousand rows keep every multiprocessor busy."""
_COLUMNS = 128
_MAX_WIDTH = 128
"""Of what a program makes of the ranks of all parts: more would not fit, and is left to other programs."""
_MIN_RANK = 16  # of tl.dot
_SUMMED_ROWS = 64
"""Rows of a tile where columns are summed. Then, and where rows are summed, the long side of a product is that which
tensor cores take 64 of at once; the ranks are few."""
_MIN_WIDTH = 64
_ENOUGH_PROGRAMS = 264
"""Two for each multiprocessor of a large GPU."""
_ENOUGH_FOR_SUMS = 400
"""Of rows: more programs would be faster, but leave more sums to be added up."""
_WORTH_A_SPLIT = 64
"""Blocks of columns in a sum."""
FIELDS = 9
"""Of a site in the table: addresses of A, its gradient, three B and their gradients, and the rank."""


Placed: TypeAlias = Sequence[tuple[int, int, Mapping[str, Site]]]
"""Rows from start to end, and what their adapter adds to which layer."""


class AddressBook:
    """Where the matrices of several adapters lie, layer by layer; one copy to the device for all of them."""

    def __init__(self, sites: Sequence[Mapping[str, Site]], device: torch.device) -> None:
        self._device = device
        self._numbers = {id(each): number for number, each in enumerate(sites)}
        names = dict.fromkeys(name for each in sites for name in each)
        self._names = {name: index for index, name in enumerate(names)}
        placed = [[each.get(name) for each in sites] for name in names]
        rows = [[(*site.addresses, site.rank) if site else (0,) * FIELDS for site in of_name] for of_name in placed]
        scales = [[site.scale if site else 0.0 for site in of_name] for of_name in placed]
        self._table = upload_array(np.array(rows, dtype=np.int64), device)
        self._scales = upload_array(np.array(scales, dtype=np.float32), device)
        self._groups: dict[tuple[tuple[int, int, int, int], ...], Groups] = {}
        self._first_rank = next(iter(sites[0].values())).rank

    def grouped(self, name: str, placed: Placed) -> GroupedSite | None:
        """The layer with that name, for rows from start to end of adapters in the book; None if none adds to it."""
        at = [(start, end, self._numbers[id(sites)], sites[name]) for start, end, sites in placed if name in sites]
        if not at:
            return None
        key = tuple((start, end, number, site.rank) for start, end, number, site in at)
        if key not in self._groups:
            self._groups[key] = Groups(key, self._device)
        index = self._names[name]
        return GroupedSite(self._groups[key], self._table[index], self._scales[index], [len(b) for b in at[0][3].b])

    @property
    def first_rank(self) -> int:
        """Of the first adapter, padded."""
        return _padded(self._first_rank)

    def tables(self, names: Sequence[str]) -> Tensor:
        """The addresses of the first adapter at these layers, which must be the first of the book: [layers, fields]"""
        assert [*self._names][: len(names)] == [*names]
        return self._table[: len(names), 0]


class Groups:
    """Rows from start to end, the number of their adapter in the book, and its rank; in order and apart."""

    def __init__(self, segments: Sequence[tuple[int, int, int, int]], device: torch.device) -> None:
        self.segments = segments
        self.device = device
        ranks = [rank for *_, rank in segments]
        self.rank = _padded(max(ranks))
        self.divisor = math.gcd(16, *ranks)
        self._cuts: dict[int, Tensor] = {}
        self._chunks: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def tiles(self) -> Tensor:
        return self.cut(_ROWS)

    def cut(self, num_rows: int) -> Tensor:
        """[tiles, 3]: first row, row after the last, number of the adapter."""
        if num_rows not in self._cuts:
            tiles = [
                (first, min(first + num_rows, end), number)
                for start, end, number, _ in self.segments
                for first in range(start, end, num_rows)
            ]
            self._cuts[num_rows] = upload(torch.tensor(tiles, dtype=torch.int32), self.device)
        return self._cuts[num_rows]

    def chunks(self, num_blocks: int) -> tuple[Tensor, Tensor]:
        """Segments cut so that `num_blocks` programs for each chunk fill the GPU, and which chunks are whose.

        The latter as [segments, 3]: first chunk, chunk after the last, number of the adapter.
        """
        total = sum(end - start for start, end, *_ in self.segments)
        num_rows = triton.next_power_of_2(max(256, total * num_blocks // _ENOUGH_FOR_SUMS))
        if num_rows not in self._chunks:
            ends = [*accumulate(triton.cdiv(end - start, num_rows) for start, end, *_ in self.segments)]
            numbers = [number for _, _, number, _ in self.segments]
            spans = torch.tensor([*zip([0, *ends], ends, numbers, strict=False)], dtype=torch.int32)
            self._chunks[num_rows] = self.cut(num_rows), upload(spans, self.device)
        return self._chunks[num_rows]


class GroupedSite:
    """One linear layer of several adapters: `table` int64 [segments, fields], `scales` float32 [segments]."""

    def __init__(self, groups: Groups, table: Tensor, scales: Tensor, outs: Sequence[int]) -> None:
        self.groups = groups
        self.table = table
        self.scales = scales
        self.outs = (*outs, 0, 0)[:3]
        self.num_parts = len(outs)

    def covers(self, num_rows: int) -> bool:
        """Whether every one of so many rows has an adapter here."""
        return sum(end - start for start, end, *_ in self.groups.segments) == num_rows

    def add(self, y: Tensor, x: Tensor) -> list[Tensor]:
        xa = self.shrink(x)
        self.expand(y, xa)
        return [xa]

    def add_gradients(self, x: Tensor, inner: Sequence[Tensor], dy: Tensor, dx: Tensor | None) -> None:
        (xa,) = inner
        dxa = self.shrink_gradient(dy)
        if dx is not None:
            self.expand_gradient(dx, dxa)
        self.add_weight_gradients(x, xa, dy, dxa)

    @property
    def width(self) -> int:
        """P R: of what its A make of a row."""
        return self.num_parts * self.groups.rank

    def shrink(self, x: Tensor, xa: Tensor | None = None) -> Tensor:
        """scale * x A^T: [T, in] -> [T, P R]; rows of no adapter are left as they are found."""
        groups = self.groups
        if xa is None:
            xa = torch.empty((len(x), self.width), dtype=x.dtype, device=x.device)
        width, num_slices = self._slices(self.num_parts)
        width, tiles = max(width, _MIN_WIDTH), groups.cut(_SUMMED_ROWS)
        _shrink[(len(tiles), num_slices)](
            x, tiles, self.table, self.scales, xa, x.stride(0), xa.stride(0), x.shape[1],
            FIELDS=FIELDS, PARTS=self.num_parts, RANK=groups.rank, WIDTH=width, ROWS=_SUMMED_ROWS,
            BLOCK=_COLUMNS, num_warps=4, num_stages=_num_stages(x, width, _COLUMNS),
        )  # fmt: skip
        return xa

    def expand(self, y: Tensor, xa: Tensor) -> None:
        """Add xa B^T to y [T, out], part by part."""
        groups = self.groups
        _expand[(len(groups.tiles), sum(triton.cdiv(out, _COLUMNS) for out in self.outs))](
            y, xa, groups.tiles, self.table, y.stride(0), *self.outs,
            FIELDS=FIELDS, PARTS=self.num_parts, RANK=groups.rank, DIVISOR=groups.divisor, ROWS=_ROWS, BLOCK=_COLUMNS,
            num_warps=4,
        )  # fmt: skip

    def shrink_gradient(self, dy: Tensor, dxa: Tensor | None = None) -> Tensor:
        """scale * dy B: [T, out] -> [T, P R], the gradient of x A^T."""
        groups, num_splits, num_columns = self.groups, *self._splits()
        if dxa is None:
            dxa = torch.empty((len(dy), self.width), dtype=dy.dtype, device=dy.device)
        sums = dxa[None]
        if num_splits > 1:
            sums = torch.empty((num_splits, *dxa.shape), dtype=torch.float32, device=dy.device)
        tiles, block = groups.cut(_SUMMED_ROWS), _summed_columns(groups.rank)
        _shrink_gradient[(len(tiles), self.num_parts, num_splits)](
            dy, tiles, self.table, self.scales, sums, dy.stride(0), sums.stride(1), *self.outs, len(dy),
            num_columns,
            FIELDS=FIELDS, PARTS=self.num_parts, RANK=groups.rank, DIVISOR=groups.divisor, ROWS=_SUMMED_ROWS,
            BLOCK=block, num_warps=4, num_stages=_num_stages(dy, groups.rank, block),
        )  # fmt: skip
        return dxa if num_splits == 1 else dxa.copy_(sums.sum(0))

    def _splits(self) -> tuple[int, int]:
        """Into how many sums the columns of a part are split, and how many columns each has.

        Few rows with very many columns, as at the unembedding, would leave most of a GPU idle.
        """
        num_blocks = triton.cdiv(max(self.outs), _COLUMNS)
        wanted = 2 * _ENOUGH_PROGRAMS // (len(self.groups.cut(_SUMMED_ROWS)) * self.num_parts)
        num_splits = max(1, min(wanted, num_blocks // _WORTH_A_SPLIT))
        return num_splits, triton.cdiv(num_blocks, num_splits) * _COLUMNS

    def expand_gradient(self, dx: Tensor, dxa: Tensor) -> None:
        """Add dxa A to dx [T, in]."""
        groups = self.groups
        width, num_slices = self._slices(self.num_parts)
        _expand_gradient[(len(groups.tiles), triton.cdiv(dx.shape[1], _COLUMNS))](
            dx, dxa, groups.tiles, self.table, dx.stride(0), dx.shape[1],
            FIELDS=FIELDS, PARTS=self.num_parts, RANK=groups.rank, WIDTH=width, SLICES=num_slices, ROWS=_ROWS,
            BLOCK=_COLUMNS, num_warps=4,
        )  # fmt: skip

    def add_weight_gradients(self, x: Tensor, xa: Tensor, dy: Tensor, dxa: Tensor) -> None:
        """Add dA = dxa^T x and dB = dy^T xa to the buffers of the adapters."""
        self._outer(dxa, x, (x.shape[1], 0, 0), of_b=False)
        self._outer(xa, dy, self.outs, of_b=True)

    def _outer(self, left: Tensor, right: Tensor, outs: Sequence[int], *, of_b: bool) -> None:
        groups = self.groups
        num_blocks = sum(triton.cdiv(out, _COLUMNS) for out in outs)
        chunks, spans = groups.chunks(num_blocks)
        height, num_slices = self._slices(1 if of_b else self.num_parts)
        sums = torch.empty((len(chunks), num_slices * height, sum(outs)), dtype=torch.float32, device=left.device)
        options: dict[str, Any] = {
            "FIELDS": FIELDS, "PARTS": self.num_parts, "RANK": groups.rank, "HEIGHT": height, "OF_B": of_b,
            "BLOCK": _COLUMNS, "num_warps": 4,
        }  # fmt: skip
        _outer[(len(chunks), num_blocks, num_slices)](
            left, right, chunks, sums, left.stride(0), right.stride(0), *outs,
            ROWS=64, **options, num_stages=3,
        )  # fmt: skip
        options["num_warps"] = 4 if groups.rank <= 32 else 8  # more sums than the registers of fewer threads hold
        _add_sums[(len(groups.segments), num_blocks, num_slices)](sums, spans, self.table, *outs, **options)

    def _slices(self, num_parts: int) -> tuple[int, int]:
        """How wide the ranks of so many parts are for one program, and how many such slices they make."""
        total = num_parts * self.groups.rank
        width = min(_MAX_WIDTH, int(triton.next_power_of_2(total)))
        return width, int(triton.cdiv(total, width))


def _padded(rank: int) -> int:
    return max(_MIN_RANK, int(triton.next_power_of_2(rank)))


def _summed_columns(width: int) -> int:
    """How many columns to take at once where all are summed: what is in flight must leave room for a second program."""
    return max(32, min(_COLUMNS, 8192 // width))


def _num_stages(x: Tensor, width: int, block: int) -> int:
    """Where columns are summed: each stage holds a block of them of some rows, and of as many ranks as there are."""
    return card.num_stages((_SUMMED_ROWS + width) * block * x.element_size(), x.device)


@triton.jit
def address_of(table, segment, field, dtype: tl.constexpr, FIELDS: tl.constexpr) -> Any:
    return tl.multiple_of(tl.load(table + segment * FIELDS + field).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _part_of(block, out0, out1, out2, BLOCK: tl.constexpr) -> Any:
    """Which part a block of columns belongs to, the first column of the part, the block within it, its width."""
    before1 = tl.cdiv(out0, BLOCK)
    before2 = before1 + tl.cdiv(out1, BLOCK)
    part = (block >= before1).to(tl.int32) + (block >= before2).to(tl.int32)
    begin = tl.where(part == 0, 0, tl.where(part == 1, out0, out0 + out1))
    inner = block - tl.where(part == 0, 0, tl.where(part == 1, before1, before2))
    return part, begin, inner, tl.where(part == 0, out0, tl.where(part == 1, out1, out2))


@triton.jit
def _shrink(
    x, tiles, table, scales, xa, stride, xa_stride, width, FIELDS: tl.constexpr, PARTS: tl.constexpr,
    RANK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
) -> Any:  # fmt: skip
    tile = tiles + tl.program_id(0) * 3
    rows = tl.load(tile) + tl.arange(0, ROWS)
    segment = tl.load(tile + 2)
    has_row = (rows < tl.load(tile + 1))[:, None]
    a = address_of(table, segment, 0, x.dtype.element_ty, FIELDS)
    rank = tl.load(table + segment * FIELDS + 8)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    # Column c of the result is row (c mod R) of part (c div R) of A; ranks below R leave columns of zeros.
    has_column = (column < PARTS * RANK) & (column % RANK < rank)
    a_row = (column // RANK) * rank + column % RANK
    x_places = x + rows.to(tl.int64)[:, None] * stride
    a_places = a + a_row[:, None] * width
    total = tl.zeros([WIDTH, ROWS], tl.float32)
    for start in range(0, width, BLOCK):
        k = start + tl.arange(0, BLOCK)[None, :]
        of_x = tl.load(x_places + k, mask=has_row & (k < width), other=0.0)
        of_a = tl.load(a_places + k, mask=has_column[:, None] & (k < width), other=0.0)
        total = tl.dot(of_a, tl.trans(of_x), total, input_precision="ieee")
    total = tl.trans(total * tl.load(scales + segment))
    places = xa + rows.to(tl.int64)[:, None] * xa_stride + column[None, :]
    tl.store(places, total.to(xa.dtype.element_ty), mask=has_row & (column < PARTS * RANK)[None, :])


@triton.jit
def _expand(
    y, xa, tiles, table, stride, out0, out1, out2, FIELDS: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr,
    DIVISOR: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
) -> Any:  # fmt: skip
    tile = tiles + tl.program_id(0) * 3
    rows = tl.load(tile) + tl.arange(0, ROWS)
    segment = tl.load(tile + 2)
    has_row = (rows < tl.load(tile + 1))[:, None]
    part, begin, inner, width = _part_of(tl.program_id(1), out0, out1, out2, BLOCK)
    columns = inner * BLOCK + tl.arange(0, BLOCK)
    has_column = (columns < width)[None, :]
    rank = tl.multiple_of(tl.load(table + segment * FIELDS + 8), DIVISOR)
    j = tl.arange(0, RANK)
    b = address_of(table, segment, 2 + part, y.dtype.element_ty, FIELDS)
    left = tl.load(xa + rows.to(tl.int64)[:, None] * (PARTS * RANK) + part * RANK + j[None, :], mask=has_row, other=0.0)
    right = tl.load(
        b + columns[:, None] * rank + j[None, :], mask=(columns < width)[:, None] & (j < rank)[None, :], other=0.0
    )
    places = y + rows.to(tl.int64)[:, None] * stride + (begin + columns)[None, :]
    before = tl.load(places, mask=has_row & has_column, other=0.0).to(tl.float32)
    total = tl.dot(left, tl.trans(right), before, input_precision="ieee")
    tl.store(places, total.to(y.dtype.element_ty), mask=has_row & has_column)


@triton.jit(do_not_specialize=["num_rows"])
def _shrink_gradient(
    dy, tiles, table, scales, sums, stride, sums_stride, out0, out1, out2, num_rows, num_columns,
    FIELDS: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, DIVISOR: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr
) -> Any:  # fmt: skip
    """Sum number s is that of `num_columns` columns of each part from s * num_columns on."""
    tile = tiles + tl.program_id(0) * 3
    rows = tl.load(tile) + tl.arange(0, ROWS)
    segment = tl.load(tile + 2)
    has_row = (rows < tl.load(tile + 1))[:, None]
    part = tl.program_id(1)
    begin = tl.where(part == 0, 0, tl.where(part == 1, out0, out0 + out1))
    width = tl.where(part == 0, out0, tl.where(part == 1, out1, out2))
    rank = tl.multiple_of(tl.load(table + segment * FIELDS + 8), DIVISOR)
    j = tl.arange(0, RANK)
    b = address_of(table, segment, 2 + part, dy.dtype.element_ty, FIELDS)
    dy_places = dy + rows.to(tl.int64)[:, None] * stride + begin
    total = tl.zeros([ROWS, RANK], tl.float32)
    begin_sum = tl.program_id(2) * num_columns
    for start in range(begin_sum, tl.minimum(begin_sum + num_columns, width), BLOCK):
        k = start + tl.arange(0, BLOCK)
        left = tl.load(dy_places + k[None, :], mask=has_row & (k < width)[None, :], other=0.0)
        right = tl.load(b + k[:, None] * rank + j[None, :], mask=(k < width)[:, None] & (j < rank)[None, :], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    total *= tl.load(scales + segment)
    row_of_sums = tl.program_id(2).to(tl.int64) * num_rows + rows
    places = sums + row_of_sums[:, None] * sums_stride + part * RANK + j[None, :]
    tl.store(places, total.to(sums.dtype.element_ty), mask=has_row)


@triton.jit
def _expand_gradient(
    dx, dxa, tiles, table, stride, width, FIELDS: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr,
    WIDTH: tl.constexpr, SLICES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
) -> Any:  # fmt: skip
    tile = tiles + tl.program_id(0) * 3
    rows = tl.load(tile) + tl.arange(0, ROWS)
    segment = tl.load(tile + 2)
    has_row = (rows < tl.load(tile + 1))[:, None]
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    has_column = (columns < width)[None, :]
    a = address_of(table, segment, 0, dx.dtype.element_ty, FIELDS)
    rank = tl.load(table + segment * FIELDS + 8)
    places = dx + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    total = tl.load(places, mask=has_row & has_column, other=0.0).to(tl.float32)
    for number in tl.static_range(SLICES):
        inner = number * WIDTH + tl.arange(0, WIDTH)
        is_inner = (inner < PARTS * RANK) & (inner % RANK < rank)
        a_row = (inner // RANK) * rank + inner % RANK
        left = tl.load(
            dxa + rows.to(tl.int64)[:, None] * (PARTS * RANK) + inner[None, :],
            mask=has_row & (inner < PARTS * RANK)[None, :],
            other=0.0,
        )
        right = tl.load(a + a_row[:, None] * width + columns[None, :], mask=is_inner[:, None] & has_column, other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    tl.store(places, total.to(dx.dtype.element_ty), mask=has_row & has_column)


@triton.jit
def _outer(
    left, right, chunks, sums, left_stride, right_stride, out0, out1, out2, FIELDS: tl.constexpr, PARTS: tl.constexpr,
    RANK: tl.constexpr, HEIGHT: tl.constexpr, OF_B: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
) -> Any:  # fmt: skip
    """left^T right over the rows of one chunk, a slice of the left side and a block of the right: [height, block]."""
    chunk = tl.program_id(0)
    first, last = tl.load(chunks + chunk * 3), tl.load(chunks + chunk * 3 + 1)
    part, begin, inner, width = _part_of(tl.program_id(1), out0, out1, out2, BLOCK)
    columns = inner * BLOCK + tl.arange(0, BLOCK)
    has_column = (columns < width)[None, :]
    height = tl.program_id(2) * HEIGHT + tl.arange(0, HEIGHT)
    # For B the part's own columns of x A^T, for A those of all parts.
    left_column = part * RANK + height if OF_B else height
    has_left = (left_column < PARTS * RANK)[None, :]
    total = tl.zeros([BLOCK, HEIGHT], tl.float32)
    for start in range(first, last, ROWS):
        rows = start + tl.arange(0, ROWS)
        has_row = (rows < last)[:, None]
        rows64 = rows.to(tl.int64)[:, None]
        of_left = tl.load(left + rows64 * left_stride + left_column[None, :], mask=has_row & has_left, other=0.0)
        of_right = tl.load(
            right + rows64 * right_stride + (begin + columns)[None, :], mask=has_row & has_column, other=0.0
        )
        total = tl.dot(tl.trans(of_right), of_left, total, input_precision="ieee")
    all_columns = out0 + out1 + out2
    row = chunk.to(tl.int64) * (tl.num_programs(2) * HEIGHT) + height
    places = sums + row[:, None] * all_columns + (begin + columns)[None, :]
    tl.store(places, tl.trans(total), mask=has_column)


@triton.jit
def _add_sums(
    sums, spans, table, out0, out1, out2, FIELDS: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr,
    HEIGHT: tl.constexpr, OF_B: tl.constexpr, BLOCK: tl.constexpr
) -> Any:  # fmt: skip
    """Add what the chunks of one segment gave to its buffer."""
    span = spans + tl.program_id(0) * 3
    segment = tl.load(span + 2)
    part, begin, inner, width = _part_of(tl.program_id(1), out0, out1, out2, BLOCK)
    columns = inner * BLOCK + tl.arange(0, BLOCK)
    height = tl.program_id(2) * HEIGHT + tl.arange(0, HEIGHT)
    all_columns = out0 + out1 + out2
    rank = tl.load(table + segment * FIELDS + 8)
    inside = (columns < width)[None, :] & (height % RANK < rank)[:, None] & (height < PARTS * RANK)[:, None]
    total = tl.zeros([HEIGHT, BLOCK], tl.float32)
    places = sums + height.to(tl.int64)[:, None] * all_columns + (begin + columns)[None, :]
    for chunk in range(tl.load(span), tl.load(span + 1)):
        before = tl.cast(chunk, tl.int64) * (tl.num_programs(2) * HEIGHT) * all_columns
        total += tl.load(places + before, mask=inside, other=0.0)
    if OF_B:
        gradient = address_of(table, segment, 5 + part, tl.float32, FIELDS)
        places = gradient + columns[None, :] * rank + height[:, None]
    else:
        gradient = address_of(table, segment, 1, tl.float32, FIELDS)
        row = (height // RANK) * rank + height % RANK
        places = gradient + row[:, None] * width + columns[None, :]
    tl.store(places, tl.load(places, mask=inside, other=0.0) + total, mask=inside)
