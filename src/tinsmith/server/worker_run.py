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
from contextlib import contextmanager
from typing import TypeAlias, TypeVar

import msgspec

from tinsmith.errors import ConfigError
from tinsmith.server.bell import Bell
from tinsmith.server.engine.engine import Engine, choose_threads
from tinsmith.server.engine.group import GroupEngine
from tinsmith.server.full_disk import is_full
from tinsmith.server.members import Members
from tinsmith.server.messages import Drawn, Figure, Message, Replay, WorkerSettings
from tinsmith.server.outage import Outage
from tinsmith.server.soundness import try_engine
from tinsmith.server.store import Store, StoreUnavailableError
from tinsmith.server.suspects import HELD_UP, ending
from tinsmith.server.weights_exchange import AskedTrainer, PublishedWeights
from tinsmith.server.worker import LOOK_AGAIN_SECONDS, Worker
from tinsmith.server.worker_metrics import WorkerMetrics

log = logging.getLogger(__name__)

E = TypeVar("E", bound=Engine)
Tell: TypeAlias = Callable[[Message], None]

_HELD_UP = {
    "disk": "the server's disk is full; work goes on when there is room",
    "database": "the server's database is out of reach; work goes on when it is back",
}
"""For those who wait for results."""
_NO_SAMPLES = 1
"""Tokens in the cache of a worker that draws none."""


def run(
    settings: WorkerSettings,
    bell: Bell,
    tell: Tell,
    is_wanted: Callable[[], bool],
    published: PublishedWeights | None = None,
    trainer: AskedTrainer | None = None,
) -> None:
    """One worker after another, as often as database or disk hold one up: the base model stays loaded meanwhile.

    `is_wanted` says whether to go on waiting for a database that is out of reach. See `Worker` for the others.
    """
    with _telling_that_we_live(tell):
        store = _opened_store(settings.database, is_wanted)
        with _opened_engine(settings, tell) as engine:
            _work(settings, store, engine, bell, tell, published, trainer)


def _work(
    settings: WorkerSettings,
    store: Store,
    engine: Engine,
    bell: Bell,
    tell: Tell,
    published: PublishedWeights | None,
    trainer: AskedTrainer | None,
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
            trainer,
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
def _telling_that_we_live(tell: Tell) -> Iterator[None]:
    """In a thread of its own, since a step may take long. What hangs is the business of the watchdog."""
    over = threading.Event()

    def go_on() -> None:
        while not over.wait(LOOK_AGAIN_SECONDS):
            tell(Message())

    thread = threading.Thread(target=go_on, name="signs of life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _opened_store(url: str, is_wanted: Callable[[], bool]) -> Store:
    outage = Outage(log)
    while True:
        try:
            return Store(url)
        except StoreUnavailableError as error:
            outage.met("The database is out of reach, so its model is not loaded yet", error)
            time.sleep(LOOK_AGAIN_SECONDS)
            if not is_wanted():
                raise


@contextmanager
def _opened_engine(settings: WorkerSettings, tell: Tell) -> Iterator[Engine]:
    """The engine, with those that share its training."""
    if settings.train_workers == 1:
        yield _tried_engine(settings, Engine, tell)
        return
    with _telling_why_not(tell):
        members = Members(settings, _end_like)
    engine = _tried_engine(settings, GroupEngine, tell)
    with _telling_why_not(tell):
        members.meet(engine)
    yield engine
    members.dismiss(engine)


def _end_like(rank: int, status: int) -> None:
    """What a member died of, we die of, too: it was in the middle of our work, and the server judges by the ending."""
    log.error("Rank %d of the training group is gone: its process ended %s.", rank, ending(status))
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(max(1, status))


def _tried_engine(settings: WorkerSettings, kind: type[E], tell: Tell) -> E:
    """An engine after a first try: weights that do not fit their config.json show only when they are used."""
    with _telling_why_not(tell):
        engine = kind.open(
            settings.folder,
            device=settings.device,
            dtype=settings.dtype,
            train_token_budget=settings.train_token_budget,
            kv_tokens=_NO_SAMPLES if settings.role == "train" else settings.kv_tokens,
            deterministic=settings.deterministic,
        )
        choose_threads(engine.model, settings.train_workers)
        try_engine(engine)
        return engine


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
