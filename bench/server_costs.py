"""What a request costs the API process, and the database, in CPU time: what a simulation of many GPUs needs to know.

No peer and no bar. CPU time says how many requests a core can carry, and is the same on a busy machine. The API is a
real server on the loopback with SQLite and a tiny model. The database is driven through the store alone, with many
owners; for PostgreSQL the CPU of its own processes is told apart from that of the process that asks.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import harness
import server_overhead

import tinsmith
from tests.server.postgres import Postgres
from tests.server.store.making import training
from tinsmith.server.store import Store
from tinsmith.server.store.records import Done, Submission

SAMPLES = 1500
TRAINING_ROUNDS = 200
MANY_OWNERS = (1_000, 10_000)
TOGETHER = 64
REPEATS = 30
SINGLES = 300
WORKER = "worker"
DONE = Done(result=b"x" * 2000, content_type="application/x-protobuf")
PAYLOAD = b"x" * 4000


def cpu_seconds(pid: int) -> float:
    """Of a process and of those of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


# --- the API ---------------------------------------------------------------------------------------------------------


def measure_api() -> None:
    import transformers

    from tests.server.tiny_models import save_model

    transformers.utils.logging.disable_progress_bar()

    with tempfile.TemporaryDirectory() as name:
        folder = save_model(Path(name) / "model", "qwen3")
        with (
            server_overhead.server(folder, Path(name) / "state") as running,
            tinsmith.ServiceClient(base_url=running.url, api_key=harness.KEY) as client,
        ):
            for row in (one_sample_each(client), trainings(server_overhead.Served(client))):
                row.work(row.count // 10)
                before = cpu_seconds(running.pid)
                row.work(row.count)
                each = 1e3 * (cpu_seconds(running.pid) - before) / row.count
                print(f"| {row.what} | {each:.2f} |", flush=True)


class ApiRow(NamedTuple):
    what: str
    count: int
    work: Callable[[int], None]


def one_sample_each(client: tinsmith.ServiceClient) -> ApiRow:
    sampler = client.create_sampling_client(base_model="tiny").result()
    prompt = tinsmith.ModelInput.from_ints(server_overhead.TOKENS * 15)

    def work(count: int) -> None:
        futures = [sampler.sample(prompt, 1, server_overhead.ONE_TOKEN) for _ in range(count)]
        for future in futures:
            future.result()

    return ApiRow("a sample with a prompt of 120 tokens", SAMPLES, work)


def trainings(served: server_overhead.Served) -> ApiRow:
    def work(count: int) -> None:
        for _ in range(count // 2):
            served.train_together()

    return ApiRow("a training operation (forward_backward and optim_step by turns)", 2 * TRAINING_ROUNDS, work)


# --- the database ----------------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    ours: float
    database: float


class Meter:
    """CPU milliseconds of a call: of this process, and of those of the database."""

    def __init__(self, postgres: Postgres | None) -> None:
        self._postgres = postgres

    def of(self, calls: Sequence[Callable[[], object]]) -> Cost:
        ours, database = time.process_time(), self._database()
        for call in calls:
            call()
        ours, database = time.process_time() - ours, self._database() - database
        return Cost(1e3 * ours / len(calls), 1e3 * database / len(calls))

    def _database(self) -> float:
        if self._postgres is None:
            return 0.0
        parent = self._postgres.pid
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        return sum(map(cpu_seconds, [parent, *map(int, children)]))


@contextmanager
def stores() -> Iterator[list[tuple[str, Store, Meter]]]:
    with tempfile.TemporaryDirectory() as folder, Postgres() as postgres:
        lite, full = Store(f"sqlite:///{folder}/store.db"), Store(postgres.new_database())
        yield [("SQLite", lite, Meter(None)), ("PostgreSQL", full, Meter(postgres))]
        lite.close()
        full.close()


class StoreRun:
    """The life of jobs in one store, a step at a time; `owners` share them equally."""

    def __init__(self, store: Store) -> None:
        self._jobs = store.jobs
        self._numbers = itertools.count()

    def submissions(self, count: int, owners: int, base_model: str) -> list[Submission]:
        """Each of another model, as if every tenant had one."""
        return [
            Submission(
                job=training(
                    None,
                    owner=f"owner-{number % owners}",
                    model_id=f"s:train:{number}",
                    base_model=base_model,
                    payload=PAYLOAD,
                )
            )
            for number in itertools.islice(self._numbers, count)
        ]

    def submit(self, batch: Sequence[Submission]) -> None:
        for start in range(0, len(batch), 500):
            self._jobs.enqueue_many(batch[start : start + 500])

    def claim(self, base_model: str, limit: int, claimed: list[list[str]]) -> None:
        claimed.append([job.request_id for job in self._jobs.claim(base_model, WORKER, train=limit)])

    def begin(self, ids: Sequence[str]) -> None:
        self._jobs.begin(WORKER, ids)

    def complete(self, ids: Sequence[str]) -> None:
        self._jobs.complete(WORKER, dict.fromkeys(ids, DONE))


def measure_store(name: str, store: Store, meter: Meter) -> None:
    def show(what: str, calls: Sequence[Callable[[], None]]) -> None:
        cost = meter.of(calls)
        print(f"| {name}: {what} | {cost.ours:.2f} | {cost.database:.2f} |", flush=True)

    run = StoreRun(store)
    claimed: dict[int, list[list[str]]] = {}
    for count, repeats in ((1, SINGLES), (TOGETHER, REPEATS)):
        batches = [run.submissions(count, 10, f"by {count}") for _ in range(repeats)]
        show(f"{count} submitted at once", [partial(run.submit, batch) for batch in batches])
        claimed[count] = []
        show(
            f"{count} claimed where 10 owners have work",
            [partial(run.claim, f"by {count}", count, claimed[count])] * repeats,
        )
    for owners in MANY_OWNERS:
        run.submit(run.submissions(max(owners, REPEATS * TOGETHER), owners, f"of {owners}"))
        claims = [partial(run.claim, f"of {owners}", TOGETHER, [])] * (REPEATS // 2)
        show(f"{TOGETHER} claimed where {owners:,} owners have work", claims)
    for count, batches in claimed.items():
        show(f"{count} begun", [partial(run.begin, ids) for ids in batches])
        show(f"{count} completed", [partial(run.complete, ids) for ids in batches])


def main() -> None:
    print("| the API process, for each | CPU (ms) |\n| --- | ---: |")
    measure_api()
    print("\n| the store | CPU of the asking process (ms) | of the database (ms) |\n| --- | ---: | ---: |")
    with stores() as opened:
        for each in opened:
            measure_store(*each)


if __name__ == "__main__":
    main()
