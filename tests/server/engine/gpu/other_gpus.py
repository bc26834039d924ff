"""Builds every kernel that the engine would launch on a GPU that is not here, and says what each asks of it.

    python -m tests.server.engine.gpu.other_gpus 89 --models qwen3-1.7b

The numbers are generations: 80 is an A100, 86 and 89 are GeForce 30 and 40, 90 an H100 or H200, 100 a B200, 120 a
GeForce 50. The engine's own passes run on tensors without content, which say that they are on such a GPU; where a
kernel would be launched, it is compiled. So nobody keeps a list of kernels. Results and speed cannot be seen like this.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tinsmith.server.engine.adapters import Adapter, AdapterSpec
from tinsmith.server.engine.attention import PackedCausal
from tinsmith.server.engine.gpu import card
from tinsmith.server.engine.gpu.decoder import DeviceDecoder, _Kind
from tinsmith.server.engine.gpu.rooms import NUM_UNITS, UNIT
from tinsmith.server.engine.gpu.slot_lora import TILE_ROWS, Ranks
from tinsmith.server.engine.head import score
from tinsmith.server.engine.kv_cache import KvPool
from tinsmith.server.engine.lora import LoraRows
from tinsmith.server.engine.model import Layer, ModelShape, Transformer
from tinsmith.server.engine.products import Matrix

MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
"""Bytes that a program may have close to a multiprocessor, by generation; the vendor's figures."""

NOWHERE = torch.device("meta")


def _config(family: str, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": family, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 2,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
        "max_position_embeddings": 8192, "tie_word_embeddings": False, **more,
    }  # fmt: skip


CONFIGS = {
    "smollm2-135m": _config("llama", 576, 1536, 9, 3, 49152),
    "qwen2.5-0.5b": _config("qwen2", 896, 4864, 14, 2, 151936),
    "qwen3-1.7b": _config("qwen3", 2048, 6144, 16, 8, 151936, head_dim=128),
    "qwen3-8b": _config("qwen3", 4096, 12288, 32, 8, 151936, head_dim=128),
    "llama-3.3-70b": _config("llama", 8192, 28672, 64, 8, 128256),
}


class Kernel(NamedTuple):
    """What it asks of a program's memory and of each thread's registers; what they lack lies in slow memory."""

    name: str
    options: str
    shared_memory: int
    registers: int
    spilled: int


class _Pointer:
    """What Triton asks of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self._offset = tensor.storage_offset() * tensor.element_size()

    def data_ptr(self) -> int:
        return self._offset


class Builder:
    """Compiles what would be launched, once for each set of constants."""

    def __init__(self, generation: int) -> None:
        self.kernels: list[Kernel] = []
        self._seen: set[tuple[object, ...]] = set()
        self._target = GPUTarget("cuda", generation, 32)
        self._compile = JITFunction.run

    def take_the_place_of_a_gpu(self) -> None:
        """For the rest of this process."""
        generation = divmod(int(self._target.arch), 10)
        driver.set_active(self)
        card.generation = lambda device: generation
        card._shared_memory = lambda device: MEMORY[int(self._target.arch)]
        torch.cuda.is_available = lambda: True
        torch.cuda.get_device_capability = lambda device=None: generation
        torch.Tensor.is_cuda = property(lambda tensor: tensor.device == NOWHERE)
        JITFunction.run = lambda kernel, *args, **options: self._build(kernel, args, options)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def _build(self, kernel: Any, args: Sequence[Any], options: dict[str, Any]) -> None:
        given = {**dict(zip(kernel.arg_names, args, strict=False)), **options}
        del given["grid"], given["warmup"]
        constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
        own = {name: value for name, value in given.items() if name in constants or name not in kernel.arg_names}
        types = [str(value.dtype) for value in given.values() if isinstance(value, Tensor)]
        key = (kernel.fn, *types, *(name for name, value in given.items() if value is None), repr(own))
        if key in self._seen:
            return
        self._seen.add(key)
        pointers = {name: _Pointer(value) if isinstance(value, Tensor) else value for name, value in given.items()}
        built = self._compile(kernel, grid=options["grid"], warmup=True, **pointers)
        name = f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"
        registers, spilled = _registers(built.asm["cubin"])
        self.kernels.append(Kernel(name, f"{types[0]} {own}", built.metadata.shared, registers, spilled))


def _registers(binary: bytes) -> tuple[int, int]:
    """Of each thread, and the bytes of it that found no register."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2])


# --- passes of the engine ---------------------------------------------------------------------------------------------


