"""`Softmax` of the head on a GPU: the logits are read as they are, once for the scores and once for the gradient."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 4096


class Softmax:
    def __init__(self, y: Tensor, targets: Tensor) -> None:
        self._y = y
        self._targets = targets
        self.logprobs = torch.empty(targets.shape, dtype=torch.float32, device=y.device)
        # The largest logit of each row, and the logarithm of the sum of what the others are beside it: apart, since
        # their sum would cost small digits where logits are large.
        self._totals = torch.empty((len(y), 2), dtype=torch.float32, device=y.device)
        _score[(len(y),)](
            y, targets, self.logprobs, self._totals, y.shape[1], targets.shape[1], targets.stride(0),
            BLOCK=_COLUMNS, num_warps=8,
        )  # fmt: skip

    def gradient(self, dlogprobs: Tensor) -> Tensor:
        """In place of the logits."""
        y, targets = self._y, self._targets
        _gradient[(len(y), triton.cdiv(y.shape[1], _COLUMNS))](
            y, targets, self._totals, dlogprobs.contiguous(), y.shape[1], targets.shape[1], targets.stride(0),
            BLOCK=_COLUMNS, num_warps=8,
        )  # fmt: skip
        return y


@triton.jit
def _score(
    y, targets, logprobs, totals, size, num_targets, target_stride, BLOCK: tl.constexpr
) -> Any:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits = y + row * size
    # Every thread keeps a maximum and a sum of its own; they meet once, after the last block.
    peaks = tl.full([BLOCK], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(logits + columns, mask=columns < size, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(peaks, values)
        # As long as a thread has seen nothing, both are minus infinity, and their difference is none.
        known = tl.where(higher == float("-inf"), 0.0, higher)
        sums = sums * tl.exp(peaks - known) + tl.exp(values - known)
        peaks = higher
    peak = tl.max(peaks)
    log_sum = tl.log(tl.sum(sums * tl.exp(peaks - peak)))
    tl.store(totals + row * 2, peak)
    tl.store(totals + row * 2 + 1, log_sum)
    for target in range(num_targets):
        chosen = tl.load(logits + tl.load(targets + row * target_stride + target)).to(tl.float32)
        tl.store(logprobs + row * num_targets + target, chosen - peak - log_sum)


@triton.jit
def _gradient(
    y, targets, totals, dlogprobs, size, num_targets, target_stride, BLOCK: tl.constexpr
) -> Any:  # fmt: skip
    """One at each target, minus the softmax everywhere, times the gradient of the log-probabilities."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    places = y + row * size + columns
    values = tl.load(places, mask=columns < size, other=float("-inf")).to(tl.float32)
    softmax = tl.exp(values - tl.load(totals + row * 2) - tl.load(totals + row * 2 + 1))
    gradient = tl.zeros([BLOCK], tl.float32)
    for target in range(num_targets):
        token = tl.load(targets + row * target_stride + target)
        factor = tl.load(dlogprobs + row * num_targets + target)
        gradient += factor * (tl.where(columns == token, 1.0, 0.0) - softmax)
    tl.store(places, gradient.to(y.dtype.element_ty), mask=columns < size)
