"""Adapters as files: the PEFT format that other tools load, and beside it what only a resumed training needs.

adapter_model.safetensors, adapter_config.json     PEFT; every adapted layer is listed, the unembedding too
optimizer.safetensors                              moments, step count and an unused gradient
tinsmith.json                                      base model, seed, the three train_* flags, and checksums of it all

Checksums are compared whenever a file is read. They are in a file that was always there, so that whoever downloads,
copies or uploads a checkpoint has no other files than before.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinsmith.errors import InvalidInputError
from tinsmith.server.engine.adapters import ALPHA, Adapter, AdapterSpec, FrozenAdapter, layout_of
from tinsmith.server.engine.damage import DamagedError, checksum, compare, reading
from tinsmith.server.engine.model import Transformer

WEIGHTS = "adapter_model.safetensors"
PEFT_CONFIG = "adapter_config.json"
OPTIMIZER = "optimizer.safetensors"
FACTS = "tinsmith.json"

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_SPEC_FIELDS = ("rank", "seed", "train_attn", "train_mlp", "train_unembed")
_CHECKSUM = "checksum"
_PREFIX = "base_model.model."
_OURS = re.compile(r"layers\.(\d+)\.(\w+)\.(lora_[AB])")
_THEIRS = re.compile(r"base_model\.model\.model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.(lora_[AB])\.weight")


class _Facts(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What is in `tinsmith.json`. A field of another name is one that was damaged."""

    base_model: str
    rank: int
    seed: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    checksums: dict[str, int] | None = None
    """Of the other files, and of all the rest in this one; none in what an earlier release wrote."""

    def own_checksum(self) -> int:
        others = {name: each for name, each in (self.checksums or {}).items() if name != FACTS}
        return zlib.crc32(msgspec.json.encode(msgspec.structs.replace(self, checksums=others)))


def write_adapter(folder: Path, adapter: Adapter, base_model: str, *, with_optimizer: bool = False) -> None:
    save_file({_peft_name(name): tensor for name, tensor in adapter.state_dict().items()}, folder / WEIGHTS)
    _write_json(folder / PEFT_CONFIG, _peft_config(adapter.spec, base_model))
    if with_optimizer:
        save_file(adapter.optimizer_state(), folder / OPTIMIZER)
    facts = _Facts(base_model, **{name: getattr(adapter.spec, name) for name in _SPEC_FIELDS})
    written = (WEIGHTS, PEFT_CONFIG, OPTIMIZER) if with_optimizer else (WEIGHTS, PEFT_CONFIG)
    facts.checksums = {name: checksum(folder / name) for name in written}
    facts.checksums[FACTS] = facts.own_checksum()
    _write_json(folder / FACTS, msgspec.to_builtins(facts))


def read_spec(folder: Path) -> AdapterSpec:
    """The shape of a saved adapter."""
    facts = _read_facts(folder)
    return AdapterSpec(**{name: getattr(facts, name) for name in _SPEC_FIELDS})


def read_adapter(folder: Path, adapter: Adapter, *, with_optimizer: bool) -> None:
    """Loads a saved adapter into one of the same shape. What is missing or damaged is noticed before anything is
    changed.
    """
    checksums = _read_facts(folder).checksums
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


def _frozen_checksum(spec: Mapping[str, str], flat: Tensor) -> int:
    about = f"{flat.dtype} {sorted(spec.items())}"
    return zlib.crc32(flat.cpu().view(torch.uint8).numpy(), zlib.crc32(about.encode()))


def _read_facts(folder: Path) -> _Facts:
    with reading(FACTS):
        facts = msgspec.json.decode((folder / FACTS).read_bytes(), type=_Facts)
    if facts.checksums is not None:
        compare(FACTS, facts.own_checksum(), facts.checksums.get(FACTS, 0))
    return facts


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


def _peft_config(spec: AdapterSpec, base_model: str) -> dict[str, Any]:
    modules = [*(_ATTENTION if spec.train_attn else ()), *(_MLP if spec.train_mlp else ())]
    if spec.train_unembed:
        modules.append("lm_head")
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": spec.rank,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": modules,
    }


def _peft_name(name: str) -> str:
    """`layers.0.q_proj.lora_A` is `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight` there."""
    found = _OURS.fullmatch(name)
    if found is None:
        return f"{_PREFIX}{name}.weight"
    layer, module, matrix = found.groups()
    block = "self_attn" if module in _ATTENTION else "mlp"
    return f"{_PREFIX}model.layers.{layer}.{block}.{module}.{matrix}.weight"


def _our_name(name: str) -> str:
    found = _THEIRS.fullmatch(name)
    if found is not None:
        return "layers.{}.{}.{}".format(*found.groups())
    return name.removeprefix(_PREFIX).removesuffix(".weight")


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
