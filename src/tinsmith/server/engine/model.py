"""The transformer of the Llama, Qwen2, Qwen3 and SmolLM families, for training and sampling alike.

    ModelShape     what config.json says
    Rope           the frequencies of the rotary embedding, scaled as config.json says
    Transformer    tokens -> hidden states -> logits

Rows are packed: there is no batch dimension and no padding. Which row may see which is the business of the `attend`
function; which adapter a row uses is that of `LoraRows`. Residual stream, norms and rotary embedding are float32;
matrix products are in `compute_dtype`.

Letters: T rows, H heads, K key/value heads, D size of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tinsmith.errors import ConfigError
from tinsmith.server.engine.blocks import joined_blocks
from tinsmith.server.engine.heads import heads
from tinsmith.server.engine.lora import AnyRows, linear
from tinsmith.server.engine.mlp import mlp
from tinsmith.server.engine.products import Matrix
from tinsmith.server.engine.steps import Turn, add_norm

if TYPE_CHECKING:
    from tinsmith.server.engine.sharding import ShardedLayers

FAMILIES = ("llama", "qwen2", "qwen3", "smollm3")
_DEFAULT_THETA = {"smollm3": 2000000.0}


@dataclass(frozen=True)
class Rope:
    """Inverse frequencies, and the factor on cosine and sine (1 except for yarn)."""

    inverse_frequencies: tuple[float, ...]
    factor: float = 1.0


@dataclass(frozen=True)
class ModelShape:
    """The sizes and switches of a model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_context: int
    tie_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    no_rope_layers: frozenset[int] = frozenset()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read a config.json, in the form of any transformers release; what we do not compute exactly is refused."""
        family = config.get("model_type")
        _refuse_unknown(config, family)
        num_layers, num_heads = config["num_hidden_layers"], config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
        attention_bias = bool(config.get("attention_bias", False))
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=head_dim,
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope=rope_from_config(config, head_dim),
            max_context=config["max_position_embeddings"],
            tie_embeddings=config.get("tie_word_embeddings", family == "smollm3"),
            qkv_bias=family == "qwen2" or attention_bias,
            output_bias=family != "qwen2" and attention_bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
            no_rope_layers=_no_rope_layers(config, num_layers) if family == "smollm3" else frozenset(),
        )


def _refuse_unknown(config: Mapping[str, Any], family: object) -> None:
    if family not in FAMILIES:
        raise ConfigError(f"The model type {family!r} is not supported; use a model of type {', '.join(FAMILIES)}.")
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"The activation {config['hidden_act']!r} is not supported; only 'silu' models are.")
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        raise ConfigError("Sliding-window attention is not supported; use a model with full attention in every layer.")
    if config.get("quantization_config"):
        raise ConfigError("Quantised weights are not supported; use the bfloat16 or float32 release of this model.")


def _no_rope_layers(config: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    """SmolLM3 lists a 0 for each layer without rotary embedding, or names their interval."""
    uses_rope = config.get("no_rope_layers")
    if uses_rope is None:
        interval = config.get("no_rope_layer_interval", 4)
        uses_rope = [int((index + 1) % interval != 0) for index in range(num_layers)]
    return frozenset(index for index in range(num_layers) if not uses_rope[index])


# --- rotary embedding ------------------------------------------------------------------------------------------------


def rope_from_config(config: Mapping[str, Any], head_dim: int) -> Rope:
    """The frequencies for `rope_parameters` (new form) or `rope_theta` and `rope_scaling` (old form)."""
    settings = {**(config.get("rope_parameters") or config.get("rope_scaling") or {})}
    theta = settings.get("rope_theta") or config.get("rope_theta") or _DEFAULT_THETA.get(config["model_type"], 10000.0)
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind not in ROPE_SCALINGS:
        raise ConfigError(f"The RoPE scaling {kind!r} is not supported; supported are {', '.join(ROPE_SCALINGS)}.")
    settings.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (theta**exponents)
    scaled, factor = ROPE_SCALINGS[kind](plain, settings | {"rope_theta": theta, "head_dim": head_dim})
    return Rope(tuple(scaled.tolist()), factor)


def _unscaled(plain: Tensor, settings: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Also for `dynamic`, which changes nothing within the context the model was trained on, our limit."""
    return plain, 1.0


def _linear(plain: Tensor, settings: Mapping[str, Any]) -> tuple[Tensor, float]:
    return plain / settings["factor"], 1.0


