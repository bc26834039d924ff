"""`tinsmith serve`, on one state folder and one port for all its lives, in a process group that can be killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.chaos.programs import MODEL
from tests.end_to_end.serving import COMMAND, KEY, STOP_SECONDS
from tinsmith.server.checkpoints import CheckpointFolders, Folders

ROOT = Path(__file__).parents[2]
_MARK = "TINSMITH_CHAOS"
_LOOK_AGAIN_SECONDS = 0.05
_READY = b"Tinsmith is ready at"
OFTEN_SNAPSHOTS = (sys.executable, "-m", "tests.chaos.serve")


class Victim:
    start_seconds = 90.0
    calm_seconds = 4.0
    """How long it is left in peace at most when it is back."""

    def __init__(
        self,
        state: Path,
        model: Path,
        *,
        command: Sequence[str | Path] = (COMMAND,),
        options: Sequence[str] = (),
        database: str = "",
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        self.state = state
        self.database = database or f"sqlite:///{state / 'tinsmith.db'}"
        self.starts = 0
        self._port = _free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        ours = [f"--model={MODEL}={model}", f"--api-key={KEY}", f"--port={self._port}", f"--state={state}"]
        ours += ["--dtype=float32"] + ([f"--database={database}"] if database else [])
        self._command = [*command, "serve", *ours, *options]
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", _MARK: str(state), **(environment or {})}
        self._log = log or state.with_name(f"{state.name}.log")  # never on a disk that is made full
        self._greeting = self._log.with_suffix(".greeting")
        self._process: subprocess.Popen[bytes] | None = None

    def _start(self) -> None:
        self.starts += 1
        with self._log.open("ab") as log, self._greeting.open("wb") as greeting:
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=greeting,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )

    def bring_back(self) -> None:
        """Waits until it is ready; if it has ended, or refuses to start, it is started again."""
        end = time.monotonic() + self.start_seconds
        while not self.is_ready:
            assert time.monotonic() < end, f"the server does not start; {self._log} may say why"
            self.revive()
            time.sleep(_LOOK_AGAIN_SECONDS)

    def revive(self) -> None:
        if not self.is_alive:
            self._start()

    @property
    def is_ready(self) -> bool:
        return self.is_alive and self._greeting.read_bytes().startswith(_READY)

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        return self._log.read_text()

    # Its files

    @property
    def states(self) -> Sequence[Path]:
        return [self.state]

    @property
    def checkpoints(self) -> Folders:
        return CheckpointFolders(self.state / "checkpoints")

    @property
    def snapshots(self) -> Folders:
        return CheckpointFolders(self.state / "snapshots")

    # Its ends

    @property
    def ways(self) -> Mapping[str, Callable[[], bool]]:
        """How it can be killed, by name; each says whether there was anything to kill."""
        return {"worker": self.kill_worker, "API": self.kill_api, "both": self.kill_both, "group": self.kill_group}

    def kill_worker(self) -> bool:
        """False if there is none at the moment."""
        return any(map(killed, self.children()))

    def kill_api(self) -> bool:
        self._running.kill()
        self._running.wait()
        return True

    def kill_both(self) -> bool:
        return self.kill_worker() & self.kill_api()

    def kill_group(self) -> bool:
        os.killpg(self._running.pid, signal.SIGKILL)
        self._running.wait()
        return True

    def end(self) -> list[str]:
        """SIGTERM; gives back complaints about its end."""
        self._running.terminate()
        try:
            status = self._running.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return [f"the server did not end within {STOP_SECONDS:.0f} s"]
        return [f"the server ended with status {status}"] if status else []

    def destroy(self) -> None:
        """Whatever of it still runs, runs no more."""
        for pid in self.left_over():
            killed(pid)
        if self._process is not None:
            self._process.wait()

    def left_over(self) -> list[int]:
        """The processes of any of its lives that run now."""
        mark = f"{_MARK}={self.state}".encode()
        return [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if mark in _environment_of(entry)]

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def children(self) -> list[int]:
        """The processes below it."""
        pid = self._running.pid
        with suppress(FileNotFoundError, ProcessLookupError):
            return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return []


def killed(pid: int) -> bool:
    """SIGKILL; false if it was gone already."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def _environment_of(entry: Path) -> list[bytes]:
    """Of a process that has ended it is empty."""
    try:
        return (entry / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
