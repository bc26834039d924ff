"""The worker as it is, with an engine in which certain tokens are deadly."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tinsmith.server import worker_process
from tinsmith.server.engine.engine import Engine
from tinsmith.server.engine.generate import Generator
from tinsmith.server.engine.running import SampleWork

EXITS, CRASHES, IS_KILLED, HANGS_ONCE = 91, 92, 93, 94
"""Tokens that end the worker: by leaving, by a crash of native code, as when the memory is full, and by waiting for
ever (if the file named by `HUNG` is not there yet)."""
HUNG = "TINSMITH_TEST_HUNG"


def hang_once() -> None:
    file = Path(os.environ[HUNG])
    if not file.exists():
        file.touch()
        signal.pause()


_DEATHS: Mapping[int, Callable[[], None]] = {
    EXITS: lambda: os._exit(7),
    CRASHES: lambda: signal.raise_signal(signal.SIGSEGV),  # in this thread, as a real one
    IS_KILLED: lambda: os.kill(os.getpid(), signal.SIGKILL),
    HANGS_ONCE: hang_once,
}


def die_of(tokens: Sequence[int]) -> None:
    for token in tokens:
        if int(token) in _DEATHS:
            _DEATHS[int(token)]()


def make_fragile() -> None:
    real_training, real_step, real_add = Engine.forward_backward, Generator.step, Generator.add
    prompts: list[Sequence[int]] = []

    def forward_backward(self: Engine, rows: Sequence[Any]) -> Any:
        outputs = real_training(self, rows)
        for row in rows:
            die_of(row.tokens)
        return outputs

    def add(self: Generator, work: SampleWork) -> None:
        prompts.append(work.prompt)
        real_add(self, work)

    def step(self: Generator) -> Any:
        for prompt in prompts:
            die_of(prompt)
        return real_step(self)

    Engine.forward_backward, Generator.add, Generator.step = forward_backward, add, step  # type: ignore[method-assign]


if __name__ == "__main__":
    make_fragile()
    worker_process.main()
