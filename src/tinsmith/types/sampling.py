"""Sampling: what is asked for and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Self, TypeAlias, cast

import msgspec
import numpy as np

from tinsmith.types._codecs import Define
from tinsmith.types._model import Request, Response
from tinsmith.types.inputs import ModelInput, Seed
from tinsmith.types.tensors import Array, TensorData

StopReason: TypeAlias = Literal["length", "stop"]
"""`length`: `max_tokens` was reached. `stop`: a stop sequence or the end-of-text token came."""

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]

TopkList: TypeAlias = list[list[tuple[int, float]] | None]
"""For every position its best tokens with their log-probabilities, or `None` where nothing was computed."""

EMPTY_TOKEN = 0
EMPTY_LOGPROB = -99999.0
"""What fills the cells of a top-k matrix that hold nothing."""


class SamplingParams(Request):
    """How to sample. Misspelt names are refused."""

    max_tokens: Count | None = None
    seed: Seed | None = None
    """With a seed, sampled tokens can be reproduced."""

    stop: str | Sequence[str] | Sequence[int] | None = None
    """Texts or token ids that end a sample. `None` ends it at the end-of-text token; `[]` never ends it early."""

    temperature: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1)] = -1
    """Only the k most likely tokens; -1 means all."""

    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    """Only the most likely tokens that together have this probability."""


class SampleRequest(Request):
    """One prompt, `num_samples` sequences."""

    num_samples: Annotated[int, msgspec.Meta(ge=1)] = 1
    prompt: ModelInput
    sampling_params: SamplingParams

    base_model: str | None = None
    model_path: str | None = None
    """A `tinker://` path of weights; without it the base model is sampled."""

    sampling_session_id: str | None = None
    """A session that already knows its model; used together with `seq_id`."""

    seq_id: int | None = None
    """The number of this request within its sampling session. Always set by the client, never used twice, and the
    identity under which a repeated submission finds its first answer."""

    prompt_logprobs: bool | None = None
    """Whether to return log-probabilities of the prompt. Unset and false are told apart."""

    topk_prompt_logprobs: Count = 0
    topk_sample_logprobs: Count = 0

    target_prompt_logprobs: TensorData | None = None
    """Token ids to score, int64 `[len(prompt) - 1, K]`, where -1 asks for nothing. Row i belongs to prompt position
    i + 1."""

    prompt_alt_tokens_k: Count = 0
    """How many alternatives to draw for every prompt token but the first."""

    prompt_logprobs_last_n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Score only the last n prompt tokens, so that the prefix before them may come from a cache."""

    record_stability_info: bool | None = None
    """Whether the server notes what the loss `stable_reinforce` needs to know about these samples."""

    type: Literal["sample"] = "sample"


class TopkLogprobs(Response, kw_only=False, eq=False):
    """The k best tokens at every position, as two matrices of shape `[length, k]`."""

    token_ids: Array
    """int32; 0 in empty cells."""

    logprobs: Array
    """float32; -99999.0 in empty cells."""

    @classmethod
    def from_lists(cls, rows: TopkList) -> TopkLogprobs:
        width = max((len(row) for row in rows if row), default=0)
        tokens = np.full((len(rows), width), EMPTY_TOKEN, dtype=np.int32)
        logprobs = np.full((len(rows), width), EMPTY_LOGPROB, dtype=np.float32)
        for position, row in enumerate(rows):
            if row:
                tokens[position, : len(row)], logprobs[position, : len(row)] = zip(*row, strict=True)
        return cls(tokens, logprobs)

    def to_lists(self) -> TopkList:
        if self.token_ids.size == 0:
            return []
        empty = (self.token_ids == EMPTY_TOKEN) & (self.logprobs == EMPTY_LOGPROB)
        # Trailing empty cells are dropped; empty cells between full ones are kept as they are.
        used = np.where(empty, 0, np.arange(1, empty.shape[1] + 1)).max(axis=1, initial=0)
        used[empty[:, :1].all(axis=1)] = 0
        pairs = zip(self.token_ids.tolist(), self.logprobs.tolist(), used.tolist(), strict=True)
        return [list(zip(ids[:n], logprobs[:n], strict=True)) if n else None for ids, logprobs, n in pairs]

    @classmethod
    def json_schema(cls, define: Define) -> dict[str, Any]:
        """In JSON these are the lists that `to_lists` gives."""
        return msgspec.json.schema(TopkList)

    def __eq__(self, other: object) -> bool:
        return _same_fields(self, other)


