"""The engine of one base model: adapters in, numbers out.

Engine.open              load a model folder
Engine.create_adapter    a new adapter on it
Engine.forward_backward  rows of any mix of adapters and losses -> one output for each row
Engine.optim_step        use up an adapter's gradient
Engine.generator         sampling with the same model
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Self, TypeAlias

import torch
from torch import Tensor

from tinsmith.errors import ConfigError, InvalidInputError
from tinsmith.server.engine.adapters import Adapter, AdapterSpec
from tinsmith.server.engine.batch import Example, MicroBatch, TrainRow, check_row, pack
from tinsmith.server.engine.generate import Generator, decodes_on_device
from tinsmith.server.engine.model import Transformer
from tinsmith.server.engine.optim import adamw_step
from tinsmith.server.engine.room import MIN_TOKENS, Footprint, free_memory
from tinsmith.server.engine.sharding import ShardedLayers, Turns
from tinsmith.server.engine.steps import has_kernels, multiplies_bfloat16
from tinsmith.server.engine.train import BadExampleError, RowOutput, run_micro_batch
from tinsmith.server.engine.transfer import download, wait_for
from tinsmith.server.engine.weights import end_of_text, load_model
from tinsmith.types import AdamParams

_log = logging.getLogger(__name__)

# Beyond this many tokens a micro-batch gets no faster; it only needs more memory.
_USEFUL_TOKENS = {"cuda": 32768, "cpu": 1024}
# Waking a thread takes some 100 microseconds; until then one core is through with the few rows of a decode step.
_WORTH_A_THREAD = 2**17
_USEFUL_KV_TOKENS = 2**20
# The rest is for adapters, for what allocators waste and, on a CPU, for other processes.
_SHARE_FOR_TRAINING = {"cuda": 0.4, "cpu": 0.25}
_SHARE_FOR_SAMPLING = {"cuda": 0.4, "cpu": 0.1}


Computed: TypeAlias = Callable[[], dict[int, RowOutput]]
"""Gives the outputs, by the index of their row, when they are there; or the error that there was."""


class EngineUsage(NamedTuple):
    """How full things are, and counts since the start."""

    token_budget: int
    kv_blocks: int
    kv_blocks_used: int
    micro_batches: int
    trained_rows: int
    trained_tokens: int
    computed_prompt_tokens: int
    found_prompt_tokens: int
    sampled_tokens: int
    decode_steps: int
    decoded_samples: int


class Engine:
    def __init__(
        self,
        model: Transformer,
        train_token_budget: int | None = None,
        kv_tokens: int | None = None,
        end_of_text: Collection[int] = (),
    ) -> None:
        self.model = model
        self.end_of_text = frozenset(end_of_text)
        if decodes_on_device(model):
            _make_room_for_adapters(model)
        self.train_token_budget = train_token_budget or automatic_token_budget(model)
        """Tokens of one micro-batch; halved when the GPU runs out of memory."""
        self.on_progress: Callable[[], None] = lambda: None
        """Called before every micro-batch."""
        self._kv_tokens = kv_tokens or automatic_kv_tokens(model)
        self.num_micro_batches = self._num_rows = self._num_tokens = 0

    @classmethod
    def open(
        cls,
        folder: Path | str,
        device: str = "auto",
        dtype: str = "auto",
        train_token_budget: int | None = None,
        kv_tokens: int | None = None,
        deterministic: bool = False,
        shards: ShardedLayers | None = None,
    ) -> Self:
        """With `shards`, of the layers only those of this process stay; then all of its group open the same model."""
        place = choose_device(device)
        chosen = choose_dtype(dtype, place)
        model = load_model(Path(folder), place, chosen, deterministic=deterministic, shards=shards)
        if shards is not None:
            shards.wait_for_all()
        if deterministic:
            check_deterministic(model)
        return cls(model, train_token_budget, kv_tokens, end_of_text(Path(folder)))

    @cached_property
    def generator(self) -> Generator:
        return Generator(self.model, self._kv_tokens, self.end_of_text)

    @property
    def batch_token_budget(self) -> int:
        """Tokens that are worth training on in one call: with fewer, something would have nothing to do."""
        return self.train_token_budget

    def create_adapter(self, spec: AdapterSpec) -> Adapter:
        return Adapter.create(self.model.shape, spec, self.model.device, self.model.compute_dtype)

    def usage(self) -> EngineUsage:
        generator = self.generator
        return EngineUsage(
            self.train_token_budget,
            generator.blocks.num_blocks,
            generator.blocks.num_blocks - generator.blocks.num_available,
            self.num_micro_batches,
            self._num_rows,
            self._num_tokens,
            generator.num_prefilled_tokens,
            generator.num_found_tokens,
            generator.num_sampled_tokens,
            generator.num_decode_steps,
            generator.num_decoded_samples,
        )

    def optim_step(self, adapter: Adapter, params: AdamParams) -> dict[str, float]:
        return adamw_step(adapter, params)

    def forward_backward(self, rows: Sequence[TrainRow]) -> list[RowOutput]:
        """Score every row and, where asked, add its gradient to its adapter; outputs in the order of the rows.

        A refused row is reported in its output and leaves no trace, and neither do the other rows of its job. If
        anything else goes wrong, the error is raised and every gradient is as it was before.
        """
        examples, errors = self._checked(rows)
        before = SavedGradients(example.adapter for example in examples if example.backward)
        outputs: dict[int, RowOutput] = {}
        norms: dict[int, float] = {}
        while examples:
            try:
                computed = self.compute(examples, before)
                norms = self._gradient_norms(examples)
                outputs = computed()
                overflowed = [example for example in examples if not math.isfinite(norms.get(id(example.adapter), 0))]
                if not overflowed:
                    break
                before.restore()
                if len({rows[example.index].job for example in overflowed}) > 1:
                    raise FloatingPointError("Several jobs together gave a gradient that is not finite.")
                errors |= {example.index: _not_finite() for example in overflowed}
                examples = [example for example in examples if example.index not in errors]
            except BadExampleError as bad:
                before.restore()
                errors |= _for_whole_jobs(rows, {bad.example.index: bad.error})
                examples = [example for example in examples if example.index not in errors]
            except BaseException:
                before.restore()
                raise
        for example in examples:
            example.adapter.has_gradient |= example.backward
            example.adapter.known_norm = norms.get(id(example.adapter), example.adapter.known_norm)
        return [RowOutput(error=errors[index]) if index in errors else outputs[index] for index in range(len(rows))]

    def _checked(self, rows: Sequence[TrainRow]) -> tuple[list[Example], dict[int, InvalidInputError]]:
        examples: list[Example] = []
        errors: dict[int, InvalidInputError] = {}
        for index, row in enumerate(rows):
            try:
                examples.append(check_row(index, row, self.model.shape))
            except InvalidInputError as error:
                errors[index] = error
        errors = _for_whole_jobs(rows, errors)
        return [example for example in examples if example.index not in errors], errors

    def compute(self, examples: Sequence[Example], before: SavedGradients) -> Computed:
        """Start to compute: the gradients are added to those that were there `before`."""
        if self.model.shards is not None:
            return self.compute_in_step(examples)
        while True:
            try:
                return self._run(pack(examples, self.train_token_budget))
            except torch.OutOfMemoryError:
                before.restore()
                if not self._could_halve_token_budget():
                    raise

    def compute_in_step(self, examples: Sequence[Example], turns: Turns | None = None) -> Computed:
        """The same where layers are sharded: as many passes as all other processes make at this moment.

        Without `turns` they all do the same as this one. If memory runs out, they have to begin again together.
        """
        shards = self.model.shards
        assert shards is not None
        batches = pack(examples, self.train_token_budget)
        turns = turns or Turns.of([batches])

        def own() -> Iterator[MicroBatch]:
            for batch in turns.placed(batches):
                shards.next_pass()
                if batch is None:
                    self.on_progress()
                else:
                    yield batch

        with shards.together(turns.passes):
            outputs = self._run(own())()
        return lambda: outputs

    def _run(self, batches: Iterable[MicroBatch]) -> Computed:
        passes = []
        for batch in batches:
            # Only a single row is ever longer than the budget: then layers are computed twice instead of kept.
            recompute = batch.num_tokens > self.train_token_budget
            self.on_progress()
            passes.append(run_micro_batch(self.model, batch, recompute=recompute))
            self._note_trained(1, batch.examples)

        def outputs() -> dict[int, RowOutput]:
            wait_for(self.model.device)
            return {index: output for each in passes for index, output in each.outputs().items()}

        return outputs

    def _note_trained(self, num_batches: int, examples: Sequence[Example]) -> None:
        self.num_micro_batches += num_batches
        self._num_rows += len(examples)
        self._num_tokens += sum(len(example.tokens) for example in examples)

    def _gradient_norms(self, examples: Sequence[Example]) -> dict[int, float]:
        """By the id of the adapter, if it has a gradient now.

        No optimizer step can use one that is not finite. Refused here, the failure belongs to the data that caused it,
        and a model rebuilt from what was done is the same.
        """
        trained = {id(example.adapter): example.adapter for example in examples if example.backward}
        norms = {key: download(adapter.gradient.norm()) for key, adapter in trained.items()}
        wait_for(self.model.device)
        return {key: float(norm) for key, norm in norms.items()}

    def _could_halve_token_budget(self) -> bool:
        if self.train_token_budget <= MIN_TOKENS:
            return False
        torch.cuda.empty_cache()
        self.train_token_budget //= 2
        _log.warning("Out of GPU memory: micro-batches now hold %d tokens.", self.train_token_budget)
        return True


class SavedGradients:
    """The gradients of some adapters as they were, to go back to."""

    def __init__(self, adapters: Iterable[Adapter]) -> None:
        self._saved: dict[int, tuple[Adapter, Tensor | None]] = {}
        for adapter in adapters:
            adapter.known_norm = None
            if id(adapter) not in self._saved:
                self._saved[id(adapter)] = adapter, adapter.gradient.clone() if adapter.has_gradient else None

    def restore(self) -> None:
        for adapter, gradient in self._saved.values():
            if gradient is None:
                adapter.gradient.zero_()
            else:
                adapter.gradient.copy_(gradient)


def _not_finite() -> InvalidInputError:
    return InvalidInputError(
        "The gradient of these data, together with what was accumulated before, is not finite, so they were left out. "
        "Check that weights and advantages are of moderate size; if the model itself has diverged, load an earlier "
        "checkpoint and lower the learning rate.",
        field="data",
    )


def _for_whole_jobs(rows: Sequence[TrainRow], errors: Mapping[int, InvalidInputError]) -> dict[int, InvalidInputError]:
    """An error of one row is that of every row of its job."""
    by_job = {rows[index].job: error for index, error in errors.items() if rows[index].job is not None}
    return {**{index: by_job[row.job] for index, row in enumerate(rows) if row.job in by_job}, **errors}


# --- choices that "auto" leaves to us --------------------------------------------------------------------------------


def choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch finds no GPU; install a CUDA build of torch, or use 'cpu'.")
    if name == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device is 'mps', but torch finds no Apple GPU; use 'cpu'.")
    return torch.device(name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """bfloat16 where the hardware multiplies it; emulated, it would be slower than float32 and less exact."""
    if name == "auto":
        has_bfloat16 = device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()
        name = "bfloat16" if has_bfloat16 or (device.type == "cuda" and multiplies_bfloat16()) else "float32"
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in dtypes:
        raise ConfigError(f"dtype is {name!r}; use 'auto', 'float32' or 'bfloat16'.")
    if name == "bfloat16" and device.type == "cuda" and not multiplies_bfloat16():
        raise ConfigError(
            f"dtype is 'bfloat16', but the GPU here ({torch.cuda.get_device_name()}) does not multiply it; GPUs from "
            "the Ampere generation on do. Use 'auto' or 'float32'."
        )
    return dtypes[name]


def check_deterministic(model: Transformer) -> None:
    """Refuse where training's attention would not be our own kernel, which is the one that has a fixed order."""
    is_suited = model.device.type == "cuda" and has_kernels() and model.compute_dtype == torch.bfloat16
    if is_suited:
        from tinsmith.server.engine.gpu import attention

        is_suited = attention.is_suited(model.shape.head_dim, model.device)
    if not is_suited:
        raise ConfigError(
            "The deterministic mode needs an NVIDIA GPU of the Hopper generation (H100, H200), Triton, bfloat16 and a "
            f"model with heads of 64 or 128; here are {model.device.type}, {model.compute_dtype} and heads of "
            f"{model.shape.head_dim}. Leave --deterministic out."
        )


