"""What the API process and the bridge to a Ray cluster tell each other, a line of JSON each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from tinsmith.server.logs import LogFormat, LogLevel
from tinsmith.server.messages import Message


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """Room for one worker."""

    base_model: str
    place: str
    cpus: int
    """For each process, which also has a GPU of its own, where there are GPUs."""
    processes: int
    """The worker, and those who share its training; each may be on another machine."""


class ClusterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The first line that the bridge reads."""

    address: str
    seats: tuple[Seat, ...]
    device: str = "auto"
    kept_here: str = ""
    """What of the server's state is on this machine alone, so that no worker may be elsewhere; empty if nothing is."""
    log_format: LogFormat = "text"
    log_level: LogLevel = "info"


class LineAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where a worker waits to be called by the API process, and what it wants to hear first."""

    host: str
    port: int
    secret: str


class Order(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What shall happen to one life of a worker, by its number."""

    life: int
    do: Literal["begin", "kill"]
    settings: msgspec.Raw = msgspec.Raw(b"null")
    """`WorkerSettings` of one that begins."""


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """About the cluster, or about one life of a worker."""

    is_ready: bool = False
    """There is room for every worker."""
    uses_gpus: bool = False
    """With a GPU for each of its processes."""
    refused: str = ""
    """Why there is no cluster to be had, and what to do about it."""
    life: int = 0
    messages: Sequence[Message] = ()
    """What is to be said of it by others than itself."""
    line: LineAddress | None = None
    """It has begun, and waits to be called here."""
    ended: int | None = None
    """How it ended."""
