"""The worker's loop with a real store and a real engine, in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tinsmith.server.engine.engine import Engine
from tinsmith.server.store import Store
from tinsmith.server.store.records import Done, Failed, JobKind, Lora, NewJob, NewModel, NewSampler, Outcome
from tinsmith.server.worker import Worker, WorkerSettings, note_served
from tinsmith.types import Datum, ForwardBackwardOutput, ModelInput, SampleResponse
from tinsmith.wire import proto

BASE = "tiny"
WAIT_SECONDS = 60.0


class Bench:
    """A state folder, and somebody who submits jobs to it."""

    def __init__(self, state: Path, folder: Path) -> None:
        self.settings = WorkerSettings(
            base_model=BASE, folder=str(folder), database=f"sqlite:///{state / 'tinsmith.db'}", state=str(state)
        )
        self.store = Store(self.settings.database)
        self.engine = Engine.open(folder, device="cpu", dtype="float32", kv_tokens=2048)

    @contextmanager
    def worker(self) -> Iterator[Worker]:
        worker = Worker(self.settings, Store(self.settings.database), self.engine)
        thread = threading.Thread(target=worker.run)
        thread.start()
        try:
            yield worker
        finally:
            worker.stop()
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive()

    def submit(self, kind: JobKind, model_id: str | None = None, **fields: Any) -> str:
        job = NewJob(
            **{"kind": kind, "owner": "ann", "session_id": "s", "base_model": BASE, "payload": b"{}", **fields},
            model_id=model_id,
        )
        model = None
        if kind == "create_model":
            model = NewModel(
                model_id=str(model_id), owner=job.owner, base_model=BASE, lora=Lora(rank=2, seed=1), optimizer_config={}
            )
        return self.store.jobs.enqueue(job, model=model).request_id

    def create(self, model_id: str) -> str:
        self.submit("create_model", model_id, seq_id=0)
        return model_id

    def data(self, model_id: str, seq_id: int, first: int = 1) -> str:
        tokens = list(range(first, first + 6))
        inputs = {"target_tokens": [token + 1 for token in tokens], "weights": [1.0] * 6}
        prepared = proto.prepare_forward_backward([Datum(ModelInput.from_ints(tokens), inputs)], "cross_entropy", None)
        payload = prepared.finish(model_id, seq_id)
        return self.submit("forward_backward", model_id, seq_id=seq_id, payload=payload, size=6)

    def step(self, model_id: str, seq_id: int) -> str:
        body = {"model_id": model_id, "seq_id": seq_id, "adam_params": {"learning_rate": 0.01}}
        return self.submit("optim_step", model_id, seq_id=seq_id, payload=msgspec.json.encode(body))

    def train(self, model_id: str, seq_ids: range) -> list[str]:
        """Data and steps in turn; the ids of the data jobs."""
        return [
            self.data(model_id, seq_id, first=seq_id) if seq_id % 2 else self.step(model_id, seq_id)
            for seq_id in seq_ids
        ][::2]

    def copy(self, model_id: str, seq_id: int) -> str:
        """A sampler of the model as it is; the job's id."""
        body = {"model_id": model_id, "seq_id": seq_id, "sampling_session_seq_id": seq_id}
        return self.submit("save_weights_for_sampler", model_id, seq_id=seq_id, payload=msgspec.json.encode(body))

    def base_sampler(self) -> str:
        sampler = NewSampler(session_id="s", sampling_session_seq_id=0, owner="ann", base_model=BASE)
        return self.store.samplers.create(sampler).sampler_id

    def sample(self, sampler_id: str, seq_id: int, **params: Any) -> str:
        body = {
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
            "sampling_params": {"seed": 1, "stop": [], **params},
        }
        return self.submit("sample", sampler_id=sampler_id, seq_id=seq_id, payload=msgspec.json.encode(body))

    def outcome(self, request_id: str) -> Outcome:
        end = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < end:
            outcome = self.store.results.statuses([request_id])[request_id].outcome
            if outcome is not None:
                assert isinstance(outcome, Done | Failed)
                return outcome
            time.sleep(0.005)
        raise AssertionError(f"{request_id} did not finish")

    def result(self, request_id: str) -> bytes:
        outcome = self.outcome(request_id)
        assert isinstance(outcome, Done), outcome
        return outcome.result

    def losses(self, request_ids: list[str]) -> list[float]:
        outputs: list[ForwardBackwardOutput] = [
            proto.decode_forward_backward_output(self.result(request_id)) for request_id in request_ids
        ]
        return [output.metrics["loss:sum"] for output in outputs]

    def tokens(self, request_id: str) -> list[int]:
        response: SampleResponse = proto.decode_sample_response(self.result(request_id))
        return response.sequences[0].tokens