class PromptAltTokens(Response, kw_only=False):
    """Tokens drawn from the model's distribution at every prompt position but the first, as `[len(prompt) - 1, k]`.

    Row i holds alternatives to prompt token i + 1, drawn with replacement at the request's temperature.
    """

    tokens: TensorData
    logprobs: TensorData


class SampledSequence(Response, kw_only=False, eq=False, dict=True):
    """One sample.

    The arrays are as they came from the server; `tokens`, `logprobs` and `topk_logprobs` are the same as lists, made on
    first use and kept.
    """

    stop_reason: StopReason

    sequence_id: str = ""
    """Names this sample in later requests, for example in a `SampledProvenanceSpan`. Older servers do not send it."""

    tokens_np: Array | None = None
    """int32 `[length]`."""

    logprobs_np: Array | None = None
    """float32 `[length]`."""

    topk_logprobs_np: TopkLogprobs | None = None

    @cached_property
    def tokens(self) -> list[int]:
        return [] if self.tokens_np is None else cast("list[int]", self.tokens_np.tolist())

    @cached_property
    def logprobs(self) -> list[float] | None:
        return None if self.logprobs_np is None else cast("list[float]", self.logprobs_np.tolist())

    @cached_property
    def topk_logprobs(self) -> TopkList | None:
        return None if self.topk_logprobs_np is None else self.topk_logprobs_np.to_lists()

    @classmethod
    def from_builtins(cls, value: object) -> Self:
        body = _SequenceBody.from_builtins(value)
        return cls(
            stop_reason=body.stop_reason,
            sequence_id=body.sequence_id,
            tokens_np=_fixed(body.tokens, np.int32),
            logprobs_np=None if body.logprobs is None else _fixed(body.logprobs, np.float32),
            topk_logprobs_np=None if body.topk_logprobs is None else TopkLogprobs.from_lists(body.topk_logprobs),
            _extra=body._extra,
        )

    def to_builtins(self, *, nulls: bool = False) -> dict[str, Any]:
        return _SequenceBody(
            stop_reason=self.stop_reason,
            sequence_id=self.sequence_id,
            tokens=self.tokens,
            logprobs=self.logprobs,
            topk_logprobs=self.topk_logprobs,
        ).to_builtins(nulls=nulls)

    @classmethod
    def json_schema(cls, define: Define) -> dict[str, Any]:
        return {**_SequenceBody.json_schema(define), "title": cls.__name__}

    def __eq__(self, other: object) -> bool:
        return _same_fields(self, other)


