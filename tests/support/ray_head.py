"""A Ray cluster of one node for tests, in processes of our own that end with us."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Self
from uuid import uuid4

START_SECONDS = 60.0
STOP_SECONDS = 30.0
# What `ray` is in a shell; a test may run where only the package can be imported.
RAY = (sys.executable, "-c", "from ray.scripts.scripts import main; main()")


class RayHead:
    def __init__(self, cpus: int = 8) -> None:
        self._cpus = cpus
        # Its sockets lie there, whose paths must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.address = f"127.0.0.1:{self._port}"
        self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid4().hex}
        """What whoever joins it needs: else everybody on this machine could run programs there."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self) -> None:
        """On the port that it had, if it was started before."""
        port = self._port
        options = ["--head", "--block", f"--port={port}", f"--num-cpus={self._cpus}", f"--temp-dir={self.folder}"]
        options += ["--include-dashboard=false", "--disable-usage-stats", "--node-ip-address=127.0.0.1"]
        options += ["--object-store-memory=200000000", "--num-gpus=0"]
        with (self.folder / "start.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*RAY, "start", *options],
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment, "OMP_NUM_THREADS": "1"},
            )
        end = time.monotonic() + START_SECONDS
        while b"Ray runtime started" not in self._log():
            assert self._process.poll() is None, self._log().decode()
            assert time.monotonic() < end, self._log().decode()
            time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL for everything but the workers, who end by themselves when they notice."""
        for pid in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self.kill()

    def _processes(self) -> list[int]:
        """All that have our folder among their arguments."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.fsencode(self.folder) in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
        return found

    def _log(self) -> bytes:
        return (self.folder / "start.log").read_bytes()
