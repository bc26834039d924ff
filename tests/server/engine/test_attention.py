"""Sequences of a packed batch see themselves and their own past, nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tinsmith.server.engine.attention import PackedCausal


def one_by_one(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """The definition, in float64, one query at a time."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q, dtype=torch.float64)
    start = 0
    for length in lengths:
        for row in range(start, start + length):
            for head in range(q.shape[1]):
                keys = k[start : row + 1, head // group].double()
                scores = keys @ q[row, head].double() / q.shape[2] ** 0.5
                out[row, head] = scores.softmax(0) @ v[start : row + 1, head // group].double()
        start += length
    return out


@pytest.mark.parametrize("lengths", [[5], [1, 1, 1], [7, 7, 2], [3, 9, 3, 3, 1]])
def test_packed_attention_equals_its_definition(lengths: list[int]) -> None:
    torch.manual_seed(0)
    num_rows = sum(lengths)
    q, k, v = torch.randn(num_rows, 4, 8), torch.randn(num_rows, 2, 8), torch.randn(num_rows, 2, 8)
    attended = PackedCausal(lengths)(0, q, k, v)
    torch.testing.assert_close(attended.double(), one_by_one(q, k, v, lengths), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[6, 6, 11, 1], [130, 130, 300], [600, 40]], ids=str)
def test_gradients_equal_those_of_one_sequence_at_a_time(dtype: torch.dtype, lengths: list[int]) -> None:
    torch.manual_seed(0)
    num_rows = sum(lengths)
    q, k, v = (torch.randn(num_rows, heads, 16, dtype=dtype, requires_grad=True) for heads in (6, 2, 2))
    weights = torch.randn(num_rows, 6, 16)
    (PackedCausal(lengths)(0, q, k, v) * weights).sum().backward()
    packed = [part.grad for part in (q, k, v)]
    exact = [part.detach().double().requires_grad_() for part in (q, k, v)]
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        scores = torch.einsum("ihd,jhd->hij", exact[0][rows], exact[1][rows].repeat_interleave(3, 1)) / 4
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        attended = torch.einsum("hij,jhd->ihd", scores.softmax(-1), exact[2][rows].repeat_interleave(3, 1))
        (attended * weights[rows]).sum().backward()
        start += length
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for ours, reference in zip(packed, exact, strict=True):
        torch.testing.assert_close(ours.double(), reference.grad, rtol=tolerance, atol=tolerance)
