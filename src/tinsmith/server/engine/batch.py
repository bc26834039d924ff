"""Rows of training data: checked, packed into micro-batches within a token budget, and back in the order given.

TrainRow     one datum, the adapter it trains and the loss it feeds
Example      a row that passed the checks, as arrays of known types
MicroBatch   examples that go through the model together, packed without padding
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinsmith.errors import InvalidInputError
from tinsmith.server.engine.adapters import Adapter
from tinsmith.server.engine.attention import PackedCausal
from tinsmith.server.engine.custom_graph import CustomLoss
from tinsmith.server.engine.lora import LoraRows
from tinsmith.server.engine.losses import CUSTOM, Loss, find_loss
from tinsmith.server.engine.model import ModelShape
from tinsmith.types import CustomLossGraph


@dataclass(frozen=True)
class TrainRow:
    """One datum: position i of `tokens` predicts row i of the inputs."""

    adapter: Adapter
    tokens: NDArray[np.integer[Any]]
    loss: str
    inputs: Mapping[str, NDArray[Any]]
    config: Mapping[str, float | str] = field(default_factory=dict)
    backward: bool = True
    graph: CustomLossGraph | None = None
    """The operations of a `custom` loss."""
    job: Hashable = None
    """Rows of one job stand or fall together: if one is refused, none of them leaves a gradient. None: on its own."""


@dataclass(frozen=True, eq=False)
class Example:
    """A checked row."""

    index: int
    """Its place among the rows given."""
    adapter: Adapter
    backward: bool
    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]  # [T, K]
    target_shape: tuple[int, ...]
    """[T] or [T, K], as given."""
    loss: Loss | CustomLoss
    inputs: Mapping[str, Tensor]
    """On the host: float64 [T, K] for a built-in loss, as they came for a custom one."""
    config: Mapping[str, float]

    @property
    def needs_whole_datum(self) -> bool:
        return isinstance(self.loss, CustomLoss) or self.loss.needs_whole_datum


def check_row(index: int, row: TrainRow, shape: ModelShape) -> Example:
    """Refuse what the model or the loss could not digest, naming the field, the value and the remedy."""
    loss = CustomLoss.from_graph(row.graph) if row.loss == CUSTOM else find_loss(row.loss)
    tokens = _checked_tokens("model_input", row.tokens, shape.vocab_size)
    if tokens.ndim != 1 or not 0 < len(tokens) <= shape.max_context:
        raise InvalidInputError(
            f"model_input has the shape {list(tokens.shape)}; it must be a sequence of 1 to {shape.max_context} "
            "tokens, the context of this model.",
            field="model_input",
            value=list(tokens.shape),
        )
    targets = _checked_targets(row, len(tokens), shape.vocab_size)
    return Example(
        index=index,
        adapter=row.adapter,
        backward=row.backward,
        tokens=tokens,
        targets=targets.reshape(len(tokens), -1),
        target_shape=targets.shape,
        loss=loss,
        inputs=_custom_inputs(row, loss) if isinstance(loss, CustomLoss) else _loss_inputs(row, loss, targets.shape),
        config={} if isinstance(loss, CustomLoss) else _checked_config(row, loss),
    )


def _checked_targets(row: TrainRow, length: int, vocab_size: int) -> NDArray[np.int64]:
    name = "loss_fn_inputs['target_tokens']"
    if "target_tokens" not in row.inputs:
        raise InvalidInputError(f"{name} is missing; the loss {row.loss} scores them. Add it to the datum.", field=name)
    targets = _checked_tokens(name, row.inputs["target_tokens"], vocab_size)
    if targets.ndim not in (1, 2) or len(targets) != length or targets.size == 0:
        raise InvalidInputError(
            f"{name} has the shape {list(targets.shape)}, but model_input has {length} tokens; give one target (or one "
            "row of K targets) for each token.",
            field=name,
            value=list(targets.shape),
        )
    return targets


def _checked_tokens(name: str, tokens: NDArray[Any], vocab_size: int) -> NDArray[np.int64]:
    array = np.asarray(tokens)
    if array.dtype.kind not in "iu":
        raise InvalidInputError(
            f"{name} has the type {array.dtype}; token ids are integers.", field=name, value=str(array.dtype)
        )
    outside = array[(array < 0) | (array >= vocab_size)]
    if outside.size:
        raise InvalidInputError(
            f"{name} holds the token {outside[0]}, but this model's vocabulary goes from 0 to {vocab_size - 1}; encode "
            "the text with the tokenizer of this model.",
            field=name,
            value=int(outside[0]),
        )
    return array.astype(np.int64, copy=False)


def _loss_inputs(row: TrainRow, loss: Loss, target_shape: tuple[int, ...]) -> dict[str, Tensor]:
    known = ("target_tokens", *loss.inputs, *loss.optional_inputs)
    if unknown := sorted(row.inputs.keys() - set(known)):
        name = f"loss_fn_inputs[{unknown[0]!r}]"
        raise InvalidInputError(
            f"{name} is not an input of the loss {row.loss}, which reads {', '.join(known)}; remove it.", field=name
        )
    if missing := [name for name in loss.inputs if name not in row.inputs]:
        name = f"loss_fn_inputs[{missing[0]!r}]"
        raise InvalidInputError(
            f"{name} is missing; the loss {row.loss} reads {', '.join(known)}. Add it to the datum.", field=name
        )
    return {name: _checked_numbers(name, row.inputs[name], target_shape) for name in known[1:] if name in row.inputs}


def _checked_numbers(key: str, values: NDArray[Any], target_shape: tuple[int, ...]) -> Tensor:
    name = f"loss_fn_inputs[{key!r}]"
    array = np.asarray(values)
    _check_finite(name, array)
    if array.shape != target_shape:
        raise InvalidInputError(
            f"{name} has the shape {list(array.shape)}, but target_tokens has {list(target_shape)}; give one number "
            "for each target.",
            field=name,
            value=list(array.shape),
        )
    return torch.from_numpy(array.astype(np.float64).reshape(len(array), -1))


def _check_finite(name: str, array: NDArray[Any]) -> None:
    if array.dtype.kind not in "fiub":
        raise InvalidInputError(f"{name} has the type {array.dtype}; give numbers.", field=name, value=str(array.dtype))
    bad = array[~np.isfinite(array)]
    if bad.size:
        raise InvalidInputError(
            f"{name} holds {bad.flat[0]}; every number must be finite. Mask such targets with a weight of 0.",
            field=name,
            value=float(bad.flat[0]),
        )


def _checked_config(row: TrainRow, loss: Loss) -> dict[str, float]:
    config = dict(loss.config)
    for key, value in row.config.items():
        name = f"loss_fn_config[{key!r}]"
        if key not in loss.config:
            known = ", ".join(loss.config) or "none"
            raise InvalidInputError(
                f"{name} is not a setting of the loss {row.loss}; its settings are: {known}.", field=name, value=value
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InvalidInputError(f"{name} is {value!r}; it must be a finite number.", field=name, value=value)
        config[key] = float(value)
    low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 0.0)
    if low > high:
        raise InvalidInputError(
            f"clip_low_threshold {low} is above clip_high_threshold {high}; they bound the ratio from below and above.",
            field="loss_fn_config['clip_low_threshold']",
            value=low,
        )
    return config


def _custom_inputs(row: TrainRow, loss: CustomLoss) -> dict[str, Tensor]:
    inputs = {}
    for key in loss.input_names:
        name = f"loss_fn_inputs[{key!r}]"
        if key not in row.inputs:
            raise InvalidInputError(f"{name} is missing; the custom loss reads it. Add it to the datum.", field=name)
        array = np.asarray(row.inputs[key])
        _check_finite(name, array)
        inputs[key] = torch.from_numpy(np.array(array))
    return inputs


# --- packing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Examples of one pass through the model, packed one after another; those of one adapter lie together."""

    examples: Sequence[Example]

    @property
    def backward(self) -> bool:
        return self.examples[0].backward

    @property
    def num_tokens(self) -> int:
        return sum(len(example.tokens) for example in self.examples)

    @property
    def attend(self) -> PackedCausal:
        return PackedCausal([len(example.tokens) for example in self.examples])

    @property
    def lora(self) -> LoraRows:
        segments: list[tuple[int, int, Adapter]] = []
        for start, end, example in self.placed():
            if segments and segments[-1][2] is example.adapter:
                start = segments.pop()[0]
            segments.append((start, end, example.adapter))
        return LoraRows(segments)

    def placed(self) -> Iterator[tuple[int, int, Example]]:
        """Each example with its first row, and the first row after it."""
        start = 0
        for example in self.examples:
            yield start, start + len(example.tokens), example
            start += len(example.tokens)

    def tokens(self) -> Tensor:
        return torch.from_numpy(np.concatenate([example.tokens for example in self.examples]))

    def positions(self) -> Tensor:
        return torch.from_numpy(np.concatenate([np.arange(len(example.tokens)) for example in self.examples]))

    def targets(self) -> Tensor:
        """[T, K] for the largest K; an example with fewer reads its own columns and ignores the rest."""
        width = max(example.targets.shape[1] for example in self.examples)
        targets = np.zeros((self.num_tokens, width), dtype=np.int64)
        for start, end, example in self.placed():
            targets[start:end, : example.targets.shape[1]] = example.targets
        return torch.from_numpy(targets)


def pack(examples: Sequence[Example], token_budget: int) -> list[MicroBatch]:
    """Micro-batches of at most `token_budget` tokens; an example that is longer has one of its own.

    Forward-only examples stay apart, since they need no backward pass. Within an adapter, those whose loss needs two
    passes through the head lie together, and equal lengths do, for both are then computed in one go.
    """
    adapters: dict[int, int] = {}
    for example in examples:
        adapters.setdefault(id(example.adapter), len(adapters))

    def order(example: Example) -> tuple[bool, int, bool, int]:
        return example.backward, adapters[id(example.adapter)], example.needs_whole_datum, -len(example.tokens)

    batches: list[list[Example]] = []
    room = 0
    for example in sorted(examples, key=order):
        length = len(example.tokens)
        if not batches or length > room or batches[-1][-1].backward != example.backward:
            batches.append([])
            room = token_budget
        batches[-1].append(example)
        room -= length
    return [MicroBatch(batch) for batch in batches]
