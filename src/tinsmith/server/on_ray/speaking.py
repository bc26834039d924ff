"""The thread that an actor works in, and what it has to say, until whoever placed the actor fetches it."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TextIO, cast

import msgspec
import ray

from tinsmith._version import __version__
from tinsmith.server import logs
from tinsmith.server.logs import LogFormat, LogLevel
from tinsmith.server.messages import Message

log = logging.getLogger(__name__)

SWITCH_SECONDS = 0.001
"""How long the thread may keep another from answering while it runs Python."""
FAREWELL_SECONDS = 5.0
"""For the news of our end to be fetched."""


class Begun(NamedTuple):
    where: str
    process: int
    version: str


class Heard(NamedTuple):
    messages: Sequence[bytes]
    log_lines: Sequence[str]
    status: int | None
    """How the thread ended, if it has."""
    is_dying: bool
    """It has not, but the process ends with this status as soon as more is asked for."""


class Speaker:
    """`work` is done in a thread of its own; its end is that of the actor, whose process is left to be killed."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._do_work = work
        self._messages: list[bytes] = []
        self._log_lines: list[str] = []
        self._status: int | None = None
        self._is_dying = self._is_end_known = False
        self._lock = threading.Lock()

    def begin(self) -> Begun:
        """Called in the loop of the actor, as is `heard`; all others may be called in any thread."""
        sys.setswitchinterval(SWITCH_SECONDS)
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        threading.Thread(target=self._work, name="worker", daemon=True).start()
        return Begun(f"{socket.gethostname()} ({ray.util.get_node_ip_address()})", os.getpid(), __version__)

    async def heard(self) -> Heard:
        """What is new, as soon as something is."""
        if self._is_end_known:
            os._exit(1)
        await self._news.wait()
        self._news.clear()
        with self._lock:
            heard = Heard(self._messages, self._log_lines, self._status, self._is_dying)
            self._messages, self._log_lines = [], []
        self._is_end_known = heard.is_dying
        return heard

    def configure_logs(self, style: LogFormat, level: LogLevel, **constants: str) -> None:
        """From now on log lines are fetched with the rest."""
        logs.configure(style, level, cast(TextIO, _Lines(self.note_log)), **constants)

    def tell(self, message: Message) -> None:
        with self._lock:
            self._messages.append(msgspec.json.encode(message))
        self.in_loop(self._news.set)

    def note_log(self, text: str) -> None:
        with self._lock:
            self._log_lines.append(text)
        self.in_loop(self._news.set)

    def in_loop(self, what: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(what)

    def end(self, status: int) -> None:
        """The process shall end, whatever the thread does, and this be known as the status it had."""
        with self._lock:
            self._status, self._is_dying = status, True
        self.in_loop(self._news.set)
        time.sleep(FAREWELL_SECONDS)
        os._exit(1)

    def _work(self) -> None:
        status = 1
        try:
            self._do_work()
            status = 0
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except BaseException:
            log.critical("This worker ends.", exc_info=True)
        with self._lock:
            self._status = status if self._status is None else self._status
        self.in_loop(self._news.set)


class _Lines(io.TextIOBase):
    """Where the log goes: to the server that this is a worker of, with everybody else's."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def write(self, text: str) -> int:
        self._note(text)
        return len(text)
