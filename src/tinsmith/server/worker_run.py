"""What every worker process does, wherever it is: load the base model, and work until it shall end.

What it has to say goes to `tell`; there is work when its bell rings, and when the bell is gone it ends.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeAlias, TypeVar

import msgspec

from tinsmith.errors import ConfigError
from tinsmith.server.bell import Bell
from tinsmith.server.engine.engine import Engine, choose_threads
from tinsmith.server.engine.group import GroupEngine
from tinsmith.server.engine.sharding import ShardedLayers
from tinsmith.server.full_disk import is_full
from tinsmith.server.member_lives import Begun, Ending, MemberLives
from tinsmith.server.member_process_life import MembersHere
from tinsmith.server.members import Members
from tinsmith.server.messages import Drawn, Figure, Member, Message, Replay, WorkerSettings
from tinsmith.server.outage import Outage
from tinsmith.server.priority import give_way
from tinsmith.server.soundness import try_engine
from tinsmith.server.store import Store, StoreUnavailableError
from tinsmith.server.store.leading import ReplacedError
from tinsmith.server.suspects import HELD_UP, ending
from tinsmith.server.weights_exchange import PublishedWeights, ReceivedWeights
from tinsmith.server.worker import LOOK_AGAIN_SECONDS, Worker
from tinsmith.server.worker_metrics import WorkerMetrics

log = logging.getLogger(__name__)

E = TypeVar("E", bound=Engine)
Tell: TypeAlias = Callable[[Message], None]
End: TypeAlias = Callable[[int], None]

_HELD_UP = {
    "disk": "the server's disk is full; work goes on when there is room",
    "database": "the server's database is out of reach; work goes on when it is back",
}
"""For those who wait for results."""
_NO_SAMPLES = 1
"""Tokens in the cache of a worker that draws none."""


def end_process(status: int) -> None:
    """As one that ended with this status."""
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(max(1, status))


def run(
    settings: WorkerSettings,
    bell: Bell,
    tell: Tell,
    published: PublishedWeights | None = None,
    received: ReceivedWeights | None = None,
    members: MemberLives | None = None,
    end: End = end_process,
) -> None:
    """One worker after another, as often as database or disk hold one up: the base model stays loaded meanwhile.

    `members` is where the others of a training group live; when one of them is lost, `end` ends us with the status that
    it had. See `Worker` for the rest.
    """
    with ExitStack() as life:
        every_second = [lambda: tell(Message())]
        life.enter_context(_beside(every_second))
        store = _opened_store(settings.database, bell, tell)
        try:
            if settings.lead:
                store.lead.work_for(settings.lead)
                store.lead.hold_as_worker()
                every_second.append(store.lead.keep_as_worker)
            engine = life.enter_context(_opened_engine(settings, tell, members or MembersHere(), end))
            _work(settings, store, engine, bell, tell, published, received)
        except ReplacedError as error:
            log.error("This worker ends: %s.", error)
            tell(Message(failed=str(error)))


def _work(
    settings: WorkerSettings,
    store: Store,
    engine: Engine,
    bell: Bell,
    tell: Tell,
    published: PublishedWeights | None,
    received: ReceivedWeights | None,
) -> None:
    def tell_figures(figures: Sequence[Figure]) -> None:
        tell(Message(figures=tuple(figures)))

    metrics, outage = WorkerMetrics(tell_figures, engine.usage()), Outage(log)

    def tell_done(request_ids: Sequence[str]) -> None:
        if request_ids:
            outage.is_over()
            tell(Message(done=tuple(request_ids)))

    def tell_held_up(error: Exception) -> None:
        if is_full(error):
            cause, what = "disk", f"The disk of {settings.state} is full, so work waits until there is room"
        else:
            cause, what = "database", "The database is out of reach, so work waits until it is back"
        outage.met(what, error)
        metrics.was_held_up(cause)
        tell(Message(held_up=_HELD_UP[cause]))

    def tell_replay(replay: Replay) -> None:
        tell(Message(replay=replay))

    def tell_no_room(reasons: Mapping[str, str]) -> None:
        tell(Message(no_room=dict(reasons)))

    def tell_drawn(drawn: Sequence[Drawn]) -> None:
        tell(Message(drawn=tuple(drawn)))

    tell(Message(ready=True))
    forgiven: Collection[str] = ()
    while not bell.is_closed:
        worker = Worker(
            settings,
            store,
            engine,
            bell,
            tell_done,
            forgiven,
            tell_replay,
            tell_no_room,
            tell_held_up,
            metrics,
            tell_drawn,
            published,
            received,
        )
        try:
            worker.run()
        except StoreUnavailableError as error:
            tell_held_up(error)
        else:
            return
        forgiven = worker.abandon()
        settings = msgspec.structs.replace(settings, last_status=HELD_UP)
        time.sleep(LOOK_AGAIN_SECONDS)


@contextmanager
def _beside(every_second: Sequence[Callable[[], None]]) -> Iterator[None]:
    """In a thread of its own, since a step may take long. What hangs is the business of the watchdog."""
    over = threading.Event()

    def go_on() -> None:
        while not over.wait(LOOK_AGAIN_SECONDS):
            for do in every_second:
                do()

    thread = threading.Thread(target=go_on, name="signs of life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _opened_store(url: str, bell: Bell, tell: Tell) -> Store:
    outage = Outage(log)
    while True:
        try:
            return Store(url)
        except StoreUnavailableError as error:
            outage.met("The database is out of reach, so its model is not loaded yet", error)
            tell(Message(held_up=_HELD_UP["database"]))
            time.sleep(LOOK_AGAIN_SECONDS)
            if not bell.rang() and bell.is_closed:
                raise


@contextmanager
def _opened_engine(settings: WorkerSettings, tell: Tell, lives: MemberLives, end: End) -> Iterator[Engine]:
    """The engine, with those that share its training."""
    if settings.train_workers == 1:
        yield _tried_engine(settings, Engine, tell)
        return
    with _telling_why_not(tell):
        members = Members(settings, lives, partial(_tell_begun, tell), partial(_end_like, tell, end))
    is_met = False
    try:
        with _telling_why_not(tell):
            shards = members.shards(_kv_tokens(settings))
        engine = _tried_engine(settings, GroupEngine, tell, shards, settings.train_workers if lives.are_here else 1)
        with _telling_why_not(tell):
            members.meet(engine)
            is_met = True
        yield engine
    except Exception:
        if not is_met or engine.is_broken:
            members.await_loss()
        raise
    members.dismiss(engine)


def _tell_begun(tell: Tell, rank: int, begun: Begun) -> None:
    tell(Message(member=Member(rank, begun.where, begun.process)))


def _end_like(tell: Tell, end: End, rank: int, lost: Ending) -> None:
    """What a member died of, we die of, too: it was in the middle of our work, and the server judges by the ending."""
    log.error("Rank %d of the training group is gone: its process ended %s.", rank, ending(lost.status))
    if lost.why:
        tell(Message(failed=f"rank {rank} of the training group is gone: {lost.why}", is_final=lost.is_final))
    end(lost.status)


def _tried_engine(
    settings: WorkerSettings, kind: type[E], tell: Tell, shards: ShardedLayers | None = None, sharers: int = 1
) -> E:
    """An engine after a first try: weights that do not fit their config.json show only when they are used.

    `sharers` divide the threads of this machine.
    """
    with _telling_why_not(tell):
        give_way(settings.device)
        engine = kind.open(
            settings.folder,
            device=settings.device,
            dtype=settings.dtype,
            train_token_budget=settings.train_token_budget,
            kv_tokens=_kv_tokens(settings),
            deterministic=settings.deterministic,
            shards=shards,
        )
        choose_threads(engine.model, sharers)
        try_engine(engine)
        return engine


def _kv_tokens(settings: WorkerSettings) -> int | None:
    return _NO_SAMPLES if settings.role == "train" else settings.kv_tokens


@contextmanager
def _telling_why_not(tell: Tell) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        tell(Message(failed=str(error), is_final=True))
        sys.exit(1)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        tell(Message(failed=f"{reason}. If memory is not short, its files do not fit: fetch the model again"))
        raise