def choose_threads(model: Transformer, num_processes: int = 1) -> None:
    """One thread where products are over before a second one has woken up; otherwise as many as torch takes.

    Several processes that work together divide those: more threads than cores would wait for each other.
    """
    torch.set_num_threads(max(1, torch.get_num_threads() // num_processes))
    layer = model.layers[0]
    largest = max(matrix.shape.numel() for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down, model.head))
    if model.device.type == "cpu" and largest < _WORTH_A_THREAD:
        torch.set_num_threads(1)


def automatic_token_budget(model: Transformer) -> int:
    """How many tokens to train on at once: as many as are useful, within a share of the free memory."""
    share = _SHARE_FOR_TRAINING.get(model.device.type, 0.25) * _free_for(model)
    affordable = int(share / _footprint(model).activations_per_token)
    return max(MIN_TOKENS, min(affordable, _USEFUL_TOKENS.get(model.device.type, 1024)))


def automatic_kv_tokens(model: Transformer) -> int:
    """How many tokens the sampler may keep: what a share of memory holds."""
    share, footprint = _SHARE_FOR_SAMPLING.get(model.device.type, 0.1) * _free_for(model), _footprint(model)
    return max(footprint.least_kv_tokens, min(int(share / footprint.cache_per_token), _USEFUL_KV_TOKENS))


def _make_room_for_adapters(model: Transformer) -> None:
    """Before the memory that is free is divided, though others would make it when they first need it."""
    from tinsmith.server.engine.gpu.rooms import make_rooms

    make_rooms(model)
    torch.cuda.empty_cache()  # of what the matrices lay in before


def _footprint(model: Transformer) -> Footprint:
    return Footprint(model.shape, model.compute_dtype, model.device.type)


def _free_for(model: Transformer) -> int:
    """Layers that are gathered need room, too."""
    return free_memory(model.device) - (0 if model.shards is None else model.shards.gathered_bytes)
