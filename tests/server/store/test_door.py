"""Revocations count at once on both databases, whoever made them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tinsmith.server.auth import Authority, Door
from tinsmith.server.config import ServerConfig
from tinsmith.server.models import ModelSource
from tinsmith.server.store import Store

KEY = "tml-a"


@pytest.fixture
def door(tmp_path: Path, url: str) -> Iterator[Door]:
    config = ServerConfig(models=(ModelSource("m", "/nowhere"),), state=tmp_path, database=url, api_keys=(KEY,))
    store = Store(url)
    with ThreadPoolExecutor(2) as threads:
        yield Door(Authority(config, store), store.keys, threads)
    store.close()


def test_a_key_is_good_until_the_moment_it_is_revoked_elsewhere(door: Door, url: str) -> None:
    async def main() -> None:
        elsewhere = Store(url)
        for number in range(10):
            made = elsewhere.keys.create("ann", f"key {number}")
            callers = await asyncio.gather(*(door.caller(made.plain) for _ in range(20)))
            assert {caller.owner for caller in callers if caller is not None} == {"ann"}
            elsewhere.keys.revoke(made.key.key_id)
            assert await asyncio.gather(*(door.caller(made.plain) for _ in range(20))) == [None] * 20
            assert await door.caller(KEY) is not None
        elsewhere.close()

    asyncio.run(main())


def test_keys_that_do_not_change_are_looked_up_once(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = []
    identify = door._authority.identify
    monkeypatch.setattr(door._authority, "identify", lambda credential: looked_up.append(1) or identify(credential))

    async def main() -> None:
        for _ in range(10):
            assert await door.caller(KEY) is not None

    asyncio.run(main())
    assert looked_up == [1]
