"""What a downloaded checkpoint holds: pairs of small matrices, by the module that they change."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tinsmith.errors import InvalidInputError
from tinsmith.export.numbers import SIZES, Floats
from tinsmith.export.tensor_files import StoredTensor, read_head

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
HEAD = "lm_head"

_LORA = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_OTHER_NAMES = {"model.unembed_tokens": HEAD}
"""What the hosted service calls modules that have another name in published weights."""
_NOT_MERGED = ("alpha_pattern", "modules_to_save", "rank_pattern", "use_dora")
"""Settings of PEFT under which an adapter is more than B times A."""


class Pair(NamedTuple):
    """What an adapter adds to one matrix: scale times B [out, rank] times A [rank, in]."""

    a: StoredTensor
    b: StoredTensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.b.shape[0], self.a.shape[1]


class Adapter:
    def __init__(self, folder: Path) -> None:
        _check_files(folder)
        self.config: dict[str, Any] = read_json(folder / CONFIG)
        self.pairs = _pairs(read_head(folder / WEIGHTS))
        self._check_config()

    @property
    def rank(self) -> int:
        return int(self.config["r"])

    @property
    def base_model(self) -> str:
        """As the server calls it."""
        return str(self.config.get("base_model_name_or_path") or "")

    @property
    def changes_head(self) -> bool:
        return HEAD in self.pairs

    @cached_property
    def scale(self) -> float:
        divisor = math.sqrt(self.rank) if self.config.get("use_rslora") else self.rank
        return float(self.config["lora_alpha"]) / divisor

    def matrices(self, module: str) -> tuple[Floats, Floats]:
        """A, and B times the scale."""
        pair = self.pairs[module]
        a, b = pair.a.floats(), pair.b.floats()
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise InvalidInputError(
                f"The adapter holds numbers at {module} that are infinite or not a number: its training broke down. "
                "Export an earlier checkpoint.",
                field=module,
            )
        return a, b * np.float32(self.scale)

    def _check_config(self) -> None:
        missing = [name for name in ("r", "lora_alpha") if not isinstance(self.config.get(name), int | float)]
        special = [name for name in _NOT_MERGED if self.config.get(name)]
        if missing or special:
            problem = f"lacks {' and '.join(missing)}" if missing else f"uses {' and '.join(special)}"
            raise InvalidInputError(
                f"The {CONFIG} of the checkpoint {problem}, so it is no plain LoRA adapter and cannot be exported. "
                "Load it with the tool that wrote it.",
                field=(missing or special)[0],
            )


def _check_files(folder: Path) -> None:
    if (folder / WEIGHTS).is_file() and (folder / CONFIG).is_file():
        return
    names = ", ".join(sorted(file.name for file in folder.iterdir() if not file.name.startswith(".")))
    raise InvalidInputError(
        f"The checkpoint is no PEFT adapter, which has {WEIGHTS} and {CONFIG}: its files are {names or 'none at all'}. "
        "Encrypted exports must be downloaded and decrypted by hand.",
    )


def _pairs(tensors: Mapping[str, StoredTensor]) -> dict[str, Pair]:
    halves: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        found = _LORA.fullmatch(name)
        if found is None or len(tensor.shape) != 2 or tensor.dtype not in SIZES:
            raise InvalidInputError(
                f"The adapter holds {name} {list(tensor.shape)} in {tensor.dtype}, which is no LoRA matrix of a linear "
                "layer. Adapters of mixture-of-experts layers and of other kinds cannot be exported yet.",
                field=name,
            )
        module = _OTHER_NAMES.get(found[1], found[1])
        halves.setdefault(module, {})[found[2]] = tensor
    return {module: _pair(module, both) for module, both in halves.items()}


def _pair(module: str, both: Mapping[str, StoredTensor]) -> Pair:
    if both.keys() != {"A", "B"} or both["A"].shape[0] != both["B"].shape[1]:
        shapes = {f"lora_{half}": list(tensor.shape) for half, tensor in both.items()}
        raise InvalidInputError(
            f"The matrices of the adapter for {module} do not belong together: {shapes}. Export the checkpoint again.",
            field=module,
        )
    return Pair(both["A"], both["B"])


def read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidInputError(f"{file} is not valid JSON: {error}. Fetch it again.") from error
    if not isinstance(content, dict):
        raise InvalidInputError(f"{file} must hold a JSON object, not a {type(content).__name__}. Fetch it again.")
    return content


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
