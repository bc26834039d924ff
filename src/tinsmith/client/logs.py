"""Shows the SDK's log on stderr for those who ask for it with TINKER_LOG. The root logger is left alone."""

from __future__ import annotations

import logging

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """A class of its own, so that a second call finds the handler of the first."""


def show_log(level: str) -> None:
    logger = logging.getLogger("tinsmith")
    logger.setLevel(level.upper())
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter(FORMAT))
        logger.addHandler(handler)
