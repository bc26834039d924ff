"""How a training run is watched: a bar for a person, a line now and then elsewhere; and how Ctrl-C ends it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Self

from tinsmith.cli.output import note
from tinsmith.cli.progress import Bar
from tinsmith.recipes.listener import Listener, Progress

LINE_SECONDS = 10.0
STDERR = 2


class Watch(Listener):
    def __init__(self) -> None:
        self._bar = Bar()
        self._is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._next_line = time.monotonic() + LINE_SECONDS
        self._trains = False

    def __enter__(self) -> Self:
        self._bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, traceback)

    def tell(self, text: str) -> None:
        note(text)

    def prepared(self, done: int, total: int) -> None:
        self._bar.report("Preparing examples", done, total)
        self._line(f"Preparing example {done} of {total}", is_due=False)

    def report(self, progress: Progress) -> None:
        step, num_steps, told = progress.step, progress.num_steps, _measures(progress)
        self._bar.report(told, step, num_steps)
        line = f"Step {step} of {num_steps}: {told}, {_duration(progress.seconds_left)} left"
        self._line(line, is_due=not self._trains or step == num_steps)
        self._trains = True

    def _line(self, text: str, *, is_due: bool) -> None:
        """Now and then, where there is no bar."""
        if not self._is_terminal and (is_due or time.monotonic() >= self._next_line):
            self._next_line = time.monotonic() + LINE_SECONDS
            note(text)

    @contextmanager
    def stops(self) -> Iterator[Callable[[], bool]]:
        """The first Ctrl-C is a wish, so that what was trained is saved; the second ends the program as usual."""
        wished = False

        def wish(number: int, frame: FrameType | None) -> None:
            nonlocal wished
            wished = True
            signal.signal(signal.SIGINT, before)
            with suppress(OSError):  # not through sys.stderr, in the midst of whose work this may be
                os.write(STDERR, b"\nStopping after the steps that are on their way. Ctrl-C again leaves at once.\n")

        before = signal.signal(signal.SIGINT, wish)
        try:
            yield lambda: wished
        finally:
            signal.signal(signal.SIGINT, before)


def _measures(progress: Progress) -> str:
    evaluated = "" if progress.eval_loss is None else f", eval loss {progress.eval_loss:.3f}"
    return f"loss {progress.loss:.3f}{evaluated}, {progress.tokens_per_second:,.0f} tokens/s"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
