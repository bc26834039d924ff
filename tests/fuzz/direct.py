"""The app called in this process, without a network: its routes and its store are real, its worker is a toy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from starlette.applications import Starlette

from tests.fuzz.world import DOOMED_KEY, KEY, OTHER_KEY, TOKENIZER_FILES, Answer, Case, Send
from tests.server.api.running import MODELS, facts
from tests.server.api.stand_in import StandInWorkers
from tests.support.tiny_tokenizer import write_folder
from tinsmith.server.app import create_app
from tinsmith.server.checkpoints import CheckpointFolders
from tinsmith.server.config import ServerConfig
from tinsmith.server.models import ModelSource
from tinsmith.server.store import Store
from tinsmith.server.store.records import Failed, Job, Outcome

BASE_MODEL = MODELS[0]
_MIB = 2**20


class ToyWorkers(StandInWorkers):
    """The toy model knows few of the things that pass the checks; what it cannot do, it says so."""

    def _outcome(self, job: Job, is_cancelled: bool) -> Outcome:
        try:
            return super()._outcome(job, is_cancelled)
        except Exception as error:  # noqa: BLE001 - it is not the one that is tested
            return Failed(error=f"the toy cannot: {error!r}"[:200], category="user")
        finally:
            self.executed.clear()


@asynccontextmanager
async def direct(state: Path, database: str = "") -> AsyncIterator[Send]:
    """A way to call an app of its own."""
    config = ServerConfig(
        models=tuple(ModelSource(name, "/nowhere") for name in MODELS),
        state=state,
        database=database,
        api_keys=(KEY, OTHER_KEY, DOOMED_KEY),
        long_poll_seconds=0.05,
        session_timeout_seconds=24 * 3600,
        max_body_bytes=8 * _MIB,
        max_decompressed_bytes=16 * _MIB,  # so that bombs are cheap for us, too
        max_json_bytes=4 * _MIB,
        max_paperwork_bytes=2**20 * _MIB,
    )
    store = Store(config.database_url)
    workers = ToyWorkers(store, CheckpointFolders(config.checkpoints), MODELS)
    folder = write_folder(state / "model", files=TOKENIZER_FILES)
    models = {name: replace(facts(name), folder=folder) for name in MODELS}
    app = create_app(config, store, models, workers)
    try:
        async with app.router.lifespan_context(app):
            yield lambda case: _call(app, case)
    finally:
        store.close()


async def _call(app: Starlette, case: Case) -> Answer:
    path, _, query = case.target.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": case.method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(b"host", b"fuzz"), *((name.encode(), value.encode("latin-1")) for name, value in case.headers)],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    unread, parts = _pieces(case.body), []

    async def receive() -> dict[str, Any]:
        if unread:
            return {"type": "http.request", "body": unread.pop(0), "more_body": bool(unread)}
        await asyncio.Event().wait()  # the client stays
        raise AssertionError

    async def send(part: Any) -> None:
        parts.append(part)

    await app(scope, receive, send)
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in parts[0]["headers"]}
    return Answer(parts[0]["status"], headers, b"".join(part.get("body", b"") for part in parts[1:]))


def _pieces(body: bytes) -> list[bytes]:
    return [body[start : start + 65536] for start in range(0, len(body), 65536)] or [b""]
