"""Causal attention of short sequences on a CPU.

A few large products, with the probabilities kept for the backward pass, take less than half the time of torch's kernel,
whose products are small ones. What is kept grows with the square of the length, hence only short sequences.

Scores and probabilities are computed in float32; the other products are in the dtype of the input.

Letters: N groups (the heads of one sequence that share keys and values), G heads of a group, L length, D size of a
head, B queries of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

MAX_LENGTH = 512

# Queries that are scored together, against all keys up to the last of them. Smaller blocks waste less on keys that lie
# ahead, larger ones make faster products.
_BLOCK = 128


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[N, G, L, D], [N, L, D], [N, L, D] -> [N, G, L, D]"""
    attended: Tensor = _Attend.apply(q, k, v)
    return attended


class _Attend(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attended = torch.empty_like(q)
        probabilities = []
        for start, end in _blocks(q.shape[2]):
            p = _probabilities(q[:, :, start:end], k[:, :end])
            attended[:, :, start:end] = torch.bmm(p, v[:, :end]).unflatten(1, (-1, end - start))
            probabilities.append(p)
        ctx.save_for_backward(q, k, v, attended, *probabilities)
        return attended

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, attended, *probabilities = ctx.saved_tensors
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros(part.shape, dtype=torch.float32) for part in (k, v))
        inner = torch.linalg.vecdot(dy.float(), attended.float()).unsqueeze(-1)
        for (start, end), p in zip(_blocks(q.shape[2]), probabilities, strict=True):
            q_block, dy_block, inner_block = (part[:, :, start:end].flatten(1, 2) for part in (q, dy, inner))
            dp = torch.bmm(dy_block, v[:, :end].transpose(1, 2))
            ds = dp.sub_(inner_block).mul_(p)
            dq[:, :, start:end] = torch.bmm(ds, k[:, :end]).unflatten(1, (-1, end - start))
            dk[:, :end] += torch.bmm(ds.transpose(1, 2), q_block)
            dv[:, :end] += torch.bmm(p.transpose(1, 2), dy_block)
        scale = _scale(q)
        return dq.mul_(scale), dk.mul_(scale).to(k.dtype), dv.to(v.dtype)


def _blocks(length: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + _BLOCK, length)) for start in range(0, length, _BLOCK))


def _probabilities(q: Tensor, k: Tensor) -> Tensor:
    """Of the last B positions on all up to them: [N, G, B, D], [N, L, D] -> [N, G * B, L]."""
    num_queries = q.shape[2]
    scores = torch.bmm(q.float().mul(_scale(q)).flatten(1, 2), k.float().transpose(1, 2))
    ahead = torch.ones(num_queries, num_queries, dtype=torch.bool).triu_(1)
    scores.unflatten(1, (-1, num_queries))[..., -num_queries:].masked_fill_(ahead, float("-inf"))
    return torch.softmax(scores, -1).to(q.dtype)


def _scale(q: Tensor) -> float:
    scale: float = q.shape[-1] ** -0.5
    return scale
