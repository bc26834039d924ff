"""The process that a worker of this machine lives in: how it is started, spoken to, and ended.

The API process (`process_life.py`) writes one line of settings to its standard input and then one byte whenever there
is work; when that input ends, the parent is gone and the worker ends too. What it has to say goes to standard output, a
line of JSON each (`messages.py`), an empty one every second. Messages about jobs only save time: both sides look at the
store every second.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from tinsmith.server import logs
from tinsmith.server.bell import Bell, first_line
from tinsmith.server.messages import Message, WorkerSettings
from tinsmith.server.state_locks import hold_as_worker
from tinsmith.server.worker_run import run

_INPUT = 0


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # both may reach the whole group, and the parent decides
    settings = msgspec.json.decode(first_line(_INPUT), type=WorkerSettings)
    logs.configure(settings.log_format, settings.log_level, base_model=settings.base_model)
    logs.log_what_ends_us()
    hold_as_worker(Path(settings.state))
    run(settings, Bell(_INPUT), _tell)
    os._exit(0)  # whatever else Python and torch would tidy up takes long, and somebody may wait for our end


def _tell(message: Message) -> None:
    with suppress(BrokenPipeError):  # the parent is gone, which the bell will tell
        sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
