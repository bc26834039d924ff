"""Puts the server together and runs it until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from types import FrameType

from tinsmith.errors import ConfigError
from tinsmith.server.app import create_app
from tinsmith.server.checkpoints import CheckpointFolders
from tinsmith.server.config import ServerConfig
from tinsmith.server.models import describe
from tinsmith.server.serve import ApiServer, allow_many_connections, listen
from tinsmith.server.snapshots import tidy_snapshots
from tinsmith.server.spilled import SpilledWeights
from tinsmith.server.state_locks import sole_use
from tinsmith.server.store import Store, StoreUnavailableError
from tinsmith.server.supervise import WorkerProcesses

log = logging.getLogger(__name__)


def serve(config: ServerConfig, on_ready: Callable[[str], None]) -> None:
    """Serves until SIGTERM or SIGINT. `on_ready` gets the address once every model is loaded."""
    with sole_use(config.state):
        _serve(config, on_ready)


def _serve(config: ServerConfig, on_ready: Callable[[str], None]) -> None:
    allow_many_connections()
    models = {source.name: describe(source) for source in config.models}
    CheckpointFolders(config.checkpoints).tidy()
    SpilledWeights(config.samplers).tidy()
    store = _opened_store(config)
    tidy_snapshots(config.snapshots, store.models.snapshots())
    workers = WorkerProcesses(config, {name: facts.folder for name, facts in models.items()}, store)
    log.info("Loading %s ...", ", ".join(models))
    server = ApiServer(create_app(config, store, models, workers))
    # uvicorn stops on these signals and then raises them again, for whoever had the handler before.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _nothing_more_to_do)
    try:
        asyncio.run(_run(server, workers, config, on_ready))
    finally:
        store.close()


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


def _opened_store(config: ServerConfig) -> Store:
    try:
        return Store(config.database_url)
    except StoreUnavailableError as error:
        reason = str(error.orig).strip().partition("\n")[0]
        raise ConfigError(f"The database cannot be opened: {reason}. Check --database, and that it is up.") from error


def _nothing_more_to_do(number: int, frame: FrameType | None) -> None:
    """The server has stopped already when this is called."""
