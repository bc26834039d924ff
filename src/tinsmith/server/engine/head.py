"""Log-probabilities of targets, and their backward pass, without ever holding the logits of all rows.

The rows go through the unembedding in chunks. If the loss of a target depends on nothing but its own log-probability,
its gradient is known as soon as the chunk is scored, and the same logits serve for the backward pass; otherwise the
caller scores first and calls again with the gradient.

Letters: N rows, K targets of each row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tinsmith.server.engine.lora import LoraRows, add_gradients, add_looped
from tinsmith.server.engine.model import Transformer

# Logits held at once. More makes the products no faster: 256 MiB of float32 keep a large GPU busy, and a CPU's caches
# prefer less.
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
        placed = lora.slice(start, end).at("lm_head")
        x, chosen = hidden[start:end], targets[start:end]
        y = model.head.product(x)
        inner = add_looped(y, x, placed)
        logprobs[start:end], exps, total = _logprobs(y, chosen)
        if gradient is None or dhidden is None:
            continue
        dlogprobs = gradient(start, end, logprobs[start:end]).to(exps)
        # d logprob / d logits is one at the target, minus the softmax everywhere
        dlogits = exps.mul_(-dlogprobs.sum(-1, keepdim=True) / total).scatter_add_(-1, chosen, dlogprobs)
        dy = dlogits.to(y.dtype)
        dx = model.head.gradient(dy)
        for (first, last, site), xa in zip(placed, inner, strict=True):
            dxa = add_gradients(site, x[first:last], xa, dy[first:last])
            dx[first:last].addmm_(dxa, site.a)
        dhidden[start:end] = dx
    return logprobs, dhidden


def _logprobs(y: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the targets, and the softmax as exponentials and their sum; uses up a float32 y."""
    logits = y.float()
    logits.sub_(logits.amax(-1, keepdim=True))
    chosen = logits.gather(-1, targets)
    exps = logits.exp_()
    total = exps.sum(-1, keepdim=True)
    return chosen - total.log(), exps, total
