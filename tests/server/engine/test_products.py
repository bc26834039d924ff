"""Frozen matrices give the products that the plain ones give, however they are laid out."""

from __future__ import annotations

import pytest
import torch

from tinsmith.server.engine.products import Matrix


@pytest.mark.parametrize("num_rows", [1, 2, 7, 65])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_both_ways_equal_those_in_float64(num_rows: int, biased: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    weight, bias = (torch.randn(size, generator=generator).to(dtype) for size in ((33, 17), (33,)))
    x, dy = (torch.randn(num_rows, size, generator=generator).to(dtype) for size in (17, 33))
    matrix = Matrix(weight, bias if biased else None)
    product = x.double() @ weight.double().t() + (bias.double() if biased else 0)
    error = 1e-6 if dtype == torch.float32 else 1e-2
    assert (matrix.product(x) - product).norm() < error * product.norm()
    gradient = dy.double() @ weight.double()
    assert (matrix.gradient(dy) - gradient).norm() < error * gradient.norm()
    assert torch.equal(matrix.plain(), weight)
