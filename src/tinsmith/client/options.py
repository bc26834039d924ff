"""Two names of the official package that old code imports for its annotations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

import msgspec


class Timeout(msgspec.Struct, frozen=True):
    """Seconds for one request and for its connection; the settings themselves are `Config.timeout` and
    `Config.connect_timeout`."""

    timeout: float = 60.0
    connect: float = 5.0


class RequestOptions(TypedDict, total=False):
    headers: Mapping[str, str]
    timeout: float | Timeout | None
    max_retries: int
    idempotency_key: str
