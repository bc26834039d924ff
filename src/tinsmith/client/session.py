"""A session at the server: opened on first use, kept alive by heartbeats, finished at close.

The keep-alive task holds the session weakly: when the last client that uses it is gone, the heartbeats stop within
one period. What is still open when the interpreter exits is finished then, briefly and as well as possible.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import itertools
import logging
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Literal

from tinsmith._version import PROTOCOL_VERSION
from tinsmith.client import futures
from tinsmith.client.checks import check_metadata
from tinsmith.client.config import Config
from tinsmith.client.connection import Call, Connection
from tinsmith.client.once import Once
from tinsmith.client.transport import HttpResponse, Traffic
from tinsmith.errors import NotFoundError, RequestExpiredError, TinkerError
from tinsmith.types import (
    ClientConfigRequest,
    ClientDynamicConfigResponse,
    CreateSessionRequest,
    CreateSessionResponse,
    SessionHeartbeatRequest,
)
from tinsmith.wire import json as wire_json

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 10.0
HEARTBEAT_WARNING_SECONDS = 120.0
QUICK_TIMEOUT_SECONDS = 10.0
MIN_REFRESH_SECONDS = 10
FINISH_SECONDS = 5.0
EXIT_SECONDS = 2.0
LAST_WORDS_AT_EXIT_SECONDS = 1.5

FinishStatus = Literal["success", "errored", "interrupted"]

_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
_inherited: weakref.WeakValueDictionary[tuple[tuple[str, str], str], Session] = weakref.WeakValueDictionary()
_inherited_lock = threading.Lock()


class Session:
    def __init__(
        self,
        connection: Connection,
        *,
        user_metadata: Mapping[str, str] | None = None,
        display_name: str | None = None,
        session_id: str | None = None,
    ) -> None:
        self.connection = connection
        self.session_id: str | None = None
        self._inherited_id = session_id
        self._request = CreateSessionRequest(
            tags=list(connection.config.tags),
            user_metadata=check_metadata(user_metadata) or {},
            sdk_version=PROTOCOL_VERSION,
            project_id=connection.config.project_id,
            display_name=display_name,
        )
        self._opening: Once[str] = Once()
        self._keeper: asyncio.Task[None] | None = None
        self._finished = False
        # Numbers within the session. next() on a count is atomic, so any thread may take one.
        self.model_numbers = itertools.count()
        self.sampler_numbers = itertools.count()
        self.loss_numbers = itertools.count()

    @property
    def is_inherited(self) -> bool:
        """Whether another process opened it; then it is kept alive here, but not finished."""
        return self._inherited_id is not None

    async def open(self) -> str:
        """The session's id; the first call creates it, concurrent ones wait for that."""
        return self.session_id or await self._opening.do(self._open)

    async def _open(self) -> str:
        self.session_id = self._inherited_id or await self._create()
        self._begin(self.session_id)
        return self.session_id

    async def _create(self) -> str:
        call = Call("POST", "/api/v1/create_session", wire_json.encode(self._request), Traffic.SESSION)
        created = await self.connection.call_for(CreateSessionResponse, call)
        for level, message in (
            (logging.INFO, created.info_message),
            (logging.WARNING, created.warning_message),
            (logging.ERROR, created.error_message),
        ):
            if message:
                logger.log(level, "%s", message)
        return created.session_id

    def _begin(self, session_id: str) -> None:
        self._keeper = self.connection.loop.start_task(_keep_alive(weakref.ref(self)))
        if not self.is_inherited:
            _open_sessions.add(self)
            self.connection.start_reporting(session_id)

    async def heartbeat(self) -> None:
        assert self.session_id is not None
        body = wire_json.encode(SessionHeartbeatRequest(session_id=self.session_id))
        await self._quick("/api/v1/session_heartbeat", body)

    async def refresh_flags(self) -> int:
        """Fetches the flags that may change while we run; gives the seconds until the next time."""
        account = self.connection.account
        body = wire_json.encode(ClientConfigRequest(sdk_version=PROTOCOL_VERSION))
        try:
            response = await self._quick("/api/v1/client/dynamic_config", body)
            account.use_dynamic_flags(wire_json.decode(ClientDynamicConfigResponse, response.body))
        except NotFoundError:
            pass  # an older server: the defaults hold
        except TinkerError as error:
            logger.debug("The server's flags could not be refreshed: %s", str(error))
        return max(MIN_REFRESH_SECONDS, account.dynamic_flags.refresh_interval_sec)

    async def _quick(self, path: str, body: bytes) -> HttpResponse:
        call = Call("POST", path, body, Traffic.SESSION, timeout=QUICK_TIMEOUT_SECONDS, retries=False)
        return await self.connection.call(call)

    async def finish(self, status: FinishStatus, detail: str | None = None, *, retries: bool = True) -> None:
        """Tells the server why the session ends. The first reason counts; an inherited session is not ours to end."""
        if self._keeper is not None:
            self._keeper.cancel()
        _open_sessions.discard(self)
        if self._finished or self.session_id is None or self.is_inherited:
            return
        self._finished = True
        body = wire_json.encode({"reason": {"type": status}, "detail": detail})
        path = f"/api/v1/sessions/{self.session_id}/finish"
        call = Call("POST", path, body, Traffic.SESSION, timeout=FINISH_SECONDS, retries=retries)
        try:
            async with asyncio.timeout(FINISH_SECONDS):
                await self.connection.call(call)
        except (TinkerError, TimeoutError) as error:
            reason = str(error) or f"no answer within {FINISH_SECONDS:g} s"
            logger.warning("The server was not told that the session ended (%s); it will expire there.", reason)

    async def leave(self, status: FinishStatus) -> None:
        """Briefly, as the interpreter exits."""
        await self.connection.say_last_words(LAST_WORDS_AT_EXIT_SECONDS)
        await self.finish(status, retries=False)


def inherited_session(config: Config, session_id: str) -> Session:
    """A session that another process opened. Copies that arrive here share one, with its connections and heartbeat."""
    with _inherited_lock:
        session = _inherited.get((config.account, session_id))
        if session is None:
            session = Session(Connection(config), session_id=session_id)
            _inherited[config.account, session_id] = session
            futures.run(session.open, session.connection.loop)
        return session


async def _keep_alive(ref: weakref.ref[Session]) -> None:
    last_success = warned = time.monotonic()
    refresh_at = 0.0
    while (session := ref()) is not None:
        if time.monotonic() >= refresh_at:
            refresh_at = time.monotonic() + await session.refresh_flags()
        del session  # held only while something is sent
        await asyncio.sleep(HEARTBEAT_SECONDS)
        session = ref()
        if session is None:
            return
        try:
            await session.heartbeat()
            last_success = warned = time.monotonic()
        except RequestExpiredError:
            return
        except TinkerError as error:
            now = time.monotonic()
            if now - warned >= HEARTBEAT_WARNING_SECONDS:
                warned = now
                logger.warning("No heartbeat has reached the server for %.0f s: %s", now - last_success, str(error))
        del session


def _finish_at_exit() -> None:
    error = getattr(sys, "last_value", None)
    status: FinishStatus = "success"
    if error is not None:
        status = "errored" if isinstance(error, Exception) else "interrupted"
    leaving = list(_open_sessions)
    pending = [futures.run(functools.partial(session.leave, status), session.connection.loop) for session in leaving]
    deadline = time.monotonic() + EXIT_SECONDS
    for future in pending:
        try:
            future.result(max(0.0, deadline - time.monotonic()))
        except Exception:  # noqa: BLE001 - at exit there is nobody left to tell
            return


atexit.register(_finish_at_exit)
