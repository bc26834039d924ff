"""The inner layer of a block: down(silu(gate(x)) * up(x)), with what adapters add to each of the products."""

from __future__ import annotations

import torch
from torch import Tensor

from tinsmith.server.engine.lora import RECORDED, AnyRows, LoraRows, linear
from tinsmith.server.engine.products import Matrix
from tinsmith.server.engine.steps import gated_silu


def mlp(x: Tensor, gate_up: Matrix, down: Matrix, lora: AnyRows | None, layer: str, *, fused: bool = True) -> Tensor:
    """[T, hidden] -> [T, hidden]; `layer` is what the names of its adapters begin with.

    What is fused is rounded less often, so its results differ in the last bits.
    """
    names = f"{layer}.gate_up_proj", f"{layer}.down_proj"
    if fused and isinstance(lora, LoraRows) and torch.is_grad_enabled():
        sites = [lora.grouped(name, x) for name in names]
        if all(site is not None and site.covers(len(x)) for site in sites):
            from tinsmith.server.engine.gpu.mlp import Mlp

            y: Tensor = Mlp.apply(x, RECORDED, gate_up, down, *sites)
            return y
    if lora is None or isinstance(lora, LoraRows):
        gated = gated_silu(linear(x, gate_up, lora, names[0]))
    else:
        gated = lora.gated_silu(x, gate_up, names[0])
    return linear(gated, down, lora, names[1])
