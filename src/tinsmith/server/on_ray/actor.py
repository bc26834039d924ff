"""A worker in an actor of a Ray cluster, on any of its machines.

The worker has a thread of its own; what it says is fetched by the bridge, which also rings its bell.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import socket
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, cast

import msgspec
import ray
from ray.actor import ActorHandle

from tinsmith._version import __version__
from tinsmith.server import logs
from tinsmith.server.bell import Bell
from tinsmith.server.messages import Message, WorkerSettings
from tinsmith.server.state_locks import hold_as_worker

if TYPE_CHECKING:  # torch is loaded in the actor alone
    from tinsmith.server.weights_exchange import Answer, AskedTrainer, PublishedWeights, WeightsWanted

log = logging.getLogger(__name__)

SWITCH_SECONDS = 0.001
"""How long the worker's thread may keep another from answering while it runs Python."""
_FETCHES = 16
"""How many of a replica's questions to its trainer may be open at once."""


class Begun(NamedTuple):
    where: str
    process: int
    version: str


class Heard(NamedTuple):
    messages: Sequence[bytes]
    log_lines: Sequence[str]
    status: int | None
    """How the worker ended, if it has."""


class WorkerActor:
    """`trainer` is the name of the actor that trains, for those that sample."""

    def __init__(self, settings: bytes, trainer: str) -> None:
        self._settings = msgspec.json.decode(settings, type=WorkerSettings)
        self._trainer_name = trainer
        self._heard, self._rung = os.pipe()
        os.set_blocking(self._rung, False)
        self._is_dismissed = False
        self._messages: list[bytes] = []
        self._log_lines: list[str] = []
        self._status: int | None = None
        self._lock = threading.Lock()
        self._published: PublishedWeights | None = None

    async def begin(self) -> Begun:
        sys.setswitchinterval(SWITCH_SECONDS)
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._can_publish = asyncio.Event()
        threading.Thread(target=self._run, name="worker", daemon=True).start()
        return Begun(f"{socket.gethostname()} ({ray.util.get_node_ip_address()})", os.getpid(), __version__)

    async def heard(self) -> Heard:
        """What is new, as soon as something is."""
        await self._news.wait()
        self._news.clear()
        with self._lock:
            heard = Heard(self._messages, self._log_lines, self._status)
            self._messages, self._log_lines = [], []
        return heard

    async def wake(self) -> None:
        self._ring()

    async def dismiss(self) -> None:
        if not self._is_dismissed:
            self._is_dismissed = True
            os.close(self._rung)

    async def weights(self, wanted: WeightsWanted) -> Answer:
        """For replicas, when they are there. What stands for the weights is a reference to an object of Ray's store."""
        await self._can_publish.wait()
        assert self._published is not None
        return await asyncio.wrap_future(self._published.ask(wanted))

    # In the worker's thread

    def _run(self) -> None:
        status = 1
        try:
            self._work()
            status = 0
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except BaseException:
            log.critical("This worker ends.", exc_info=True)
        with self._lock:
            self._status = status
        self._tell_loop(self._news.set)

    def _work(self) -> None:
        from tinsmith.server.weights_exchange import PublishedWeights
        from tinsmith.server.worker_run import run

        settings = self._settings
        whose = {"base_model": settings.base_model, **({"worker": settings.place} if settings.place else {})}
        logs.configure(settings.log_format, settings.log_level, cast(TextIO, _Lines(self._note_log)), **whose)
        state = Path(settings.state)
        state.mkdir(mode=0o700, parents=True, exist_ok=True)  # on other machines, for copies of files
        hold_as_worker(state)
        trainer = None
        if settings.role == "train":
            self._published = PublishedWeights(ray.put, self._ring)
            self._tell_loop(self._can_publish.set)
        elif settings.role == "sample":
            trainer = _asked_trainer(self._trainer_name, self._ring)
        is_wanted = lambda: not self._is_dismissed  # noqa: E731
        run(settings, Bell(self._heard), self._tell, is_wanted, self._published, trainer)

    def _tell(self, message: Message) -> None:
        with self._lock:
            self._messages.append(msgspec.json.encode(message))
        self._tell_loop(self._news.set)

    def _note_log(self, text: str) -> None:
        with self._lock:
            self._log_lines.append(text)
        self._tell_loop(self._news.set)

    def _tell_loop(self, what: Any) -> None:
        self._loop.call_soon_threadsafe(what)

    def _ring(self) -> None:
        if not self._is_dismissed:
            with contextlib.suppress(BlockingIOError):  # it is full of rings already
                os.write(self._rung, b".")


class _Lines(io.TextIOBase):
    """Where the log goes: to the server that this is a worker of, with everybody else's."""

    def __init__(self, note: Any) -> None:
        self._note = note

    def write(self, text: str) -> int:
        self._note(text)
        return len(text)


def _asked_trainer(name: str, ring: Any) -> AskedTrainer:
    from tinsmith.server.weights_exchange import AskedTrainer

    trainer, threads = _Trainer(name), ThreadPoolExecutor(_FETCHES, thread_name_prefix="fetch")

    def ask(wanted: WeightsWanted) -> Future[Answer]:
        return threads.submit(trainer.fetch, wanted)

    return AskedTrainer(ask, ring)


class _Trainer:
    """Found by its name, and once more when it was lost."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._actor: ActorHandle[Any] | None = None

    def fetch(self, wanted: WeightsWanted) -> Answer:
        from tinsmith.server.weights_exchange import Parcel

        try:
            if self._actor is None:
                self._actor = ray.get_actor(self._name)
            answer: Answer = ray.get(self._actor.weights.remote(wanted))
            return Parcel(ray.get(answer.weights), answer.seq_id) if isinstance(answer, Parcel) else answer
        except BaseException:
            self._actor = None
            raise