def _llama3(plain: Tensor, settings: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Long waves are stretched, short ones kept, those between blended."""
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    waves_in_context = settings["original_max_position_embeddings"] * plain / (2 * math.pi)
    kept = ((waves_in_context - low) / (high - low)).clamp(0, 1)
    return kept * plain + (1 - kept) * plain / settings["factor"], 1.0


def _yarn(plain: Tensor, settings: Mapping[str, Any]) -> tuple[Tensor, float]:
    """A ramp over the dimensions: the first keep their frequency, the last are stretched by the whole factor."""
    factor, head_dim = settings["factor"], settings["head_dim"]

    def dimension_turning(times: float) -> float:
        """Which dimension turns this many times within the original context."""
        turns = settings["original_max_position_embeddings"] / (times * 2 * math.pi)
        return float(head_dim * math.log(turns) / (2 * math.log(settings["rope_theta"])))

    first = dimension_turning(settings.get("beta_fast") or 32)
    last = dimension_turning(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    return stretched * plain / factor + (1 - stretched) * plain, _yarn_factor(factor, settings)


def _yarn_factor(factor: float, settings: Mapping[str, Any]) -> float:
    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if (given := settings.get("attention_factor")) is not None:
        return float(given)
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        return temperature(settings["mscale"]) / temperature(settings["mscale_all_dim"])
    return temperature(1.0)


ROPE_SCALINGS: Mapping[str, Callable[[Tensor, Mapping[str, Any]], tuple[Tensor, float]]] = {
    "default": _unscaled,
    "dynamic": _unscaled,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


# --- the model -------------------------------------------------------------------------------------------------------


class Attend(Protocol):
    """Attention of one layer over packed rows; keys and values come with the rotary embedding applied."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, H, D], k and v [T, K, D] -> [T, H, D]"""


@dataclass(frozen=True, eq=False)
class Layer:
    """The frozen weights of one block; matrices in the compute dtype, norms and biases as their use wants them."""

    input_norm: Tensor
    qkv: Matrix  # [(H + 2 K) * D, hidden]
    qk_norm: Tensor | None  # [H + K, D]
    output: Matrix
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.qkv, self.output, self.gate_up, self.down


@dataclass(frozen=True, eq=False)
class Transformer:
    shape: ModelShape
    embedding: Tensor  # [vocab, hidden]
    layers: Sequence[Layer]
    final_norm: Tensor
    head: Matrix  # [vocab, hidden]; the embedding if tied
    deterministic: bool = False
    """Whether a row's result is the same to the last bit in any batch, and in training and sampling alike."""
    shards: ShardedLayers | None = None
    """Where the matrices of the layers come from, if they are not here all the time."""

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def hidden(
        self, tokens: Tensor, positions: Tensor, attend: Attend, lora: AnyRows | None, *, recompute: bool = False
    ) -> Tensor:
        """[T] tokens at [T] positions -> [T, hidden], final norm applied.

        With `recompute`, the backward pass computes each layer once more instead of keeping what is inside it: a third
        slower, for rows too long to keep everything.
        """
        if self.shards is None or self.shards.is_in_step:
            return self._hidden(tokens, positions, attend, lora, recompute)
        with self.shards.announced():
            return self._hidden(tokens, positions, attend, lora, recompute)

    def _hidden(
        self, tokens: Tensor, positions: Tensor, attend: Attend, lora: AnyRows | None, recompute: bool
    ) -> Tensor:
        x = functional.embedding(tokens, self.embedding).float()
        delta: Tensor | None = None
        turn = self._turn(positions)
        if (blocks := joined_blocks(self, attend, lora)) is not None:
            hidden: Tensor = blocks.hidden(x, self._eps, turn, recompute=recompute)
            return hidden
        for index in range(len(self.layers)):
            if self.shards is not None:
                x, delta = self.shards.enter(index, x, delta)
            if recompute and torch.is_grad_enabled():
                x, delta = checkpoint(self._layer, index, x, delta, turn, attend, lora, use_reentrant=False)
            else:
                x, delta = self._layer(index, x, delta, turn, attend, lora)
            if self.shards is not None:
                x, delta = self.shards.leave(index, x, delta)
        return self._add_norm(x, delta, self.final_norm)[1]

    def logits(self, hidden: Tensor, lora: AnyRows | None) -> Tensor:
        """[N, hidden] -> [N, vocab], float32."""
        return linear(hidden.to(self.compute_dtype), self.head, lora, "lm_head").float()

    @cached_property
    def rooms(self) -> Any:
        """For one adapter around the matrices, on a GPU."""
        from tinsmith.server.engine.gpu.joined import Rooms

        return Rooms(self)

    @cached_property
    def _eps(self) -> Tensor:
        return torch.tensor(self.shape.rms_norm_eps, device=self.device)

    @cached_property
    def _frequencies(self) -> Tensor:
        return torch.tensor(self.shape.rope.inverse_frequencies, device=self.device)

    def _turn(self, positions: Tensor) -> Turn:
        angles = (positions.to(torch.float32)[:, None] * self._frequencies)[:, None, :]
        return angles.cos() * self.shape.rope.factor, angles.sin() * self.shape.rope.factor

    def _add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        return add_norm(x, delta, weight, self._eps, self.compute_dtype)

    def _layer(
        self, index: int, x: Tensor, delta: Tensor | None, turn: Turn, attend: Attend, lora: AnyRows | None
    ) -> tuple[Tensor, Tensor]:
        """The residual, and what is still to be added to it: the norm that follows does both in one step."""
        layer = self.layers[index]
        x, normed = self._add_norm(x, delta, layer.input_norm)
        x, normed = self._add_norm(x, self._attention(index, normed, turn, attend, lora), layer.mlp_norm)
        return x, mlp(normed, layer.gate_up, layer.down, lora, f"layers.{index}", fused=not self.deterministic)

    def _attention(self, index: int, x: Tensor, turn: Turn, attend: Attend, lora: AnyRows | None) -> Tensor:
        q, k, v = self._heads(index, x, turn, lora)
        attended = attend(index, q, k, v).reshape(x.shape[0], -1)
        return linear(attended, self.layers[index].output, lora, f"layers.{index}.o_proj")

    def _heads(self, index: int, x: Tensor, turn: Turn, lora: AnyRows | None) -> tuple[Tensor, Tensor, Tensor]:
        layer, shape = self.layers[index], self.shape
        own_turn = None if index in shape.no_rope_layers else turn
        how = shape.num_heads, shape.num_kv_heads, layer.qk_norm, self._eps, own_turn
        return heads(x, layer.qkv, lora, f"layers.{index}", *how, fused=not self.deterministic)
