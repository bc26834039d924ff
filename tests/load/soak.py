"""`python -m tests.load.soak --minutes 60`: clients come and go for an hour, and nothing may grow.

The server keeps for a minute what it would keep for a day or a week, so an hour is enough for everything to come and go
many times. After a quarter of the time, growth is measured; at last all clients leave, and all they left must go too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

from tests.chaos.programs import MODEL
from tests.end_to_end.serving import ServerProcess
from tests.load.guests import STOP
from tests.load.trend import Bound, Point, growth
from tests.load.vitals import Vitals, expire_checkpoints, of_process, of_state
from tests.server.tiny_models import save_model

ROOT = Path(__file__).parents[2]
WARM_UP = 0.25
"""The share of the time that is not judged: caches fill, and memory finds its level."""
LOOK_SECONDS = 5.0
HASTY_GUEST_SECONDS = 60.0
"""How often a client process is killed in the middle of its work."""
HASTY_GUEST_LIFE_SECONDS = 6.0

BOUNDS: dict[str, Bound] = {
    "memory": Bound(16),
    "files": Bound(4),
    "sockets": Bound(4),
    "sockets nobody closes": Bound(1),
    "threads": Bound(2),
    "client tinsmith: threads": Bound(2, 0.5),
    "processes": Bound(0),
    "tasks": Bound(3),
    "temporary files": Bound(0),
    "state: files and folders": Bound(20, 1.0),
    "state: database": Bound(1, 0.1),
    "state: write-ahead log": Bound(1, 0.1),
    "rows": Bound(20, 1.0),
}
"""Growth over all the time that is judged; memory in MiB.

The API's sockets are counted without those that the official client holds. Rows and files come and go with the clients,
who are slower when the machine has other work; what is not removed would be many times as much after an hour. At the
end all of these have to be gone. Of the threads of our client, most are those in which its HTTP library connects; they
end ten seconds after their last use, and there are more of them when many clients come at once.
"""

KEPT_ON_PURPOSE = {"rows of identity", "rows of keys", "rows of posts", "rows of turns"}
"""What is to outlive its clients: the database's own row, and those for each key."""
NOT_OURS = "client tinker"

Say = Callable[[str], None]


