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
        self._with_room: Tensor | None = None
        self._bias_with_room: Tensor | None = None
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

    def make_room(self, num_rows: int) -> Tensor:
        """Rows below the matrix, zero at first, for whoever wants more products with the same input: [rows, in]"""
        num_out, num_in = self.shape
        whole = torch.zeros(num_out + num_rows, num_in, dtype=self.dtype, device=self._weight.device)
        whole[:num_out] = self._weight
        self._with_room, self._weight = whole, whole[:num_out]
        if self.bias is not None:
            self._bias_with_room = functional.pad(self.bias, (0, num_rows))
        return whole[num_out:]

    @property
    def has_room(self) -> bool:
        return self._with_room is not None

    def product_with_room(self, x: Tensor, num_rows: int) -> Tensor:
        """The product, and beside it those with so many of the rows below: [T, in] -> [T, out + rows]"""
        assert self._with_room is not None
        end = self.shape[0] + num_rows
        weight = self._with_room[:end]
        bias = None if self._bias_with_room is None else self._bias_with_room[:end]
        if len(x) == 1:
            return _one_row(x, weight, bias)
        return functional.linear(x, weight, bias)

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
