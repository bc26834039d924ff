"""Puts the server together and runs it until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from contextlib import closing
from types import FrameType

from tinsmith.errors import ConfigError
from tinsmith.server.app import create_app
from tinsmith.server.checkpoints import CheckpointFolders
from tinsmith.server.config import ServerConfig
from tinsmith.server.memory import collect_seldom
from tinsmith.server.models import ModelFacts, describe
from tinsmith.server.serve import ApiServer, allow_many_connections, listen
from tinsmith.server.snapshots import SnapshotFolders
from tinsmith.server.spilled import SpilledWeights
from tinsmith.server.state_locks import sole_use
from tinsmith.server.store import Store, StoreUnavailableError
from tinsmith.server.supervise import WorkerProcesses

log = logging.getLogger(__name__)


def serve(config: ServerConfig, on_ready: Callable[[str], None]) -> None:
    """Serves until SIGTERM or SIGINT. `on_ready` gets the address once every model is loaded."""
    with sole_use(config.state), closing(_opened_store(config)) as store:
        _serve(config, store, on_ready)


def _serve(config: ServerConfig, store: Store, on_ready: Callable[[str], None]) -> None:
    allow_many_connections()
    models, missing = _described(config, store)
    CheckpointFolders(config.checkpoints).tidy()
    SpilledWeights(config.samplers).tidy()
    SnapshotFolders(config.snapshots).tidy(store.models.snapshots())
    workers = WorkerProcesses(config, {name: facts.folder for name, facts in models.items()}, store, missing)
    log.info("Loading %s ...", ", ".join(models))
    server = ApiServer(create_app(config, store, models, workers))
    collect_seldom()
    # uvicorn stops on these signals and then raises them again, for whoever had the handler before.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _nothing_more_to_do)
    asyncio.run(_run(server, workers, config, on_ready))


async def _run(
    server: ApiServer, workers: WorkerProcesses, config: ServerConfig, on_ready: Callable[[str], None]
) -> None:
    listener = listen(config.host, config.port)
    host = f"[{config.host}]" if ":" in config.host else config.host
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    loading = asyncio.create_task(workers.ready())
    try:
        await asyncio.wait({serving, loading}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
            on_ready(f"http://{host}:{listener.getsockname()[1]}")
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


def _opened_store(config: ServerConfig) -> Store:
    try:
        return Store(config.database_url)
    except StoreUnavailableError as error:
        reason = str(error.orig).strip().partition("\n")[0]
        raise ConfigError(f"The database cannot be opened: {reason}. Check --database, and that it is up.") from error


def _nothing_more_to_do(number: int, frame: FrameType | None) -> None:
    """The server has stopped already when this is called."""
