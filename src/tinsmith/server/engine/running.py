"""Sample requests on their way: what the parts of the sampler tell each other.

SampleWork    one request, as it came
Request       one that was found valid, with its prompt's place in the cache
Sample        one of its samples, as far as it is
Batch         the samples of a decode step, in order
Decoder       runs decode steps
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tinsmith.server.engine import sampler
from tinsmith.server.engine.adapters import FrozenAdapter
from tinsmith.server.engine.kv_cache import BlockTable, Ints
from tinsmith.server.engine.lora import LoraRows, Segment
from tinsmith.server.engine.model import Transformer
from tinsmith.server.engine.prompt_scores import PromptScores
from tinsmith.server.engine.stopping import Decode, Stopper
from tinsmith.types import SamplingParams, StopReason, TensorData

Key: TypeAlias = Hashable
TopkRow: TypeAlias = list[tuple[int, float]]


@dataclass(frozen=True, eq=False)
class SampleWork:
    key: Key
    prompt: Sequence[int]
    params: SamplingParams
    num_samples: int = 1
    adapter: FrozenAdapter | None = None
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    decode: Decode | None = None
    """Turns tokens into text; needed for stop texts."""
    end_tokens: Collection[int] = ()
    """Tokens that end a sample besides those that `params` say."""
    is_streamed: bool = False
    """Whether its tokens are wanted as they are drawn: see `Generator.samples`."""
    owner: str = ""
    """Whose prompt it is: what is found in the cache, which shows, was computed for the same one."""


@dataclass(eq=False)
class Sample:
    """One sample on its way."""

    request: Request
    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk: list[TopkRow] = field(default_factory=list)
    stop_reason: StopReason | None = None
    table: BlockTable | None = None
    num_in_flight: int = 0
    """Tokens that a step was launched for, and that were not taken yet."""

    @property
    def num_cached(self) -> int:
        """How many tokens have keys and values: all but the last one sampled."""
        return len(self.request.prompt) + len(self.tokens) - 1

    @property
    def goes_on(self) -> bool:
        """Whether another step may be launched for it."""
        return self.table is not None and len(self.tokens) + self.num_in_flight < self.request.max_tokens


@dataclass(eq=False)
class Request:
    """A request that was found valid."""

    work: SampleWork
    prompt: npt.NDArray[np.int32]
    max_tokens: int
    stopper: Stopper
    seed: int
    scores: PromptScores
    keys: list[bytes]
    """Of the full blocks of the prompt."""

    order: int
    """By arrival."""

    table: BlockTable | None = None
    """Of the prompt. The only sample of a request goes on in it, several make tables of their own."""

    tail: Ints | None = None
    """Blocks set aside at admission, so that one of several samples can always go on."""

    num_prefilled: int = 0
    num_cache_hits: int = 0
    samples: list[Sample] = field(default_factory=list)

    @property
    def adapter(self) -> FrozenAdapter | None:
        return self.work.adapter


@dataclass(frozen=True)
class DrawnRows:
    """What one step drew for the rows of its batch."""

    tokens: list[int]
    logprobs: list[float]
    topk: list[TopkRow]


class Batch:
    """The rows of a decode step in order, and what stays the same from step to step while they do."""

    def __init__(self, rows: list[Sample], model: Transformer, before: LoraRows | None = None) -> None:
        self.rows = rows
        self.model = model
        self._before = before
        self.segments = segments_of((1, row.request.adapter) for row in rows)
        self.params = [row.request.work.params for row in rows]
        largest = max((row.request.work.topk_sample_logprobs for row in rows), default=0)
        self.num_topk = min(largest, model.shape.vocab_size)

    def replaced(self, rows: list[Sample]) -> Batch:
        """Another set of rows, ordered so that those of one adapter, and the samples of one request, lie together."""
        if rows == self.rows:
            return self
        first = {row.request.adapter: row.request.order for row in reversed(rows)}
        rows.sort(key=lambda row: (first[row.request.adapter], row.request.order, row.index))
        return Batch(rows, self.model, self.__dict__.get("lora"))

    @cached_property
    def lora(self) -> LoraRows:
        return self._before.regrouped(self.segments) if self._before else LoraRows(self.segments)

    @property
    def adapters(self) -> list[FrozenAdapter]:
        return [adapter for _, _, adapter in self.segments if isinstance(adapter, FrozenAdapter)]

    def draw(self, logits: Tensor) -> DrawnRows:
        """The next token of every row, from float32 logits."""
        positions = [len(row.tokens) for row in self.rows]
        keys = sampler.keys_of(self._seeds, self._streams, positions)
        tokens, logprobs = sampler.draw(logits, self._settings, keys)
        return DrawnRows(tokens.tolist(), logprobs.tolist(), self.topk(logits))

    def topk(self, logits: Tensor) -> list[TopkRow]:
        """For rows that ask for them, and their neighbours, the most likely tokens."""
        if not self.num_topk:
            return []
        values, ids = sampler.best(logits, self.num_topk)
        values = values - sampler.log_sums(logits)[:, None]
        return [list(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]

    @cached_property
    def _settings(self) -> sampler.Settings:
        return sampler.Settings.of(self.params, self.model.shape.vocab_size, self.model.device)

    @cached_property
    def _seeds(self) -> npt.NDArray[np.uint64]:
        return np.array([row.request.seed for row in self.rows], np.uint64)

    @cached_property
    def _streams(self) -> npt.NDArray[np.uint64]:
        return np.array([row.index for row in self.rows], np.uint64)


class Outcome(NamedTuple):
    """What a step drew, and for whom."""

    batch: Batch
    drawn: DrawnRows


class Decoder(Protocol):
    """One token for each row of a batch, step by step."""

    max_rows: int
    """Of one batch."""

    call_cost_tokens: int
    """What it costs a step to read a prefix that several rows share apart from the rest, in tokens of reading."""

    @property
    def is_behind(self) -> bool:
        """Whether the outcome of a step was not returned yet."""

    def step(self, batch: Batch) -> Outcome | None:
        """Run a step, if the batch has rows; returns the outcome of this step or, if it runs on, of the one before."""

    def draw(self, batch: Batch, logits: Tensor) -> DrawnRows:
        """The first tokens of samples, from logits [rows, vocabulary] in the dtype of the products."""


def segments_of(rows: Iterable[tuple[int, FrozenAdapter | None]]) -> list[Segment]:
    """Counts of rows with their adapter -> stretches of rows, neighbours of one adapter joined."""
    segments: list[Segment] = []
    end = 0
    for count, adapter in rows:
        start, end = end, end + count
        if segments and segments[-1][2] is adapter:
            start = segments.pop()[0]
        segments.append((start, end, adapter))
    return segments
