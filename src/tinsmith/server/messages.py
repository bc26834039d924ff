"""What the API process and its workers tell each other."""

from __future__ import annotations

import msgspec


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The first line that a worker reads."""

    base_model: str
    folder: str
    database: str
    state: str
    device: str = "auto"
    dtype: str = "auto"
    kv_tokens: int | None = None
    train_token_budget: int | None = None
    stall_seconds: float = 3600
    last_status: int | None = None
    """How the worker before this one ended; below zero, by which signal."""


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line that a worker writes."""

    ready: bool = False
    done: tuple[str, ...] = ()
    """Jobs that have just finished."""
    failed: str = ""
    """Why the model cannot be loaded."""
    is_final: bool = False
    """Another try would fail in the same way."""
