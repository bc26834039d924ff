"""Queries, keys and values with adapters in one pass equal their steps one after the other."""

from __future__ import annotations

import pytest
import torch

from tests.server.engine.gpu.adapters import DTYPE, exact, gradients, grouped, looped, site
from tests.server.engine.gpu.devices import DEVICE, assert_near, normal
from tinsmith.server.engine import elementwise
from tinsmith.server.engine.gpu.heads import Heads
from tinsmith.server.engine.products import Matrix

EPS = torch.tensor(1e-6, device=DEVICE)
CASES = {
    "norm and turn": ([(0, 40)], [16], 2, 1, 16, True, True),
    "ranks apart": ([(0, 33), (33, 34), (34, 45)], [32, 4, 20], 3, 1, 32, True, True),
    "a rank too large to be taken at once": ([(0, 5), (5, 9)], [100, 4], 2, 1, 16, True, True),
    "turn alone": ([(0, 5)], [8], 2, 2, 24, False, True),
    "norm alone": ([(0, 5)], [8], 2, 1, 16, True, False),
    "neither": ([(0, 5)], [8], 2, 1, 16, False, False),
}


@pytest.mark.parametrize("case", CASES)
def test_forward_and_back(case: str) -> None:
    segments, ranks, num_q, num_kv, size, has_norm, has_turn = CASES[case]
    num_rows, width, num_turned = segments[-1][1], 24, num_q + num_kv
    outs = [num_q * size, num_kv * size, num_kv * size]
    sites = [site(rank, width, outs) for rank in ranks]
    plain = [exact(each) for each in sites]
    qkv = (normal(sum(outs), width) * width**-0.5).to(DTYPE)
    weight = normal(num_turned, size) if has_norm else None
    angles = normal(num_rows, 1, size // 2)
    turn = (angles.cos(), angles.sin()) if has_turn else None
    x = normal(num_rows, width, dtype=DTYPE).requires_grad_()
    found = Heads.apply(
        x, torch.zeros((), requires_grad=True), Matrix(qkv), grouped(segments, sites), num_q, num_kv, weight, EPS, turn
    )
    dq, dk, dv = (normal(*part.shape, dtype=DTYPE) for part in found)
    torch.autograd.backward(found, (dq, dk, dv))

    additions, x64 = looped(segments, plain), x.detach().double()
    heads = x64 @ qkv.double().t()
    xa = additions.add(heads, x64)
    heads = heads.float().view(num_rows, -1, size)
    turned = elementwise.turn_heads(heads, num_turned, weight, EPS, turn)
    dheads = elementwise.turn_heads_backward(dq.float(), dk.float(), dv.float(), heads, weight, EPS, turn)
    dheads = dheads.flatten(1).double()
    dx = dheads @ qkv.double()
    additions.add_gradients(x64, xa, dheads, dx)

    for ours, expected in zip(found, (turned[:, :num_q], turned[:, num_q:], heads[:, num_turned:]), strict=True):
        assert_near(ours.detach(), expected)
    assert x.grad is not None
    assert_near(x.grad, dx)
    for ours, expected in zip(gradients(sites), gradients(plain), strict=True):
        assert_near(ours, expected, tolerance=1e-2)
