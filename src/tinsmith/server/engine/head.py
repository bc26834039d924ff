"""Log-probabilities of targets, and their backward pass, without ever holding the logits of all rows.

The rows go through the unembedding in chunks. If the loss of a target depends on nothing but its own log-probability,
its gradient is known as soon as the chunk is scored, and the same logits serve for the backward pass; otherwise the
caller scores first and calls again with the gradient.

Letters: N rows, K targets of each row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tinsmith.server.engine.lora import LoraRows
from tinsmith.server.engine.model import Transformer
from tinsmith.server.engine.softmax import Softmax
from tinsmith.server.engine.steps import has_kernels

# Logits held at once. More makes the products no faster: half a GiB of bfloat16 keeps a large GPU busy, and a CPU's
# caches prefer less.
_MAX_LOGITS = {"cuda": 2**28, "cpu": 2**24}

Gradient = Callable[[int, int, Tensor], Tensor]
"""From the log-probabilities of rows start to end, [n, K], to the gradient of the loss with respect to them."""


def score(
    model: Transformer, hidden: Tensor, targets: Tensor, lora: LoraRows, gradient: Gradient | None = None
) -> tuple[Tensor, Tensor | None]:
    """The log-probabilities [N, K] of the targets [N, K] and, with `gradient`, the gradient of the hidden states.

    The gradients of the adapters' own unembedding products are added to their buffers on the way.
    """
    logprobs = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
    dhidden = None if gradient is None else torch.empty_like(hidden)
    chunk = max(1, _MAX_LOGITS.get(hidden.device.type, 2**24) // model.shape.vocab_size)
    for start in range(0, len(hidden), chunk):
        end = min(start + chunk, len(hidden))
        x, chosen = hidden[start:end], targets[start:end]
        additions = lora.slice(start, end).additions("lm_head", x)
        y = model.head.product(x)
        inner = additions.add(y, x) if additions else []
        softmax = _softmax(y, chosen)
        logprobs[start:end] = softmax.logprobs
        if gradient is None or dhidden is None:
            continue
        dy = softmax.gradient(gradient(start, end, softmax.logprobs).to(softmax.logprobs))
        dx = model.head.gradient(dy)
        if additions:
            additions.add_gradients(x, inner, dy, dx)
        dhidden[start:end] = dx
    return logprobs, dhidden


def _softmax(y: Tensor, targets: Tensor) -> Any:
    if y.is_cuda and has_kernels():
        from tinsmith.server.engine.gpu.softmax import Softmax as OnGpu

        return OnGpu(y, targets)
    return Softmax(y, targets)
