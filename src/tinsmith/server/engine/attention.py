"""Causal attention within each sequence of a packed batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional


class PackedCausal:
    """Attention for whole sequences lying one after another: an `Attend` for training and for prompts.

    Neighbours of equal length go through one call, so sort by length where the order is free.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.num_rows = sum(lengths)
        self.runs = [(length, len(list(run))) for length, run in groupby(lengths)]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if len(self.runs) == 1:
            return _attend_equal(*self.runs[0], q, k, v)
        sizes = [length * count for length, count in self.runs]
        parts = zip(self.runs, q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
        return torch.cat([_attend_equal(*run, *qkv) for run, *qkv in parts])


def _attend_equal(length: int, count: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of `count` sequences of one length: [count * length, heads, size] -> the same."""
    q, k, v = (part.unflatten(0, (count, length)).transpose(1, 2) for part in (q, k, v))
    attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return attended.transpose(1, 2).flatten(0, 1)
