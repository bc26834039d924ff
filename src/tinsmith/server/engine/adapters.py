"""Adapters: LoRA weights with their gradients and optimizer state.

    AdapterSpec      rank, seed and which layers are trained; with the model's shape it determines the first weights
    Adapter          a live adapter: float32 weights, gradient, moments
    FrozenAdapter    a copy for sampling that no later training step moves

Every tensor of an adapter is a view of one flat buffer, and so are its gradient and its moments: an optimizer step, a
copy, a norm or a cast is one operation, whatever the number of layers.

Tensors are named by module: `layers.0.q_proj.lora_A` [rank, in], `layers.0.q_proj.lora_B` [out, rank], `lm_head...`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import count

import torch
from torch import Tensor

from tinsmith.errors import InvalidInputError
from tinsmith.server.engine.adapter_facts import ALPHA
from tinsmith.server.engine.lora import Site
from tinsmith.server.engine.model import ModelShape

MAX_RANK = 256

# Views begin at multiples of this many elements: vector units and tensor cores want aligned matrices.
_ALIGNMENT = 64

_VERSIONS = count(1)


@dataclass(frozen=True)
class AdapterSpec:
    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= MAX_RANK:
            raise InvalidInputError(
                f"rank {self.rank} is not possible; use a LoRA rank from 1 to {MAX_RANK}.",
                field="rank",
                value=self.rank,
            )
        if not (self.train_attn or self.train_mlp or self.train_unembed):
            raise InvalidInputError(
                "train_attn, train_mlp and train_unembed are all false: there is nothing to train. Set one to true.",
                field="lora_config",
            )

    @property
    def scale(self) -> float:
        return ALPHA / self.rank


@dataclass(frozen=True)
class _Module:
    """One adapted projection, and where its A and B begin in the flat buffer."""

    name: str
    num_in: int
    num_out: int
    a: int
    b: int


@dataclass(frozen=True)
class _Group:
    """The modules of one linear layer, fused where they share their input: their A lie together."""

    name: str
    modules: tuple[_Module, ...]


@dataclass(frozen=True)
class Layout:
    """Where each tensor of an adapter lies in its flat buffer."""

    rank: int
    groups: tuple[_Group, ...]
    size: int

    def tensors(self, flat: Tensor) -> dict[str, Tensor]:
        """Every A and B of a flat buffer by name, as views."""
        return {name: _view(flat, start, shape) for name, start, shape in self._places()}

    def sites(self, flat: Tensor, scale: float, gradient: Tensor | None = None) -> dict[str, Site]:
        """What the layers of the model read, and where they leave their gradients."""
        return {group.name: self._site(group, flat, scale, gradient) for group in self.groups}

    def _site(self, group: _Group, flat: Tensor, scale: float, gradient: Tensor | None) -> Site:
        a, b = self._matrices(group, flat)
        if gradient is None:
            return Site(a, b, scale)
        return Site(a, b, scale, *self._matrices(group, gradient))

    def _matrices(self, group: _Group, flat: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        first, num_rows = group.modules[0], self.rank * len(group.modules)
        a = _view(flat, first.a, (num_rows, first.num_in))
        return a, tuple(_view(flat, module.b, (module.num_out, self.rank)) for module in group.modules)

    def _places(self) -> Iterator[tuple[str, int, tuple[int, int]]]:
        for group in self.groups:
            for module in group.modules:
                yield f"{module.name}.lora_A", module.a, (self.rank, module.num_in)
                yield f"{module.name}.lora_B", module.b, (module.num_out, self.rank)


def layout_of(shape: ModelShape, spec: AdapterSpec) -> Layout:
    groups = []
    end = 0
    for name, parts in _adapted(shape, spec):
        modules = []
        a = end
        b = _aligned(a + spec.rank * sum(num_in for _, num_in, _ in parts))
        for module, num_in, num_out in parts:
            modules.append(_Module(module, num_in, num_out, a, b))
            a += spec.rank * num_in
            b = _aligned(b + spec.rank * num_out)
        groups.append(_Group(name, tuple(modules)))
        end = b
    return Layout(spec.rank, tuple(groups), end)


def _adapted(shape: ModelShape, spec: AdapterSpec) -> Iterator[tuple[str, list[tuple[str, int, int]]]]:
    """Name of the model's linear layer, and its projections with their sizes, in the order of the forward pass."""
    width, inner = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    for layer in (f"layers.{index}." for index in range(shape.num_layers)):
        if spec.train_attn:
            yield (
                f"{layer}qkv_proj",
                [(f"{layer}q_proj", width, q), (f"{layer}k_proj", width, kv), (f"{layer}v_proj", width, kv)],
            )
            yield f"{layer}o_proj", [(f"{layer}o_proj", q, width)]
        if spec.train_mlp:
            yield f"{layer}gate_up_proj", [(f"{layer}gate_proj", width, inner), (f"{layer}up_proj", width, inner)]
            yield f"{layer}down_proj", [(f"{layer}down_proj", inner, width)]
    if spec.train_unembed:
        yield "lm_head", [("lm_head", width, shape.vocab_size)]


class FrozenAdapter:
    """Weights of one moment, in the dtype of the products, without gradients."""

    def __init__(self, layout: Layout, flat: Tensor, spec: AdapterSpec) -> None:
        self.flat = flat
        self.spec = spec
        self.sites: Mapping[str, Site] = layout.sites(flat, spec.scale)


