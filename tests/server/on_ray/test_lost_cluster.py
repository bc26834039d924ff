"""A cluster that is lost and comes back at the same address, while workers wait for room."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import msgspec
import pytest

from tests.support.ray_head import RayHead
from tinsmith.server.config import ServerConfig
from tinsmith.server.lives import Life
from tinsmith.server.messages import Message, WorkerSettings
from tinsmith.server.models import ModelSource
from tinsmith.server.on_ray.lives import RayLives
from tinsmith.server.suspects import UNSEEN

SECONDS = 120.0


async def said(life: Life, what: str) -> Message:
    """The next message that has something of this kind to say."""
    async for line in life.heard():
        message = msgspec.json.decode(line, type=Message)
        if getattr(message, what):
            return message
    raise AssertionError("it has ended")


def test_workers_that_waited_for_room_on_a_cluster_that_is_gone_are_started_on_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = WorkerSettings(base_model="m", folder="", database="", state=str(tmp_path), place="train")

    async def scenario(head: RayHead) -> None:
        config = ServerConfig(models=(ModelSource("m", "m"),), state=tmp_path, ray=head.address)
        on_ray = RayLives(config, {"m": {"train": 1}})
        await on_ray.prepare()
        os.kill(head.pid, signal.SIGSTOP)  # or it would end what is left when the first is gone
        head.kill_raylet()
        life = await on_ray.begin(settings)
        assert "waits for room" in (await said(life, "held_up")).held_up
        await asyncio.to_thread(head.kill)
        await asyncio.to_thread(head.start)
        assert await life.ended() == UNSEEN
        assert (await said(await on_ray.begin(settings), "where")).process
        await on_ray.close()

    with RayHead() as head:
        for name, value in head.environment.items():
            monkeypatch.setenv(name, value)
        asyncio.run(asyncio.wait_for(scenario(head), SECONDS))
