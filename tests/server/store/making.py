"""Short ways to make what the store takes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import TypeVar

import msgspec

from tinsmith.server.store import Store
from tinsmith.server.store.models import insert_model
from tinsmith.server.store.records import CheckpointKey, Done, Job, Lora, NewCheckpoint, NewJob, NewModel

T = TypeVar("T")
MODEL = "s:train:0"
SAMPLER = "s:sample:0"
DONE = Done(result=b"result", content_type="application/json")


class Clock:
    """Time that passes a microsecond at every look, and more when told."""

    def __init__(self) -> None:
        self._now = datetime(2030, 1, 1, tzinfo=UTC)
        self._lock = threading.Lock()

    def __call__(self) -> datetime:
        self.pass_(timedelta(microseconds=1))
        return self._now

    def pass_(self, span: timedelta) -> None:
        with self._lock:
            self._now += span


def training(seq_id: int | None, **changes: object) -> NewJob:
    job = NewJob(
        kind="forward_backward",
        owner="ann",
        payload=f"train {seq_id}".encode(),
        session_id="s",
        base_model="tiny",
        model_id=MODEL,
        seq_id=seq_id,
    )
    return msgspec.structs.replace(job, **changes)


def sample(seq_id: int, **changes: object) -> NewJob:
    job = NewJob(
        kind="sample",
        owner="ann",
        payload=f"sample {seq_id}".encode(),
        session_id="s",
        base_model="tiny",
        sampler_id=SAMPLER,
        seq_id=seq_id,
    )
    return msgspec.structs.replace(job, **changes)


def new_model(**changes: object) -> NewModel:
    model = NewModel(
        model_id=MODEL,
        owner="ann",
        base_model="tiny",
        lora=Lora(rank=8, seed=7),
        optimizer_config={"type": "adamw"},
        session_id="s",
    )
    return msgspec.structs.replace(model, **changes)


def add_model(store: Store, model: NewModel) -> None:
    """As the job does that makes it, but without a job."""
    database = store._database
    database.write(lambda connection: insert_model(database, connection, model, database.now()))


def new_checkpoint(name: str = "one", **changes: object) -> NewCheckpoint:
    checkpoint = NewCheckpoint(
        key=CheckpointKey(run_id=MODEL, kind="weights", name=name),
        owner="ann",
        base_model="tiny",
        lora=Lora(rank=8),
        optimizer_config={"type": "adamw"},
        size_bytes=100,
        request_id=f"{MODEL}:{name}",
    )
    return msgspec.structs.replace(checkpoint, **changes)


def seq_ids(jobs: Iterable[Job]) -> list[int]:
    return [job.seq_id for job in jobs]


def at_once(count: int, call: Callable[[int], T]) -> list[T]:
    """Run `call(0)`, `call(1)`, ... in threads that start together."""
    barrier = threading.Barrier(count)

    def start(place: int) -> T:
        barrier.wait(timeout=30)
        return call(place)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(start, range(count)))
