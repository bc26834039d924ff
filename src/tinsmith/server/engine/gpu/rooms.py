"""Room around the frozen matrices of a model's layers, where adapters are laid: one product serves both.

    make_rooms    once for each model, before anything depends on where its matrices lie
    size_of_rooms how many numbers they hold, of a model with this shape
    layers_of     the matrices, with the names of what adapters add to them
    parts_of      the projections of each kind of layer

Above and beside each matrix is room for one adapter, whose training wants A there on the way back and B on the way
forward (`joined.py`). Below it is room for the A of several, which sampling uses (`slot_lora.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from tinsmith.server.engine.model import ModelShape, Transformer
from tinsmith.server.engine.products import Matrix

UNIT = 32
"""Ranks that an adapter takes up at least."""
NUM_UNITS = 8
"""Below a matrix; above and beside it is one."""


def make_rooms(model: Transformer) -> None:
    parts = parts_of(model.shape)
    for name, matrix in layers_of(model):
        if not matrix.has_room:
            width = UNIT * len(parts[name.rpartition(".")[2]])
            matrix.make_room(above=width, below=NUM_UNITS * width, beside=width)


def size_of_rooms(shape: ModelShape) -> int:
    heads = shape.num_heads * shape.head_dim
    inputs = {
        "qkv_proj": shape.hidden_size,
        "o_proj": heads,
        "gate_up_proj": shape.hidden_size,
        "down_proj": shape.intermediate_size,
    }
    size = 0
    for name, num_in in inputs.items():
        outs = parts_of(shape)[name]
        width = UNIT * len(outs)
        size += (1 + NUM_UNITS) * width * (num_in + width) + width * sum(outs)
    return shape.num_layers * size


def layers_of(model: Transformer) -> Iterator[tuple[str, Matrix]]:
    """Not the unembedding, which may be the embedding too."""
    for index, layer in enumerate(model.layers):
        yield f"layers.{index}.qkv_proj", layer.qkv
        yield f"layers.{index}.o_proj", layer.output
        yield f"layers.{index}.gate_up_proj", layer.gate_up
        yield f"layers.{index}.down_proj", layer.down


def parts_of(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Outputs of the projections of each kind of layer."""
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        "qkv_proj": (q, kv, kv),
        "o_proj": (shape.hidden_size,),
        "gate_up_proj": (shape.intermediate_size, shape.intermediate_size),
        "down_proj": (shape.hidden_size,),
        "lm_head": (shape.vocab_size,),
    }
