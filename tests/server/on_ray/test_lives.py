"""Workers on a Ray cluster as the API process knows them, with a stand-in for the bridge."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tinsmith.server.config import ServerConfig
from tinsmith.server.lives import CannotBeginError
from tinsmith.server.messages import WorkerSettings
from tinsmith.server.models import ModelSource
from tinsmith.server.on_ray import lives
from tinsmith.server.on_ray.lives import RayLives
from tinsmith.server.suspects import UNSEEN

SETTINGS = WorkerSettings(base_model="m", folder="", database="", state="")


def on_ray(state: Path) -> RayLives:
    return RayLives(ServerConfig(models=(ModelSource("m", "m"),), state=state, ray="auto"), {})


def test_workers_that_had_gpus_wait_for_them_when_the_cluster_comes_back_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPUs they would be slower by orders of magnitude, and round differently."""
    monkeypatch.setattr(lives, "BRIDGE_MODULE", "tests.server.on_ray.brief_bridge")

    async def scenario() -> None:
        those = on_ray(tmp_path)
        await those.prepare()
        assert those._bridge is not None
        while not those._bridge.is_over:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)
        with pytest.raises(CannotBeginError, match="cuda"):
            await those.begin(SETTINGS)

    asyncio.run(scenario())


def test_a_bridge_that_does_not_kill_when_it_is_told_is_killed_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a server could not stop, nor replace the worker."""
    monkeypatch.setattr(lives, "BRIDGE_MODULE", "tests.server.on_ray.deaf_bridge")
    monkeypatch.setattr(lives, "KILL_SECONDS", 0.1)

    async def scenario() -> None:
        those = on_ray(tmp_path)
        life = await those.begin(SETTINGS)
        life.kill()
        assert await life.ended() == UNSEEN
        await those.close()

    asyncio.run(scenario())


def test_a_bridge_that_is_not_understood_ends_with_its_workers_and_another_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lives, "BRIDGE_MODULE", "tests.server.on_ray.garbled_bridge")

    async def scenario() -> None:
        those = on_ray(tmp_path)
        assert await (await those.begin(SETTINGS)).ended() == UNSEEN
        monkeypatch.setattr(lives, "BRIDGE_MODULE", "tests.server.on_ray.deaf_bridge")
        await those.begin(SETTINGS)
        await those.close()

    asyncio.run(scenario())
