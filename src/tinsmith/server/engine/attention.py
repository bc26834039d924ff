"""Causal attention within each sequence of a packed batch.

On a GPU one kernel takes sequences of any lengths: our own where it was measured, torch's elsewhere. On a CPU
neighbours of equal length go through one call, so sort by length where the order is free; short ones have a way of
their own (`short_attention.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tinsmith.server.engine import short_attention
from tinsmith.server.engine.steps import has_kernels
from tinsmith.server.engine.transfer import upload


class PackedCausal:
    """Attention for whole sequences lying one after another: an `Attend` for training and for prompts."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths
        self._tiles: Any = None
        self._starts: Tensor | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.is_cuda and q.dtype == torch.bfloat16:
            return self._on_gpu(q, k, v)
        if len(self._runs) == 1:
            return _of_equal_lengths(*self._runs[0], q, k, v)
        sizes = [length * count for length, count in self._runs]
        parts = zip(self._runs, q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
        return torch.cat([_of_equal_lengths(*run, *qkv) for run, *qkv in parts])

    def _on_gpu(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if has_kernels():
            from tinsmith.server.engine.gpu import attention

            if attention.is_suited(q.shape[2], q.device):
                return attention.attend(q, k, v, self.tiles(q.device))
        if self._starts is None:
            self._starts = upload(torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32), q.device)
        longest = max(self.lengths)
        return kernel_for_any_lengths()(q, k, v, self._starts, self._starts, longest, longest)

    def tiles(self, device: torch.device) -> Any:
        """How the sequences are cut, for our own kernel."""
        if self._tiles is None:
            from tinsmith.server.engine.gpu.attention import Tiles

            self._tiles = Tiles(self.lengths, device)
        return self._tiles

    @cached_property
    def _runs(self) -> list[tuple[int, int]]:
        """Lengths, and how many sequences in a row have them."""
        return [(length, len(list(run))) for length, run in groupby(self.lengths)]


def kernel_for_any_lengths() -> Callable[..., Tensor]:
    """torch's kernel for packed sequences."""
    return _OfAnyLengths.apply  # type: ignore[no-any-return]


class _OfAnyLengths(torch.autograd.Function):  # type: ignore[misc]
    """torch's flash attention for packed sequences, in bfloat16 on a GPU: [T, H, D], [S, K, D] twice -> [T, H, D].

    `q_starts` and `k_starts` say where each sequence begins, and the numbers after them how long the longest is. The
    public form of it, `varlen_attn`, wants as many keys as queries in some releases.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *places: Any) -> Tensor:
        attended, weight, *random, _ = torch.ops.aten._flash_attention_forward(q, k, v, *places, 0.0, True, False)
        ctx.save_for_backward(q, k, v, attended, weight, *random)
        ctx.places = places
        return attended

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        *saved, seed, offset = ctx.saved_tensors
        flash_backward = torch.ops.aten._flash_attention_backward
        return *flash_backward(dy, *saved, *ctx.places, 0.0, True, seed, offset), None, None, None, None


class _InFloat32(torch.autograd.Function):  # type: ignore[misc]
    """Causal attention of bfloat16 on a CPU: [N, H, L, D], [N, K, L, D] twice -> [N, H, L, D].

    The CPU's kernel is faster in float32; what is kept for the backward pass stays bfloat16.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        attended, weight = flash(q.float(), k.float(), v.float(), 0.0, True)
        attended = attended.to(q.dtype)
        ctx.save_for_backward(q, k, v, attended, weight)
        return attended

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        *parts, weight = ctx.saved_tensors
        flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        gradients = flash_backward(dy.float(), *(part.float() for part in parts), weight, 0.0, True)
        return tuple(gradient.to(dy.dtype) for gradient in gradients)


def _of_equal_lengths(length: int, count: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of `count` sequences of one length: [count * length, heads, size] -> the same."""
    q, k, v = (part.unflatten(0, (count, length)).transpose(1, 2) for part in (q, k, v))
    if q.device.type == "cpu" and length <= short_attention.MAX_LENGTH:
        attended = _of_short_ones(q, k, v)
    elif q.device.type == "cpu" and q.dtype == torch.bfloat16:
        attended = _InFloat32.apply(q, k, v)
    else:
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return attended.transpose(1, 2).flatten(0, 1)


def _of_short_ones(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The heads that share keys and values make a group."""
    groups = q.unflatten(1, (k.shape[1], -1)).flatten(0, 1)
    return short_attention.attend(groups, k.flatten(0, 1), v.flatten(0, 1)).view(q.shape)