class Adapter:
    """A live adapter. Weights, gradient and moments are float32; products read a copy in the model's dtype."""

    def __init__(self, layout: Layout, spec: AdapterSpec, weights: Tensor, compute_dtype: torch.dtype) -> None:
        self.layout = layout
        self.spec = spec
        self.weights = weights
        self.gradient = torch.zeros_like(weights)
        self.has_gradient = False
        """Whether anything was accumulated since the last step."""
        self.known_norm: float | None = None
        """Of the gradient, if it was computed since that last changed."""
        self.step = 0
        self.version = next(_VERSIONS)
        """A number that no other weights of this process have or had."""
        # In float32 the products read the weights themselves.
        self._compute = weights if compute_dtype == weights.dtype else weights.to(compute_dtype)
        self.sites: Mapping[str, Site] = layout.sites(self._compute, spec.scale, self.gradient)

    # Whoever only helps with the gradient never makes a step, and needs no moments.
    @cached_property
    def exp_avg(self) -> Tensor:
        return torch.zeros_like(self.weights)

    @cached_property
    def exp_avg_sq(self) -> Tensor:
        return torch.zeros_like(self.weights)

    @classmethod
    def create(
        cls,
        shape: ModelShape,
        spec: AdapterSpec,
        device: torch.device | str = "cpu",
        compute_dtype: torch.dtype = torch.float32,
    ) -> Adapter:
        """A new adapter that changes nothing yet: A random, B zero.

        The numbers are drawn on the CPU, so that a seed means the same weights on every device.
        """
        layout = layout_of(shape, spec)
        weights = torch.zeros(layout.size)
        generator = torch.Generator().manual_seed(spec.seed % 2**64)
        for name, tensor in layout.tensors(weights).items():
            if name.endswith("lora_A"):
                # kaiming_uniform_(a=sqrt(5)), as in torch's linear layers and in peft
                bound = 1 / math.sqrt(tensor.shape[1])
                tensor.uniform_(-bound, bound, generator=generator)
        return cls(layout, spec, weights.to(device), compute_dtype)

    def frozen_copy(self) -> FrozenAdapter:
        return FrozenAdapter(self.layout, self._compute.clone(), self.spec)

    def weights_changed(self) -> None:
        """To be called by whoever wrote to `weights`: the products read them from a copy, also in other processes."""
        self.version = next(_VERSIONS)
        if self._compute is not self.weights:
            self._compute.copy_(self.weights)

    def gradient_norm(self) -> float:
        return float(self.gradient.norm()) if self.known_norm is None else self.known_norm

    def clear_gradient(self) -> None:
        self.known_norm = None
        self.gradient.zero_()
        self.has_gradient = False

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of the weights by name, float32, on the CPU."""
        return _copied(self.layout.tensors(self.weights))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over weights; what the optimizer knew of the old ones, and their gradient, is forgotten."""
        _fill(self.layout.tensors(self.weights), state)
        self.weights_changed()
        self.clear_gradient()
        self.exp_avg.zero_()
        self.exp_avg_sq.zero_()
        self.step = 0

    def optimizer_state(self) -> dict[str, Tensor]:
        """A copy of the moments and of an unused gradient, by name: with `state_dict`, all that the next step needs."""
        state = {"step": torch.tensor(self.step)}
        for kind, flat in self._optimizer_buffers():
            if kind != "gradient" or self.has_gradient:
                named = _copied(self.layout.tensors(flat))
                state |= {f"{kind}.{name}": tensor for name, tensor in named.items()}
        return state

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        self.clear_gradient()
        for kind, flat in self._optimizer_buffers():
            part = {
                name.removeprefix(f"{kind}."): value for name, value in state.items() if name.startswith(f"{kind}.")
            }
            if kind != "gradient" or part:
                _fill(self.layout.tensors(flat), part)
            self.has_gradient = self.has_gradient or (kind == "gradient" and bool(part))
        self.step = int(state["step"])

    def _optimizer_buffers(self) -> Iterator[tuple[str, Tensor]]:
        yield "exp_avg", self.exp_avg
        yield "exp_avg_sq", self.exp_avg_sq
        yield "gradient", self.gradient


def _view(flat: Tensor, start: int, shape: tuple[int, int]) -> Tensor:
    return flat[start : start + shape[0] * shape[1]].view(shape)


def _aligned(start: int) -> int:
    return -(-start // _ALIGNMENT) * _ALIGNMENT


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}


def _fill(tensors: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copy by name, refusing a state of another rank, model or set of layers before anything is changed."""
    if wrong := sorted(tensors.keys() ^ state.keys()):
        raise InvalidInputError(
            f"The adapter and the saved weights differ in {len(wrong)} tensors, first {wrong[0]}; load them into an "
            "adapter of the same base model with the same train_attn, train_mlp and train_unembed.",
            field=wrong[0],
        )
    for name, tensor in tensors.items():
        if tensor.shape != state[name].shape:
            raise InvalidInputError(
                f"{name} has the shape {list(state[name].shape)} in the saved weights and {list(tensor.shape)} in the "
                "adapter; load them into an adapter of the same base model and rank.",
                field=name,
                value=list(state[name].shape),
            )
    for name, tensor in tensors.items():
        tensor.copy_(state[name])
