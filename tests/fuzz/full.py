"""The two halves of the full campaign: many inputs without a network, and fewer with all there is."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

from tests.fuzz import direct as in_process
from tests.fuzz import over_http
from tests.fuzz.aftermath import Database, too_many
from tests.fuzz.bending import case as next_case
from tests.fuzz.campaign import Campaign
from tests.fuzz.over_http import FuzzedServer, open_files, resident_bytes
from tests.fuzz.world import OTHER_KEY, TOKENS, World

MAX_GROWTH_BYTES = 96 * 2**20
MAX_MORE_FILES = 16
AT_ONCE = 64
"""Requests to the real server; some of them are polls, which it holds."""
DRAIN_SECONDS = 300
_WARM_UP = 0.3
"""The share of the inputs after which memory should not grow any more."""


async def direct(folder: Path, seed: int, inputs: range, database_url: str = "") -> Campaign:
    async with in_process.direct(folder / "state", database_url) as send:
        world = World(send, in_process.BASE_MODEL)
        await world.build()
        database = Database(folder / "state", database_url)
        campaign = Campaign(world, send, seed)
        rows, others = database.rows(), database.things_of(world.foreign["model_id"])
        memory = await _run(campaign, inputs, ["self"])
        campaign.complain(too_many(rows, database.rows(), campaign.accepted), "rows")
        campaign.complain(memory, "memory")
        if database.things_of(world.foreign["model_id"]) != others:
            campaign.complain(["somebody else's things have changed"], "isolation")
        campaign.complain([f"{name} was written" for name in os.listdir(folder) if name != "state"], "files")
        database.close()
    return campaign


async def real(folder: Path, seed: int, inputs: range, torn: int) -> Campaign:
    with over_http.real_server(folder) as server:
        send = over_http.sender(server.url)
        world = World(send, over_http.BASE_MODEL)
        await world.build()
        campaign, workers = Campaign(world, send, seed, AT_ONCE), server.workers()
        seen = await _bystander(world)
        files = open_files(server.pid)
        memory = await _run(campaign, inputs, [server.pid, *workers])
        await _tear(campaign, server, seed, torn)
        await _drain(campaign, Database(server.state))
        campaign.complain(memory, "memory")
        campaign.complain(_processes(server, workers, files), "processes")
        if await _bystander(world) != seen:
            campaign.complain(["somebody else's model has changed"], "isolation")
    return campaign


async def _run(campaign: Campaign, inputs: range, pids: Sequence[int | str]) -> list[str]:
    """Everything that is wrong with the memory of the processes afterwards."""
    step, warm = max(1, len(inputs) // 10), 0
    for start in range(inputs.start, inputs.stop, step):
        await campaign.run(range(start, min(start + step, inputs.stop)))
        now = sum(map(resident_bytes, pids))
        warm = max(warm, now) if campaign.sent <= _WARM_UP * len(inputs) else warm
        sys.stderr.write(f"{campaign.sent:,} inputs, {now / 2**20:.0f} MiB, {len(campaign.findings)} findings\n")
    grown = sum(map(resident_bytes, pids)) - warm
    return [f"memory grew by {grown / 2**20:.0f} MiB"] if warm and grown > MAX_GROWTH_BYTES else []


async def _tear(campaign: Campaign, server: FuzzedServer, seed: int, count: int) -> None:
    """Requests that are not HTTP: no answer is needed, but the server must live on."""
    for index in range(count):
        random = Random(f"{seed}:torn:{index}")
        request = over_http.torn(over_http.written(next_case(campaign.world, random)), random)
        async with asyncio.timeout(60):
            raw = await over_http.exchange(server.url, request, hang_up=True)
        if raw.startswith(b"HTTP/1.1 5") and b"503" not in raw[:12]:
            campaign.complain([f"answered {raw[:100]!r} to {request[:200]!r}"], f"torn {index}")
        campaign.sent += 1


async def _drain(campaign: Campaign, database: Database) -> None:
    """What was accepted gets done, and none of it fails through a fault of the server."""
    for _ in range(DRAIN_SECONDS):
        if not database.unfinished():
            break
        await asyncio.sleep(1)
    else:
        campaign.complain([f"{database.unfinished()} jobs were not done"], "hang")
    campaign.complain(database.faults(), "worker")
    database.close()


def _processes(server: FuzzedServer, workers: list[int], files: int) -> list[str]:
    found = [] if server.workers() == workers else ["a worker died"]
    more = open_files(server.pid) - files
    found += [f"{more} more open files"] if more > MAX_MORE_FILES else []
    trouble = server.log().partition("Traceback")
    return found + ([f"the log has {trouble[1]}{trouble[2][:3000]}"] if trouble[1] else [])


async def _bystander(world: World) -> object:
    """What the model of somebody else gives for an input."""
    claim = world.claim(world.foreign["model_id"])
    prompt = {"chunks": [{"type": "encoded_text", "tokens": TOKENS}]}
    inputs = {
        "target_tokens": {"data": TOKENS, "dtype": "int64"},
        "weights": {"data": [1.0] * 6, "dtype": "float32"},
    }
    examples = {"data": [{"model_input": prompt, "loss_fn_inputs": inputs}], "loss_fn": "cross_entropy"}
    body = {"model_id": claim.model_id, "seq_id": claim.number, "forward_input": examples}
    return (await world.result("forward", body, OTHER_KEY))["metrics"]
