"""Published weights in: a folder of config.json and safetensors becomes a `Transformer`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tinsmith.errors import ConfigError
from tinsmith.server.engine.model import Layer, ModelShape, Transformer
from tinsmith.server.engine.products import Matrix
from tinsmith.server.engine.sharding import ShardedLayers


def load_model(
    folder: Path,
    device: torch.device | str,
    compute_dtype: torch.dtype,
    *,
    deterministic: bool = False,
    shards: ShardedLayers | None = None,
) -> Transformer:
    """Read a model folder; matrices that share their input are laid together, so that one product computes them.

    With `shards`, only those of one layer are ever whole.
    """
    shape = ModelShape.from_config(read_config(folder))
    with ExitStack() as stack:
        tensors = _Tensors(folder, stack, torch.device(device), compute_dtype)
        matrix = partial(Matrix, deterministic=deterministic)
        of_layer = partial(matrix, stays=shards is None)
        embedding = tensors.matrix("model.embed_tokens.weight")
        tied = shape.tie_embeddings or "lm_head.weight" not in tensors
        return Transformer(
            shape=shape,
            embedding=embedding,
            layers=list(_layers(tensors, shape, of_layer, shards)),
            final_norm=tensors.vector("model.norm.weight"),
            head=matrix(embedding if tied else tensors.matrix("lm_head.weight")),
            deterministic=deterministic,
            shards=shards,
        )


def read_config(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{folder} has no config.json; give the folder of a model, or its hub id.") from None
    except ValueError as error:
        raise ConfigError(f"{folder / 'config.json'} is not valid JSON ({error}); download the model again.") from error
    return config


def end_of_text(folder: Path) -> frozenset[int]:
    """The tokens that end a text: those of generation_config.json, or else of config.json."""
    path = folder / "generation_config.json"
    generation = json.loads(path.read_bytes()) if path.exists() else {}
    tokens = generation.get("eos_token_id") or read_config(folder).get("eos_token_id")
    if tokens is None:
        return frozenset()
    return frozenset(tokens if isinstance(tokens, list) else [tokens])


class _Tensors:
    """The tensors of all files of a folder by name; each is read when it is asked for."""

    def __init__(self, folder: Path, stack: ExitStack, device: torch.device, compute_dtype: torch.dtype) -> None:
        self.folder = folder
        self.device = device
        self.compute_dtype = compute_dtype
        self._files: dict[str, Any] = {}
        for path in _weight_files(folder):
            file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            self._files |= dict.fromkeys(file.keys(), file)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def matrix(self, *names: str) -> Tensor:
        """One matrix, or several one below the other, in the dtype of the products."""
        return self._joined(names, self.compute_dtype)

    def bias(self, *names: str) -> Tensor:
        return self._joined(names, self.compute_dtype)

    def vector(self, name: str) -> Tensor:
        return self._joined([name], torch.float32)

    def _joined(self, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        parts = [self._read(name) for name in names]
        joined = torch.empty(sum(len(part) for part in parts), *parts[0].shape[1:], dtype=dtype, device=self.device)
        for target, part in zip(joined.split([len(part) for part in parts]), parts, strict=True):
            target.copy_(part)
        return joined

    def _read(self, name: str) -> Tensor:
        if name not in self._files:
            raise ConfigError(f"{self.folder} has no tensor {name}; the download is incomplete or another model's.")
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


def _weight_files(folder: Path) -> Iterator[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names: set[str] = set(json.loads(index.read_bytes())["weight_map"].values())
        yield from (folder / name for name in sorted(names))
    elif (single := folder / "model.safetensors").exists():
        yield single
    else:
        raise ConfigError(
            f"{folder} has neither model.safetensors nor model.safetensors.index.json; convert the weights to "
            "safetensors, or choose a release that has them."
        )


def _layers(
    tensors: _Tensors, shape: ModelShape, make: Callable[..., Matrix], shards: ShardedLayers | None
) -> Iterator[Layer]:
    for index in range(shape.num_layers):
        layer = _layer(tensors, shape, f"model.layers.{index}.", make)
        if shards is not None:
            shards.take(layer.matrices)
        yield layer


def _layer(tensors: _Tensors, shape: ModelShape, prefix: str, make: Callable[..., Matrix]) -> Layer:
    def matrix(has_bias: bool, *modules: str) -> Matrix:
        weight = tensors.matrix(*(f"{prefix}{module}.weight" for module in modules))
        return make(weight, tensors.bias(*(f"{prefix}{module}.bias" for module in modules)) if has_bias else None)

    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up = ("mlp.gate_proj", "mlp.up_proj")
    return Layer(
        input_norm=tensors.vector(f"{prefix}input_layernorm.weight"),
        qkv=matrix(shape.qkv_bias, *qkv),
        qk_norm=_qk_norm(tensors, shape, prefix) if shape.qk_norm else None,
        output=matrix(shape.output_bias, "self_attn.o_proj"),
        mlp_norm=tensors.vector(f"{prefix}post_attention_layernorm.weight"),
        gate_up=matrix(shape.mlp_bias, *gate_up),
        down=matrix(shape.mlp_bias, "mlp.down_proj"),
    )


def _qk_norm(tensors: _Tensors, shape: ModelShape, prefix: str) -> Tensor:
    """The norm weights of every query and key head, so that one step norms all of them: [H + K, D]."""
    q = tensors.vector(f"{prefix}self_attn.q_norm.weight").expand(shape.num_heads, -1)
    k = tensors.vector(f"{prefix}self_attn.k_norm.weight").expand(shape.num_kv_heads, -1)
    return torch.cat([q, k])
