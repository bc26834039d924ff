"""Each kernel computes what the plain step does, forward and back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.server.engine.gpu.devices import DEVICE, assert_near, normal
from tinsmith.server.engine import elementwise as plain
from tinsmith.server.engine.gpu import elementwise as kernels

DTYPES = [torch.float32, torch.bfloat16]
EPS = torch.tensor(1e-6, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_delta", [True, False])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 64), (3, 576), (5, 1024)])
def test_the_norm_of_a_sum(num_rows: int, width: int, has_delta: bool, dtype: torch.dtype) -> None:
    x, weight = normal(num_rows, width), normal(width)
    delta = normal(num_rows, width, dtype=dtype) if has_delta else None
    found, expected = (each.add_norm(x, delta, weight, EPS, dtype) for each in (kernels, plain))
    for ours, reference in zip(found, expected, strict=True):
        assert ours.dtype == reference.dtype
        assert_near(ours, reference)
    total, _, inverse = expected
    dy = normal(num_rows, width, dtype=dtype)
    for dx in (None, normal(num_rows, width)):
        backward = [each.add_norm_backward(dx, dy, total, inverse, weight, dtype) for each in (kernels, plain)]
        for ours, reference in zip(*backward, strict=True):
            assert ours.dtype == reference.dtype
            assert_near(ours, reference)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("has_turn", [True, False])
@pytest.mark.parametrize(("num_q", "num_kv", "size"), [(4, 2, 16), (9, 3, 64), (6, 6, 96)])
def test_heads_are_normed_and_turned(
    num_q: int, num_kv: int, size: int, has_norm: bool, has_turn: bool, dtype: torch.dtype
) -> None:
    heads = normal(5, num_q + 2 * num_kv, size, dtype=dtype)
    weight = normal(num_q + num_kv, size) if has_norm else None
    angles = normal(5, 1, size // 2)
    turn = (angles.cos(), angles.sin()) if has_turn else None
    found, expected = (each.turn_heads(heads, num_q + num_kv, weight, EPS, turn) for each in (kernels, plain))
    assert_near(found, expected)
    # Gradients come as attention leaves them: queries here as a view with gaps between the rows.
    dq = normal(5, num_q + 1, size, dtype=dtype)[:, 1:]
    dk, dv = normal(5, num_kv, size, dtype=dtype), normal(5, num_kv, size, dtype=dtype)
    found, expected = (each.turn_heads_backward(dq, dk, dv, heads, weight, EPS, turn) for each in (kernels, plain))
    assert_near(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 8), (3, 1024), (2, 1500)])
def test_the_gated_activation(num_rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up, dy = 3 * normal(num_rows, 2 * width, dtype=dtype), normal(num_rows, width, dtype=dtype)
    assert_near(kernels.gated_silu(gate_up), plain.gated_silu(gate_up))
    assert_near(kernels.gated_silu_backward(dy, gate_up), plain.gated_silu_backward(dy, gate_up))


def test_rows_of_a_wider_tensor_are_read_where_they_lie() -> None:
    wide: Tensor = normal(4, 8, 16)
    found, expected = (each.turn_heads(wide[:, 2:], 4, None, EPS, TURN) for each in (kernels, plain))
    assert_near(found, expected)


TURN = (normal(4, 1, 8).cos(), normal(4, 1, 8).sin())
