"""The process that a worker lives in: how it is started, spoken to, and ended.

The API process (`keeper.py`) writes one line of settings to its standard input and then one byte whenever there is
work; when that input ends, the parent is gone and the worker ends too. What it has to say goes to standard output, a
line of JSON each (`messages.py`), an empty one every second. Messages about jobs only save time: both sides look at the
store every second.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from tinsmith.errors import ConfigError
from tinsmith.server import logs
from tinsmith.server.bell import Bell
from tinsmith.server.engine.engine import Engine, choose_threads
from tinsmith.server.engine.group import GroupEngine
from tinsmith.server.engine.sharding import ShardedLayers
from tinsmith.server.full_disk import is_full
from tinsmith.server.members import Members
from tinsmith.server.messages import Drawn, Figure, Message, Replay, WorkerSettings
from tinsmith.server.outage import Outage
from tinsmith.server.priority import give_way
from tinsmith.server.soundness import try_engine
from tinsmith.server.state_locks import hold_as_worker
from tinsmith.server.store import Store, StoreUnavailableError
from tinsmith.server.suspects import HELD_UP, ending
from tinsmith.server.worker import LOOK_AGAIN_SECONDS, Worker
from tinsmith.server.worker_metrics import WorkerMetrics

log = logging.getLogger("tinsmith.server.worker_process")  # which has another name when it is started

E = TypeVar("E", bound=Engine)

_INPUT = 0
_HELD_UP = {
    "disk": "the server's disk is full; work goes on when there is room",
    "database": "the server's database is out of reach; work goes on when it is back",
}
"""For those who wait for results."""


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # both may reach the whole group, and the parent decides
    settings = msgspec.json.decode(_first_line(), type=WorkerSettings)
    logs.configure(settings.log_format, settings.log_level, base_model=settings.base_model)
    logs.log_what_ends_us()
    hold_as_worker(Path(settings.state))
    with _telling_that_we_live():
        run(settings, _opened_store(settings.database))


def run(settings: WorkerSettings, store: Store) -> None:
    """One worker after another, as often as database or disk hold one up: the base model stays loaded meanwhile."""
    with _opened_engine(settings) as engine:
        _work(settings, store, engine)


def _work(settings: WorkerSettings, store: Store, engine: Engine) -> None:
    bell = Bell(_INPUT)
    metrics, outage = WorkerMetrics(_tell_figures, engine.usage()), Outage(log)

    def tell_done(request_ids: Sequence[str]) -> None:
        if request_ids:
            outage.is_over()
            _tell(Message(done=tuple(request_ids)))

    def tell_held_up(error: Exception) -> None:
        if is_full(error):
            cause, what = "disk", f"The disk of {settings.state} is full, so work waits until there is room"
        else:
            cause, what = "database", "The database is out of reach, so work waits until it is back"
        outage.met(what, error)
        metrics.was_held_up(cause)
        _tell(Message(held_up=_HELD_UP[cause]))

    _tell(Message(ready=True))
    forgiven: Collection[str] = ()
    while not bell.is_closed:
        worker = Worker(
            settings,
            store,
            engine,
            bell,
            tell_done,
            forgiven,
            _tell_replay,
            _tell_no_room,
            tell_held_up,
            metrics,
            _tell_drawn,
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


def _tell_replay(replay: Replay) -> None:
    _tell(Message(replay=replay))


def _tell_no_room(reasons: Mapping[str, str]) -> None:
    _tell(Message(no_room=dict(reasons)))


def _tell_drawn(drawn: Sequence[Drawn]) -> None:
    _tell(Message(drawn=tuple(drawn)))


def _tell_figures(figures: Sequence[Figure]) -> None:
    _tell(Message(figures=tuple(figures)))


def _tell(message: Message) -> None:
    with suppress(BrokenPipeError):  # the parent is gone, which the bell will tell
        sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
        sys.stdout.buffer.flush()


@contextmanager
def _telling_that_we_live() -> Iterator[None]:
    """In a thread of its own, since a step may take long. What hangs is the business of the watchdog."""
    over = threading.Event()

    def tell() -> None:
        while not over.wait(LOOK_AGAIN_SECONDS):
            _tell(Message())

    thread = threading.Thread(target=tell, name="signs of life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _opened_store(url: str) -> Store:
    """Waits for a database that is out of reach, unless the parent is gone."""
    parent, outage = os.getppid(), Outage(log)
    while True:
        try:
            return Store(url)
        except StoreUnavailableError as error:
            outage.met("The database is out of reach, so its model is not loaded yet", error)
            time.sleep(LOOK_AGAIN_SECONDS)
            if os.getppid() != parent:
                raise


@contextmanager
def _opened_engine(settings: WorkerSettings) -> Iterator[Engine]:
    """The engine, with those that share its training."""
    if settings.train_workers == 1:
        yield _tried_engine(settings, Engine)
        return
    with _telling_why_not():
        members = Members(settings, _end_like)
        shards = members.shards()
    engine = _tried_engine(settings, GroupEngine, shards)
    with _telling_why_not():
        members.meet(engine)
    yield engine
    members.dismiss(engine)


def _end_like(rank: int, status: int) -> None:
    """What a member died of, we die of, too: it was in the middle of our work, and the server judges by the ending."""
    log.error("Rank %d of the training group is gone: its process ended %s.", rank, ending(status))
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(max(1, status))


def _tried_engine(settings: WorkerSettings, kind: type[E], shards: ShardedLayers | None = None) -> E:
    """An engine after a first try: weights that do not fit their config.json show only when they are used."""
    with _telling_why_not():
        give_way(settings.device)
        engine = kind.open(
            settings.folder,
            device=settings.device,
            dtype=settings.dtype,
            train_token_budget=settings.train_token_budget,
            kv_tokens=settings.kv_tokens,
            deterministic=settings.deterministic,
            shards=shards,
        )
        choose_threads(engine.model, settings.train_workers)
        try_engine(engine)
        return engine


@contextmanager
def _telling_why_not() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        _tell(Message(failed=str(error), is_final=True))
        sys.exit(1)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        _tell(Message(failed=f"{reason}. If memory is not short, its files do not fit: fetch the model again"))
        raise


def _first_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(_INPUT, 1)
        if not byte:
            raise SystemExit("The worker is started by the server; it expects its settings on standard input.")
        line += byte
    return line


if __name__ == "__main__":
    main()