def empty_model(config: dict[str, Any], dtype: torch.dtype, *, deterministic: bool = False) -> Transformer:
    shape = ModelShape.from_config(config)

    def matrix(num_out: int, num_in: int, has_bias: bool = False) -> Matrix:
        bias = torch.empty(num_out, dtype=dtype, device=NOWHERE) if has_bias else None
        return Matrix(torch.empty(num_out, num_in, dtype=dtype, device=NOWHERE), bias, deterministic=deterministic)

    def norm(*size: int) -> Tensor:
        return torch.empty(*size, device=NOWHERE)

    hidden, inner, q, kv = shape.hidden_size, shape.intermediate_size, shape.num_heads, shape.num_kv_heads
    layers = [
        Layer(norm(hidden), matrix((q + 2 * kv) * shape.head_dim, hidden, shape.qkv_bias),
              norm(q + kv, shape.head_dim) if shape.qk_norm else None, matrix(hidden, q * shape.head_dim),
              norm(hidden), matrix(2 * inner, hidden), matrix(hidden, inner))
        for _ in range(shape.num_layers)
    ]  # fmt: skip
    embedding = torch.empty(shape.vocab_size, hidden, dtype=dtype, device=NOWHERE)
    head = matrix(shape.vocab_size, hidden)
    return Transformer(shape, embedding, layers, norm(hidden), head, deterministic)


def train(model: Transformer, ranks: Sequence[int]) -> None:
    """A pass of one adapter or of four, forward and back."""
    lengths = [100, 300, 64, 64]
    ends = [sum(lengths[: index + 1]) for index in range(len(lengths))] if len(ranks) > 1 else [sum(lengths)]
    adapters = [Adapter.create(model.shape, AdapterSpec(rank, 0), NOWHERE, model.compute_dtype) for rank in ranks]
    lora = LoraRows([*zip([0, *ends], ends, adapters, strict=False)])
    tokens = torch.empty(sum(lengths), dtype=torch.int64, device=NOWHERE)
    hidden = model.hidden(tokens, tokens, PackedCausal(lengths), lora)
    with torch.no_grad():
        _, dhidden = score(model, hidden.detach(), tokens[:, None], lora, lambda start, end, logprobs: logprobs)
    hidden.backward(dhidden)


def prefill(model: Transformer, rank: int) -> None:
    """A prompt, through the frozen copy of an adapter."""
    frozen = Adapter.create(model.shape, AdapterSpec(rank, 0), NOWHERE, model.compute_dtype).frozen_copy()
    tokens = torch.empty(100, dtype=torch.int64, device=NOWHERE)
    with torch.no_grad():
        model.hidden(tokens, tokens, PackedCausal([100]), LoraRows([(0, 100, frozen)]))


def decode(model: Transformer, num_rows: int, ranks: Sequence[int]) -> None:
    """A step of as many rows, which share these adapters, some of them with filters."""
    pool = KvPool.__new__(KvPool)
    slots = torch.empty(1024, model.shape.num_kv_heads, model.shape.head_dim, dtype=model.compute_dtype, device=NOWHERE)
    pool.layer = lambda layer: (slots, slots)
    num_tiles, units = 0, 0
    if ranks:
        num_tiles = triton.next_power_of_2(len(ranks) + num_rows // TILE_ROWS)
        units = triton.next_power_of_2(sum(triton.cdiv(rank, UNIT) for rank in ranks))
    kind = _Kind(num_rows, num_tiles, Ranks.of(ranks) if ranks else None, units if units <= NUM_UNITS else 0, True)
    with torch.no_grad():
        DeviceDecoder(model, pool, block_size=16, spare_block=63)._compute(kind)


def build(generation: int, names: Sequence[str], ranks: Sequence[int]) -> list[Kernel]:
    builder = Builder(generation)
    builder.take_the_place_of_a_gpu()
    models = [empty_model(CONFIGS[name], torch.bfloat16) for name in names]
    exact = empty_model(CONFIGS[names[0]], torch.float32)
    for model in models:
        for rank in ranks:
            train(model, [rank])
            train(model, [rank] * 4)
            prefill(model, rank)
            for num_adapters in (1, NUM_UNITS + 1):  # beside the matrices, and apart
                decode(model, 256, [rank] * num_adapters)
        for num_rows in (1, 8, 64, 512):
            decode(model, num_rows, [])
    train(exact, ranks)
    for num_rows in (1, 8, 256):
        decode(exact, num_rows, ranks)
    decode(exact, 256, ranks * (NUM_UNITS + 1))
    if generation == 90:  # it is refused elsewhere
        train(empty_model(CONFIGS[names[0]], torch.bfloat16, deterministic=True), ranks)
    return builder.kernels


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("generation", type=int, choices=MEMORY)
    parser.add_argument("--models", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 32, 64, 128, 256])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set, so nothing would be compiled; unset it.")
    kernels = build(given.generation, given.models, given.ranks)
    kernels.sort(key=lambda kernel: (kernel.shared_memory, kernel.spilled), reverse=True)
    if given.json:
        json.dump([kernel._asdict() for kernel in kernels], sys.stdout)
        return
    lines = [f"{len(kernels)} kernels: memory of {MEMORY[given.generation]:,} bytes, registers, bytes spilled"]
    lines += [
        f"{kernel.shared_memory:8,} {kernel.registers:4} {kernel.spilled:6,} {kernel.name} {kernel.options}"
        for kernel in kernels
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
