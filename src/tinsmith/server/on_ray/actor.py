"""A worker in an actor of a Ray cluster, on any of its machines.

The worker has a thread of its own, which the API process speaks with (`line.py`); its log and its end are fetched by
the bridge.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import ray
from ray.actor import ActorHandle

from tinsmith.errors import ConfigError, MissingExtraError
from tinsmith.server.bell import Bell
from tinsmith.server.messages import Message, WorkerSettings
from tinsmith.server.objects import check_rights
from tinsmith.server.on_ray.line import Line
from tinsmith.server.on_ray.member import MembersOnRay
from tinsmith.server.on_ray.messages import LineAddress
from tinsmith.server.on_ray.speaking import Begun, Heard, Speaker
from tinsmith.server.state_locks import hold_as_worker
from tinsmith.server.weights_exchange import Answer, Parcel, PublishedWeights, ReceivedWeights, WeightsWanted

if TYPE_CHECKING:  # torch is loaded in the actor alone
    from tinsmith.server.engine.adapters import FrozenAdapter

MAX_SENT_TO = 16
"""With more replicas than this, each asks for the weights it needs: sending all to all would fill their network."""
MAX_COPIED_HERE_BYTES = 2**20
"""More takes so long to copy that a thread of its own is worth it."""
_FETCHES = 16
"""How many of a replica's questions to its trainer may be open at once."""


class WorkerActor:
    """`trainer` is the name of the actor that trains, for those that sample; `members` says where those go that share
    the training of this one."""

    def __init__(self, settings: bytes, trainer: str, members: Sequence[Mapping[str, Any]]) -> None:
        self._settings = msgspec.json.decode(settings, type=WorkerSettings)
        self._member_options = members
        self._heard, self._rung = os.pipe()
        os.set_blocking(self._rung, False)
        self._line = Line(ray.util.get_node_ip_address())
        self._speaker = Speaker(self._work)
        self._published: PublishedWeights | None = None
        self._received: ReceivedWeights | None = None
        self._replicas: Sequence[ActorHandle[Any]] = ()
        self._introduction = -1
        if self._settings.role == "train":
            self._published = PublishedWeights(_put, self._send, self._ring)
        elif self._settings.role == "sample":
            asked, threads = _Trainer(trainer), ThreadPoolExecutor(_FETCHES, thread_name_prefix="fetch")
            self._received = ReceivedWeights(lambda wanted: threads.submit(asked.fetch, wanted), self._ring)

    async def begin(self) -> Begun:
        return self._speaker.begin()

    async def line(self) -> LineAddress:
        return self._line.address

    async def heard(self) -> Heard:
        return await self._speaker.heard()

    # The weights of samplers, from who trains to those who sample

    async def send_to(self, number: int, replicas: Sequence[ActorHandle[Any]]) -> None:
        """Those that there are from now on. Calls may overtake each other: the highest number is the newest."""
        if number > self._introduction:
            self._introduction, self._replicas = number, replicas

    async def weights(self, wanted: WeightsWanted) -> Answer:
        """For a replica that was not sent them. What stands for the weights is a reference to an object of Ray's."""
        assert self._published is not None
        return await asyncio.wrap_future(self._published.ask(wanted))

    async def take(self, name: str, seq_id: int, weights: Any) -> None:
        """What the trainer has sent, as Ray has resolved it."""
        assert self._received is not None
        parcel = Parcel(name, weights, seq_id)
        if weights.flat.nbytes < MAX_COPIED_HERE_BYTES:
            self._received.take(parcel)
        else:
            await asyncio.to_thread(self._received.take, parcel)

    def _send(self, parcel: Parcel) -> None:
        for replica in self._replicas if len(self._replicas) <= MAX_SENT_TO else ():
            replica.take.remote(parcel.name, parcel.seq_id, parcel.weights)

    # In the worker's thread

    def _work(self) -> None:
        from tinsmith.server.worker_run import run

        settings = self._settings
        whose = {"base_model": settings.base_model, **({"worker": settings.place} if settings.place else {})}
        self._speaker.configure_logs(settings.log_format, settings.log_level, **whose)
        line, speaker = self._line, self._speaker
        bell = Bell(line.wait_for_call(), self._heard)
        state = Path(settings.state)
        try:
            state.mkdir(mode=0o700, parents=True, exist_ok=True)  # on other machines, for copies of files
            hold_as_worker(state)
        except OSError as error:
            why = f"the state folder {state} cannot be used there: {error}; choose another with --state, for all nodes"
            line.tell(Message(failed=why, is_final=True))
            raise SystemExit(1) from error
        try:
            check_rights(settings.storage)
        except (ConfigError, MissingExtraError) as error:
            line.tell(Message(failed=str(error), is_final=True))
            raise SystemExit(1) from error
        members = MembersOnRay(self._member_options, line.tell, speaker.note_log)
        run(settings, bell, line.tell, self._published, self._received, members, speaker.end)

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is full of rings already
            os.write(self._rung, b".")


def _put(frozen: FrozenAdapter) -> Any:
    from tinsmith.server.engine.adapter_files import pack

    return ray.put(pack(frozen))


class _Trainer:
    """Found by its name, and once more when it was lost."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._actor: ActorHandle[Any] | None = None

    def fetch(self, wanted: WeightsWanted) -> Answer:
        try:
            if self._actor is None:
                self._actor = ray.get_actor(self._name)
            answer: Answer = ray.get(self._actor.weights.remote(wanted))
            return answer._replace(weights=ray.get(answer.weights)) if isinstance(answer, Parcel) else answer
        except BaseException:
            self._actor = None
            raise
