"""The whole load: a real server, one client alone on it, then very many at once, and what all of them saw."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.chaos.programs import MODEL
from tests.end_to_end.serving import ServerProcess
from tests.load.crowd import GO, STOP
from tests.load.records import Record, read_records
from tests.load.vitals import Vitals, of_process, of_state
from tests.server.tiny_models import save_model

ROOT = Path(__file__).parents[2]
LOOK_SECONDS = 1.0
_PAUSE_SECONDS = 0.5
OPENING_SECONDS = 300.0
END_SECONDS = 900.0
_COMMAND = (sys.executable, "-m", "tests.load.crowd")
STEPS_BACK = 10
"""The crowd would have machines of its own; here it gives way to the server and to the client that is measured."""


class Group(NamedTuple):
    """The clients of one process. One with samplers has nothing else: it ends when they have all their samples."""

    package: str
    samplers: int = 0
    models: int = 0
    probes: int = 0

    @property
    def priority(self) -> Sequence[str]:
        return () if self.probes else ("nice", "-n", str(STEPS_BACK))

    def numbers(self, samples: int) -> list[str]:
        return [str(number) for number in (self.samplers, self.models, self.probes, samples)]


ONE_CLIENT = Group("http", models=1, probes=1)
"""Trains and samples, and sees how long each acknowledgement takes: first alone, and then in the crowd."""


@dataclass
class Seen:
    """What became of it all: records of the one client alone, of the same client in the crowd, and of the crowd."""

    alone: list[Record] = field(default_factory=list)
    probe: list[Record] = field(default_factory=list)
    crowd: list[Record] = field(default_factory=list)
    looks: list[tuple[float, Vitals]] = field(default_factory=list)
    state: Vitals = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)


class Load:
    def __init__(self, folder: Path, groups: Mapping[str, Group], *, samples: int, keys: int) -> None:
        self._folder, self._groups, self._samples = folder, groups, samples
        self._keys = [f"tml-load-{number}" for number in range(keys)]
        self.seen = Seen()

    def run(self, alone_seconds: float, least_seconds: float = 0.0) -> Seen:
        self._folder.mkdir(parents=True, exist_ok=True)
        model = save_model(self._folder / "model", "qwen3", vocab_size=256, max_position_embeddings=256)
        options = [f"--api-key={key}" for key in self._keys]
        with ServerProcess(self._folder / "state", {MODEL: model}, *options) as server, self._watching(server):
            self.seen.alone = self._alone(server, alone_seconds)
            self._together(server, least_seconds)
            self.seen.state = of_state(server.state)
        return self.seen

    def _alone(self, server: ServerProcess, seconds: float) -> list[Record]:
        crowds = Crowds(self._folder / "alone", {"alone": ONE_CLIENT}, server.url, self._samples, self._keys[:1])
        with crowds:
            crowds.begin()
            time.sleep(seconds)
            crowds.stop()
            self.seen.complaints += crowds.ended()
        return crowds.records()["alone"]

    def _together(self, server: ServerProcess, least_seconds: float) -> None:
        groups = {**self._groups, "probe": ONE_CLIENT}
        crowds = Crowds(self._folder / "together", groups, server.url, self._samples, self._keys)
        with crowds:
            crowds.begin()
            started = time.monotonic()
            while crowds.samplers_are_busy() or time.monotonic() - started < least_seconds:
                time.sleep(_PAUSE_SECONDS)
            crowds.stop()
            self.seen.complaints += crowds.ended()
        records = crowds.records()
        self.seen.probe = records.pop("probe", [])
        self.seen.crowd = [record for some in records.values() for record in some]

    @contextmanager
    def _watching(self, server: ServerProcess) -> Iterator[None]:
        """Looks at the server every second, in a thread that gives way as the crowd does: there is a lot to look at."""
        over = threading.Event()

        def watch() -> None:
            os.nice(STEPS_BACK)  # on Linux, this thread alone
            while not over.wait(LOOK_SECONDS):
                self.seen.looks.append((time.monotonic(), _vitals(server)))

        self.seen.looks.append((time.monotonic(), _vitals(server)))
        thread = threading.Thread(target=watch, name="watch")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def _vitals(server: ServerProcess) -> Vitals:
    (worker,) = server.workers()
    vitals = {f"API: {name}": value for name, value in of_process(server._process.pid).items()}
    return vitals | {f"worker: {name}": value for name, value in of_process(worker).items()}


class Crowds:
    """Client processes that begin and stop together."""

    def __init__(self, folder: Path, groups: Mapping[str, Group], url: str, samples: int, keys: Sequence[str]) -> None:
        assert not any(group.samplers and (group.models or group.probes) for group in groups.values())
        self._folder, self._groups = folder, groups
        self._commands = {
            name: [*group.priority, *_COMMAND, name, group.package, url, str(folder), *group.numbers(samples), *keys]
            for name, group in groups.items()
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> None:
        self._folder.mkdir()
        for name, command in self._commands.items():
            with (self._folder / f"{name}.log").open("wb") as log:
                self._processes[name] = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def __exit__(self, *exception: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def begin(self) -> None:
        """Lets all go when all are ready."""
        end = time.monotonic() + OPENING_SECONDS
        while not all((self._folder / f"{name}.ready").exists() for name in self._groups):
            broken = [name for name, process in self._processes.items() if process.poll() is not None]
            assert not broken, f"{broken} ended before it was ready; see the logs in {self._folder}"
            assert time.monotonic() < end, f"the sessions are not open after {OPENING_SECONDS:.0f} s"
            time.sleep(0.1)
        (self._folder / GO).touch()

    def samplers_are_busy(self) -> bool:
        """Whether a sampler has not all its samples yet."""
        busy = [name for name, group in self._groups.items() if group.samplers]
        return any(self._processes[name].poll() is None for name in busy)

    def stop(self) -> None:
        (self._folder / STOP).touch()

    def ended(self) -> list[str]:
        """Waits for all, and complains about those that failed."""
        end, complaints = time.monotonic() + END_SECONDS, []
        for name, process in self._processes.items():
            try:
                status = process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                complaints.append(f"the clients {name} did not end within {END_SECONDS:.0f} s")
                continue
            if status:
                complaints.append(f"the clients {name} ended with {status}: {self._last_words(name)}")
        return complaints

    def _last_words(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()[-500:]

    def records(self) -> dict[str, list[Record]]:
        """Of those that came to their end."""
        paths = {name: self._folder / f"{name}.json" for name in self._groups}
        return {name: read_records(path) for name, path in paths.items() if path.exists()}
