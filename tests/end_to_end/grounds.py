"""What the servers under test stand on: this machine alone; or a Ray cluster, PostgreSQL and a bucket.

`pytest --servers=ray` takes the second one for every server that is started by `serving.py`, in whatever test.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, Protocol
from unittest import mock

from tests.support.ray_head import RayHead

if TYPE_CHECKING:  # what is not needed on this machine alone is not loaded there
    from tests.end_to_end.serving import ServerProcess
    from tests.server.bucket import Bucket
    from tests.server.postgres import Postgres

Doing = Literal["train", "sample"]
SAMPLERS = 2


class Ground(Protocol):
    start_seconds: float
    """How long a server may take until its models are loaded."""

    def options(self, given: Sequence[str]) -> list[str]:
        """What a server is started with besides the options that its test gives it, for all its lives."""

    def workers(self, server: ServerProcess) -> list[int]:
        """The ids of the worker processes, each model's one that trains first."""

    def working(self, server: ServerProcess, doing: Doing) -> int:
        """One of the workers that do this, of the first model or of any."""

    def ending(self, how: str) -> str:
        """What is told of a worker that ended so."""

    def traces(self, server: ServerProcess) -> str:
        """Where a worker that breaks down writes to."""

    def close(self) -> None: ...


class OneMachine:
    """Workers below the server, SQLite, files in the state folder."""

    start_seconds = 90.0

    def options(self, given: Sequence[str]) -> list[str]:
        return []

    def workers(self, server: ServerProcess) -> list[int]:
        return server.children()

    def working(self, server: ServerProcess, doing: Doing) -> int:
        return server.children()[0]

    def ending(self, how: str) -> str:
        return how

    def traces(self, server: ServerProcess) -> str:
        return server.log()

    def close(self) -> None:
        pass


class OnRay:
    """A cluster, a PostgreSQL and a bucket for all servers; each has a database and a prefix of its own."""

    start_seconds = 240.0
    _CPUS = 64  # which are only counted: several servers are there at once, with two base models each

    def __init__(self, trainers: int) -> None:
        from tests.server.bucket import running_bucket
        from tests.server.postgres import Postgres

        self._trainers = trainers
        self._numbers = count(1)
        with ExitStack() as stack:
            self.postgres: Postgres = stack.enter_context(Postgres())
            self.bucket: Bucket = stack.enter_context(running_bucket())
            # Workers have the credentials of the bucket from their node.
            self.cluster = stack.enter_context(RayHead(self._CPUS))
            stack.enter_context(mock.patch.dict(os.environ, self.cluster.environment))
            self.close = stack.pop_all().close

    def options(self, given: Sequence[str]) -> list[str]:
        ours = {
            "--ray": self.cluster.address,
            "--train-workers": self._trainers,
            "--sample-workers": SAMPLERS,
            "--storage": f"s3://tinsmith/server-{next(self._numbers)}",
        }
        names = {option.partition("=")[0] for option in given}
        if "--database" not in names:
            ours["--database"] = self.postgres.new_database()
        return [f"{name}={value}" for name, value in ours.items() if name not in names]

    def workers(self, server: ServerProcess) -> list[int]:
        """None, if the server is gone: then they go, too; or if it has no bridge, and so another one leads."""
        with suppress(OSError):
            if not server.children():
                return []
            return [worker["process"] for worker in _shown(server)]
        return []

    def working(self, server: ServerProcess, doing: Doing) -> int:
        """The busiest, if they sample."""
        found = [worker for worker in _shown(server) if worker["name"].startswith(doing)]
        process: int = max(found, key=lambda worker: worker["samples"] or 0)["process"]
        return process

    def ending(self, how: str) -> str:
        return "unseen, on the cluster"

    def traces(self, server: ServerProcess) -> str:
        return "".join(file.read_text() for file in self.cluster.folder.glob("session_latest/logs/worker-*.err"))


def _shown(server: ServerProcess) -> list[dict[str, Any]]:
    """All workers, as the dashboard has them."""
    answer = server.call("GET", "/dashboard/api/overview")
    assert answer.status == 200, answer
    return [worker for model in answer.json()["models"] for worker in model["workers"]]


_chosen: Ground | None = None
_trainers = 0


def choose(servers: str, trainers: int) -> None:
    global _trainers
    _trainers = trainers if servers == "ray" else 0


def ground() -> Ground:
    """Made when the first server is."""
    global _chosen
    _chosen = _chosen or (OnRay(_trainers) if _trainers else OneMachine())
    return _chosen


def leave() -> None:
    global _chosen
    if _chosen is not None:
        _chosen.close()
        _chosen = None
