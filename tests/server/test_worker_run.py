"""What a worker says before it can begin to work."""

from __future__ import annotations

import os
import socket

import pytest

from tinsmith.server import worker_run
from tinsmith.server.bell import Bell
from tinsmith.server.messages import Message, WorkerSettings
from tinsmith.server.store import StoreUnavailableError


def test_a_worker_that_does_not_reach_the_database_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be on another machine than its server, which does."""
    monkeypatch.setattr(worker_run, "LOOK_AGAIN_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as free:
        database = f"postgresql://127.0.0.1:{free.getsockname()[1]}/nobody"
    heard, rung = os.pipe()
    told: list[str] = []

    def tell(message: Message) -> None:
        if message.held_up:
            told.append(message.held_up)
            os.close(rung)  # its server has heard enough, and ends it

    settings = WorkerSettings(base_model="m", folder="", database=database, state="")
    with pytest.raises(StoreUnavailableError):
        worker_run.run(settings, Bell(heard), tell)
    assert told == ["the server's database is out of reach; work goes on when it is back"]
    os.close(heard)