class Soak:
    def __init__(self, folder: Path, *, keep_seconds: int, session_seconds: int, say: Say = print) -> None:
        self.folder, self._say = folder, say
        self._keep_seconds, self._session_seconds = keep_seconds, session_seconds
        self.looks: list[tuple[float, Vitals]] = []
        self.complaints: list[str] = []
        self._temporary = folder / "tmp"
        self._rounds = folder / "rounds"

    def run(self, minutes: float, pause: float) -> None:
        self._temporary.mkdir(parents=True)
        self._rounds.mkdir()
        model = save_model(self.folder / "model", "qwen3", vocab_size=256, max_position_embeddings=256)
        with self._server(model) as server:
            self._quiet = self._look(server, {})
            self._visited(server, 60 * minutes, pause)
            self._left(server)
        self._judge_rounds()

    @contextmanager
    def _server(self, model: Path) -> Iterator[ServerProcess]:
        changed = {"KEEP_SECONDS": str(self._keep_seconds), "TMPDIR": str(self._temporary)}
        before = {name: os.environ.get(name) for name in changed}
        os.environ.update(changed)
        server = ServerProcess(
            self.folder / "state",
            {MODEL: model},
            f"--session-timeout={self._session_seconds}",
            command=(sys.executable, "-m", "tests.load.serve"),
        )
        with server:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
            yield server

    # The hour

    def _visited(self, server: ServerProcess, seconds: float, pause: float) -> None:
        guests = {package: self._guest(package, server.url, pause) for package in ("tinsmith", "tinker", "http")}
        hasty, hasty_since = None, time.monotonic()
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end:
                time.sleep(min(LOOK_SECONDS, max(0.0, end - time.monotonic())))
                self._note(self._look(server, guests))
                expire_checkpoints(server.state)
                age = time.monotonic() - hasty_since
                if hasty is not None and age > HASTY_GUEST_LIFE_SECONDS:
                    _end(hasty)
                    hasty = None
                elif age > HASTY_GUEST_SECONDS:
                    hasty = self._guest("tinsmith", server.url, 0.0, self.folder / "hasty")
                    hasty_since = time.monotonic()
        finally:
            ended = [f"the client {name} has ended" for name, guest in guests.items() if guest.poll() is not None]
            self.complaints += ended
            (self._rounds / STOP).touch()
            for guest in guests.values():
                _end(guest, patience=120.0)
            if hasty is not None:
                _end(hasty)

    def _guest(self, package: str, url: str, pause: float, folder: Path | None = None) -> subprocess.Popen[bytes]:
        folder = folder or self._rounds
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "tests.load.guests", package, url, str(folder), str(pause)]
        with (folder / f"{package}.log").open("ab") as log:
            return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def _look(self, server: ServerProcess, guests: Mapping[str, subprocess.Popen[bytes]]) -> Vitals:
        (worker,) = server.workers()
        processes = {"API": server._process.pid, "worker": worker}
        processes |= {f"client {name}": guest.pid for name, guest in guests.items() if name != "http"}
        vitals = {
            f"{owner}: {name}": value for owner, pid in processes.items() for name, value in of_process(pid).items()
        }
        # The official client keeps connections of clients that were dropped; the server may not close them before it.
        held = vitals.get("client tinker: sockets", 0)
        vitals |= {name: vitals[name] - held for name in ("API: files", "API: sockets")}
        vitals |= {f"state: {name}": value for name, value in of_state(server.state).items()}
        vitals["server: temporary files"] = len(list(self._temporary.rglob("*")))
        if rounds := self._rounds_of("tinsmith"):
            vitals["client tinsmith: tasks"] = int(rounds[-1]["tasks"])
        return vitals

    def _note(self, vitals: Vitals) -> None:
        """Also in a file, so that it can be looked at before the end."""
        self.looks.append((time.monotonic(), vitals))
        with (self.folder / "looks.jsonl").open("a") as looks:
            looks.write(json.dumps(self.looks[-1]) + "\n")

    # After it

    def _left(self, server: ServerProcess) -> None:
        """Everybody has gone; what they left goes after the time for which it is kept."""
        patience = time.monotonic() + 300 + 4 * (self._keep_seconds + self._session_seconds)
        while left := self._left_over(self._look(server, {})):
            expire_checkpoints(server.state)
            if time.monotonic() > patience:
                self.complaints += [f"left over when everybody had gone: {each}" for each in left]
                return
            time.sleep(1)

    def _left_over(self, vitals: Vitals) -> list[str]:
        rows = [f"{int(value)} {name}" for name, value in vitals.items() if _is_left_row(name) and value]
        return rows + [
            f"{name}: {vitals[name]:.0f}, and {self._quiet[name]:.0f} in the beginning"
            for name in ("API: sockets", "API: processes", "state: files and folders")
            if vitals[name] > self._quiet[name]
        ]

    def _rounds_of(self, package: str) -> list[dict[str, int | str]]:
        path = self._rounds / f"{package}.rounds"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def _judge_rounds(self) -> None:
        for package in ("tinsmith", "tinker", "http"):
            rounds = self._rounds_of(package)
            self._say(f"{package}: {len(rounds)} rounds")
            self.complaints += [f"{package}, round {one['number']}: {one['error']}" for one in rounds if one["error"]]

    def judge_growth(self) -> None:
        """Of use after many minutes only."""
        judged = self.looks[int(len(self.looks) * WARM_UP) :]
        self._say(f"{'':44}{'start':>9}{'median':>9}{'most':>9}{'growth':>9}{'bound':>9}")
        for name in sorted(self.looks[-1][1]):
            points = [Point(moment, vitals[name]) for moment, vitals in judged if name in vitals]
            level, grown, bound = median(point.value for point in points), growth(points), bound_of(name)
            limit = "" if bound is None else f"{max(bound.most, bound.share * level):.1f}"
            most = max(point.value for point in points)
            self._say(f"{name:44}{points[0].value:9.1f}{level:9.1f}{most:9.1f}{grown:+9.1f}{limit:>9}")
            if bound is not None and not bound.allows(grown, level):
                self.complaints.append(f"{name} grew by {grown:.1f} (median {level:.1f}), allowed are {limit}")


def bound_of(name: str) -> Bound | None:
    """By the longest name that it ends with, or begins with for rows; `None` for what is not judged."""
    owner, _, what = name.partition(": ")
    if owner == NOT_OURS or what in KEPT_ON_PURPOSE:
        return None
    if what.startswith("rows of"):
        return BOUNDS["rows"]
    return BOUNDS.get(name) or BOUNDS[what]


def _is_left_row(name: str) -> bool:
    what = name.partition(": ")[2]
    return what.startswith("rows of") and what not in KEPT_ON_PURPOSE


def _end(process: subprocess.Popen[bytes], patience: float = 0.0) -> None:
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.load.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two rounds of a client process")
    parser.add_argument("--keep", type=int, default=60, help="for how many seconds the server keeps things")
    options = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="tinsmith-soak-"))
    say = partial(print, flush=True)
    soak = Soak(folder, keep_seconds=options.keep, session_seconds=options.keep // 2, say=say)
    soak.run(options.minutes, options.pause)
    soak.judge_growth()
    for complaint in soak.complaints:
        say(complaint)
    if soak.complaints:
        say(f"The logs are in {folder}.")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
