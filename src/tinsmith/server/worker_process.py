"""The process that a worker lives in: how it is started, spoken to, and ended.

The API process (`keeper.py`) writes one line of settings to its standard input and then one byte whenever there is
work; when that input ends, the parent is gone and the worker ends too. What it has to say goes to standard output, a
line of JSON each (`messages.py`). Messages about jobs only save time: both sides look at the store every second.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from tinsmith.errors import ConfigError
from tinsmith.server.bell import Bell
from tinsmith.server.engine.engine import Engine, choose_threads
from tinsmith.server.full_disk import DiskFullError
from tinsmith.server.messages import Message, WorkerSettings
from tinsmith.server.soundness import try_engine
from tinsmith.server.state_locks import hold_as_worker
from tinsmith.server.store import Store, StoreUnavailableError
from tinsmith.server.suspects import HELD_UP
from tinsmith.server.worker import LOOK_AGAIN_SECONDS, Worker

log = logging.getLogger(__name__)

_INPUT = 0


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # both may reach the whole group, and the parent decides
    settings = msgspec.json.decode(_first_line(), type=WorkerSettings)
    hold_as_worker(Path(settings.state))
    run(settings, _opened_store(settings.database))


def run(settings: WorkerSettings, store: Store) -> None:
    """One worker after another, as often as database or disk hold one up: the base model stays loaded meanwhile."""
    engine, bell = _opened_engine(settings), Bell(_INPUT)
    _tell(Message(ready=True))
    forgiven: Collection[str] = ()
    while not bell.is_closed:
        worker = Worker(settings, store, engine, bell, _tell_done, forgiven)
        try:
            worker.run()
        except StoreUnavailableError as error:
            log.error("The database is out of reach or full, so work waits: %s", error)
        except DiskFullError as error:
            log.error("The disk of %s is full, so work waits until there is room: %s", settings.state, error)
        else:
            return
        forgiven = worker.abandon()
        settings = msgspec.structs.replace(settings, last_status=HELD_UP)
        time.sleep(LOOK_AGAIN_SECONDS)


def _tell_done(request_ids: Sequence[str]) -> None:
    if request_ids:
        _tell(Message(done=tuple(request_ids)))


def _tell(message: Message) -> None:
    with suppress(BrokenPipeError):  # the parent is gone, which the bell will tell
        sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
        sys.stdout.buffer.flush()


def _opened_store(url: str) -> Store:
    """Waits for a database that is out of reach, unless the parent is gone."""
    parent = os.getppid()
    while True:
        try:
            return Store(url)
        except StoreUnavailableError as error:
            log.warning("The database is out of reach: %s", error)
            time.sleep(LOOK_AGAIN_SECONDS)
            if os.getppid() != parent:
                raise


def _opened_engine(settings: WorkerSettings) -> Engine:
    """The engine, after a first try: weights that do not fit their config.json show only when they are used."""
    try:
        engine = Engine.open(
            settings.folder,
            device=settings.device,
            dtype=settings.dtype,
            train_token_budget=settings.train_token_budget,
            kv_tokens=settings.kv_tokens,
        )
        choose_threads(engine.model)
        try_engine(engine)
    except ConfigError as error:
        _tell(Message(failed=str(error), is_final=True))
        sys.exit(1)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        _tell(Message(failed=f"{reason}. If memory is not short, its files do not fit: fetch the model again"))
        raise
    return engine


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
