"""Adapters as files: the PEFT format that other tools load, and beside it what only a resumed training needs.

adapter_model.safetensors, adapter_config.json     PEFT; every adapted layer is listed, the unembedding too
tinsmith.json                                      base model, seed and the three train_* flags
optimizer.safetensors                              moments, step count and an unused gradient
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinsmith.errors import InvalidInputError
from tinsmith.server.engine.adapters import ALPHA, Adapter, AdapterSpec, FrozenAdapter, layout_of
from tinsmith.server.engine.model import Transformer

WEIGHTS = "adapter_model.safetensors"
PEFT_CONFIG = "adapter_config.json"
OPTIMIZER = "optimizer.safetensors"
FACTS = "tinsmith.json"

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_SPEC_FIELDS = ("rank", "seed", "train_attn", "train_mlp", "train_unembed")
_PREFIX = "base_model.model."
_OURS = re.compile(r"layers\.(\d+)\.(\w+)\.(lora_[AB])")
_THEIRS = re.compile(r"base_model\.model\.model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.(lora_[AB])\.weight")


def write_adapter(folder: Path, adapter: Adapter, base_model: str) -> None:
    save_file({_peft_name(name): tensor for name, tensor in adapter.state_dict().items()}, folder / WEIGHTS)
    _write_json(folder / PEFT_CONFIG, _peft_config(adapter.spec, base_model))
    spec = adapter.spec
    _write_json(
        folder / FACTS,
        {
            "base_model": base_model,
            "rank": spec.rank,
            "seed": spec.seed,
            "train_attn": spec.train_attn,
            "train_mlp": spec.train_mlp,
            "train_unembed": spec.train_unembed,
        },
    )


def write_optimizer(folder: Path, adapter: Adapter) -> None:
    save_file(adapter.optimizer_state(), folder / OPTIMIZER)


def read_spec(folder: Path) -> AdapterSpec:
    """The shape of a saved adapter; from the PEFT configuration alone if another tool wrote it."""
    if (folder / FACTS).exists():
        facts = _read_json(folder / FACTS)
        return AdapterSpec(
            rank=facts["rank"],
            seed=facts["seed"],
            train_attn=facts["train_attn"],
            train_mlp=facts["train_mlp"],
            train_unembed=facts["train_unembed"],
        )
    config = _read_json(folder / PEFT_CONFIG)
    modules = set(config["target_modules"])
    return AdapterSpec(
        rank=config["r"],
        seed=0,
        train_attn=bool(modules & set(_ATTENTION)),
        train_mlp=bool(modules & set(_MLP)),
        train_unembed="lm_head" in modules,
    )


def read_adapter(folder: Path, adapter: Adapter, *, with_optimizer: bool) -> None:
    """Loads a saved adapter into one of the same shape. What is missing is noticed before anything is changed."""
    weights = {_our_name(name): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    optimizer = _optimizer_state(folder) if with_optimizer else None
    adapter.load_state_dict(weights)
    if optimizer is not None:
        adapter.load_optimizer_state(optimizer)


def write_frozen(path: Path, frozen: FrozenAdapter) -> None:
    """The weights of a sampler, in the dtype they are used in."""
    spec = frozen.spec
    save_file({"flat": frozen.flat}, path, metadata={name: json.dumps(getattr(spec, name)) for name in _SPEC_FIELDS})


def read_frozen(path: Path, model: Transformer) -> FrozenAdapter:
    with safe_open(path, framework="pt", device=str(model.device)) as file:
        spec = AdapterSpec(**{name: json.loads(text) for name, text in file.metadata().items()})
        return FrozenAdapter(layout_of(model.shape, spec), file.get_tensor("flat"), spec)


def _optimizer_state(folder: Path) -> Mapping[str, Tensor]:
    if not (folder / OPTIMIZER).exists():
        raise InvalidInputError(
            "This checkpoint holds no optimizer state; load it without, or load one that save_state made.",
            field="optimizer",
            value=True,
        )
    state: Mapping[str, Tensor] = load_file(folder / OPTIMIZER)
    return state


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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"{path.name} of this checkpoint cannot be read: {error}", field="path") from error
    return value
