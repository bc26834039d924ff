"""Promises: how a result is asked for, and what says that it is not there yet or never will be."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal, Self, TypeAlias

import msgspec

from tinsmith.types._model import Request, Response
from tinsmith.types.training import (
    CreateModelResponse,
    ForwardBackwardOutput,
    LoadWeightsResponse,
    ModelID,
    OptimStepResponse,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
    UnloadModelResponse,
)

RequestID: TypeAlias = str


class UntypedAPIFuture(Response):
    """A request was accepted; its result can be asked for by this id."""

    request_id: RequestID
    model_id: ModelID | None = None
    sample_sequence_ids: list[str] | None = None
    """For samples: one id per sequence, in the order of the result."""


class FutureRetrieveRequest(Request):
    request_id: RequestID
    allow_metadata_only: bool = False
    """Whether the server may answer with the size of a large result instead of the result."""


class TryAgainResponse(Response):
    """The result is not there yet."""

    type: Literal["try_again"] = "try_again"
    request_id: RequestID | None = None
    queue_state: str = "active"
    """`active`, `paused_capacity` or `paused_rate_limit`; a server may know others."""

    queue_state_reason: str | None = None


class ResultMetadataResponse(Response):
    """The result is there and large; it comes with the next request that does not allow metadata only."""

    status: Literal["complete_metadata"]
    response_payload_size: int = 0


class RequestErrorCategory(StrEnum):
    """Whose fault it was."""

    Unknown = "unknown"
    Server = "server"
    User = "user"

    @classmethod
    def _missing_(cls, value: object) -> RequestErrorCategory:
        """Any case is understood, and what is new is unknown."""
        text = str(value).lower()
        return next((category for category in cls if category.value == text), cls.Unknown)


class RequestFailedResponse(Response):
    """The request failed on the server. A category that this version does not know is kept in `extra["category"]`."""

    error: str
    category: RequestErrorCategory = RequestErrorCategory.Unknown

    @classmethod
    def from_builtins(cls, value: object) -> Self:
        if not isinstance(value, Mapping) or "category" not in value:
            return super().from_builtins(value)
        raw = value["category"]
        category = RequestErrorCategory(raw)
        response = super().from_builtins({**value, "category": category})
        if raw is None or str(raw).lower() == category:
            return response
        return response.model_copy(update={"_extra": (*response._extra, ("category", raw))})


FutureRetrieveResponse: TypeAlias = (
    TryAgainResponse
    | ForwardBackwardOutput
    | OptimStepResponse
    | SaveWeightsResponse
    | LoadWeightsResponse
    | SaveWeightsForSamplerResponse
    | SaveWeightsExternalResponse
    | CreateModelResponse
    | UnloadModelResponse
    | RequestFailedResponse
)


class SamplingSessionFuturesTarget(Request):
    """All samples of one client of a sampling session."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str
    cloned_sampler_id: int = 0
    """`seq_id // 1_000_000_000`; 0 for the first client."""


class FuturesRetrieveRequest(Request):
    """Asks for whatever finished since `prev_cursor`."""

    target: SamplingSessionFuturesTarget
    prev_cursor: int = 0
    timeout: float | None = None
    retrieved_request_ids: list[str] = msgspec.field(default_factory=list)
    """Results that were fetched, so that the server may forget them."""


class FutureFinished(Response):
    state: Literal["finished"] = "finished"
    request_id: RequestID
    response_payload_uncompressed_size: int | None = None


class FutureFailed(Response):
    state: Literal["failed"] = "failed"
    request_id: RequestID


FutureCompletion: TypeAlias = FutureFinished | FutureFailed


class FuturesRetrieveResponse(Response):
    completions: list[FutureCompletion]
    cursor: int
    """To be passed back as `prev_cursor`."""


class CancelFutureRequest(Request):
    request_id: RequestID
