"""AdamW on the flat buffers of an adapter, step for step as torch.optim.AdamW with clip_grad_norm_."""

from __future__ import annotations

import math

import torch

from tinsmith.errors import InvalidInputError
from tinsmith.server.engine.adapters import Adapter
from tinsmith.types import AdamParams


def adamw_step(adapter: Adapter, params: AdamParams) -> dict[str, float]:
    """Use up the accumulated gradient; returns its norm before clipping.

    Without a gradient the step is that of a zero gradient: momentum and weight decay go on, as in torch.
    """
    check_adam_params(params)
    norm = adapter.gradient_norm()
    if not math.isfinite(norm):
        adapter.clear_gradient()
        raise InvalidInputError(
            f"The accumulated gradient has the norm {norm}; it was discarded and the weights are unchanged. Check the "
            "weights and advantages of the data for extreme values.",
            field="gradient",
            value=norm,
        )
    if params.grad_clip_norm > 0:
        adapter.gradient.mul_(min(1.0, params.grad_clip_norm / (norm + 1e-6)))
    _update(adapter, params)
    adapter.weights_changed()
    adapter.clear_gradient()
    return {"grad_norm": norm}


def _update(adapter: Adapter, params: AdamParams) -> None:
    adapter.step += 1
    if adapter.weights.is_cuda:
        _update_in_one_pass(adapter, params)
        return
    correction1 = 1 - params.beta1**adapter.step
    correction2 = 1 - params.beta2**adapter.step
    gradient, weights = adapter.gradient, adapter.weights
    adapter.exp_avg.lerp_(gradient, 1 - params.beta1)
    adapter.exp_avg_sq.mul_(params.beta2).addcmul_(gradient, gradient, value=1 - params.beta2)
    denominator = adapter.exp_avg_sq.sqrt().div_(math.sqrt(correction2)).add_(params.eps)
    weights.mul_(1 - params.learning_rate * params.weight_decay)
    weights.addcdiv_(adapter.exp_avg, denominator, value=-params.learning_rate / correction1)


def _update_in_one_pass(adapter: Adapter, params: AdamParams) -> None:
    """The same by torch's kernel for GPUs, which wants the number of the step there as well."""
    step = torch.full((), float(adapter.step), device=adapter.weights.device)
    torch._fused_adamw_(
        [adapter.weights],
        [adapter.gradient],
        [adapter.exp_avg],
        [adapter.exp_avg_sq],
        [],
        [step],
        lr=params.learning_rate,
        beta1=params.beta1,
        beta2=params.beta2,
        weight_decay=params.weight_decay,
        eps=params.eps,
        amsgrad=False,
        maximize=False,
    )


def check_adam_params(params: AdamParams) -> None:
    """Refuse settings with which a step makes no sense; that they are finite is the type's own rule."""
    for name, remedy, is_good in (
        ("learning_rate", "0 or more", params.learning_rate >= 0),
        ("beta1", "at least 0 and below 1", 0 <= params.beta1 < 1),
        ("beta2", "at least 0 and below 1", 0 <= params.beta2 < 1),
        # Weights whose gradient was always zero would be divided by zero.
        ("eps", "greater than 0", params.eps > 0),
        ("weight_decay", "0 or more", params.weight_decay >= 0),
    ):
        value = getattr(params, name)
        if not is_good:
            raise InvalidInputError(
                f"{name} is {value}; it must be {remedy}.", field=f"adam_params.{name}", value=value
            )
