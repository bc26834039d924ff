"""Adapters as files: the PEFT format that other tools load, and beside it what only a resumed training needs.

adapter_model.safetensors, adapter_config.json     PEFT; every adapted layer is listed, the unembedding too
optimizer.safetensors                              moments, step count and an unused gradient
tinsmith.json                                      what the others do not say, and checksums of it all

What can be known of them without torch is in `adapter_facts`.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinsmith.errors import InvalidInputError
from tinsmith.server.engine.adapter_facts import ATTENTION, OPTIMIZER, WEIGHTS, Facts, read_facts, write_facts
from tinsmith.server.engine.adapters import Adapter, AdapterSpec, FrozenAdapter, layout_of
from tinsmith.server.engine.damage import DamagedError, checksum, compare, reading
from tinsmith.server.engine.model import Transformer

_SPEC_FIELDS = ("rank", "seed", "train_attn", "train_mlp", "train_unembed")
_CHECKSUM = "checksum"
_PREFIX = "base_model.model."
_OURS = re.compile(r"layers\.(\d+)\.(\w+)\.(lora_[AB])")
_THEIRS = re.compile(r"base_model\.model\.model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.(lora_[AB])\.weight")


def write_adapter(folder: Path, adapter: Adapter, base_model: str, *, with_optimizer: bool = False) -> None:
    save_file({_peft_name(name): tensor for name, tensor in adapter.state_dict().items()}, folder / WEIGHTS)
    if with_optimizer:
        save_file(adapter.optimizer_state(), folder / OPTIMIZER)
    spec = {name: getattr(adapter.spec, name) for name in _SPEC_FIELDS}
    write_facts(folder, Facts(base_model, **spec, steps=adapter.step))


def read_spec(folder: Path) -> AdapterSpec:
    """The shape of a saved adapter."""
    facts = read_facts(folder)
    return AdapterSpec(**{name: getattr(facts, name) for name in _SPEC_FIELDS})


def read_adapter(folder: Path, adapter: Adapter, *, with_optimizer: bool) -> None:
    """Loads a saved adapter into one of the same shape. What is missing or damaged is noticed before anything is
    changed.
    """
    checksums = read_facts(folder).checksums
    weights = {_our_name(name): tensor for name, tensor in _read_tensors(folder / WEIGHTS, checksums).items()}
    optimizer = _optimizer_state(folder, checksums) if with_optimizer else None
    adapter.load_state_dict(weights)
    if optimizer is not None:
        adapter.load_optimizer_state(optimizer)


def write_frozen(path: Path, frozen: FrozenAdapter) -> None:
    """The weights of a sampler, in the dtype they are used in."""
    spec = {name: json.dumps(getattr(frozen.spec, name)) for name in _SPEC_FIELDS}
    save_file({"flat": frozen.flat}, path, metadata={**spec, _CHECKSUM: str(_frozen_checksum(spec, frozen.flat))})


def read_frozen(path: Path, model: Transformer) -> FrozenAdapter:
    with reading(path.name):
        path.open("rb").close()  # for its error: to `safe_open` too many open files are a file that is missing
        with safe_open(path, framework="pt", device=str(model.device)) as file:
            metadata, flat = dict(file.metadata() or {}), file.get_tensor("flat")
        expected = metadata.pop(_CHECKSUM, None)
        if metadata.keys() != set(_SPEC_FIELDS):  # one of another name is one that was damaged
            raise DamagedError(f"{path.name} says {sorted(metadata)} of itself instead of {sorted(_SPEC_FIELDS)}")
        compare(path.name, _frozen_checksum(metadata, flat), None if expected is None else int(expected))
        spec = AdapterSpec(**{name: json.loads(text) for name, text in metadata.items()})
    return FrozenAdapter(layout_of(model.shape, spec), flat, spec)


class PackedAdapter(NamedTuple):
    """The weights of a sampler as they travel between processes: the bytes of one array, and what they mean."""

    spec: Mapping[str, Any]
    dtype: str
    flat: np.ndarray[Any, np.dtype[np.uint8]]


def pack(frozen: FrozenAdapter) -> PackedAdapter:
    spec = {name: getattr(frozen.spec, name) for name in _SPEC_FIELDS}
    dtype = str(frozen.flat.dtype).removeprefix("torch.")
    return PackedAdapter(spec, dtype, frozen.flat.cpu().view(torch.uint8).numpy())


def unpack(packed: PackedAdapter, model: Transformer) -> FrozenAdapter:
    """On the CPU they stay where they are: the bytes must be the caller's own."""
    spec = AdapterSpec(**packed.spec)
    flat = torch.from_numpy(packed.flat).view(getattr(torch, packed.dtype)).to(model.device)
    return FrozenAdapter(layout_of(model.shape, spec), flat, spec)


def _frozen_checksum(spec: Mapping[str, str], flat: Tensor) -> int:
    about = f"{flat.dtype} {sorted(spec.items())}"
    return zlib.crc32(flat.cpu().view(torch.uint8).numpy(), zlib.crc32(about.encode()))


def _read_tensors(file: Path, checksums: Mapping[str, int] | None) -> dict[str, Tensor]:
    with reading(file.name):
        compare(file.name, checksum(file), None if checksums is None else checksums.get(file.name, 0))
        tensors: dict[str, Tensor] = load_file(file)
    return tensors


def _optimizer_state(folder: Path, checksums: Mapping[str, int] | None) -> Mapping[str, Tensor]:
    if OPTIMIZER not in (checksums or ()) and not (folder / OPTIMIZER).exists():
        raise InvalidInputError(
            "This checkpoint holds no optimizer state; load it without, or load one that save_state made.",
            field="optimizer",
            value=True,
        )
    return _read_tensors(folder / OPTIMIZER, checksums)


def _peft_name(name: str) -> str:
    """`layers.0.q_proj.lora_A` is `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight` there."""
    found = _OURS.fullmatch(name)
    if found is None:
        return f"{_PREFIX}{name}.weight"
    layer, module, matrix = found.groups()
    block = "self_attn" if module in ATTENTION else "mlp"
    return f"{_PREFIX}model.layers.{layer}.{block}.{module}.{matrix}.weight"


def _our_name(name: str) -> str:
    found = _THEIRS.fullmatch(name)
    if found is not None:
        return "layers.{}.{}.{}".format(*found.groups())
    return name.removeprefix(_PREFIX).removesuffix(".weight")
