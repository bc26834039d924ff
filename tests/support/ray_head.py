"""A Ray cluster on this machine for tests, in processes of our own that end with us."""

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self
from uuid import uuid4

START_SECONDS = 60.0
STOP_SECONDS = 30.0
# What `ray` is in a shell; a test may run where only the package can be imported.
RAY = (sys.executable, "-c", "from ray.scripts.scripts import main; main()")
_HERE = "127.0.0.1"


class RayNode:
    """`ray start --block`: one process with the others of the node below it, and it ends when one of them does."""

    def __init__(
        self, name: str, folder: Path, cpus: int, options: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.folder = folder
        self._log_file = folder / f"{name}.log"
        self._options = [*options, "--block", f"--num-cpus={cpus}", "--num-gpus=0", f"--node-ip-address={_HERE}"]
        self._options += ["--disable-usage-stats", "--object-store-memory=200000000"]
        self._environment = {**os.environ, **environment, "OMP_NUM_THREADS": "1"}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """As it was, if it was started before."""
        with self._log_file.open("wb") as log:
            self._process = subprocess.Popen(
                [*RAY, "start", *self._options], stdout=log, stderr=log, env=self._environment
            )
        end = time.monotonic() + START_SECONDS
        while b"Ray runtime started" not in self._log():
            assert self.is_alive, self._log().decode()
            assert time.monotonic() < end, self._log().decode()
            time.sleep(0.1)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill_raylet(self) -> bool:
        """SIGKILL for the process that starts all workers of the node, which end with it; false if there is none."""
        for pid in self._below():
            with contextlib.suppress(OSError):
                if Path(os.readlink(f"/proc/{pid}/exe")).name == "raylet":
                    os.kill(pid, signal.SIGKILL)
                    return True
        return False

    def kill(self) -> None:
        """SIGKILL for everything but the workers, who end by themselves when they notice."""
        for pid in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        self.kill()

    def _processes(self) -> list[int]:
        return self._below()

    def _below(self) -> list[int]:
        if self._process is None:
            return []
        pid = self._process.pid
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return []

    def _log(self) -> bytes:
        return self._log_file.read_bytes()


class RayHead(RayNode):
    """The first node of a cluster, and the only one unless others join."""

    def __init__(self, cpus: int = 8) -> None:
        # Its sockets lie there, whose paths must be short.
        folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        with socket.socket() as free:
            free.bind((_HERE, 0))
            port = free.getsockname()[1]
        self.address = f"{_HERE}:{port}"
        self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid4().hex}
        """What whoever joins it needs: else everybody on this machine could run programs there."""
        options = ["--head", f"--port={port}", f"--temp-dir={folder}", "--include-dashboard=false"]
        super().__init__("head", folder, cpus, options, self.environment)

    def another(self, name: str, cpus: int) -> RayNode:
        """A node that joins it, on the same machine."""
        return RayNode(name, self.folder, cpus, [f"--address={self.address}"], self.environment)

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _processes(self) -> list[int]:
        """All that have our folder among their arguments."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.fsencode(self.folder) in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
        return found
