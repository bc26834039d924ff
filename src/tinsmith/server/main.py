"""Puts the server together and runs it until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import signal
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TypeAlias
from uuid import uuid4

from sqlalchemy.exc import DatabaseError

from tinsmith._version import __version__
from tinsmith.errors import ConfigError
from tinsmith.server.app import create_app
from tinsmith.server.config import DATABASE_FILE, ServerConfig
from tinsmith.server.crew import places
from tinsmith.server.full_disk import WaitError
from tinsmith.server.lives import Lives
from tinsmith.server.memory import collect_seldom
from tinsmith.server.models import ModelFacts, describe
from tinsmith.server.serve import ApiServer, allow_many_connections, listen
from tinsmith.server.shared_workers import SharedWorkers
from tinsmith.server.state_locks import check_database, note_database, sole_use
from tinsmith.server.storage import check_storage, move_in, note_storage, open_storage
from tinsmith.server.store import Store, StoreUnavailableError
from tinsmith.server.store.database import utc_now
from tinsmith.server.supervise import WorkerProcesses

log = logging.getLogger(__name__)


def serve(config: ServerConfig, on_ready: Callable[[str], None]) -> None:
    """Serves until SIGTERM or SIGINT. `on_ready` gets the address once every model is loaded."""
    with sole_use(config.state), closing(_opened_store(config)) as store:
        if config.storage and store.lead.can_be_shared:
            _serve(config, store, on_ready, partial(_shared_workers, config, store))
            return
        name = _new_name(config)
        with store.identity.sole_use(name):
            _serve(config, store, on_ready, partial(_own_workers, config, store, name))


def _own_workers(
    config: ServerConfig, store: Store, name: str, folders: Mapping[str, Path], missing: Mapping[str, str]
) -> WorkerProcesses:
    """Those of the only server on its database."""
    _remove_unneeded(config, store)
    lead = name if store.lead.can_be_shared else ""
    return WorkerProcesses(config, folders, store, missing, _lives(config, folders), lead)


def _shared_workers(
    config: ServerConfig, store: Store, folders: Mapping[str, Path], missing: Mapping[str, str]
) -> SharedWorkers:
    """Those of all servers on a database: whoever leads runs them."""

    def begin(name: str) -> WorkerProcesses:
        return WorkerProcesses(config, folders, store, missing, _lives(config, folders), name)

    prepare = partial(_remove_unneeded, config, store)
    return SharedWorkers(store, config.storage, [*folders], partial(_new_name, config), prepare, begin)


_MakeWorkers: TypeAlias = Callable[[Mapping[str, Path], Mapping[str, str]], WorkerProcesses | SharedWorkers]
"""From the folders of the base models, and why some are missing."""


def _serve(config: ServerConfig, store: Store, on_ready: Callable[[str], None], make_workers: _MakeWorkers) -> None:
    check_database(config.state, store.identity.database_id())
    _warn_if_open_to_all(config.state)
    store.begin_reserve()
    allow_many_connections()
    models, missing = _described(config, store)
    _tidy_files(config, store)
    _log_start(config, [*models])
    with _refused_if_away():
        workers = make_workers({name: facts.folder for name, facts in models.items()}, missing)
    server = ApiServer(create_app(config, store, models, workers))
    collect_seldom()
    # uvicorn stops on these signals and then raises them again, for whoever had the handler before.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _nothing_more_to_do)
    asyncio.run(_run(server, workers, config, on_ready))
    log.info("Stopped.")


def _lives(config: ServerConfig, base_models: Iterable[str]) -> Lives | None:
    if not config.ray:
        return None
    from tinsmith.server.on_ray.lives import RayLives

    return RayLives(config, {name: places(config.train_workers, config.sample_workers) for name in base_models})


def _tidy_files(config: ServerConfig, store: Store) -> None:
    """Refuses a storage that is out of reach, or another's."""
    check_storage(config.state, config.storage)
    database_id = store.identity.database_id()
    storage = open_storage(config.state, config.storage, config.cache_bytes, store)
    if storage.objects is not None:
        storage.objects.claim(database_id)
    note_database(config.state, database_id)
    note_storage(config.state, config.storage)
    with _refused_if_away():
        storage.checkpoints.tidy()
        storage.spilled.tidy()
        storage.snapshots.tidy()
        if storage.objects is not None:
            move_in(config.state, storage)


