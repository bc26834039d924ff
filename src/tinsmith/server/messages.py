"""What the API process and its workers tell each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from tinsmith.server.hiding import SecretsHidden
from tinsmith.server.logs import LogFormat, LogLevel
from tinsmith.types import LoadWeightsRequest, SampleRequest

Role: TypeAlias = Literal["both", "train", "sample"]


class WorkerSettings(SecretsHidden, frozen=True, kw_only=True):
    """The first line that a worker reads."""

    base_model: str
    folder: str
    database: str
    state: str
    storage: str = ""
    cache_bytes: int = 0
    device: str = "auto"
    dtype: str = "auto"
    deterministic: bool = False
    kv_tokens: int | None = None
    train_token_budget: int | None = None
    train_workers: int = 1
    """Processes that train together, this one included."""
    shard_base: Literal["auto", "always", "never"] = "never"
    """Whether each of them has a shard of the base model's layers instead of all of them."""
    stall_seconds: float = 3600
    replay_bound_seconds: float = 60
    max_checkpoint_bytes: int | None = None
    log_format: LogFormat = "text"
    log_level: LogLevel = "info"
    lead: str = ""
    """The name in which its server leads, if others could do so in its place."""
    role: Role = "both"
    """What of the work on its base model is this worker's."""
    place: str = ""
    """Which of the workers of its base model this is, where there are several."""
    last_status: int | None = None
    """How the worker before this one ended; below zero, by which signal."""


class MemberSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The only line that a member of a training group reads."""

    base_model: str
    folder: str
    device: str
    dtype: str
    deterministic: bool = False
    train_token_budget: int | None = None
    rank: int
    size: int
    sharers: int = 1
    """Processes of the group that divide the threads of its machine."""
    host: str
    """The address at which the others find this member."""
    meeting_host: str
    meeting_port: int
    backend: Literal["gloo", "nccl"] = "gloo"
    start_seconds: float = 600
    shard_base: Literal["auto", "always", "never"] = "never"
    stall_seconds: float = 3600
    """How long another process may keep this one waiting for its shard of a layer."""
    log_format: LogFormat = "text"
    log_level: LogLevel = "info"


class Figure(msgspec.Struct, frozen=True, array_like=True):
    """One number on the page of metrics."""

    name: str
    labels: dict[str, str]
    value: float

    @property
    def place(self) -> tuple[str, ...]:
        return self.name, *self.labels.values()


class SampleJob(SampleRequest):
    """What the job of a sample holds: the request, and what only endpoints of this server ask for besides."""

    end_tokens: Sequence[int] = ()
    """Tokens that end a sample, whatever its stops are."""
    is_streamed: bool = False
    """Whether its tokens are told as they are drawn."""
    reward: float | None = None
    """Shown beside it to those who look at samples."""


class LoadJob(LoadWeightsRequest):
    """What the job of a load holds: the request, and on whose behalf its checkpoint is read."""

    reader: str | None = None
    """Whose credential was shown for it, if the model's owner could not read it."""


class Drawn(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of a sample that were drawn one after the other, the first of them in the place `start`."""

    request_id: str
    index: int
    """Which of the samples of this request."""
    start: int
    tokens: list[int]
    logprobs: list[float]
    topk: list[list[tuple[int, float]]] = []
    """For each token the most likely ones in its place, if that was asked for."""


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """How far a model is that is being built again."""

    model_id: str
    replayed: int
    total: int


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A process that shares the training of a worker."""

    rank: int
    where: str
    process: int


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line that a worker writes: every second, and if only to say that it is there."""

    ready: bool = False
    where: str = ""
    process: int = 0
    """The machine that the worker is on, and the id of its process there."""
    member: Member | None = None
    """One that has begun."""
    done: tuple[str, ...] = ()
    """Jobs that have just finished."""
    replay: Replay | None = None
    held_up: str = ""
    """Why no work is being done at the moment, though nothing is wrong with the worker."""
    no_room: dict[str, str] | None = None
    """The models and samplers that wait for room on the disk or for their files, with the reason; others go on."""
    failed: str = ""
    """Why the model cannot be loaded."""
    drawn: tuple[Drawn, ...] = ()
    """Of the samples whose tokens are wanted as they are drawn, what is new. Their results have all of it again."""
    figures: tuple[Figure, ...] = ()
    """Of those that the worker counts, what has changed."""
    is_final: bool = False
    """Another try would fail in the same way, in the same place."""
