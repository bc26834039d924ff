"""Who may use a state folder: one server at a time, and no new one before the workers of the last one have ended.

A worker whose server was killed ends after its step. Until then it may be writing a checkpoint, and what it completes
still counts.

A folder and a database belong together: whatever one of them does not know of the other would be lost.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from tinsmith.errors import ConfigError

log = logging.getLogger(__name__)

WAIT_SECONDS = 120.0
_LOOK_AGAIN_SECONDS = 0.05
_SERVER, _WORKERS = "serve.lock", "workers.lock"
DATABASE_ID = "database-id"
"""Names the database of the folder, in its own words."""


@contextmanager
def sole_use(state: Path) -> Iterator[None]:
    """The folder is made if it is not there, for its owner alone. Two servers on one folder would run the same jobs."""
    lock = FileLock(state / _SERVER)
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(
            f"Another server uses the state folder {state}. Stop it (that of local mode ends by itself, two seconds "
            "after the last script), or choose another folder: with --state for `tinsmith serve`, with TINSMITH_STATE "
            "in local mode."
        ) from None
    except OSError as error:
        raise ConfigError(f"The state folder {state} cannot be used: {error}. Choose another with --state.") from error
    try:
        _wait_for_workers(state)
        yield
    finally:
        lock.release()


def hold_as_worker(state: Path) -> None:
    """Lets no other server use the folder until this process ends."""
    fcntl.flock(os.open(state / _WORKERS, os.O_CREAT | os.O_RDWR), fcntl.LOCK_SH)


@contextmanager
def one_at_a_time(file: Path) -> Iterator[None]:
    """Of all threads and processes that come here with this file; one that dies makes room for the next."""
    descriptor = os.open(file, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def check_database(state: Path, database_id: str | None) -> None:
    """Refuses a database, or `None` if there is none, that is not the one of this folder."""
    file = state / DATABASE_ID
    if file.exists() and (expected := file.read_text().strip()) != database_id:
        raise ConfigError(
            f"The state folder {state} belongs to another database, that with the id {expected}. Start the server with "
            "the --database that it had before, or choose another folder for this one, with --state. If that database "
            f"is lost for good, delete {file}; the server will know nothing of what is in the folder."
        )


def note_database(state: Path, database_id: str) -> None:
    """From now on the folder is that of this database: to be called when it is known that a server can use both."""
    if not (state / DATABASE_ID).exists():
        write_note(state / DATABASE_ID, database_id)


def write_note(file: Path, text: str) -> None:
    """Whole or not at all, whatever happens."""
    unfinished = file.with_name(f".unfinished-{file.name}")
    with unfinished.open("w") as opened:
        opened.write(f"{text}\n")
        opened.flush()
        os.fsync(opened.fileno())
    unfinished.replace(file)


def _wait_for_workers(state: Path) -> None:
    descriptor = os.open(state / _WORKERS, os.O_CREAT | os.O_RDWR)
    try:
        if not _is_free(descriptor):
            log.info("A worker of the last server is still busy; waiting up to %.0f s for its end.", WAIT_SECONDS)
        end = time.monotonic() + WAIT_SECONDS
        while not _is_free(descriptor):
            if time.monotonic() > end:
                raise ConfigError(
                    f"A worker of an earlier server still uses the state folder {state}. Wait until it has finished "
                    "its step, or end that process."
                )
            time.sleep(_LOOK_AGAIN_SECONDS)
    finally:
        os.close(descriptor)


def _is_free(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
