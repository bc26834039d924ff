"""What a leader and the members of its training group say to each other, besides the tensors of adapters.

    Hello        a member's first word: which model it has
    Share        rows to compute; after it come the weights that the member does not have
    Answer       what came of them; after it come the gradients of the adapters that were trained
    JoinPass     the leader goes through the layers alone, and needs the member's shards of them; there is no answer
    Dismissal    the leader's last word

Rows travel as checked examples, exactly as the leader would compute them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from tinsmith.errors import InvalidInputError
from tinsmith.server.engine.adapters import Adapter, AdapterSpec
from tinsmith.server.engine.batch import Example
from tinsmith.server.engine.custom_graph import CustomLoss
from tinsmith.server.engine.losses import LOSSES
from tinsmith.server.engine.sharding import Turns
from tinsmith.server.engine.train import BadExampleError, RowOutput
from tinsmith.types import CustomLossGraph
from tinsmith.wire import json

M = TypeVar("M", bound="Hello | Answer")

_NAMES = {id(loss): name for name, loss in LOSSES.items()}


class Array(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Hello(msgspec.Struct, frozen=True, array_like=True):
    shape: str
    dtype: str
    fingerprint: list[float]
    """A hidden state of the base model: other weights give another one."""
    token_budget: int
    """Of its micro-batches."""
    norms: list[float]
    """Of its matrices, where layers are sharded: there hidden states show nothing, since all have a part in them."""


class SharedAdapter(msgspec.Struct, frozen=True, array_like=True):
    version: int
    spec: AdapterSpec
    is_sent: bool
    """Whether its weights follow; otherwise the member has them."""


class SharedRow(msgspec.Struct, frozen=True, array_like=True):
    index: int
    adapter: int
    """Its place among the adapters of the share."""
    backward: bool
    tokens: Array
    targets: Array
    target_shape: tuple[int, ...]
    loss: str | int
    """Its name, or the place of a custom one among those of the share."""
    inputs: dict[str, Array]
    config: dict[str, float]


class InStep(msgspec.Struct, frozen=True, array_like=True):
    """How a share is computed where layers are sharded."""

    turns: Turns
    token_budget: int


class Share(msgspec.Struct, frozen=True, array_like=True, tag=True):
    adapters: list[SharedAdapter] = []
    custom_losses: list[bytes] = []
    rows: list[SharedRow] = []
    """None only where layers are sharded: the others need the shards of this member."""
    in_step: InStep | None = None


class JoinPass(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Dismissal(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Output(msgspec.Struct, frozen=True, array_like=True):
    index: int
    logprobs: Array
    loss: float
    metrics: dict[str, float]


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    """Of a row that turned out to be impossible."""

    index: int
    message: str
    field: str | None
    value: str


class Answer(msgspec.Struct, frozen=True, array_like=True):
    outputs: list[Output] = []
    trained: list[int] = []
    """The places of the adapters whose gradients follow."""
    num_batches: int = 0
    refusal: Refusal | None = None
    failure: str = ""
    """What went wrong, if it was no row's fault."""
    is_out_of_memory: bool = False
    """Whether that was it."""


def encode(message: Hello | Share | Answer | JoinPass | Dismissal) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(kind: type[M], data: bytes) -> M:
    return msgspec.msgpack.decode(data, type=kind)


def decode_order(data: bytes) -> Share | JoinPass | Dismissal:
    """What a leader says to a member."""
    return msgspec.msgpack.decode(data, type=Share | JoinPass | Dismissal)


# --- rows ------------------------------------------------------------------------------------------------------------


def adapters_of(examples: Sequence[Example]) -> list[Adapter]:
    """Each once, in the order of their first rows."""
    return list({id(example.adapter): example.adapter for example in examples}.values())


def share_of(examples: Sequence[Example], known_versions: frozenset[int], in_step: InStep | None = None) -> Share:
    adapters = adapters_of(examples)
    places = {id(adapter): place for place, adapter in enumerate(adapters)}
    losses: dict[tuple[int, ...], CustomLoss] = {}
    for example in examples:
        if isinstance(example.loss, CustomLoss):
            losses.setdefault(_identity(example.loss), example.loss)
    custom_places = {identity: place for place, identity in enumerate(losses)}

    def row(example: Example) -> SharedRow:
        custom = isinstance(example.loss, CustomLoss)
        return SharedRow(
            index=example.index,
            adapter=places[id(example.adapter)],
            backward=example.backward,
            tokens=_packed(example.tokens),
            targets=_packed(example.targets),
            target_shape=example.target_shape,
            loss=custom_places[_identity(example.loss)] if custom else _NAMES[id(example.loss)],
            inputs={name: _packed(tensor.numpy()) for name, tensor in example.inputs.items()},
            config=dict(example.config),
        )

    return Share(
        adapters=[
            SharedAdapter(adapter.version, adapter.spec, adapter.version not in known_versions) for adapter in adapters
        ],
        custom_losses=[json.encode(CustomLossGraph(nodes=list(loss.nodes))) for loss in losses.values()],
        rows=[row(example) for example in examples],
        in_step=in_step,
    )


def _identity(loss: object) -> tuple[int, ...]:
    """Each row has a loss object of its own, with the nodes of one graph: they travel once."""
    assert isinstance(loss, CustomLoss)
    return tuple(map(id, loss.nodes))


def examples_of(share: Share, adapters: Sequence[Adapter]) -> list[Example]:
    custom = [CustomLoss.from_graph(json.decode(CustomLossGraph, graph)) for graph in share.custom_losses]
    return [
        Example(
            index=row.index,
            adapter=adapters[row.adapter],
            backward=row.backward,
            tokens=_unpacked(row.tokens),
            targets=_unpacked(row.targets),
            target_shape=row.target_shape,
            loss=LOSSES[row.loss] if isinstance(row.loss, str) else custom[row.loss],
            inputs={name: torch.from_numpy(_unpacked(array)) for name, array in row.inputs.items()},
            config=row.config,
        )
        for row in share.rows
    ]


# --- what came of them -----------------------------------------------------------------------------------------------


def packed_output(index: int, output: RowOutput) -> Output:
    assert output.logprobs is not None
    return Output(index, _packed(output.logprobs), output.loss, output.metrics)


def row_output(output: Output) -> RowOutput:
    return RowOutput(_unpacked(output.logprobs), output.loss, output.metrics)


def refusal_of(bad: BadExampleError) -> Refusal:
    return Refusal(bad.example.index, bad.error.message, bad.error.field, bad.error.value)


def refused(refusal: Refusal, examples: Sequence[Example]) -> BadExampleError:
    error = InvalidInputError(refusal.message, field=refusal.field)
    error.value = refusal.value
    return BadExampleError(next(example for example in examples if example.index == refusal.index), error)


def _packed(array: NDArray[Any]) -> Array:
    return Array(array.dtype.str, array.shape, array.tobytes())


def _unpacked(array: Array) -> NDArray[Any]:
    """A copy: torch wants memory that can be written to."""
    return np.frombuffer(array.data, np.dtype(array.dtype)).reshape(array.shape).copy()
