"""A language model of three numbers: deterministic, instant, and honest about losses and gradients.

The log-probability of a token depends on that token, on the one before it, and on how many optimizer steps were
taken; it rises with every step, so a training loop sees its loss fall. Losses are the real formulas on top of that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

VOCABULARY = 1000
END_OF_TEXT = 0
DEFAULT_MAX_TOKENS = 16
EMPTY_TOPK_LOGPROB = -99999.0

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Inputs = Mapping[str, Any]


class BadInput(Exception):
    """The engine cannot compute this; the user's fault."""


@dataclass(frozen=True)
class Sparse:
    """A matrix by its listed cells, row after row; the others are zero."""

    values: npt.NDArray[Any]
    row_starts: Ints
    columns: Ints
    shape: tuple[int, ...]

    def rows(self) -> Ints:
        return np.repeat(np.arange(self.shape[0]), np.diff(self.row_starts))

    def dense(self) -> npt.NDArray[Any]:
        matrix = np.zeros(self.shape, self.values.dtype)
        matrix[self.rows(), self.columns] = self.values
        return matrix


@dataclass(frozen=True)
class Example:
    """One datum: input tokens (zeros stand for images and audio) and the inputs of the loss, dense."""

    tokens: Ints
    inputs: Inputs


@dataclass(frozen=True)
class LossOutput:
    """Per-example arrays by name, and the metrics of the whole request."""

    examples: list[dict[str, Floats]]
    metrics: dict[str, float]


@dataclass(frozen=True)
class Policy:
    """The whole state of a model: weights, gradient, optimizer state."""

    steps: int = 0
    gradient: float = 0.0
    moment: float = 0.0

    def logprobs(self, before: Ints, tokens: Ints) -> Floats:
        hashed = (31 * tokens + 17 * before) % 97
        return (-(1 + hashed / 97) / (1 + 0.1 * self.steps)).astype(np.float32)

    def stepped(self) -> Policy:
        return Policy(self.steps + 1, 0.0, 0.9 * self.moment + self.gradient)

    def without_optimizer(self) -> Policy:
        return Policy(self.steps)

    def plus_gradient(self, gradient: float) -> Policy:
        return replace(self, gradient=self.gradient + gradient)


# Each loss: (p, inputs, config) -> loss per token, and its derivative by p.
Terms = tuple[npt.NDArray[Any], npt.NDArray[Any]]


def _cross_entropy(p: Floats, inputs: Inputs, config: Mapping[str, float]) -> Terms:
    weights = _needed(inputs, "weights") if "weights" in inputs else np.ones_like(p)
    return -weights * p, -weights


def _importance_sampling(p: Floats, inputs: Inputs, config: Mapping[str, float]) -> Terms:
    weighted = _ratio(p, inputs) * _needed(inputs, "advantages")
    return -weighted, -weighted


def _ppo(p: Floats, inputs: Inputs, config: Mapping[str, float]) -> Terms:
    return _clipped(p, _ratio(p, inputs), inputs, config)


def _gspo(p: Floats, inputs: Inputs, config: Mapping[str, float]) -> Terms:
    mask = inputs.get("sequence_ratio_mask", np.ones_like(p))
    mean = np.sum(mask * (p - _needed(inputs, "logprobs"))) / max(np.sum(mask), 1)
    return _clipped(p, np.full_like(p, np.exp(mean)), inputs, config)


def _clipped(p: Floats, ratio: Floats, inputs: Inputs, config: Mapping[str, float]) -> Terms:
    advantages = _needed(inputs, "advantages")
    bounded = np.clip(ratio, config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2))
    free = ratio * advantages <= bounded * advantages
    return -np.minimum(ratio * advantages, bounded * advantages), -np.where(free, ratio * advantages, 0.0)


def _cispo(p: Floats, inputs: Inputs, config: Mapping[str, float]) -> Terms:
    bounded = np.clip(_ratio(p, inputs), config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 4.0))
    weight = bounded * _needed(inputs, "advantages")
    return -weight * p, -weight


def _dro(p: Floats, inputs: Inputs, config: Mapping[str, float]) -> Terms:
    beta, advantages = config.get("beta", 0.05), _needed(inputs, "advantages")
    distance = p - _needed(inputs, "logprobs")
    return -(p * advantages - 0.5 * beta * distance**2), -(advantages - beta * distance)


def _likelihood(p: Floats, inputs: Inputs, config: Mapping[str, float]) -> Terms:
    """A stand-in where the formula is not public, or was uploaded by the user."""
    return -p, -np.ones_like(p)


LOSSES: Mapping[str, Callable[[Floats, Inputs, Mapping[str, float]], Terms]] = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
    "gspo": _gspo,
    "stable_reinforce": _likelihood,
    "custom": _likelihood,
}


def _needed(inputs: Inputs, name: str) -> npt.NDArray[Any]:
    if name not in inputs:
        raise BadInput(f"loss_fn_inputs lacks {name!r}")
    return np.asarray(inputs[name])


def _ratio(p: Floats, inputs: Inputs) -> Floats:
    return np.asarray(np.exp(p - _needed(inputs, "logprobs")))


def run_loss(
    policy: Policy, examples: list[Example], loss: str, config: Mapping[str, float], chunk: int
) -> tuple[LossOutput, float]:
    """The output of a forward pass, and the gradient (by the log-probabilities, summed) of its loss."""
    if loss not in LOSSES:
        raise BadInput(f"loss_fn {loss!r} is not one of {', '.join(LOSSES)}")
    outputs, gradient = [], 0.0
    for example in examples:
        targets = _needed(example.inputs, "target_tokens")
        p = policy.logprobs(_context(example.tokens, targets), targets)
        elementwise, slope = LOSSES[loss](p, example.inputs, config)
        outputs.append({"logprobs": p, "elementwise_loss": elementwise.astype(np.float32)})
        gradient -= float(np.sum(slope, dtype=np.float64))
    return LossOutput(outputs, _metrics(outputs, chunk)), gradient


