"""How much memory a base model takes on a device, and how much there is.

Footprint           a model that is whole, by its shape: weights, and what training and sampling take at least
free_memory         of a device, now
available_memory    the same, with what the system would give up for us: files that it keeps in memory
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from tinsmith.server import memory
from tinsmith.server.engine.model import ModelShape

MIN_TOKENS = 256
"""Of a micro-batch: with fewer, everything else would take longer than the products."""
_LEAST_CACHE = 8192


@dataclass(frozen=True)
class Footprint:
    shape: ModelShape
    dtype: torch.dtype
    device_type: str

    @property
    def _itemsize(self) -> int:
        return int(self.dtype.itemsize)

    @property
    def weights(self) -> int:
        """Matrices are kept twice on a CPU: laid out for the way back, too. On a GPU there is room around them."""
        copies = 2 if self.device_type == "cpu" else 1
        shape = self.shape
        per_layer = shape.hidden_size * (
            2 * shape.head_dim * (shape.num_heads + shape.num_kv_heads) + 3 * shape.intermediate_size
        )
        embedding = shape.vocab_size * shape.hidden_size
        has_head_of_its_own = not shape.tie_embeddings or self.device_type == "cpu"
        head = copies * embedding if has_head_of_its_own else 0
        return self._itemsize * (embedding + head + copies * shape.num_layers * per_layer + self._rooms)

    @property
    def _rooms(self) -> int:
        """Numbers around the matrices, where adapters are laid."""
        if self.device_type != "cuda":
            return 0
        from tinsmith.server.engine.gpu.rooms import size_of_rooms

        return size_of_rooms(self.shape)

    @property
    def activations_per_token(self) -> int:
        """What the layers keep for the backward pass: two float32 residuals, the inputs of all products, attention.

        Of the heads as they come, turned, and attended; of the inner layer gate and up and, on a CPU, the activation.
        """
        shape = self.shape
        width_of_heads = 3 * shape.head_dim * (shape.num_heads + shape.num_kv_heads)
        num_inner = 2 if self.device_type == "cuda" else 3
        products = 2 * shape.hidden_size + num_inner * shape.intermediate_size + width_of_heads
        return shape.num_layers * (8 * shape.hidden_size + self._itemsize * products)

    @property
    def cache_per_token(self) -> int:
        """Keys and values that sampling keeps."""
        shape = self.shape
        return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * self._itemsize

    @property
    def least_kv_tokens(self) -> int:
        """A whole context. But a GPU gives all of it away at once, and for a long one a small GPU has no room."""
        longest = self.shape.max_context
        return longest if self.device_type == "cpu" else min(longest, _LEAST_CACHE)

    def at_least(self, train_tokens: int | None, kv_tokens: int | None) -> int:
        """With the micro-batch and the cache that were asked for, or else the smallest that are made."""
        activations = (MIN_TOKENS if train_tokens is None else train_tokens) * self.activations_per_token
        cache = (self.least_kv_tokens if kv_tokens is None else kv_tokens) * self.cache_per_token
        return self.weights + activations + cache


def free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_memory(device: torch.device) -> int:
    return free_memory(device) if device.type == "cuda" else memory.available_memory()
