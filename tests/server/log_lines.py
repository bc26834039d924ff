"""What this process logs for as long as a test wants to see it, as the server would write it."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from tinsmith.server import logs


@contextmanager
def logged(style: logs.LogFormat, level: logs.LogLevel = "debug", **constants: str) -> Iterator[io.StringIO]:
    loggers = [logging.getLogger(name) for name in ("", "tinsmith")]
    handlers, levels = loggers[0].handlers[:], [logger.level for logger in loggers]
    stream = io.StringIO()
    try:
        with mock.patch.object(sys, "stderr", stream):
            logs.configure(style, level, **constants)
        yield stream
    finally:
        loggers[0].handlers[:] = handlers
        for logger, before in zip(loggers, levels, strict=True):
            logger.setLevel(before)
        logging.captureWarnings(False)
