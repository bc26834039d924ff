"""Two servers on a Ray cluster, with PostgreSQL and a bucket: many more processes that can be killed."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from http.client import HTTPException
from pathlib import Path
from random import Random
from typing import Any, Self

from tests.chaos.victim import Victim, killed
from tests.end_to_end.serving import KEY
from tests.server.bucket import Bucket
from tests.support.ray_head import RayHead, RayNode
from tinsmith.server.checkpoints import Folders
from tinsmith.server.storage import open_storage

SAMPLERS = 2
_CPUS = 8
_RESTART_SECONDS = 2.0
_LOOK_SECONDS = 0.2
_ASK_SECONDS = 5.0
_LINGER_SECONDS = 15.0
"""For Ray to end the processes of actors whose driver is gone."""
_CACHE_BYTES = 2**30
_ACTOR = re.compile(rb"ray::\w+Actor\b")
"""What Ray calls a process after its class, if it is one of ours; a node has others, which are there all the time."""


class KeptCluster:
    """A head without room for workers and a node with it; each is started again after its end, as systemd would."""

    def __init__(self) -> None:
        self.head = RayHead(cpus=0)
        self.node = self.head.another("node", _CPUS)
        self._is_wanted = True
        self._threads = [
            threading.Thread(target=self._keep, args=(node,), daemon=True) for node in (self.head, self.node)
        ]

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.head)
            stack.enter_context(self.node)
            for thread in self._threads:
                thread.start()
            stack.callback(self._let_go)
            self._close = stack.pop_all().close
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _let_go(self) -> None:
        self._is_wanted = False
        for thread in self._threads:
            thread.join()

    def _keep(self, node: RayNode) -> None:
        while self._is_wanted:
            time.sleep(_LOOK_SECONDS)
            if not node.is_alive:
                time.sleep(_RESTART_SECONDS)
                try:
                    node.start()
                except AssertionError:  # its port is still taken, or the head is not there yet
                    node.kill()

    def actors(self) -> list[int]:
        """The processes of workers and members, which have the name that Ray gives them, and its token."""
        token = self.head.environment["RAY_AUTH_TOKEN"].encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                title, variables = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
            except OSError:
                continue
            if _ACTOR.match(title) and token in variables:
                found.append(int(entry.name))
        return found

    def left_actors(self) -> list[int]:
        """Those that do not end in good time when nobody needs them any more."""
        end = time.monotonic() + _LINGER_SECONDS
        while (actors := self.actors()) and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)
        return actors


class RayVictim(Victim):
    """A server whose workers, if it leads, are on a cluster."""

    start_seconds = 240.0
    calm_seconds = 15.0  # what it takes to come back is several times as long as on one machine

    def __init__(
        self,
        state: Path,
        model: Path,
        cluster: KeptCluster,
        *,
        storage: str,
        trainers: int,
        options: Sequence[str] = (),
        **others: Any,
    ) -> None:
        ours = [f"--ray={cluster.head.address}", f"--storage={storage}"]
        ours += [f"--train-workers={trainers}", f"--sample-workers={SAMPLERS}"]
        super().__init__(state, model, options=[*ours, *options], **others)
        self._environment |= cluster.head.environment
        self._storage = storage

    @property
    def is_ready(self) -> bool:
        """With all workers: they come back more slowly than kills come."""
        return super().is_ready and asked(self.url + "/readyz") is not None

    # Its files

    @property
    def checkpoints(self) -> Folders:
        return open_storage(self.state, self._storage, _CACHE_BYTES).stored[0]

    @property
    def snapshots(self) -> Folders:
        return open_storage(self.state, self._storage, _CACHE_BYTES).stored[1]


class PairOnRay:
    """Two servers on one database, bucket and cluster, behind a load balancer: now one of them leads, now the other."""

    calm_seconds = RayVictim.calm_seconds

    def __init__(self, servers: Sequence[RayVictim], url: str, cluster: KeptCluster, random: Random) -> None:
        self.url = url
        self._servers = servers
        self._cluster = cluster
        self._random = random

    @property
    def starts(self) -> int:
        return sum(server.starts for server in self._servers)

    @property
    def is_alive(self) -> bool:
        return bool(self._running)

    def bring_back(self) -> None:
        self.revive()  # both at once, before one is waited for
        for server in self._servers:
            server.bring_back()

    def revive(self) -> None:
        for server in self._servers:
            server.revive()

    def log(self) -> str:
        return "".join(server.log() for server in self._servers)

    # What they keep

    @property
    def database(self) -> str:
        return self._servers[0].database

    @property
    def states(self) -> Sequence[Path]:
        return [server.state for server in self._servers]

    @property
    def checkpoints(self) -> Folders:
        return self._servers[0].checkpoints

    @property
    def snapshots(self) -> Folders:
        return self._servers[0].snapshots

    # Their ends

    @property
    def ways(self) -> Mapping[str, Callable[[], bool]]:
        return {
            "leader's API": lambda: any(server.kill_api() for server in self._leading),
            "follower's API": lambda: any(server.kill_api() for server in self._standing_by),
            "both APIs": lambda: len(running := self._running) > 1 and all(server.kill_api() for server in running),
            "bridge": lambda: any(server.kill_worker() for server in self._leading),
            "leader's API and bridge": lambda: any(server.kill_group() for server in self._leading),
            "trainer": lambda: self._kill_actor("train"),
            "member": lambda: self._kill_actor("train-rank-"),
            "replica": lambda: self._kill_actor("sample-"),
            "raylet": self._cluster.node.kill_raylet,
            "head": self._cluster.head.kill_raylet,
        }

    @property
    def _running(self) -> list[RayVictim]:
        return [server for server in self._servers if server.is_alive]

    @property
    def _leading(self) -> list[RayVictim]:
        """Whoever has a bridge, which is the one process that a server has below it."""
        return [server for server in self._running if server.children()]

    @property
    def _standing_by(self) -> list[RayVictim]:
        """Nobody, if it cannot be seen who leads."""
        leading = self._leading
        return [server for server in self._running if server not in leading] if leading else []

    def _kill_actor(self, kind: str) -> bool:
        """One of this kind, if the servers know of any; what they know may be a second old."""
        actors = self._cluster.actors()
        found = [worker["process"] for worker in self._workers() if _is_a(kind, worker["name"])]
        alive = [process for process in found if process in actors]
        return bool(alive) and killed(self._random.choice(alive))

    def _workers(self) -> list[dict[str, Any]]:
        """As the dashboard has them, whichever server answers."""
        answer = asked(self.url + "/dashboard/api/overview")
        return [worker for model in (answer or {"models": []})["models"] for worker in model["workers"]]

    def end(self) -> list[str]:
        """One after the other: if the first one led, the second one is about to when it has to end, too."""
        return [complaint for server in self._servers for complaint in server.end()]

    def destroy(self) -> None:
        """Actors are nobody's children here, so their end has to be looked for: they may be on a disk that is to go."""
        for server in self._servers:
            server.destroy()
        for pid in self._cluster.left_actors():
            killed(pid)

    def left_over(self) -> list[int]:
        return [pid for server in self._servers for pid in server.left_over()] + self._cluster.left_actors()


def _is_a(kind: str, name: str) -> bool:
    """The trainer has a name of its own, others have one with a number."""
    return name.startswith(kind) if kind.endswith("-") else name == kind


def asked(url: str) -> Any:
    """Nothing, if it does not answer or has reasons not to."""
    request = urllib.request.Request(url, headers={"x-api-key": KEY})
    try:
        with urllib.request.urlopen(request, timeout=_ASK_SECONDS) as response:
            return json.loads(response.read() or b"{}")
    except (OSError, HTTPException, ValueError):
        return None


class BucketAway:
    """The storage of objects does not answer, and comes back with all that it had."""

    name = "bucket away"

    def __init__(self, bucket: Bucket) -> None:
        self.begin, self.end = bucket.go_away, bucket.come_back
