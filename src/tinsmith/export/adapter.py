"""What a downloaded checkpoint holds: pairs of small matrices, by the module that they change."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tinsmith.errors import InvalidInputError
from tinsmith.export.numbers import SIZES, Floats
from tinsmith.export.tensor_files import StoredTensor, read_head

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
FACTS = "tinsmith.json"
"""What our own server adds."""
HEAD = "lm_head"

_LORA = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_COPY = re.compile(r"base_model\.model\.(lm_head|model\.embed_tokens)(?:\.base_layer)?\.weight")
"""What peft saves along with an adapter that changes one of these, although it is a part of the base."""
_OTHER_NAMES = {"model.unembed_tokens": HEAD}
"""What the hosted service calls modules that have another name in published weights."""
_MORE_THAN_A_PRODUCT = (
    "alora_invocation_tokens",
    "arrow_config",
    "fan_in_fan_out",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "trainable_token_indices",
    "use_dora",
    "use_qalora",
)
"""Settings of PEFT under which an adapter is more than B times A, or something else."""
_CHANGES_THE_BASE = ("corda", "loftq", "lora_ga", "olora", "pissa")
"""Ways to begin in which a part of the base moves into the adapter; without the rest of it the sum is wrong."""
_LARGEST_ALPHA = 1e9
_LARGEST_CONFIG_BYTES = 2**20
_MODULE_NAME = re.compile(r"[\w.]+", re.ASCII)


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
        tensors = read_head(folder / WEIGHTS)
        self.copies = {found[1]: each for name, each in tensors.items() if (found := _COPY.fullmatch(name))}
        """Of matrices of the base, by their modules."""
        self._check_config()  # first: what is special about an adapter is better told by this than by its tensors
        self.pairs = _pairs({name: each for name, each in tensors.items() if not _COPY.fullmatch(name)})
        self.steps = _steps(folder / FACTS)

    @property
    def rank(self) -> int:
        """The largest; modules may have ranks of their own."""
        return max((pair.a.shape[0] for pair in self.pairs.values()), default=int(self.config["r"]))

    @property
    def alpha(self) -> float:
        return float(self.config["lora_alpha"])

    @property
    def base_model(self) -> str:
        """As the server calls it."""
        return str(self.config.get("base_model_name_or_path") or "")

    @property
    def changes_head(self) -> bool:
        return HEAD in self.pairs

    def scale(self, module: str) -> float:
        """What B times A is multiplied with."""
        patterns = self.config.get("alpha_pattern") or {}
        alpha = next((value for name, value in patterns.items() if f".{module}".endswith(f".{name}")), self.alpha)
        rank = self.pairs[module].a.shape[0]
        return float(alpha) / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def matrices(self, module: str, unit: float = 1.0) -> tuple[Floats, Floats]:
        """A, and B times the scale, of which there are so many to the `unit`."""
        pair = self.pairs[module]
        a = pair.a.floats()
        with np.errstate(over="ignore"):
            b = pair.b.floats() * np.float32(self.scale(module) / unit)
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise InvalidInputError(
                f"The adapter holds numbers at {module} that are infinite or not a number: its training broke down. "
                "Use an earlier checkpoint.",
                field=module,
            )
        return a, b

    def _check_config(self) -> None:
        problem = _problem(self.config)
        if problem is not None:
            raise InvalidInputError(
                f"The {CONFIG} {problem}, so this is no plain LoRA adapter and cannot be used. Load it with the tool "
                "that wrote it, or train one without.",
                field=CONFIG,
            )


def _problem(config: Mapping[str, Any]) -> str | None:
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        return f"has the alpha_pattern {patterns!r}, which must be an object"
    # Ranks are read from the matrices; only the numbers that they are multiplied with must be told.
    if not all(map(is_positive, (config.get("r"), config.get("lora_alpha"), *patterns.values()))):
        return (
            f"has r {config.get('r')!r}, lora_alpha {config.get('lora_alpha')!r} and alpha_pattern {patterns}, which "
            "must be positive numbers"
        )
    if (config.get("peft_type") or "LORA") != "LORA":
        return f"has the peft_type {config['peft_type']!r}"
    if special := [name for name in _MORE_THAN_A_PRODUCT if config.get(name)]:
        return f"uses {' and '.join(special)}"
    if (config.get("bias") or "none") != "none":
        return f"has bias {config['bias']!r}: biases were trained too"
    if str(config.get("init_lora_weights")).lower().startswith(_CHANGES_THE_BASE):
        return f"has init_lora_weights {config['init_lora_weights']!r}, which changes the base; convert it with peft"
    if odd := [name for name in patterns if not _MODULE_NAME.fullmatch(name)]:
        return f"has the alpha_pattern {odd[0]!r}, which is not the name of a module"
    return None


def is_positive(value: object) -> bool:
    """Whether it can be a rank or an alpha."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _LARGEST_ALPHA


def _check_files(folder: Path) -> None:
    if (folder / WEIGHTS).is_file() and (folder / CONFIG).is_file():
        if (size := (folder / CONFIG).stat().st_size) > _LARGEST_CONFIG_BYTES:
            raise InvalidInputError(f"The {CONFIG} has {size:,} bytes, which no tool writes. Save the adapter again.")
        return
    names = ", ".join(sorted(file.name for file in folder.iterdir() if not file.name.startswith(".")))
    raise InvalidInputError(
        f"This is no PEFT adapter, which has {WEIGHTS} and {CONFIG}: its files are {names or 'none at all'}. "
        "Encrypted exports must be downloaded and decrypted by hand.",
    )


def _steps(facts: Path) -> int | None:
    """How many optimizer steps were taken, where the server says so."""
    steps = read_json(facts).get("steps") if facts.is_file() else None
    return steps if isinstance(steps, int) and steps else None


def _pairs(tensors: Mapping[str, StoredTensor]) -> dict[str, Pair]:
    halves: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        found = _LORA.fullmatch(name)
        if found is None or len(tensor.shape) != 2 or tensor.dtype not in SIZES:
            raise InvalidInputError(
                f"The adapter holds {name} {list(tensor.shape)} in {tensor.dtype}, which is no LoRA matrix of a linear "
                "layer. Adapters of mixture-of-experts layers and of other kinds cannot be used yet.",
                field=name,
            )
        module = _OTHER_NAMES.get(found[1], found[1])
        both = halves.setdefault(module, {})
        if found[2] in both:
            raise InvalidInputError(
                f"The adapter holds {name}, and the same matrix of {module} by another name. Leave one of them out.",
                field=name,
            )
        both[found[2]] = tensor
    return {module: _pair(module, both) for module, both in halves.items()}


def _pair(module: str, both: Mapping[str, StoredTensor]) -> Pair:
    if both.keys() != {"A", "B"} or not 1 <= both["A"].shape[0] == both["B"].shape[1]:
        shapes = {f"lora_{half}": list(tensor.shape) for half, tensor in both.items()}
        raise InvalidInputError(
            f"The matrices of the adapter for {module} do not belong together: {shapes}. Save the adapter again.",
            field=module,
        )
    return Pair(both["A"], both["B"])


def read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidInputError(f"{file.name} is not valid JSON: {error}. Fetch it again.") from error
    except RecursionError as error:
        raise InvalidInputError(f"{file.name} is nested too deeply. Fetch it again.") from error
    if not isinstance(content, dict):
        raise InvalidInputError(f"{file.name} must hold a JSON object, not a {type(content).__name__}. Fetch it again.")
    return content