@pytest.fixture
def bench(tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr("tinsmith.server.worker.tell", lambda message: None)
    made = Bench(tmp_path, tiny_folder)
    yield made
    made.store.close()


def test_a_new_worker_goes_on_where_the_last_one_was(bench: Bench) -> None:
    whole, cut = bench.create("s:train:0"), bench.create("s:train:1")
    with bench.worker():
        expected = bench.losses(bench.train(whole, range(1, 9)))
        losses = bench.losses(bench.train(cut, range(1, 4)))
    with bench.worker():
        bench.step(cut, 4)
        assert losses + bench.losses(bench.train(cut, range(5, 9))) == pytest.approx(expected, rel=1e-6)


def test_a_sampler_copied_from_a_model_outlives_its_worker(bench: Bench) -> None:
    model = bench.create("s:train:0")
    with bench.worker():
        bench.train(model, range(1, 5))
        sampler_id = msgspec.json.decode(bench.result(bench.copy(model, 5)))["sampling_session_id"]
        before = bench.tokens(bench.sample(sampler_id, 0, max_tokens=10, temperature=0.5))
        bench.train(model, range(7, 11))
    with bench.worker():
        assert bench.tokens(bench.sample(sampler_id, 1, max_tokens=10, temperature=0.5)) == before


def test_what_a_worker_had_claimed_is_done_by_the_next(bench: Bench) -> None:
    model = bench.create("s:train:0")
    sample = bench.sample(bench.base_sampler(), 0, max_tokens=3)
    dead = bench.store.jobs.claim(BASE, "dead", "train", 10) + bench.store.jobs.claim(BASE, "dead", "sample", 10)
    assert len(dead) == 2
    with bench.worker():
        assert len(bench.tokens(sample)) == 3
        bench.losses([bench.data(model, 1)])


def test_a_worker_that_ends_late_leaves_the_jobs_of_its_successor_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go_on = threading.Event(), threading.Event()
    real = bench.engine.generator.step

    def slow() -> Any:
        reached.set()
        assert go_on.wait(WAIT_SECONDS)
        return real()

    monkeypatch.setattr(bench.engine.generator, "step", slow)
    job = bench.sample(bench.base_sampler(), 0, max_tokens=1)
    with bench.worker() as late:
        assert reached.wait(WAIT_SECONDS)
        late.stop()
        bench.store.jobs.requeue(BASE)
        bench.store.jobs.claim(BASE, "successor", "sample", 1)
        go_on.set()
    assert bench.store.jobs.complete("successor", {job: Done(result=b"", content_type="x")}) == [job]


def test_an_error_of_the_engine_is_that_of_one_job(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch fails as a whole; one by one, only the job whose fault it is does."""
    models = [bench.create(f"s:train:{number}") for number in range(3)]
    real = bench.engine.forward_backward

    def fragile(rows: Any) -> Any:
        if any(row.tokens[0] == 66 for row in rows):
            raise RuntimeError("a bug of ours")
        return real(rows)

    monkeypatch.setattr(bench.engine, "forward_backward", fragile)
    jobs = [bench.data(model, 1, first=66 if number == 1 else 1) for number, model in enumerate(models)]
    with bench.worker():
        first, faulty, last = (bench.outcome(job) for job in jobs)
        assert isinstance(first, Done)
        assert isinstance(last, Done)
        assert isinstance(faulty, Failed)
        assert faulty.category == "server"
        assert "a bug of ours" not in faulty.error


def test_an_error_of_the_sampler_leaves_the_worker_alive(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = bench.base_sampler()
    real, failed = bench.engine.generator.step, []

    def once() -> Any:
        if not failed:
            failed.append(True)
            raise RuntimeError("a bug of ours")
        return real()

    monkeypatch.setattr(bench.engine.generator, "step", once)
    job = bench.sample(sampler, 0, max_tokens=2)
    with bench.worker():
        assert isinstance(bench.outcome(job), Failed)
        assert len(bench.tokens(bench.sample(sampler, 1, max_tokens=2))) == 2


def test_samples_are_drawn_while_training_goes_on(bench: Bench) -> None:
    model, sampler = bench.create("s:train:0"), bench.base_sampler()
    long_queue = bench.train(model, range(1, 401))
    with bench.worker():
        bench.result(long_queue[2])
        bench.tokens(bench.sample(sampler, 0, max_tokens=4))
        assert bench.store.results.statuses([long_queue[-1]])[long_queue[-1]].outcome is None


def test_a_cancelled_sample_ends(bench: Bench) -> None:
    sampler = bench.base_sampler()
    endless = bench.sample(sampler, 0, max_tokens=120)
    bench.store.jobs.claim(BASE, "dead", "sample", 1)
    assert bench.store.jobs.cancel(endless, "ann") == "asked"
    with bench.worker():
        assert len(bench.tokens(bench.sample(sampler, 1, max_tokens=2))) == 2
    assert bench.store.results.statuses([endless])[endless].state == "cancelled"


def test_a_long_time_alone_does_not_cost_a_long_time_in_company() -> None:
    """After a thousand turns alone, whoever comes is ahead for some ten turns and not for a thousand."""
    served: dict[str, float] = {}
    for _ in range(1000):
        note_served(served, [("ann", 10.0)])
    turns = 0
    while served.get("bob", 0.0) < served["ann"]:
        note_served(served, [("bob", 10.0)])
        turns += 1
    assert turns <= 10


def test_who_was_not_seen_for_long_is_forgotten() -> None:
    served = {"ann": 1000.0}
    for _ in range(500):
        note_served(served, [("bob", 1.0)])
    assert "ann" not in served
