"""Frozen matrices, laid out as the products of this machine read them fastest.

torch multiplies a plain matrix by laying it out anew in blocks at every call. With the few rows of a decode step that
costs as much as the product itself; and for float32 it calls a library that is slow on CPUs of other makers. oneDNN,
which torch carries along, can keep the blocks instead.
"""

from __future__ import annotations

import platform

import torch
from torch import Tensor
from torch.nn import functional

from tinsmith.server.engine.steps import has_kernels

# A call of oneDNN takes 14 microseconds before it multiplies, one of torch's own in float32 two.
_WORTH_PACKING = 2**16


class Matrix:
    """[out, in], with an optional bias; never changed and never trained."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, deterministic: bool = False, stays: bool = True
    ) -> None:
        """One that does not stay may be `let_go`, and is laid out as it came, since it may come often."""
        self.shape = weight.shape
        self.dtype = weight.dtype
        self.bias = bias
        self._is_packed = stays and _can_pack(weight)
        self._weight = _packed(weight) if self._is_packed else weight
        self._transposed: Tensor | None = None
        self._whole: Tensor | None = None
        self._above = 0
        self._longer_bias: Tensor | None = None
        self._is_deterministic = deterministic
        self._has_kernel = weight.is_cuda and has_kernels()

    def product(self, x: Tensor) -> Tensor:
        """x W^T + b: [T, in] -> [T, out]"""
        if self._is_packed:
            return _multiply(x, self._weight, self.bias)
        if self._is_deterministic:
            return _fixed(x, self._weight, self.bias)
        if self._has_kernel and len(x) == 1:
            return _one_row(x, self._weight, self.bias)
        return functional.linear(x, self._weight, self.bias)

    def make_room(self, above: int, below: int, beside: int) -> None:
        """Lay the matrix into a larger one, zero elsewhere: so many rows above and below it, and columns beside it.

        What is laid there takes part in the same products; it is for adapters.
        """
        num_out, num_in = self.shape
        size = above + num_out + below, num_in + beside
        self._whole = torch.zeros(size, dtype=self.dtype, device=self._weight.device)
        self._above = above
        self._weight = self._around().copy_(self._weight)
        if self.bias is not None:
            self._longer_bias = functional.pad(self.bias, (0, below))

    @property
    def has_room(self) -> bool:
        return self._whole is not None

    @property
    def below(self) -> Tensor:
        """[rows, in]"""
        assert self._whole is not None
        return self._whole[self._above + self.shape[0] :, : self.shape[1]]

    def product_with_rows_below(self, x: Tensor, num_rows: int) -> Tensor:
        """The product, and beside it those with so many of the rows below: [T, in] -> [T, out + rows]"""
        weight = self._around(below=num_rows)
        bias = None if self._longer_bias is None else self._longer_bias[: len(weight)]
        if len(x) == 1:
            return _one_row(x, weight, bias)
        return functional.linear(x, weight, bias)

    def product_with_columns_beside(self, x: Tensor) -> Tensor:
        """The product with as many of the columns beside as x has more than it: [T, in + columns] -> [T, out]"""
        return functional.linear(x, self._around(beside=x.shape[1] - self.shape[1]), self.bias)

    def gradient_with_rows_above(self, dy: Tensor) -> Tensor:
        """The gradient with as many of the rows above as dy has more columns: [T, rows + out] -> [T, in]"""
        return torch.mm(dy, self._around(above=dy.shape[1] - self.shape[0]))

    def _around(self, above: int = 0, below: int = 0, beside: int = 0) -> Tensor:
        """The matrix with the nearest of what lies around it."""
        assert self._whole is not None
        num_out, num_in = self.shape
        return self._whole[self._above - above : self._above + num_out + below, : num_in + beside]

    def gradient(self, dy: Tensor) -> Tensor:
        """dy W: [T, out] -> [T, in]"""
        if not self._is_packed:
            return torch.mm(dy, self._weight)
        if self._transposed is None:  # a model that only samples never needs it
            self._transposed = _packed(self.plain().t().contiguous())
        return _multiply(dy, self._transposed, None)

    def let_go(self) -> None:
        """Until it is held again, there are no products."""
        self._weight = self._weight.new_empty(0)

    def hold(self, weight: Tensor) -> None:
        """The same weight as before, in other memory."""
        self._weight = weight

    def plain(self) -> Tensor:
        return self._weight.to_dense() if self._is_packed else self._weight


def _fixed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    from tinsmith.server.engine.gpu import fixed_product

    return fixed_product.product(x, weight, bias)


def _one_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    from tinsmith.server.engine.gpu import one_row

    return one_row.product(x, weight, bias)


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or platform.machine() not in ("x86_64", "AMD64"):
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.float32:
        return bool(weight.numel() >= _WORTH_PACKING)
    has_bfloat16: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.bfloat16 and has_bfloat16


def _packed(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def _multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y
