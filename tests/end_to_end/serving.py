"""`tinsmith serve` as a user starts it: a process of its own, with its workers below it, or as `grounds.py` has it."""

from __future__ import annotations

import io
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

from tests.end_to_end.grounds import Doing, ground

KEY, OTHER_KEY = "tml-compat", "tml-somebody-else"
STOP_SECONDS = 45.0
_READY = re.compile(r"Tinsmith is ready at (http://\S+)")
COMMAND = Path(sys.executable).with_name("tinsmith")
_ROOT = Path(__file__).parents[2]


class Answer(NamedTuple):
    status: int
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class ServerProcess:
    """Started by `with`; ended with SIGTERM, and then nothing of it is left."""

    def __init__(
        self, state: Path, models: Mapping[str, Path], *options: str, command: Sequence[str | Path] = (COMMAND,)
    ) -> None:
        self.state = state
        self.ground = ground()
        self.options = (*options, *self.ground.options(options))
        self._models = models
        self._command = command
        self._port = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        assert self.terminate() == 0, self.log()

    def start(self) -> None:
        """Starts it, on the port it had if it was started before, and waits until the models are loaded."""
        self.state.mkdir(parents=True, exist_ok=True)
        options = [f"--model={name}={folder}" for name, folder in self._models.items()]
        options += [f"--api-key={key}" for key in (KEY, OTHER_KEY)]
        options += [f"--port={self._port}", f"--state={self.state}", "--dtype=float32", *self.options]
        with (self.state / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command, "serve", *options],
                cwd=_ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},  # tiny products gain nothing from threads
            )
        assert self._process.stdout is not None
        found = _READY.match(_line_within(self._process.stdout, self.ground.start_seconds))
        if not found:
            self._process.kill()
            self._gone(self.children())
        assert found, f"no greeting; the log says:\n{self.log()}"
        self.url = found[1]
        self._port = int(self.url.rpartition(":")[2])

    def log(self) -> str:
        return (self.state / "server.log").read_text()

    def place(self) -> list[str]:
        """The options of commands that work on its database."""
        return [f"--state={self.state}", *(option for option in self.options if option.startswith("--database="))]

    # Its processes

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_up(self) -> bool:
        return self._process.poll() is None

    def children(self) -> list[int]:
        """The ids of the processes below it, in the order of their start."""
        pid = self._process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def workers(self) -> list[int]:
        """The ids of the worker processes, wherever they are."""
        return self.ground.workers(self)

    def kill_worker(self, doing: Doing = "train") -> int:
        """SIGKILL for one of the workers that do this; gives back who that was."""
        worker = self.ground.working(self, doing)
        os.kill(worker, signal.SIGKILL)
        return worker

    def kill(self) -> None:
        """SIGKILL for the API process; its workers notice and end by themselves."""
        others = {*self.workers(), *self.children()}
        self._process.kill()
        self._gone(others)

    def kill_all(self) -> None:
        """SIGKILL for the API process and its workers in one moment."""
        others = {*self.workers(), *self.children()}
        for pid in (*others, self._process.pid):
            os.kill(pid, signal.SIGKILL)
        self._gone(others)

    def terminate(self) -> int:
        """SIGTERM, and the exit status."""
        others = {*self.workers(), *self.children()}
        self._process.terminate()
        self._gone(others)
        return self._process.returncode

    def _gone(self, others: Collection[int]) -> None:
        """Waits for its end, and for that of all others."""
        try:
            self._process.wait(STOP_SECONDS)
            wait_until(lambda: not any(map(is_running, others)), STOP_SECONDS, "the workers did not end")
        finally:
            for pid in [self._process.pid, *others]:
                if is_running(pid):
                    os.kill(pid, signal.SIGKILL)
            assert self._process.stdout is not None
            self._process.stdout.close()

    # Requests by hand

    def call(
        self, method: str, path: str, body: Any = None, *, key: str = KEY, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Anything but bytes is sent as JSON."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        sent = {"content-type": "application/json", "x-api-key": key, **(headers or {})}
        request = urllib.request.Request(self.url + path, data=data, headers=sent, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return Answer(response.status, response.read())
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, error.read())

    def post(self, endpoint: str, body: Any = None, **options: Any) -> Answer:
        return self.call("POST", f"/api/v1/{endpoint}", body, **options)

    def result(self, acknowledged: Answer, **options: Any) -> Any:
        """What became of an accepted request."""
        assert acknowledged.status == 200, acknowledged
        for _ in range(4):
            answer = self.post("retrieve_future", {"request_id": acknowledged.json()["request_id"]}, **options)
            if answer.status != 408:
                return answer.json()
        raise AssertionError("the request did not finish")

    def downloaded(self, path: str) -> dict[str, bytes]:
        """The files of a checkpoint, by name."""
        run, kind, name = path.removeprefix("tinker://").split("/")
        url = self.call("GET", f"/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/archive").json()["url"]
        content = self.call("GET", url.removeprefix(self.url)).body
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            return {each.name: archive.extractfile(each).read() for each in archive.getmembers()}  # type: ignore[union-attr]


def failed_start(state: Path, *options: str) -> str:
    """What `tinsmith serve` says when it gives up."""
    done = subprocess.run(
        [COMMAND, "serve", "--port=0", f"--state={state}", *options, *ground().options(options)],
        capture_output=True,
        text=True,
        timeout=ground().start_seconds,
        check=False,
    )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


def wait_until(is_so: Callable[[], bool], seconds: float, complaint: str) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, complaint
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Someone else's child that has ended stays in the table until its new parent looks; that counts as ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def _line_within(stream: IO[bytes], seconds: float) -> str:
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        return stream.readline().decode() if selector.select(seconds) else ""