class SampleResponse(Response, kw_only=False, eq=False, dict=True):
    """The answer to a `SampleRequest`. Arrays and lists as in `SampledSequence`."""

    sequences: Sequence[SampledSequence]

    prompt_logprobs_np: Array | None = None
    """float32, one per prompt token, NaN where nothing was computed (always for the first)."""

    topk_prompt_logprobs_np: TopkLogprobs | None = None

    target_prompt_logprobs: TensorData | None = None
    """float32 in the shape and layout of the request's tensor, 0.0 where that had -1."""

    prompt_cache_hit_tokens: int = 0
    """How many prompt tokens came from the prefix cache; the prompt is counted once, not once per sample."""

    prompt_alt_tokens: PromptAltTokens | None = None

    @cached_property
    def prompt_logprobs(self) -> list[float | None] | None:
        """As a list, with `None` where nothing was computed."""
        if self.prompt_logprobs_np is None:
            return None
        return [
            None if value != value else value for value in self.prompt_logprobs_np.tolist()
        ]  # NaN differs from itself

    @cached_property
    def topk_prompt_logprobs(self) -> TopkList | None:
        return None if self.topk_prompt_logprobs_np is None else self.topk_prompt_logprobs_np.to_lists()

    @classmethod
    def from_builtins(cls, value: object) -> Self:
        body = _SampleBody.from_builtins(value)
        topk = body.topk_prompt_logprobs
        return cls(
            sequences=body.sequences,
            prompt_logprobs_np=None if body.prompt_logprobs is None else _fixed(body.prompt_logprobs, np.float32),
            topk_prompt_logprobs_np=None if topk is None else TopkLogprobs.from_lists(topk),
            target_prompt_logprobs=body.target_prompt_logprobs,
            prompt_cache_hit_tokens=body.prompt_cache_hit_tokens,
            prompt_alt_tokens=body.prompt_alt_tokens,
            _extra=body._extra,
        )

    def to_builtins(self, *, nulls: bool = False) -> dict[str, Any]:
        return _SampleBody(
            sequences=list(self.sequences),
            prompt_logprobs=self.prompt_logprobs,
            topk_prompt_logprobs=self.topk_prompt_logprobs,
            target_prompt_logprobs=self.target_prompt_logprobs,
            prompt_cache_hit_tokens=self.prompt_cache_hit_tokens,
            prompt_alt_tokens=self.prompt_alt_tokens,
        ).to_builtins(nulls=nulls)

    @classmethod
    def json_schema(cls, define: Define) -> dict[str, Any]:
        return {**_SampleBody.json_schema(define), "title": cls.__name__}

    def __eq__(self, other: object) -> bool:
        return _same_fields(self, other)


class _SequenceBody(Response):
    """A `SampledSequence` in JSON."""

    stop_reason: StopReason
    sequence_id: str = ""
    tokens: list[int]
    logprobs: list[float] | None = None
    topk_logprobs: TopkList | None = None


class _SampleBody(Response):
    """A `SampleResponse` in JSON."""

    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: TopkList | None = None
    target_prompt_logprobs: TensorData | None = None
    prompt_cache_hit_tokens: int = 0
    prompt_alt_tokens: PromptAltTokens | None = None
    type: Literal["sample"] = "sample"


def _fixed(values: Sequence[float | None], dtype: type) -> Array:
    """A read-only array; `None` becomes NaN."""
    array: Array = np.array(values, dtype=dtype)
    array.flags.writeable = False
    return array


def _same_fields(mine: Response, other: object) -> bool:
    """Equality for classes that hold arrays, whose own `==` answers cell by cell. NaN equals NaN here."""
    return type(other) is type(mine) and all(
        _same(getattr(mine, name), getattr(other, name)) for name in mine.__struct_fields__
    )


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(two, np.ndarray):
        return bool(np.array_equal(one, two, equal_nan=one.dtype.kind == "f"))
    return type(one) is type(two) and bool(one == two)


class CreateSamplingSessionRequest(Request):
    """Opens a place to sample from: a base model, or saved weights."""

    session_id: str
    sampling_session_seq_id: int
    """The number of this sampling session within its session."""

    base_model: str | None = None
    model_path: str | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class CreateSamplingSessionResponse(Response):
    type: Literal["create_sampling_session"] = "create_sampling_session"
    sampling_session_id: str


class JoinSamplingSessionRequest(Request):
    """A second client of a sampling session asks for a number of its own."""

    sampling_session_id: str
    type: Literal["join_sampling_session"] = "join_sampling_session"


class JoinSamplingSessionResponse(Response):
    type: Literal["join_sampling_session"] = "join_sampling_session"

    client_counter: int
    """Unique among the clients of the sampling session; the first one is 0."""


class GetSamplerResponse(Response):
    sampler_id: str
    base_model: str
    model_path: str | None = None