def _remove_unneeded(config: ServerConfig, store: Store) -> None:
    """What workers before have left. Called when there is none."""
    storage = open_storage(config.state, config.storage, config.cache_bytes, store)
    storage.snapshots.remove_unneeded(store.models.snapshots())


@contextmanager
def _refused_if_away() -> Iterator[None]:
    try:
        yield
    except WaitError as error:
        raise ConfigError(f"The server cannot start now: {error}. Start it again when that is over.") from error


def _log_start(config: ServerConfig, models: Sequence[str]) -> None:
    kept = "no limit to" if config.max_checkpoint_bytes is None else f"{config.max_checkpoint_bytes:,} bytes of"
    log.info(
        "Tinsmith %s starts on %s, port %d, with its state in %s%s%s%s. Limits for each owner: %s models, %s "
        "checkpoints, %s operations that wait with %s bytes, %s open requests.",
        __version__,
        config.host,
        config.port,
        config.state,
        " and in a database elsewhere" if config.database else "",
        f", its files in {config.storage}" if config.storage else "",
        f", its workers on {_cluster(config)}" if config.ray else "",
        f"{config.max_models:,}",
        kept,
        f"{config.max_queued_requests:,}",
        f"{config.max_queued_bytes:,}",
        f"{config.max_open_requests:,}",
    )
    log.info("Loading %s ...", ", ".join(models))


def _cluster(config: ServerConfig) -> str:
    return "the Ray cluster of this machine" if config.ray == "auto" else f"the Ray cluster at {config.ray}"


async def _run(
    server: ApiServer, workers: WorkerProcesses | SharedWorkers, config: ServerConfig, on_ready: Callable[[str], None]
) -> None:
    listener = listen(config.host, config.port)
    host = f"[{config.host}]" if ":" in config.host else config.host
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    loading = asyncio.create_task(workers.ready())
    try:
        await asyncio.wait({serving, loading}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done() and not loading.cancelled():  # as it is if the server is stopped meanwhile
            loading.result()
            address = f"http://{host}:{listener.getsockname()[1]}"
            log.info("Ready at %s.", address)
            on_ready(address)
            await serving
    finally:
        loading.cancel()
        server.should_exit = True
        await serving


def _described(config: ServerConfig, store: Store) -> tuple[dict[str, ModelFacts], dict[str, str]]:
    """The base models, and why some are not served.

    One whose files are missing is no reason to let the others down, if it was used before: its models wait for it.
    """
    found: dict[str, ModelFacts] = {}
    missing: dict[str, str] = {}
    used = store.models.base_models()
    for source in config.models:
        try:
            found[source.name] = describe(source)
        except ConfigError as error:
            if source.name not in used or len(missing) + 1 == len(config.models):
                raise
            missing[source.name] = str(error)
            log.error("%s is not served, and its models wait: %s", source.name, error)
    return found, missing


def _warn_if_open_to_all(state: Path) -> None:
    """A folder that we make is for its owner alone; one that was there may be meant otherwise."""
    mode = stat.S_IMODE(state.stat().st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        log.warning(
            "Other users of this machine can look into the state folder %s (its mode is %o), which holds prompts and "
            "data. Close it with: chmod 700 %s",
            state,
            mode,
            state,
        )


def _new_name(config: ServerConfig) -> str:
    """For this server and this moment."""
    where = f"process {os.getpid()} on {platform.node()}, with the state folder {config.state.absolute()}"
    return f"{where}, since {utc_now():%Y-%m-%d %H:%M:%S} UTC ({uuid4().hex[:8]})"


def _opened_store(config: ServerConfig) -> Store:
    if not config.database and not (config.state / DATABASE_FILE).exists():
        check_database(config.state, None)  # before an empty one is made, which would look as if everything were gone
    try:
        return Store(config.database_url)
    except StoreUnavailableError as error:
        reason = str(error.orig).strip().partition("\n")[0]
        raise ConfigError(f"The database cannot be opened: {reason}. Check --database, and that it is up.") from error
    except DatabaseError as error:
        file = config.database_url.partition(":///")[2]
        raise ConfigError(
            f"The database {file} cannot be read: {error.orig}. If the disk is sound, the file is damaged or none of "
            "ours: put that of a backup in its place, or give another with --database or --state."
        ) from error


def _nothing_more_to_do(number: int, frame: FrameType | None) -> None:
    """The server has stopped already when this is called."""
