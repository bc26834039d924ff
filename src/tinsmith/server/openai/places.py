"""Where requests that know no sessions take place: one session of each owner, with a sampler for each source.

A session lives as long as it is used, and some time longer, so that there are few of them; its heartbeats come from
here. One that nobody uses any more is ended, and forgotten like those of other clients.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from tinsmith._version import __version__
from tinsmith.server.config import ServerConfig
from tinsmith.server.openai.sources import Source
from tinsmith.server.routes._call import Call
from tinsmith.server.routes.sessions import DEFAULT_PROJECT
from tinsmith.server.store import Store, StoreUnavailableError
from tinsmith.server.store.records import Heartbeat, NewSampler, NewSession, Sampler

log = logging.getLogger(__name__)

KEPT_SECONDS = 3600.0
BEAT_SECONDS = 60.0

NAME, TAG = "OpenAI endpoints", "openai"


@dataclass
class Seat:
    """A sampler, and the numbers of its requests."""

    sampler: Sampler
    numbers: Iterator[int] = field(default_factory=itertools.count)
    used: float = 0.0


@dataclass
class _Place:
    """One owner's."""

    session_id: str
    seats: dict[Source, Seat] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    num_open: int = 0
    used: float = 0.0


class Places:
    def __init__(self, config: ServerConfig, store: Store, now: Callable[[], float] = time.monotonic) -> None:
        self._pause = min(BEAT_SECONDS, config.session_timeout_seconds / 4)
        self._store = store
        self._now = now
        self._places: dict[str, _Place] = {}
        self._making: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def seat(self, call: Call, source: Source) -> Seat:
        async with self._making.setdefault(call.owner, asyncio.Lock()):
            place = self._places.get(call.owner)
            if place is None:
                place = self._places[call.owner] = await self._open(call)
            seat = place.seats.get(source)
            if seat is None:
                seat = place.seats[source] = await self._add(call, place, source)
            place.used = seat.used = self._now()
            return seat

    @contextmanager
    def in_use(self, owner: str) -> Iterator[None]:
        """While a request of this owner is open, its session does not end."""
        place = self._places.get(owner)
        if place is None:
            yield
            return
        place.num_open += 1
        try:
            yield
        finally:
            place.num_open -= 1
            place.used = self._now()

    async def _open(self, call: Call) -> _Place:
        call.services.paperwork.charge(call.owner, 0)
        session = await call.stored(
            call.store.sessions.create,
            NewSession(
                owner=call.owner,
                tags=(TAG,),
                sdk_version=__version__,
                project_id=DEFAULT_PROJECT,
                display_name=NAME,
            ),
        )
        return _Place(session.session_id)

    async def _add(self, call: Call, place: _Place, source: Source) -> Seat:
        call.services.paperwork.charge(call.owner, 0)
        sampler = await call.stored(
            call.store.samplers.create,
            NewSampler(
                session_id=place.session_id,
                sampling_session_seq_id=next(place.numbers),
                owner=call.owner,
                base_model=source.base_model,
                model_path=source.model_path,
                saved_by=source.saved_by,
                model_id=source.model_id,
            ),
        )
        return Seat(sampler)

    # Beside the requests

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._pause)
            try:
                await self._look()
            except StoreUnavailableError:
                continue  # others tell of it, and no session ends as long as it lasts
            except Exception:
                log.exception("could not keep the sessions of the OpenAI endpoints alive")

    async def close(self) -> None:
        """The server stops, and nobody is left who uses them."""
        try:
            await self._end(list(self._places))
        except StoreUnavailableError:
            log.info("The sessions of the OpenAI endpoints will end in silence, as the database is out of reach.")

    async def _look(self) -> None:
        long_ago = self._now() - KEPT_SECONDS
        for place in self._places.values():  # the weights of a seat that is empty for long may be given up
            place.seats = {source: seat for source, seat in place.seats.items() if seat.used >= long_ago}
        places = self._places.items()
        await self._end([owner for owner, place in places if not place.num_open and place.used < long_ago])
        await self._beat([Heartbeat(place.session_id, owner) for owner, place in self._places.items()])

    async def _beat(self, beats: list[Heartbeat]) -> None:
        states = await asyncio.to_thread(self._store.sessions.heartbeats, beats) if beats else []
        for beat, state in zip(beats, states, strict=True):
            if state != "active":  # its owner has ended it
                self._places.pop(beat.owner, None)

    async def _end(self, owners: list[str]) -> None:
        ended = [(owner, self._places.pop(owner)) for owner in owners]  # at once: who comes back now opens another
        for owner, place in ended:
            await asyncio.to_thread(self._store.sessions.finish, place.session_id, owner, "success")
