"""The workers as a server knows them that does not lead: by what the leader posts, and by what it hears at once."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from tinsmith.server.bulletin import ModelNews, read_news
from tinsmith.server.crew import replica_for
from tinsmith.server.messages import Figure, Replay
from tinsmith.server.routing import Router
from tinsmith.server.store.bulletin import Posted
from tinsmith.server.store.records import Lane, NewJob
from tinsmith.server.worker_metrics import WorkerState
from tinsmith.types import SampleRequest

SILENT_SECONDS = 10.0
"""After so long without a word of the leader, what it said last is not believed any more."""
NO_LEADER = "the server that ran the workers is gone; another one is about to take its place"
_NOTHING = ModelNews()


class LedWorkers:
    """`wake` tells the leader that there is work for a base model.

    Of several sampler replicas, every server chooses by what it has sent to them itself.
    """

    def __init__(self, wake: Callable[[str], None], now: Callable[[], float] = time.monotonic) -> None:
        self._wake = wake
        self._now = now
        self._posted: Posted | None = None
        self._heard_at = -SILENT_SECONDS
        self._news: dict[str, ModelNews] = {}
        self._routers: defaultdict[str, Router] = defaultdict(Router)

    def read(self, posted: Posted | None) -> None:
        """What the leader posted last; `None` if it has not begun to."""
        if posted == self._posted:
            return
        self._posted, self._news = posted, {} if posted is None else read_news(posted.content)
        self._heard_at = self._now()
        for name, news in self._news.items():
            self._note_replicas(self._routers[name], news)

    def forget(self) -> None:
        """What the leader said, who is not it any more, and what was sent to its workers."""
        self._posted, self._news = None, {}
        self._routers.clear()

    @property
    def hears(self) -> bool:
        """Whether somebody leads, and has said how the workers are."""
        return self._posted is not None and self._now() - self._heard_at < SILENT_SECONDS

    def _note_replicas(self, router: Router, news: ModelNews) -> None:
        replicas = [state for state in news.states if state.role == "sample" and not state.is_leaving]
        ready = {state.name for state in replicas if state.is_ready}
        for gone in router.loads.keys() - ready:
            router.gone(gone)
        for name in ready - router.loads.keys():
            router.came(name)

    def _of(self, base_model: str) -> ModelNews:
        return self._news.get(base_model, _NOTHING) if self.hears else _NOTHING

    @property
    def samples(self) -> dict[str, int]:
        """By base model: those that were sent to its replicas from here and are not drawn yet."""
        return {name: sum(router.loads.values()) for name, router in self._routers.items() if router.loads}

    def long_underway(self) -> set[str]:
        """The requests that were underway at the last call, too."""
        return {request_id for router in self._routers.values() for request_id in router.long_underway()}

    # What the API asks

    def wake(self, base_model: str, replica: str | None = None) -> None:
        self._wake(base_model)

    def choose_replica(self, job: NewJob, request: SampleRequest) -> str:
        return replica_for(job, request, self._routers[job.base_model or ""])

    def are_over(self, request_ids: Sequence[str]) -> None:
        for router in self._routers.values():
            for request_id in request_ids:
                router.done(request_id)

    def is_ready(self, base_model: str, lane: Lane | None = None) -> bool:
        return self._of(base_model).of(lane).is_ready

    def problem(self, base_model: str) -> str | None:
        return self._of(base_model).problem

    def held_up(self, base_model: str, stream: str = "", lane: Lane | None = None) -> str | None:
        if not self.hears:
            return NO_LEADER
        those = self._of(base_model).of(lane)
        return those.held_up or those.no_room.get(stream)

    def replay(self, base_model: str, lane: Lane | None = None) -> Replay | None:
        return self._of(base_model).of(lane).replay

    def figures(self, base_model: str) -> Iterable[Figure]:
        return self._of(base_model).figures

    def states(self, base_model: str) -> Sequence[WorkerState]:
        return self._of(base_model).states
