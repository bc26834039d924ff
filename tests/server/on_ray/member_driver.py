"""What a worker sees of members on Ray, and a bridge of a worker that ends like one; a program that tells in JSON."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from tinsmith.server.messages import MemberSettings, Message
from tinsmith.server.on_ray import member
from tinsmith.server.on_ray.speaking import Begun, Heard, Speaker
from tinsmith.server.suspects import UNSEEN


class Dying:
    """Its thread hangs, and is not waited for."""

    def __init__(self) -> None:
        self._speaker = Speaker(self._hang)

    async def begin(self) -> Begun:
        return self._speaker.begin()

    async def heard(self) -> Heard:
        return await self._speaker.heard()

    def _hang(self) -> None:
        threading.Thread(target=self._speaker.end, args=(3,)).start()
        threading.Event().wait()


def without_files(folder: Path) -> Any:
    logged: list[str] = []
    lives = member.MembersOnRay([{"num_cpus": 1}], lambda message: None, logged.append)
    life = lives.begin(settings(folder))
    begun = life.begun()
    ending = life.ended()
    life.kill()
    (node,) = ray.nodes()
    return {
        "begun": begun is not None,
        "ending": ending,
        "host": lives.host,
        "address": node["NodeManagerAddress"],
    }


def without_room(folder: Path) -> Any:
    """More than the cluster has: the member waits, and says so; then it is given up."""
    told: list[Message] = []
    heard = threading.Event()

    def tell(message: Message) -> None:
        told.append(message)
        heard.set()

    member.TELL_SECONDS = 0.2
    life = member.MembersOnRay([{"num_cpus": 100}], tell, lambda text: None).begin(settings(folder))
    begun: list[Any] = []
    waiting = threading.Thread(target=lambda: begun.append(life.begun()))
    waiting.start()
    heard.wait()
    life.kill()
    waiting.join()
    return {"told": told[0].held_up, "begun": begun, "is_unseen": life.ended().status == UNSEEN}


async def dying() -> Any:
    actor: Any = ray.remote(Dying).options(num_cpus=1).remote()
    await actor.begin.remote()
    heard: Heard = await actor.heard.remote()
    try:
        await actor.heard.remote()
    except RayError:
        return {"status": heard.status, "is_dying": heard.is_dying, "is_gone": True}
    return {"is_gone": False}


def settings(folder: Path) -> MemberSettings:
    return MemberSettings(
        base_model="m",
        folder=str(folder),
        device="cpu",
        dtype="float32",
        rank=1,
        size=2,
        host="",
        meeting_host="127.0.0.1",
        meeting_port=open_meeting().port,
        start_seconds=60,
    )


def open_meeting() -> Any:
    from tinsmith.server.engine import channels

    meeting = channels.open_meeting("127.0.0.1", seconds=60)
    _meetings.append(meeting)
    return meeting


_meetings: list[Any] = []


if __name__ == "__main__":
    address, folder = sys.argv[1], Path(sys.argv[2])
    ray.init(address=address, log_to_driver=False, logging_level="error")
    found = {
        "without_files": without_files(folder),
        "without_room": without_room(folder),
        "dying": asyncio.run(dying()),
    }
    sys.stdout.write(json.dumps(msgspec.to_builtins(found)) + "\n")
