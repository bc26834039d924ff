"""The server of local mode: one model, a free loopback port, and it ends when nobody uses it any more.

`client/local.py` starts it as `python -m tinsmith.server.local STATE [MODEL]`. It tells that script how the start goes,
a line of JSON each on standard output, up to `{"ready": URL}` or `{"error": TEXT}`; later it writes there no more,
because the script may be gone while others use the server.
"""

from __future__ import annotations

import logging
import os
import platform
import signal
import sys
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

import msgspec

from tinsmith.errors import TinkerError
from tinsmith.server import logs
from tinsmith.server.config import ServerConfig
from tinsmith.server.embedded import embedded_model
from tinsmith.server.main import serve
from tinsmith.server.models import parse_source
from tinsmith.sharing import RunningServer, SharedFolder

LOOK_AGAIN_SECONDS = 1.0

log = logging.getLogger("tinsmith.server.local")  # which has another name when it is started


def main(state: Path, model: str = "") -> None:
    logs.configure()
    os.environ["PYTHONSAFEPATH"] = "1"  # the workers must not import a script's neighbours instead of libraries
    folder = SharedFolder(state)
    with folder.server_lock().acquire(timeout=0):
        # From now on, so that a script that gives up during a long download leaves nothing running.
        threading.Thread(target=_end_when_unused, args=(folder,), daemon=True).start()
        try:
            source = parse_source(model) if model else embedded_model(progress=_tell_progress)
            config = ServerConfig(models=(source,), port=0, state=state, takes_any_key=True)
            _tell(stage=f"Loading {source.name}", share=0.0)
            serve(config, on_ready=lambda url: _announce(folder, url, model))
        except TinkerError as error:
            _tell(error=str(error))
            raise SystemExit(1) from error


def _announce(folder: SharedFolder, url: str, model: str) -> None:
    started = datetime.now(UTC).isoformat(timespec="seconds")
    folder.announce(RunningServer(url=url, model=model, host=platform.node(), pid=os.getpid(), started=started))
    _tell(ready=url)


def _tell_progress(stage: str, share: float) -> None:
    _tell(stage=stage, share=share)


def _tell(**message: str | float) -> None:
    with suppress(OSError):  # the script is gone; another may be waiting for this server
        sys.stdout.write(msgspec.json.encode(message).decode() + "\n")
        sys.stdout.flush()


def _end_when_unused(folder: SharedFolder) -> NoReturn:
    """The gate is never given back: a script that comes now waits until this process is gone."""
    import filelock

    gate = folder.gate()
    while True:
        time.sleep(LOOK_AGAIN_SECONDS)
        try:
            gate.acquire(timeout=0)
        except filelock.Timeout:  # somebody is coming
            continue
        if folder.is_unused():
            break
        gate.release()
    log.info("Nobody uses this server any more; it ends.")
    while True:  # a signal between two handlers is lost
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(LOOK_AGAIN_SECONDS)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
