"""Clients on a fake server, data for them, and time that does not pass."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

from tests.support.server import FakeServer, Recorded
from tinsmith.client.config import Config
from tinsmith.client.retry import Clock
from tinsmith.client.service import ServiceClient
from tinsmith.client.training import TrainingClient
from tinsmith.types import AdamParams, Datum, ModelInput

KEY = "tml-secret-of-the-tests"
ADAM = AdamParams(learning_rate=1e-3)
BASE_MODEL = "tiny/model-1"
PATIENCE = 20.0
"""Seconds after which a test that would hang fails instead."""


class VirtualClock(Clock):
    """Sleeping costs nothing: it moves this clock on instead."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds
        await asyncio.sleep(0)


def make_data(count: int = 1, num_tokens: int = 3, first: int = 1) -> list[Datum]:
    """Examples that differ in their first token, so that a test can tell them apart at the server."""
    return [
        Datum(
            ModelInput.from_ints([first + index, *range(2, num_tokens + 1)]),
            {"target_tokens": list(range(num_tokens)), "weights": [1.0] * num_tokens},
        )
        for index in range(count)
    ]


def make_config(server: FakeServer, **settings: Any) -> Config:
    return Config.from_env(base_url=server.url, api_key=KEY, env={}, **{"telemetry": False, **settings})


@contextlib.contextmanager
def open_service(server: FakeServer, **settings: Any) -> Iterator[ServiceClient]:
    client = ServiceClient(config=make_config(server, **settings))
    try:
        yield client
    finally:
        client.close("success").result(PATIENCE)


@contextlib.contextmanager
def open_training(server: FakeServer, **settings: Any) -> Iterator[TrainingClient]:
    with open_service(server, **settings) as service:
        yield service.create_lora_training_client(BASE_MODEL, rank=8).result(PATIENCE)


def seq_ids(server: FakeServer, *endpoints: str) -> list[int]:
    """The numbers of the training requests that arrived, in the order of arrival."""
    wanted = endpoints or ("forward_backward", "forward", "optim_step", "save_weights", "load_weights")
    return [number_of(request) for request in server.received() if request.endpoint in wanted]


def number_of(request: Recorded) -> int:
    if "protobuf" in request.headers.get("content-type", ""):
        return int(request.message().seq_id)
    return int(request.json()["seq_id"])
