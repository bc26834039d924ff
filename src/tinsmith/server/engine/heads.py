"""Queries, keys and values of a block, normed and turned, with what adapters add to their product."""

from __future__ import annotations

import torch
from torch import Tensor

from tinsmith.server.engine.lora import RECORDED, AnyRows, LoraRows, linear
from tinsmith.server.engine.products import Matrix
from tinsmith.server.engine.steps import Turn, turn_heads


def heads(
    x: Tensor,
    qkv: Matrix,
    lora: AnyRows | None,
    layer: str,
    num_q: int,
    num_kv: int,
    weight: Tensor | None,
    eps: Tensor,
    turn: Turn | None,
    *,
    fused: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """[T, hidden] -> [T, H, D], [T, K, D] twice; `layer` is what the name of its adapters begins with.

    What is fused is rounded less often, so its results differ in the last bits.
    """
    name, how = f"{layer}.qkv_proj", (num_q, num_kv, weight, eps, turn)
    if not (lora is None or isinstance(lora, LoraRows)):
        return lora.turned_heads(x, qkv, name, *how)
    site = lora.grouped(name, x) if fused and lora is not None and torch.is_grad_enabled() else None
    if site is not None and site.covers(len(x)):
        from tinsmith.server.engine.gpu.heads import Heads

        q, k, v = Heads.apply(x, RECORDED, qkv, site, *how)
        return q, k, v
    return turn_heads(linear(x, qkv, lora, name).view(x.shape[0], num_q + 2 * num_kv, -1), *how)
