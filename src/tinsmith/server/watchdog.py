"""Ends a worker whose engine hangs, with a trace of where. Its successor goes on."""

from __future__ import annotations

import faulthandler
import time

_LAZINESS = 0.1
"""The share of the time by which a beat may be left out: each starts a thread, and a decode step is short."""


class Watchdog:
    """`beat` before every step of the engine and within long ones; `rest` before waiting for work.

    The timer is the interpreter's own and needs nothing of it, so that it works while native code holds everything up.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._again = 0.0

    def beat(self) -> None:
        now = time.monotonic()
        if now >= self._again:
            self._again = now + _LAZINESS * self._seconds
            faulthandler.dump_traceback_later(self._seconds, exit=True)

    def rest(self) -> None:
        self._again = 0.0
        faulthandler.cancel_dump_traceback_later()
