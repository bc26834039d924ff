"""A product with one row equals the plain one."""

from __future__ import annotations

import pytest
import torch

from tests.server.engine.gpu.devices import assert_near, normal
from tinsmith.server.engine.gpu import one_row


@pytest.mark.parametrize("shape", [(7, 33), (16, 1024), (5, 1500)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_times_a_matrix(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, bias, x = normal(*shape, dtype=dtype), normal(shape[0], dtype=dtype), normal(1, shape[1], dtype=dtype)
    expected = x.double() @ weight.double().t()
    assert_near(one_row.product(x, weight, None), expected)
    assert_near(one_row.product(x, weight, bias), expected + bias.double())
