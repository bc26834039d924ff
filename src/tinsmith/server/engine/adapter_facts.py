"""What is known of a saved adapter without torch: which files it has, what they are for, and whether they are sound.

Checksums are compared whenever a file is read. They are in a file that was always there, so that whoever downloads,
copies or uploads a checkpoint has no other files than before.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tinsmith.server.engine.damage import checksum, compare, reading

WEIGHTS = "adapter_model.safetensors"
PEFT_CONFIG = "adapter_config.json"
OPTIMIZER = "optimizer.safetensors"
FACTS = "tinsmith.json"

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
UNEMBED = "lm_head"
ALPHA = 32
"""Of every adapter here, whatever its rank."""


class Facts(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What is in `tinsmith.json`. A field of another name is one that was damaged."""

    base_model: str
    rank: int
    seed: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    steps: int = 0
    """Optimizer steps that were taken; 0 also in what an earlier release wrote."""
    checksums: dict[str, int] | None = None
    """Of the other files, and of all the rest in this one; none in what an earlier release wrote."""

    def own_checksum(self) -> int:
        others = {name: each for name, each in (self.checksums or {}).items() if name != FACTS}
        return zlib.crc32(msgspec.json.encode(msgspec.structs.replace(self, checksums=others)))


def write_facts(folder: Path, facts: Facts) -> None:
    """The last files of an adapter, which say what the others are."""
    _write_json(folder / PEFT_CONFIG, _peft_config(facts))
    written = [name for name in (WEIGHTS, PEFT_CONFIG, OPTIMIZER) if (folder / name).exists()]
    facts.checksums = {name: checksum(folder / name) for name in written}
    facts.checksums[FACTS] = facts.own_checksum()
    _write_json(folder / FACTS, msgspec.to_builtins(facts))


def read_facts(folder: Path) -> Facts:
    with reading(FACTS):
        facts = msgspec.json.decode((folder / FACTS).read_bytes(), type=Facts)
    if facts.checksums is not None:
        compare(FACTS, facts.own_checksum(), facts.checksums.get(FACTS, 0))
    return facts


def check_sound(folder: Path) -> None:
    """`DamagedError` if a file for other tools is not as it was written. Encrypted ones have no facts beside them."""
    checksums = read_facts(folder).checksums if (folder / FACTS).exists() else None
    for name in (WEIGHTS, PEFT_CONFIG):
        if checksums is not None:
            with reading(name):
                compare(name, checksum(folder / name), checksums.get(name, 0))


def _peft_config(facts: Facts) -> dict[str, Any]:
    modules = [*(ATTENTION if facts.train_attn else ()), *(MLP if facts.train_mlp else ())]
    if facts.train_unembed:
        modules.append(UNEMBED)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": facts.base_model,
        "r": facts.rank,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": modules,
    }


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
