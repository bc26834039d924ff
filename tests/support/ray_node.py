"""Another node of a Ray cluster for tests, on this machine and at an address of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

from tests.support.ray_head import RAY, START_SECONDS, STOP_SECONDS, RayHead


class RayNode:
    """Any address of this machine will do that is not the head's, such as 127.0.0.2."""

    def __init__(self, head: RayHead, address: str, cpus: int) -> None:
        self._head = head
        self.address = address
        self._cpus = cpus
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))

    def __enter__(self) -> Self:
        options = [f"--address={self._head.address}", "--block", f"--num-cpus={self._cpus}", "--num-gpus=0"]
        options += [f"--node-ip-address={self.address}", "--object-store-memory=200000000", "--disable-usage-stats"]
        with (self.folder / "start.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*RAY, "start", *options],
                stdout=log,
                stderr=log,
                env={**os.environ, **self._head.environment, "OMP_NUM_THREADS": "1"},
            )
        end = time.monotonic() + START_SECONDS
        while b"Ray runtime started" not in self._log():
            assert self._process.poll() is None, self._log().decode()
            assert time.monotonic() < end, self._log().decode()
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def kill(self) -> None:
        """SIGKILL for the raylet, whose workers end when they notice."""
        for pid in self._children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()

    def _children(self) -> list[int]:
        with contextlib.suppress(OSError):
            pid = self._process.pid
            return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return []

    def _log(self) -> bytes:
        return (self.folder / "start.log").read_bytes()
