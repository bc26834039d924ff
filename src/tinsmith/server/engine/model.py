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
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tinsmith.errors import ConfigError
from tinsmith.server.engine.lora import LoraRows, linear
from tinsmith.server.engine.products import Matrix

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


# --- elementwise steps, each with its backward pass: fewer passes over memory and less kept than autograd's own ------


def _step(function: Any, *args: Any) -> Tensor:
    """Without a way back there is nothing to keep, and for a few rows autograd costs more than the step itself."""
    y: Tensor = function.apply(*args) if torch.is_grad_enabled() else function.plain(*args)
    return y


class _RmsNorm(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def plain(x: Tensor, weight: Tensor, eps: Tensor, dtype: torch.dtype) -> Tensor:
        x = x.float()
        return (x * _RmsNorm.inverse(x, eps)).mul_(weight).to(dtype)

    @staticmethod
    def inverse(x: Tensor, eps: Tensor) -> Tensor:
        """One over the root of the mean square of each row; in few steps, which is what costs when rows are few."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: Tensor, dtype: torch.dtype) -> Tensor:
        x = x.float()
        inverse = _RmsNorm.inverse(x, eps)
        ctx.save_for_backward(x, inverse, weight)
        return (x * inverse).mul_(weight).to(dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        x, inverse, weight = ctx.saved_tensors
        dn = dy * weight
        inner = torch.linalg.vecdot(dn, x).unsqueeze(-1).mul_(inverse.square()).div_(-x.shape[-1])
        return dn.addcmul_(x, inner).mul_(inverse), None, None, None


class _Rotate(torch.autograd.Function):  # type: ignore[misc]
    """Turns each pair (i, i + D/2) of a head by its angle: x [T, H, D], cos and sin [T, 1, D/2]."""

    @staticmethod
    def plain(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        first, second = x.float().chunk(2, dim=-1)
        turned = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        turned_first, turned_second = turned.chunk(2, dim=-1)
        torch.mul(first, cos, out=turned_first).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=turned_second).addcmul_(first, sin)
        return turned.to(dtype)

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return _Rotate.plain(x, cos, sin, dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _Rotate.plain(dy, cos, -sin, ctx.dtype), None, None, None


class _GatedSilu(torch.autograd.Function):  # type: ignore[misc]
    """silu(gate) * up on the fused output of gate and up: [T, 2 F] -> [T, F]."""

    @staticmethod
    def plain(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return _GatedSilu.plain(gate_up)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        gradient = torch.empty_like(gate_up)
        dgate, dup = gradient.chunk(2, dim=-1)
        torch.mul(dy, functional.silu(gate), out=dup)
        torch.ops.aten.silu_backward.grad_input(dy * up, gate, grad_input=dgate)
        return gradient


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


@dataclass(frozen=True, eq=False)
class Transformer:
    shape: ModelShape
    embedding: Tensor  # [vocab, hidden]
    layers: Sequence[Layer]
    final_norm: Tensor
    head: Matrix  # [vocab, hidden]; the embedding if tied

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def hidden(
        self, tokens: Tensor, positions: Tensor, attend: Attend, lora: LoraRows | None, *, recompute: bool = False
    ) -> Tensor:
        """[T] tokens at [T] positions -> [T, hidden], final norm applied.

        With `recompute`, the backward pass computes each layer once more instead of keeping what is inside it: a third
        slower, for rows too long to keep everything.
        """
        x = functional.embedding(tokens, self.embedding).float()
        turn = self._turn(positions)
        for index in range(len(self.layers)):
            if recompute and torch.is_grad_enabled():
                x = checkpoint(self._layer, index, x, turn, attend, lora, use_reentrant=False)
            else:
                x = self._layer(index, x, turn, attend, lora)
        return self._norm(x, self.final_norm)

    def logits(self, hidden: Tensor, lora: LoraRows | None) -> Tensor:
        """[N, hidden] -> [N, vocab], float32."""
        return linear(hidden.to(self.compute_dtype), self.head, lora, "lm_head").float()

    @cached_property
    def _eps(self) -> Tensor:
        return torch.tensor(self.shape.rms_norm_eps, device=self.device)

    @cached_property
    def _frequencies(self) -> Tensor:
        return torch.tensor(self.shape.rope.inverse_frequencies, device=self.device)

    def _turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = (positions.to(torch.float32)[:, None] * self._frequencies)[:, None, :]
        return angles.cos() * self.shape.rope.factor, angles.sin() * self.shape.rope.factor

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return _step(_RmsNorm, x, weight, self._eps, self.compute_dtype)

    def _layer(
        self, index: int, x: Tensor, turn: tuple[Tensor, Tensor], attend: Attend, lora: LoraRows | None
    ) -> Tensor:
        x = x + self._attention(index, self._norm(x, self.layers[index].input_norm), turn, attend, lora)
        return x + self._mlp(index, self._norm(x, self.layers[index].mlp_norm), lora)

    def _attention(
        self, index: int, x: Tensor, turn: tuple[Tensor, Tensor], attend: Attend, lora: LoraRows | None
    ) -> Tensor:
        layer, shape = self.layers[index], self.shape
        num_rotated = shape.num_heads + shape.num_kv_heads
        qkv = linear(x, layer.qkv, lora, f"layers.{index}.qkv_proj")
        # Queries and keys lie side by side, so that one step norms or turns the heads of both.
        heads = qkv.view(x.shape[0], -1, shape.head_dim)
        qk, v = torch.split_with_sizes(heads, [num_rotated, shape.num_kv_heads], dim=1)
        if layer.qk_norm is not None:
            qk = self._norm(qk, layer.qk_norm)
        if index not in shape.no_rope_layers:
            qk = _step(_Rotate, qk, *turn, self.compute_dtype)
        q, k = torch.split_with_sizes(qk, [shape.num_heads, shape.num_kv_heads], dim=1)
        attended = attend(index, q, k, v).reshape(x.shape[0], -1)
        return linear(attended, layer.output, lora, f"layers.{index}.o_proj")

    def _mlp(self, index: int, x: Tensor, lora: LoraRows | None) -> Tensor:
        layer = self.layers[index]
        gate_up = linear(x, layer.gate_up, lora, f"layers.{index}.gate_up_proj")
        return linear(_step(_GatedSilu, gate_up), layer.down, lora, f"layers.{index}.down_proj")
