"""Puts the server together and runs it until it is told to stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from filelock import FileLock, Timeout

from tinsmith.errors import ConfigError
from tinsmith.server.app import create_app
from tinsmith.server.checkpoints import CheckpointFolders
from tinsmith.server.config import ServerConfig
from tinsmith.server.models import describe
from tinsmith.server.serve import ApiServer, listen
from tinsmith.server.store import Store
from tinsmith.server.supervise import WorkerProcesses


def serve(config: ServerConfig, on_ready: Callable[[str], None]) -> None:
    """Serves until SIGTERM or SIGINT. `on_ready` gets the address once every model is loaded."""
    config.state.mkdir(parents=True, exist_ok=True)
    with _sole_use(config.state):
        _serve(config, on_ready)


def _serve(config: ServerConfig, on_ready: Callable[[str], None]) -> None:
    models = {source.name: describe(source) for source in config.models}
    CheckpointFolders(config.checkpoints).tidy()
    store = Store(config.database_url)
    workers = WorkerProcesses(config, {name: facts.folder for name, facts in models.items()})
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
    await asyncio.wait({serving, loading}, return_when=asyncio.FIRST_COMPLETED)
    if loading.done():
        on_ready(f"http://{host}:{listener.getsockname()[1]}")
    loading.cancel()
    await serving


@contextmanager
def _sole_use(state: Path) -> Iterator[None]:
    """Two servers on one folder would run the same jobs."""
    lock = FileLock(state / "serve.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(
            f"Another server uses the state folder {state}. Stop it, or choose another folder with --state."
        ) from None
    try:
        yield
    finally:
        lock.release()


def _nothing_more_to_do(number: int, frame: FrameType | None) -> None:
    """The server has stopped already when this is called."""
