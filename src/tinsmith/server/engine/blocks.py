"""Whether the layers of a pass go another way, where one adapter is trained on a GPU: see `gpu/blocks.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tinsmith.server.engine.attention import PackedCausal
from tinsmith.server.engine.lora import LoraRows
from tinsmith.server.engine.steps import has_kernels

if TYPE_CHECKING:
    from tinsmith.server.engine.model import Transformer


def joined_blocks(model: Transformer, attend: object, lora: object) -> Any:
    """The layers with the one adapter of all rows laid beside their matrices; None where they go the usual way."""
    if not (torch.is_grad_enabled() and isinstance(lora, LoraRows) and isinstance(attend, PackedCausal)):
        return None
    sites = lora.of_all_rows()
    if sites is None or not can_join(model):
        return None
    from tinsmith.server.engine.gpu.blocks import Blocks

    return Blocks(model, model.rooms, lora, attend.tiles(model.device)) if model.rooms.has_place_for(sites) else None


def can_join(model: Transformer) -> bool:
    """What is joined is rounded less often than a sampler's products: not where both must be equal."""
    if not (model.embedding.is_cuda and has_kernels()) or model.compute_dtype != torch.bfloat16:
        return False
    from tinsmith.server.engine.gpu import attention

    is_whole = model.shards is None and not model.deterministic
    return is_whole and attention.is_suited(model.shape.head_dim, model.device)
