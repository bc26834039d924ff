"""What the servers on one database tell each other at once: that there is work, what is done, what was drawn.

It only saves time, as all of them look at the database every second; a message may be lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from uuid import uuid4

import msgspec

from tinsmith.server.messages import Drawn
from tinsmith.server.outage import Outage
from tinsmith.server.store import Store, StoreUnavailableError
from tinsmith.server.store.relay import MAX_BYTES

log = logging.getLogger(__name__)

_TRY_AGAIN_SECONDS = 1.0
_START_SECONDS = _STOP_SECONDS = 5.0


class Told(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    by: str
    """Who says it, and need not hear it."""
    wake: tuple[str, ...] = ()
    """The base models for which there is work."""
    done: tuple[str, ...] = ()
    """Jobs that are over."""
    drawn: tuple[Drawn, ...] = ()
    samples: dict[str, int] = {}
    """By base model: how many samples that came to the sender are not drawn yet, as it knows."""


class Relay:
    """`hear` is called on the event loop with what others say."""

    def __init__(self, store: Store, hear: Callable[[Told], None]) -> None:
        self._store = store
        self._hear = hear
        self._me = uuid4().hex[:8]
        self._waiting: list[Told] = []
        self._news = asyncio.Event()
        self._over = threading.Event()
        self._listens = asyncio.Event()
        self._outage = Outage(log, over="This server hears the others again")
        self._telling: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None

    async def start(self) -> None:
        """Returns when it listens, if that is soon."""
        self._telling = asyncio.create_task(self._tell_all(), name="relay")
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._listen, args=(loop,), name="relay", daemon=True)
        self._thread.start()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._listens.wait(), _START_SECONDS)

    async def stop(self) -> None:
        self._over.set()
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.gather(self._telling, return_exceptions=True)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _STOP_SECONDS)

    # Telling

    def wake(self, base_model: str) -> None:
        self._tell(Told(by=self._me, wake=(base_model,)))

    def done(self, request_ids: Sequence[str]) -> None:
        if request_ids:
            self._tell(Told(by=self._me, done=tuple(request_ids)))

    def drawn(self, drawn: Sequence[Drawn]) -> None:
        self._tell(Told(by=self._me, drawn=tuple(drawn)))

    def samples(self, by_base_model: Mapping[str, int]) -> None:
        self._tell(Told(by=self._me, samples=dict(by_base_model)))

    def _tell(self, told: Told) -> None:
        self._waiting.append(told)
        self._news.set()

    async def _tell_all(self) -> None:
        """What comes while some is on its way goes together, after it."""
        while True:
            await self._news.wait()
            self._news.clear()
            waiting, self._waiting = self._waiting, []
            texts = [text for told in joined(waiting) for text in pieces(told)]
            try:
                await asyncio.to_thread(self._store.relay.tell, texts)
            except StoreUnavailableError:
                continue  # others say so
            except Exception:
                log.exception("could not tell other servers what is new")

    # Hearing

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        def begin() -> None:
            self._outage.is_over()
            loop.call_soon_threadsafe(self._listens.set)

        while not self._over.is_set():
            try:
                self._store.relay.listen(begin, lambda text: self._pass_on(text, loop), self._over)
            except Exception as error:  # noqa: BLE001 - the driver's own errors are among them
                if not self._over.is_set():
                    self._outage.met("This server does not hear the others, and looks for itself every second", error)
                self._over.wait(_TRY_AGAIN_SECONDS)

    def _pass_on(self, text: str, loop: asyncio.AbstractEventLoop) -> None:
        told = msgspec.json.decode(text, type=Told)
        if told.by != self._me:
            loop.call_soon_threadsafe(self._hear, told)


def joined(told: Sequence[Told]) -> Iterator[Told]:
    """Few messages in place of many, in their order. Who is woken twice at once is woken once."""
    if told:
        wake = dict.fromkeys(name for each in told for name in each.wake)
        done = (request_id for each in told for request_id in each.done)
        drawn = (each_drawn for each in told for each_drawn in each.drawn)
        yield Told(by=told[0].by, wake=tuple(wake), done=tuple(done), drawn=tuple(drawn))
        samples = [each.samples for each in told if each.samples]
        yield from (Told(by=told[0].by, samples=newest) for newest in samples[-1:])


def pieces(told: Told) -> Iterator[str]:
    """As texts that are short enough. What was drawn comes before its end is told."""
    text = msgspec.json.encode(told)
    if len(text) <= MAX_BYTES:
        yield text.decode()
        return
    for half in _halves(told):
        yield from pieces(half)


def _halves(told: Told) -> Iterator[Told]:
    if told.drawn and (told.done or told.wake):
        yield Told(by=told.by, drawn=told.drawn)
        yield Told(by=told.by, wake=told.wake, done=told.done)
    elif len(told.drawn) == 1:
        yield from (Told(by=told.by, drawn=(part,)) for part in _parts(told.drawn[0]))
    elif told.drawn:
        middle = len(told.drawn) // 2
        yield from (Told(by=told.by, drawn=part) for part in (told.drawn[:middle], told.drawn[middle:]))
    elif told.wake and told.done:
        yield Told(by=told.by, wake=told.wake)
        yield Told(by=told.by, done=told.done)
    elif len(told.done) > 1:
        middle = len(told.done) // 2
        yield from (Told(by=told.by, done=part) for part in (told.done[:middle], told.done[middle:]))


def _parts(drawn: Drawn) -> Iterator[Drawn]:
    """One token that is too long, because much was asked about it, is left out: the result has it."""
    if len(drawn.tokens) < 2:
        return
    middle = len(drawn.tokens) // 2
    for start, end in ((0, middle), (middle, len(drawn.tokens))):
        yield Drawn(
            drawn.request_id,
            drawn.index,
            drawn.start + start,
            drawn.tokens[start:end],
            drawn.logprobs[start:end],
            drawn.topk[start:end],
        )
