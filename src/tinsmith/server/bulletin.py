"""What is known of the workers, by base model, in a form that the server that leads can post for the others."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tinsmith.server.messages import Figure, Replay
from tinsmith.server.store.records import Lane
from tinsmith.server.supervise import WorkerProcesses
from tinsmith.server.worker_metrics import WorkerState

LANES: tuple[Lane | None, ...] = ("train", "sample", None)


class ByLane(msgspec.Struct, frozen=True):
    """Of those who do one kind of work; or of all."""

    is_ready: bool = False
    held_up: str | None = None
    no_room: dict[str, str] = {}
    replay: Replay | None = None


class ModelNews(msgspec.Struct, frozen=True, kw_only=True):
    """Of the workers of one base model."""

    lanes: tuple[ByLane, ByLane, ByLane] = (ByLane(), ByLane(), ByLane())
    """As in `LANES`."""
    problem: str | None = None
    figures: tuple[Figure, ...] = ()
    states: tuple[WorkerState, ...] = ()

    def of(self, lane: Lane | None) -> ByLane:
        return self.lanes[LANES.index(lane)]


News = dict[str, ModelNews]


def news_of(workers: WorkerProcesses, base_models: Iterable[str]) -> bytes:
    return msgspec.json.encode({name: _model_news(workers, name) for name in base_models})


def read_news(content: bytes) -> News:
    return msgspec.json.decode(content, type=News)


def _model_news(workers: WorkerProcesses, name: str) -> ModelNews:
    train, sample, both = (
        ByLane(
            workers.is_ready(name, lane),
            workers.held_up(name, lane=lane),
            dict(workers.no_room(name, lane)),
            workers.replay(name, lane),
        )
        for lane in LANES
    )
    return ModelNews(
        lanes=(train, sample, both),
        problem=workers.problem(name),
        figures=tuple(workers.figures(name)),
        states=tuple(workers.states(name)),
    )
