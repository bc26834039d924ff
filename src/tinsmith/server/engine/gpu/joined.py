"""One adapter beside the frozen matrices: its low-rank products are part of the frozen ones.

    Rooms     the room around the matrices of all layers, and the way an adapter gets there
    Joined    one linear layer with it, forward and back

Forward, a row x is followed by xa = scale * x A^T, and W by B: [x xa] [W B]^T = x W^T + xa B^T. On the way back, dxa =
scale * dy B goes before dy, and A lies above W: [dxa dy] [A; W] = dxa A + dy W. So what the adapter adds is neither
read nor written by itself; for that, rows are written with room at their end, or at their beginning, in the first
place. With many adapters the zeros would outweigh it: this is for one (`lora.py` is for more).

Letters: T rows, P parts of a site, R the rank of the adapter, padded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.server.engine.gpu.lora import FIELDS, AddressBook, GroupedSite, address_of
from tinsmith.server.engine.gpu.rooms import UNIT, layers_of, make_rooms, parts_of
from tinsmith.server.engine.lora import Site
from tinsmith.server.engine.model import Transformer
from tinsmith.server.engine.products import Matrix
from tinsmith.server.engine.transfer import upload_array

_BLOCK = 128
_PLACES = 6
"""Of a matrix in the table: its address, the distance of its rows, its inputs, and the outputs of three parts."""


class Rooms:
    """Where the matrices of a model lie, with room for an adapter around them."""

    def __init__(self, model: Transformer) -> None:
        make_rooms(model)
        layers, parts = [*layers_of(model)], parts_of(model.shape)
        self.names = [name for name, _ in layers]
        outs = [(*parts[name.rpartition(".")[2]], 0, 0)[:3] for name in self.names]
        places = [
            (weight.data_ptr(), weight.stride(0), weight.shape[1], *out)
            for weight, out in zip((matrix.plain() for _, matrix in layers), outs, strict=True)
        ]
        self._places = upload_array(np.array(places, dtype=np.int64), model.device)
        self._dtype = model.compute_dtype
        self._most_in = max(matrix.shape[1] for _, matrix in layers)
        self._most_out = max(matrix.shape[0] for _, matrix in layers)

    def has_place_for(self, sites: Mapping[str, Site]) -> bool:
        """Whether an adapter has a part in every layer, and is small enough."""
        return all(name in sites and sites[name].rank <= UNIT for name in self.names)

    def lay(self, book: AddressBook) -> None:
        """The first adapter of the book in place of the one before."""
        tables, rank = book.tables(self.names), book.first_rank
        dtype = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[self._dtype]
        options = {"FIELDS": FIELDS, "PLACES": _PLACES, "RANK": rank, "BLOCK": _BLOCK, "DTYPE": dtype}
        stride, num_matrices = tables.stride(0), len(self.names)
        _lay_b[(num_matrices, triton.cdiv(self._most_out, _BLOCK))](self._places, tables, stride, **options)
        _lay_a[(num_matrices, triton.cdiv(self._most_in, _BLOCK))](self._places, tables, stride, **options)


class Joined:
    """A frozen matrix and what lies around it."""

    def __init__(self, matrix: Matrix, site: GroupedSite) -> None:
        self._matrix = matrix
        self._site = site

    @property
    def room(self) -> int:
        """Columns that its input has at the end of a row, and its output's gradient at the beginning."""
        return self._site.width

    def new_input(self, like: Tensor) -> Tensor:
        """For as many rows: [T, in + room]"""
        return like.new_empty((len(like), self._matrix.shape[1] + self.room), dtype=self._matrix.dtype)

    def new_gradient(self, like: Tensor) -> Tensor:
        """For as many rows: [T, room + out]"""
        return like.new_empty((len(like), self.room + self._matrix.shape[0]), dtype=self._matrix.dtype)

    def product(self, x: Tensor) -> Tensor:
        """[T, in + room] -> [T, out]; the room is filled."""
        num_in = self._matrix.shape[1]
        self._site.shrink(x[:, :num_in], x[:, num_in:])
        return self._matrix.product_with_columns_beside(x)

    def fill_room(self, dy: Tensor) -> None:
        """Before the gradients: [T, room + out]"""
        self._site.shrink_gradient(dy[:, self.room :], dy[:, : self.room])

    def gradient(self, dy: Tensor) -> Tensor:
        """[T, room + out], filled -> [T, in]"""
        return self._matrix.gradient_with_rows_above(dy)

    def add_weight_gradients(self, x: Tensor, xa: Tensor, dy: Tensor) -> None:
        """Add those of A and B to the adapter's buffers: [T, in], [T, room] and [T, room + out], all filled."""
        self._site.add_weight_gradients(x, xa, dy[:, self.room :], dy[:, : self.room])


@triton.jit
def _lay_b(
    places, tables, table_stride, FIELDS: tl.constexpr, PLACES: tl.constexpr, RANK: tl.constexpr,
    BLOCK: tl.constexpr, DTYPE: tl.constexpr
) -> Any:  # fmt: skip
    """The B of each part beside its own rows, and zeros beside those of others."""
    place, table = places + tl.program_id(0) * PLACES, tables + tl.program_id(0) * table_stride
    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    j = tl.arange(0, RANK)
    rank = tl.load(table + 8)
    matrix = tl.load(place).to(tl.pointer_type(DTYPE))
    stride, num_in = tl.load(place + 1), tl.load(place + 2)
    num_out = tl.load(place + 3) + tl.load(place + 4) + tl.load(place + 5)
    begin = tl.zeros([], tl.int64)
    for part in tl.static_range(3):
        out = tl.load(place + 3 + part)
        if out > 0:
            b = address_of(table, 0, 2 + part, DTYPE, FIELDS)
            is_own = (rows >= begin) & (rows < begin + out)
            values = tl.load(
                b + (rows - begin)[:, None] * rank + j[None, :], mask=is_own[:, None] & (j < rank)[None, :], other=0.0
            )
            beside = matrix + rows.to(tl.int64)[:, None] * stride + num_in + part * RANK + j[None, :]
            tl.store(beside, values, mask=(rows < num_out)[:, None])
        begin += out


@triton.jit
def _lay_a(
    places, tables, table_stride, FIELDS: tl.constexpr, PLACES: tl.constexpr, RANK: tl.constexpr,
    BLOCK: tl.constexpr, DTYPE: tl.constexpr
) -> Any:  # fmt: skip
    """The A of all parts above the matrix."""
    place, table = places + tl.program_id(0) * PLACES, tables + tl.program_id(0) * table_stride
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    j = tl.arange(0, RANK)
    rank = tl.load(table + 8)
    matrix = tl.load(place).to(tl.pointer_type(DTYPE))
    stride, num_in = tl.load(place + 1), tl.load(place + 2)
    num_parts = (tl.load(place + 3) > 0).to(tl.int64) + (tl.load(place + 4) > 0) + (tl.load(place + 5) > 0)
    a = address_of(table, 0, 0, DTYPE, FIELDS)
    is_column = (columns < num_in)[None, :]
    for part in range(num_parts):
        of_a = a + (part * rank + j)[:, None] * num_in + columns[None, :]
        values = tl.load(of_a, mask=(j < rank)[:, None] & is_column, other=0.0)
        row = (part - num_parts) * RANK + j
        tl.store(matrix + row[:, None] * stride + columns[None, :], values, mask=is_column)
