"""A few thousand inputs of the fuzzer; `make fuzz` tries many more, other ones each time, and a real server as well."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

from tests.fuzz import full
from tests.fuzz.bending import case, valid
from tests.fuzz.direct import BASE_MODEL, direct
from tests.fuzz.drafts import CHECKPOINT, DRAFTS
from tests.fuzz.rules import broken
from tests.fuzz.world import KEY, Answer, Case, World
from tinsmith.server.endpoints import ENDPOINTS

SEED, INPUTS = 2030, 3000

_NOT_HERE = {
    f"GET {CHECKPOINT}/export": "the checkpoints of the stand-in worker are not real",
    "POST /api/v1/import_weights": "there is no real base model",
    "DELETE /dashboard/api/keys/{key_id}": "the only key that could be spared is gone by then",
}
"""What is accepted in tests of its own alone."""


def test_no_input_makes_the_server_fail(tmp_path: Path) -> None:
    campaign = asyncio.run(full.direct(tmp_path, SEED, range(INPUTS)))
    assert campaign.is_clean, campaign.report()
    assert campaign.sent == INPUTS
    assert {200, 204, 400, 401, 404, 413, 415, 422} <= set(campaign.statuses), campaign.report()


def test_every_endpoint_is_fuzzed() -> None:
    assert {f"{endpoint.method} {endpoint.path}" for endpoint in ENDPOINTS} <= set(DRAFTS)


def test_requests_that_are_not_bent_are_accepted(tmp_path: Path) -> None:
    """One that is refused as it stands would hide everything that comes after the first check."""
    refused = asyncio.run(_refused_drafts(tmp_path))
    assert not refused, refused


async def _refused_drafts(state: Path) -> dict[str, object]:
    """The endpoints that take none of a few drafts, with the last answer."""
    async with direct(state) as send:
        world = World(send, BASE_MODEL)
        await world.build()
        refused: dict[str, object] = {}
        for name in (name for name in DRAFTS if name not in _NOT_HERE):
            for attempt in range(8):
                answer = await send(valid(name, world, Random(attempt)))
                refused[name] = await _reason(world, answer)
                if refused[name] is None:
                    del refused[name]
                    break
        return refused


async def _reason(world: World, answer: Answer) -> object:
    if answer.status >= 300:
        return answer
    if not answer.body.startswith(b'{"request_id"'):
        return None
    return (await world.outcome(answer.json()["request_id"])).get("error")


def test_an_input_can_be_repeated_by_its_seed_and_number() -> None:
    async def nowhere(case: Case) -> Answer:
        raise AssertionError

    first, second = (_cases(World(nowhere, "tiny")) for _ in range(2))
    assert first == second
    assert len(set(first)) > 50


def _cases(world: World) -> list[Case]:
    world.session_id, world.losses = "s", ["s:loss:0"]
    world.models, world.samplers, world.spare_sessions, world.doomed = ["s:train:0"], ["s:sample:0"], ["t"], ["d"]
    world.files = ["/api/v1/files/s:train:0/external_weights/kept/a?expires=1&signature=x", "/api/v1/traces/s?a=b"]
    world.request_ids = ["s:train:0:0", "s:train:0:1"]
    world.foreign = {"session_id": "o", "path": "tinker://o/weights/x"}
    return [case(world, Random(f"1:{index}")) for index in range(100)]


def test_the_rules_tell_good_answers_from_bad_ones() -> None:
    asked = Case("POST /x", "POST", "/x", (), b"")

    def answer(status: int, body: bytes, **headers: str) -> Answer:
        return Answer(status, {"content-length": str(len(body)), **headers}, body)

    good = b'{"detail":"rank is 0; take 1 or more"}'
    assert broken(asked, answer(200, b"{}")) is None
    assert broken(asked, answer(422, good)) is None
    assert broken(asked, answer(500, good)) == "status 500"
    assert broken(asked, answer(422, b'{"detail":""}')) == "a refusal without a reason"
    assert broken(asked, answer(400, b"no")) == "a refusal that is not JSON"
    assert broken(asked, answer(404, b'{"detail":"' + b"x" * 9000 + b'"}')) == "a refusal of 9,013 bytes"
    assert broken(asked, answer(400, good, **{"content-encoding": "gzip"})) == "a refusal without its length"
    assert broken(asked, answer(200, KEY.encode())) == "a credential in the answer"
