"""The layers of a model in training with one adapter, all of them a single step for autograd.

    Blocks    all layers of one pass

Every tensor is written where the next product reads it, with room for what the adapter adds (`joined.py`); between two
products there is one pass over memory. The activation of the inner layer is not kept: the way back makes it once more.
The residual is float32; its gradient is rounded to the dtype of the products, as these want it, and goes on so.

A block begins after a norm and ends with the next one: what passes between two blocks is the residual, and its norm
with room beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tinsmith.server.engine.gpu import attention, elementwise
from tinsmith.server.engine.gpu.aside import Aside
from tinsmith.server.engine.gpu.joined import Joined, Rooms
from tinsmith.server.engine.lora import RECORDED, LoraRows
from tinsmith.server.engine.model import Layer, Transformer
from tinsmith.server.engine.steps import Turn


class Blocks:
    """For rows that all have one adapter, which has a part in every layer and fits into the rooms."""

    def __init__(self, model: Transformer, rooms: Rooms, lora: LoraRows, tiles: attention.Tiles) -> None:
        self._model = model
        self._rooms = rooms
        self._book = lora.book(model.device)
        self._placed = lora.sites
        self._tiles = tiles

    def hidden(self, x: Tensor, eps: Tensor, turn: Turn, *, recompute: bool) -> Tensor:
        """From the embeddings of the rows, [T, hidden] in float32, to their hidden states with the final norm.

        With `recompute`, the way back computes each block once more instead of keeping what is inside it.
        """
        self._rooms.lay(self._book)
        hidden: Tensor = _Pass.apply(x, RECORDED, self, eps, turn, recompute)
        return hidden

    def block(self, index: int, eps: Tensor, turn: Turn) -> _Block:
        model, is_last = self._model, index + 1 == len(self._model.layers)
        matrices = model.layers[index].matrices
        names = self._rooms.names[len(matrices) * index : len(matrices) * (index + 1)]
        sites = [self._book.grouped(name, self._placed) for name in names]
        qkv, output, gate_up, down = (Joined(*at) for at in zip(matrices, sites, strict=True))
        return _Block(
            model.layers[index], qkv, output, gate_up, down, model.shape.num_heads, model.shape.num_kv_heads, eps,
            None if index in model.shape.no_rope_layers else turn, self._tiles,
            model.final_norm if is_last else model.layers[index + 1].input_norm, 0 if is_last else qkv.room,
        )  # fmt: skip

    @property
    def num_blocks(self) -> int:
        return len(self._model.layers)


class _Pass(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, blocks: Blocks, eps: Tensor, turn: Turn, recompute: bool
    ) -> Tensor:
        ctx.passed = []
        normed = x
        for index in range(blocks.num_blocks):
            # Not all of them before the first one: the GPU computes a layer while the host prepares the next.
            block = blocks.block(index, eps, turn)
            if index == 0:
                normed = block.first_norm(x)
            given = x, normed
            x, normed, kept = block.forward(x, normed)
            ctx.passed.append((block, given, None if recompute else kept))
        return normed

    @staticmethod
    def backward(ctx: Any, dnormed: Tensor) -> tuple[None, ...]:
        dx: Tensor | None = None
        with Aside(dnormed.device) as aside:
            while ctx.passed:
                block, (x, normed), kept = ctx.passed.pop()
                if kept is None:
                    kept = block.forward(x, normed)[2]
                # Below the first block there is nothing to train.
                dx, dnormed = block.backward(dx, dnormed, normed, kept, aside, goes_on=bool(ctx.passed))
                del kept, x, normed
                aside.end_round()
        return (None,) * 6


class _Kept(NamedTuple):
    """What the way back through a block needs, besides its input."""

    heads: Tensor
    turned: Tensor
    attended: Tensor
    log_sums: Tensor
    x: Tensor
    inverse: Tensor
    inner: Tensor
    gate_up: Tensor
    active_a: Tensor
    x_after: Tensor
    inverse_after: Tensor


@dataclass(frozen=True, eq=False)
class _Block:
    layer: Layer
    qkv: Joined
    output: Joined
    gate_up: Joined
    down: Joined
    num_q: int
    num_kv: int
    eps: Tensor
    turn: Turn | None
    tiles: attention.Tiles
    next_norm: Tensor
    next_room: int

    def first_norm(self, x: Tensor) -> Tensor:
        """Of the embeddings: [T, hidden] -> [T, hidden + room]"""
        normed = self.qkv.new_input(x)
        elementwise.add_norm(x, None, self.layer.input_norm, self.eps, normed.dtype, normed[:, : x.shape[1]])
        return normed

    def forward(self, x: Tensor, normed: Tensor) -> tuple[Tensor, Tensor, _Kept]:
        """Residual [T, hidden] and norm [T, hidden + room] -> the same after the block, with room for the next one."""
        width, dtype = x.shape[1], normed.dtype
        heads = self.qkv.product(normed).unflatten(1, (self.num_q + 2 * self.num_kv, -1))
        turned = self._turned(heads)
        attended = self.output.new_input(x)
        q, k, v = self._queries_keys_values(heads, turned)
        _, log_sums = attention.forward(q, k, v, self.tiles.forward, attention.FORWARD, self._by_head(attended))
        inner = self.gate_up.new_input(x)
        delta = self.output.product(attended)
        x, _, inverse = elementwise.add_norm(x, delta, self.layer.mlp_norm, self.eps, dtype, inner[:, :width])
        gate_up = self.gate_up.product(inner)
        active = self.down.new_input(x)
        elementwise.gated_silu(gate_up, active[:, : -self.down.room])
        following = x.new_empty((len(x), width + self.next_room), dtype=dtype)
        delta = self.down.product(active)
        x_after, _, inverse_after = elementwise.add_norm(
            x, delta, self.next_norm, self.eps, dtype, following[:, :width]
        )
        active_a = active[:, -self.down.room :].contiguous()
        kept = _Kept(heads, turned, attended, log_sums, x, inverse, inner, gate_up, active_a, x_after, inverse_after)
        return x_after, following, kept

    def backward(
        self, dx: Tensor | None, dfollowing: Tensor, normed: Tensor, kept: _Kept, aside: Aside, *, goes_on: bool
    ) -> tuple[Tensor, Tensor]:
        """The gradients of residual and norm after the block -> those before it, [T, hidden] each.

        Where it does not go on below, that of the norm is left out. Those of the adapter are computed aside.
        """
        width = kept.x.shape[1]
        dx, dy = self._norm_gradient(dx, dfollowing, kept.x_after, kept.inverse_after, self.next_norm, self.down)
        self.down.fill_room(dy)
        dactive = self.down.gradient(dy)
        dgate_up = self.gate_up.new_gradient(kept.x)
        elementwise.gated_silu_again(dactive, kept.gate_up, dgate_up[:, self.gate_up.room :])
        active = dactive  # it took the place of its gradient
        aside.do(self.down.add_weight_gradients, active, kept.active_a, dy)
        del dactive, active
        self.gate_up.fill_room(dgate_up)
        aside.do(self.gate_up.add_weight_gradients, kept.inner[:, :width], kept.inner[:, width:], dgate_up)
        dinner = self.gate_up.gradient(dgate_up)
        del dgate_up

        dx, dy = self._norm_gradient(dx, dinner, kept.x, kept.inverse, self.layer.mlp_norm, self.output)
        by_head = self._by_head(kept.attended)
        self.output.fill_room(dy)
        aside.do(self.output.add_weight_gradients, by_head.flatten(1), kept.attended[:, -self.output.room :], dy)
        dattended = self.output.gradient(dy)
        q, k, v = self._queries_keys_values(kept.heads, kept.turned)
        dq, dk, dv = attention.gradients(dattended.view(by_head.shape), q, k, v, by_head, kept.log_sums, self.tiles)
        dheads = self.qkv.new_gradient(kept.x)
        elementwise.turn_heads_backward(
            dq, dk, dv, kept.heads, self.layer.qk_norm, self.eps, self.turn,
            dheads[:, self.qkv.room :].unflatten(1, kept.heads.shape[1:]),
        )  # fmt: skip
        self.qkv.fill_room(dheads)
        aside.do(self.qkv.add_weight_gradients, normed[:, :width], normed[:, width:], dheads)
        return dx, self.qkv.gradient(dheads) if goes_on else dheads

    def _norm_gradient(
        self, dx: Tensor | None, dy: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, before: Joined
    ) -> tuple[Tensor, Tensor]:
        """Of the residual; and of what was added to it, the output of `before`: the same with room at its beginning."""
        rounded = before.new_gradient(x)
        total = rounded[:, before.room :]
        elementwise.rounded_norm_gradient(dx, dy, x, inverse, weight, total)
        return total, rounded

    def _turned(self, heads: Tensor) -> Tensor:
        """Queries and keys, normed and turned as far as the layer does so: [T, H + K, D] at least"""
        if self.layer.qk_norm is None and self.turn is None:
            return heads
        return elementwise.turn_heads(heads, self.num_q + self.num_kv, self.layer.qk_norm, self.eps, self.turn)

    def _queries_keys_values(self, heads: Tensor, turned: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        num_turned = self.num_q + self.num_kv
        return turned[:, : self.num_q], turned[:, self.num_q : num_turned], heads[:, num_turned:]

    def _by_head(self, attended: Tensor) -> Tensor:
        """[T, H D + room] -> [T, H, D]"""
        return attended[:, : -self.output.room].unflatten(1, (self.num_q, -1))
