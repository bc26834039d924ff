"""The inner layer with adapters in one pass equals its steps one after the other."""

from __future__ import annotations

import pytest
import torch

from tests.server.engine.gpu.adapters import DTYPE, exact, gradients, grouped, looped, site
from tests.server.engine.gpu.devices import assert_near, normal
from tinsmith.server.engine import elementwise
from tinsmith.server.engine.gpu.mlp import Mlp
from tinsmith.server.engine.products import Matrix

CASES = {
    "one adapter": ([(0, 30)], [16], 48, 40),
    "a tile and a bit": ([(0, 70)], [4], 16, 136),
    "ranks apart": ([(0, 33), (33, 34), (34, 50)], [32, 4, 20], 24, 48),
}


@pytest.mark.parametrize("case", CASES)
def test_forward_and_back(case: str) -> None:
    segments, ranks, width, inner = CASES[case]
    outer_sites = [site(rank, width, [inner, inner]) for rank in ranks]
    inner_sites = [site(rank, inner, [width]) for rank in ranks]
    plain_outer, plain_inner = [exact(each) for each in outer_sites], [exact(each) for each in inner_sites]
    gate_up, down = (normal(2 * inner, width) * width**-0.5).to(DTYPE), (normal(width, inner) * inner**-0.5).to(DTYPE)
    x = normal(segments[-1][1], width, dtype=DTYPE).requires_grad_()
    dy = normal(*x.shape, dtype=DTYPE)
    sites = grouped(segments, outer_sites), grouped(segments, inner_sites)
    y = Mlp.apply(x, torch.zeros((), requires_grad=True), Matrix(gate_up), Matrix(down), *sites)
    y.backward(dy)

    outer, back = looped(segments, plain_outer), looped(segments, plain_inner)
    x64, dy64 = x.detach().double(), dy.double()
    both = x64 @ gate_up.double().t()
    xa = outer.add(both, x64)
    h = elementwise.gated_silu(both)
    y64 = h @ down.double().t()
    ha = back.add(y64, h)
    dh = dy64 @ down.double()
    back.add_gradients(h, ha, dy64, dh)
    dboth = elementwise.gated_silu_backward(dh, both)
    dx = dboth @ gate_up.double()
    outer.add_gradients(x64, xa, dboth, dx)

    assert_near(y.detach(), y64)
    assert x.grad is not None
    assert_near(x.grad, dx)
    for found, expected in zip(gradients(outer_sites + inner_sites), gradients(plain_outer + plain_inner), strict=True):
        assert_near(found, expected, tolerance=1e-2)
