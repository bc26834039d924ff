"""What llama.cpp must know of a model to run it: its family, its sizes and its rotary embedding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tinsmith.errors import InvalidInputError
from tinsmith.export.numbers import Floats

if TYPE_CHECKING:
    from gguf import GGUFWriter

ARCHITECTURES = {"llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3", "smollm3": "SMOLLM3"}
"""By `model_type`, and what the library calls them."""

_THETAS = {"smollm3": 2000000.0}
_NO_ROPE_INTERVAL = 4
"""In llama.cpp every fourth layer of SmolLM3 is without rotary embedding, whatever the model says."""


class Shape(NamedTuple):
    """What config.json says, in whatever form of the past years."""

    family: str
    config: Mapping[str, Any]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        shape = cls(str(config.get("model_type")), config)
        if (problem := shape._problem()) is not None:
            raise InvalidInputError(
                f"The base cannot be written as GGUF: {problem}. Export with --to merged instead.", field="base"
            )
        return shape

    @property
    def num_layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def num_heads(self) -> int:
        return int(self.config["num_attention_heads"])

    @property
    def num_kv_heads(self) -> int:
        return int(self.config.get("num_key_value_heads") or self.num_heads)

    @property
    def head_dim(self) -> int:
        return int(self.config.get("head_dim") or self.config["hidden_size"] // self.num_heads)

    @property
    def rope(self) -> dict[str, Any]:
        return {**(self.config.get("rope_parameters") or self.config.get("rope_scaling") or {})}

    @property
    def rope_kind(self) -> str:
        return str(self.rope.get("rope_type") or self.rope.get("type") or "default")

    @property
    def theta(self) -> float:
        said = self.rope.get("rope_theta") or self.config.get("rope_theta")
        return float(said or _THETAS.get(self.family, 10000.0))

    @property
    def trained_context(self) -> int:
        """Before its rotary embedding was stretched."""
        return int(self.rope.get("original_max_position_embeddings") or self.config["max_position_embeddings"])

    @property
    def turns_pairs(self) -> bool:
        """Whether llama.cpp rotates neighbours of a head, instead of numbers that are half a head apart."""
        return self.family in ("llama", "smollm3")

    def _problem(self) -> str | None:
        if self.family not in ARCHITECTURES:
            return f"its model type is {self.family!r}, and known are {', '.join(ARCHITECTURES)}"
        if self.family != "llama" and (self.config.get("attention_bias") or self.config.get("mlp_bias")):
            return f"llama.cpp knows no {self.family} with attention_bias or mlp_bias"
        if self.rope_kind not in ("default", "dynamic", "linear", "llama3", "yarn"):
            return f"its RoPE scaling is {self.rope_kind!r}"
        if self.rope_kind == "yarn" and (odd := {"attention_factor", "mscale", "mscale_all_dim"} & self.rope.keys()):
            return f"its yarn scaling has {', '.join(sorted(odd))}"
        if self.family == "smollm3" and not self._has_usual_no_rope_layers():
            return f"its layers without rotary embedding are not every {_NO_ROPE_INTERVAL}th"
        return None

    def _has_usual_no_rope_layers(self) -> bool:
        usual = [int((index + 1) % _NO_ROPE_INTERVAL != 0) for index in range(self.num_layers)]
        listed = self.config.get("no_rope_layers")
        if listed is None:
            return bool(self.config.get("no_rope_layer_interval", _NO_ROPE_INTERVAL) == _NO_ROPE_INTERVAL)
        return bool(listed == usual)


def add_model(writer: GGUFWriter, shape: Shape) -> None:
    config = shape.config
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    _add_rope(writer, shape)


def _add_rope(writer: GGUFWriter, shape: Shape) -> None:
    """`dynamic` changes nothing within the context that is said above, and `llama3` is a tensor."""
    from gguf import RopeScalingType

    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.theta)
    if shape.rope_kind == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(shape.rope["factor"])
    elif shape.rope_kind == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(shape.rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(shape.trained_context)
        writer.add_rope_scaling_yarn_beta_fast(float(shape.rope.get("beta_fast") or 32))
        writer.add_rope_scaling_yarn_beta_slow(float(shape.rope.get("beta_slow") or 1))


def rope_divisors(shape: Shape) -> Floats | None:
    """What each frequency is divided by, for models that say so as Llama 3 does.

    Slow ones are divided by `factor`, fast ones are left as they are, and in between it goes over smoothly.
    """
    if shape.rope_kind != "llama3":
        return None
    settings = shape.rope
    low, high, factor = (settings[name] for name in ("low_freq_factor", "high_freq_factor", "factor"))
    frequencies = shape.theta ** -(np.arange(0, shape.head_dim, 2) / shape.head_dim)
    turns = shape.trained_context * frequencies / (2 * math.pi)
    fast_share = np.clip((turns - low) / (high - low), 0, 1)
    divisors: Floats = (1 / ((1 - fast_share) / factor + fast_share)).astype(np.float32)
    return divisors