def _context(tokens: Ints, targets: Ints) -> Ints:
    """The input token at each target's position, shaped to go with targets of one or two dimensions."""
    context = np.zeros(len(targets), np.int64)
    known = min(len(tokens), len(targets))
    context[:known] = tokens[:known]
    return context[:, None] if targets.ndim == 2 else context


def _metrics(outputs: list[dict[str, Floats]], chunk: int) -> dict[str, float]:
    """One metric of every documented reduction, so that joining chunks can be tested."""
    lengths = [len(output["logprobs"]) for output in outputs]
    loss = sum(float(np.sum(output["elementwise_loss"], dtype=np.float64)) for output in outputs)
    return {
        "loss:sum": loss,
        "tokens:mean": sum(lengths) / len(lengths),
        "longest:max": max(lengths),
        "shortest:min": min(lengths),
        "spread:slack": max(lengths),
        "digest:hash2": 2**40 + chunk,
        "chunk:unique": chunk,
    }


@dataclass(frozen=True)
class TopK:
    tokens: Ints  # [positions, k]
    logprobs: Floats


@dataclass(frozen=True)
class Sequence:
    tokens: Ints
    logprobs: Floats
    stopped: bool
    topk: TopK | None


@dataclass(frozen=True, eq=False)
class Sampled:
    sequences: list[Sequence]
    prompt_logprobs: Floats | None = None
    topk_prompt: TopK | None = None
    target_prompt: Floats | Sparse | None = None
    alternatives: TopK | None = None
    cached_tokens: int = 0


@dataclass(frozen=True)
class SampleOptions:
    """A sampling request, as far as this engine cares."""

    num_samples: int = 1
    max_tokens: int = DEFAULT_MAX_TOKENS
    seed: int = 0
    stop: tuple[int, ...] = (END_OF_TEXT,)
    greedy: bool = False
    prompt_logprobs: bool = False
    topk_prompt: int = 0
    topk_sample: int = 0
    alternatives: int = 0
    targets: Ints | Sparse | None = field(default=None)
    last_n: int | None = None


def sample(policy: Policy, prompt: Ints, options: SampleOptions) -> Sampled:
    before, scored = prompt[:-1], prompt[1:]
    return Sampled(
        sequences=[_generate(policy, prompt, options, index) for index in range(options.num_samples)],
        prompt_logprobs=_prompt_logprobs(policy, prompt, options.last_n) if options.prompt_logprobs else None,
        topk_prompt=_with_empty_first_row(_topk(policy, before, scored, options.topk_prompt)),
        target_prompt=None if options.targets is None else _target_logprobs(policy, before, options.targets),
        alternatives=_topk(policy, before, scored + 1, options.alternatives),
        cached_tokens=len(prompt) // 2,
    )


def _generate(policy: Policy, prompt: Ints, options: SampleOptions, index: int) -> Sequence:
    start = int(prompt.sum()) + 7 * policy.steps + (0 if options.greedy else 13 * index + options.seed)
    positions = np.arange(options.max_tokens, dtype=np.int64)
    tokens = (start + positions * positions) % VOCABULARY
    ends = np.flatnonzero(np.isin(tokens, options.stop)) if options.stop else ()
    tokens = tokens[: ends[0] + 1] if len(ends) else tokens
    before = np.concatenate((prompt[-1:], tokens[:-1]))
    logprobs = policy.logprobs(before, tokens)
    return Sequence(tokens, logprobs, bool(len(ends)), _topk(policy, before, tokens, options.topk_sample))


def _prompt_logprobs(policy: Policy, prompt: Ints, last_n: int | None) -> Floats:
    logprobs = np.full(len(prompt), np.nan, np.float32)
    first = max(1, 1 if last_n is None else len(prompt) - last_n)
    logprobs[first:] = policy.logprobs(prompt[first - 1 : -1], prompt[first:])
    return logprobs


def _topk(policy: Policy, before: Ints, tokens: Ints, k: int) -> TopK | None:
    """The given tokens and their neighbours, likeliest first."""
    if k == 0:
        return None
    candidates = (tokens[:, None] + np.arange(k)) % VOCABULARY
    logprobs = policy.logprobs(before[:, None], candidates)
    order = np.argsort(-logprobs, axis=1, kind="stable")
    return TopK(np.take_along_axis(candidates, order, 1), np.take_along_axis(logprobs, order, 1))


def _with_empty_first_row(topk: TopK | None) -> TopK | None:
    """Nothing comes before the first prompt token, so nothing is known about it."""
    if topk is None:
        return None
    k = topk.tokens.shape[1]
    empty = np.full((1, k), EMPTY_TOPK_LOGPROB, np.float32)
    return TopK(np.vstack((np.zeros((1, k), np.int64), topk.tokens)), np.vstack((empty, topk.logprobs)))


def _target_logprobs(policy: Policy, before: Ints, targets: Ints | Sparse) -> Floats | Sparse:
    if isinstance(targets, Sparse):
        values = policy.logprobs(before[targets.rows()], targets.values)
        return replace(targets, values=values)
    return np.where(targets < 0, np.float32(0), policy.logprobs(before[:, None], targets)).astype(np.float32)
