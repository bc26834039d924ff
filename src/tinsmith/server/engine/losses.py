"""Every built-in loss: from the log-probabilities of one datum to one term for each target.

p is the log-probability of a target under the model, q the `logprobs` input (that of the sampler), A the `advantages`,
r = exp(p - q). A loss is the sum of its terms over targets and data, never a mean. The clip thresholds, named
`clip_low_threshold` and `clip_high_threshold`, bound r itself; as inputs, one for each target, they take the place
of those in the config.

    loss                   terms                                           config
    cross_entropy          -weights * p
    importance_sampling    -r * A
    ppo                    -min(r * A, clip(r) * A)                        clip thresholds 0.8 and 1.2
    cispo                  -detach(clip(r)) * p * A                        clip thresholds 0.0 and 4.0
    dro                    -(p * A - beta / 2 * (p - q)^2)                 beta 0.05
    gspo                   ppo's, with r the ratio of the whole datum      clip thresholds 0.8 and 1.2

The ratio of gspo is exp(mean of p - q over the targets in `sequence_ratio_mask`): its value is that of the whole datum,
its gradient that of each target's own p. The API states no default for dro's beta nor for gspo's thresholds; 0.05 and
those of ppo are our choice.

Terms are computed in float64: they are few, and an exponential of a difference deserves the digits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor

from tinsmith.errors import InvalidInputError

Inputs: TypeAlias = Mapping[str, Tensor]
Config: TypeAlias = Mapping[str, float]

_CLIP = ("clip_low_threshold", "clip_high_threshold")


@dataclass(frozen=True)
class Loss:
    """What a loss reads, and its terms."""

    terms: Callable[[Tensor, Inputs, Config], Tensor]
    inputs: tuple[str, ...]
    """Beside `target_tokens`; each has its shape."""
    optional_inputs: tuple[str, ...] = ()
    config: Config = field(default_factory=dict)
    """Its settings with their defaults."""
    needs_whole_datum: bool = False
    """Whether a term depends on other targets, so that none can be computed before all log-probabilities are known."""


def _cross_entropy(p: Tensor, inputs: Inputs, config: Config) -> Tensor:
    return -inputs["weights"] * p


def _importance_sampling(p: Tensor, inputs: Inputs, config: Config) -> Tensor:
    return -torch.exp(p - inputs["logprobs"]) * inputs["advantages"]


def _ppo(p: Tensor, inputs: Inputs, config: Config) -> Tensor:
    return _pessimistic(torch.exp(p - inputs["logprobs"]), inputs, config)


def _cispo(p: Tensor, inputs: Inputs, config: Config) -> Tensor:
    ratio = torch.exp(p.detach() - inputs["logprobs"])
    return -_clipped(ratio, inputs, config) * p * inputs["advantages"]


def _dro(p: Tensor, inputs: Inputs, config: Config) -> Tensor:
    return -(p * inputs["advantages"] - 0.5 * config["beta"] * (p - inputs["logprobs"]) ** 2)


def _gspo(p: Tensor, inputs: Inputs, config: Config) -> Tensor:
    mask = inputs["sequence_ratio_mask"]
    # A mask without any target leaves no ratio to speak of: it counts as 1.
    mean = ((p.detach() - inputs["logprobs"]) * mask).sum() / mask.sum().clamp(min=1)
    return _pessimistic(torch.exp(mean + p - p.detach()), inputs, config)


def _pessimistic(ratio: Tensor, inputs: Inputs, config: Config) -> Tensor:
    advantages = inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, inputs, config) * advantages)


def _clipped(ratio: Tensor, inputs: Inputs, config: Config) -> Tensor:
    low, high = (inputs.get(name, config[name]) for name in _CLIP)
    # clamp wants both bounds as numbers or both as tensors; here one may be an input and the other a setting.
    return torch.where(ratio < low, low, torch.where(ratio > high, high, ratio))


_POLICY = ("logprobs", "advantages")
_PPO_CONFIG: Config = MappingProxyType({"clip_low_threshold": 0.8, "clip_high_threshold": 1.2})
_CISPO_CONFIG: Config = MappingProxyType({"clip_low_threshold": 0.0, "clip_high_threshold": 4.0})

LOSSES: Mapping[str, Loss] = MappingProxyType(
    {
        "cross_entropy": Loss(_cross_entropy, ("weights",)),
        "importance_sampling": Loss(_importance_sampling, _POLICY),
        "ppo": Loss(_ppo, _POLICY, _CLIP, _PPO_CONFIG),
        "cispo": Loss(_cispo, _POLICY, _CLIP, _CISPO_CONFIG),
        "dro": Loss(_dro, _POLICY, (), MappingProxyType({"beta": 0.05})),
        "gspo": Loss(_gspo, (*_POLICY, "sequence_ratio_mask"), _CLIP, _PPO_CONFIG, needs_whole_datum=True),
    }
)
CUSTOM = "custom"


def find_loss(name: str) -> Loss:
    if name in LOSSES:
        return LOSSES[name]
    raise InvalidInputError(
        f"The loss {name!r} is not supported by this server; supported are {', '.join([*LOSSES, CUSTOM])}.",
        field="loss_fn",
        value=name,
    )


def terms_and_gradient(loss: Loss, logprobs: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, Tensor]:
    """The terms, and the gradient of their sum with respect to the float64 log-probabilities."""
    with torch.enable_grad():
        p = logprobs.detach().requires_grad_()
        terms = loss.terms(p, inputs, config)
        (gradient,) = torch.autograd.grad(terms.sum(), p)
    return terms.detach(), gradient
