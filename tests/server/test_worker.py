"""The worker's loop with a real store and a real engine, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.server.workbench import BASE, WAIT_SECONDS, Workbench, hold_up
from tinsmith.server import worker
from tinsmith.server.engine import adapter_files
from tinsmith.server.soundness import BrokenEngineError
from tinsmith.server.store import StoreUnavailableError
from tinsmith.server.store.models import Models
from tinsmith.server.store.records import Done, Failed, NewSampler
from tinsmith.server.store.samplers import Samplers
from tinsmith.server.worker import Worker


def test_a_new_worker_goes_on_where_the_last_one_was(bench: Workbench) -> None:
    whole, cut = bench.create("s:train:0"), bench.create("s:train:1")
    with bench.worker():
        expected = bench.losses(bench.train(whole, range(1, 9)))
        losses = bench.losses(bench.train(cut, range(1, 4)))
    with bench.worker():
        bench.step(cut, 4)
        assert losses + bench.losses(bench.train(cut, range(5, 9))) == pytest.approx(expected, rel=1e-6)


def test_a_sampler_copied_from_a_model_outlives_its_worker(bench: Workbench) -> None:
    model = bench.create("s:train:0")
    with bench.worker():
        bench.train(model, range(1, 5))
        sampler_id = msgspec.json.decode(bench.result(bench.copy(model, 5)))["sampling_session_id"]
        before = bench.tokens(bench.sample(sampler_id, 0, max_tokens=10, temperature=0.5))
        bench.train(model, range(7, 11))
    with bench.worker():
        assert bench.tokens(bench.sample(sampler_id, 1, max_tokens=10, temperature=0.5)) == before


def test_a_sampler_does_not_pass_to_what_was_saved_under_the_name_of_its_weights(bench: Workbench) -> None:
    model = bench.create("s:train:0")
    with bench.worker():
        path = bench.save(model, 1, "latest")
        bench.train(model, range(3, 5))
        bench.data(model, 2)
        sampler = NewSampler(
            session_id="s",
            sampling_session_seq_id=0,
            owner="ann",
            base_model=BASE,
            model_path=path,
            saved_by="s:train:0:1",
        )
        sampler_id = bench.store.samplers.create(sampler).sampler_id
        before = bench.tokens(bench.sample(sampler_id, 0, max_tokens=10, temperature=0.5))
        bench.save(model, 5, "latest", overwrite=True)
        assert bench.tokens(bench.sample(sampler_id, 1, max_tokens=10, temperature=0.5)) == before
    with bench.worker():
        refused = bench.outcome(bench.sample(sampler_id, 2, max_tokens=10))
        assert isinstance(refused, Failed)
        assert "was overwritten" in refused.error


def test_what_a_worker_had_claimed_is_done_by_the_next(bench: Workbench) -> None:
    model = bench.create("s:train:0")
    sample = bench.sample(bench.base_sampler(), 0, max_tokens=3)
    dead = bench.store.jobs.claim(BASE, "dead", train=10) + bench.store.jobs.claim(BASE, "dead", sample=10)
    assert len(dead) == 2
    with bench.worker():
        assert len(bench.tokens(sample)) == 3
        bench.losses([bench.data(model, 1)])


def test_a_worker_takes_as_many_samples_as_it_has_room_for_and_leaves_the_others(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "MAX_CLAIMED_SAMPLES", 32)
    reached, go_on = hold_up(monkeypatch, bench.engine.generator, "step")
    sampler = bench.base_sampler()
    requests = [bench.sample(sampler, number, more={"num_samples": 16}, max_tokens=1) for number in range(5)]
    with bench.worker():
        assert reached.wait(WAIT_SECONDS)
        states = bench.store.results.statuses(requests)
        assert [states[request].state for request in requests] == ["running"] * 2 + ["queued"] * 3
        go_on.set()
        assert all(isinstance(bench.outcome(request), Done) for request in requests)


def test_one_owner_gets_three_quarters_of_the_places_of_a_worker(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "MAX_CLAIMED_SAMPLES", 8)
    reached, go_on = hold_up(monkeypatch, bench.engine.generator, "step")
    sampler = bench.base_sampler()
    requests = [bench.sample(sampler, number, max_tokens=1) for number in range(9)]
    with bench.worker():
        assert reached.wait(WAIT_SECONDS)
        states = bench.store.results.statuses(requests)
        assert [states[request].state for request in requests] == ["running"] * 6 + ["queued"] * 3
        go_on.set()
        assert all(isinstance(bench.outcome(request), Done) for request in requests)


def test_a_request_for_more_samples_than_a_worker_has_room_for_is_drawn(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "MAX_CLAIMED_SAMPLES", 4)
    sampler = bench.base_sampler()
    requests = [bench.sample(sampler, number, more={"num_samples": 9}, max_tokens=1) for number in range(3)]
    with bench.worker():
        assert all(isinstance(bench.outcome(request), Done) for request in requests)


def test_a_worker_that_ends_late_leaves_the_jobs_of_its_successor_alone(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go_on = hold_up(monkeypatch, bench.engine.generator, "step")
    job = bench.sample(bench.base_sampler(), 0, max_tokens=1)
    with bench.worker() as stop:
        assert reached.wait(WAIT_SECONDS)
        stop()
        bench.store.jobs.requeue(BASE, max_attempts=3, error="")
        bench.store.jobs.claim(BASE, "successor", sample=1)
        go_on.set()
    assert bench.store.jobs.complete("successor", {job: Done(result=b"", content_type="x")}) == [job]


def test_an_error_of_the_engine_is_that_of_one_job(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_engine_that_fails_at_everything_ends_its_worker_and_fails_no_job(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an error of a GPU that stays: the next process may do better, and whose fault it was will show."""
    job = bench.data(bench.create("s:train:0"), 1)

    def broken(rows: Any) -> Any:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(bench.engine, "forward_backward", broken)
    with bench.worker():
        bench.wait_for_its_death()
    assert isinstance(bench.died_of, BrokenEngineError)
    bench.died_of = None
    monkeypatch.undo()
    with bench.worker():
        assert isinstance(bench.outcome(job), Done)


def test_an_error_of_the_sampler_leaves_the_worker_alive(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_disk_that_takes_nothing_fails_the_save_and_says_why(bench: Workbench) -> None:
    (Path(bench.settings.state) / "checkpoints").write_text("in the way")
    body = {"model_id": "s:train:0", "seq_id": 1, "path": "a"}
    with bench.worker():
        model_id = bench.create("s:train:0")
        failed = bench.outcome(bench.submit("save_weights", model_id, seq_id=1, payload=msgspec.json.encode(body)))
        bench.result(bench.data(model_id, 2))
    assert isinstance(failed, Failed)
    assert failed.category == "server"
    assert "Not a directory" in failed.error
    assert "send it again" in failed.error


def test_a_save_that_meets_a_lost_database_is_done_later(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    model_id = bench.create("s:train:0")
    job = bench.submit(
        "save_weights", model_id, seq_id=1, payload=b'{"model_id": "s:train:0", "seq_id": 1, "path": "a"}'
    )

    def fail(*_: Any, **__: Any) -> None:
        raise StoreUnavailableError("INSERT", {}, Exception("the database is shutting down"))

    monkeypatch.setattr(adapter_files, "write_adapter", fail)
    with bench.worker():
        bench.wait_for_its_death()
    assert isinstance(bench.died_of, StoreUnavailableError)
    bench.died_of = None
    monkeypatch.undo()
    with bench.worker():
        assert isinstance(bench.outcome(job), Done)


def test_samples_and_training_wait_for_a_lost_database_too(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is lost while a model is looked up, which is in the midst of a job."""
    jobs = {
        "models": bench.data(bench.create("s:train:0"), 1),
        "samplers": bench.sample(bench.base_sampler(), 0, max_tokens=2),
    }

    def fail(*_: Any) -> None:
        raise StoreUnavailableError("SELECT", {}, Exception("the server closed the connection"))

    for table, job in jobs.items():
        kind = Models if table == "models" else Samplers
        monkeypatch.setattr(kind, "get", fail)
        with bench.worker():
            bench.wait_for_its_death()
        assert isinstance(bench.died_of, StoreUnavailableError)
        bench.died_of = None
        monkeypatch.undo()
        assert bench.store.results.statuses([job])[job].outcome is None
    with bench.worker():
        assert all(isinstance(bench.outcome(job), Done) for job in jobs.values())


def test_a_number_of_another_sampler_is_refused_and_that_one_keeps_its_weights(bench: Workbench) -> None:
    with bench.worker():
        first, second = bench.create("s:train:0"), bench.create("s:train:1")
        for model_id in (first, second):
            bench.losses([bench.data(model_id, 1, first=1 if model_id == first else 9)])
            bench.result(bench.step(model_id, 2))
        sampler_id = msgspec.json.decode(bench.result(bench.copy(first, 3)))["sampling_session_id"]
        before = bench.tokens(bench.sample(sampler_id, 0, max_tokens=10))
        refused = bench.outcome(bench.copy(second, 3))
        assert isinstance(refused, Failed)
        assert "sampling_session_seq_id is 3, which is another sampler" in refused.error
        assert bench.tokens(bench.sample(sampler_id, 1, max_tokens=10)) == before


def test_samples_are_drawn_while_training_goes_on(bench: Workbench) -> None:
    model, sampler = bench.create("s:train:0"), bench.base_sampler()
    long_queue = bench.train(model, range(1, 401))
    with bench.worker():
        bench.result(long_queue[2])
        bench.tokens(bench.sample(sampler, 0, max_tokens=4))
        assert bench.store.results.statuses([long_queue[-1]])[long_queue[-1]].outcome is None


@pytest.mark.parametrize("seed", [7, None])
def test_a_sample_that_is_drawn_again_comes_out_the_same(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, seed: int | None
) -> None:
    """Its worker dies when all is drawn and nothing is told."""
    told: list[dict[str, Any]] = []
    sampler = bench.base_sampler()
    jobs = [bench.sample(sampler, number, max_tokens=20, seed=seed) for number in range(2)]

    def die(self: Worker, outcomes: dict[str, Any], *_: Any) -> None:
        told.append(outcomes)
        raise RuntimeError("killed")

    with monkeypatch.context() as deadly, bench.worker():
        deadly.setattr(Worker, "_complete", die)
        bench.wait_for_its_death()
        bench.died_of = None
    with bench.worker():
        results = {job: bench.result(job) for job in jobs}
    assert told[0]
    assert all(results[job] == outcome.result for job, outcome in told[0].items())
    first, second = (bench.tokens(job) for job in jobs)
    assert (first == second) == (seed is not None), "without a seed of the client each has its own"


def test_a_cancelled_sample_ends(bench: Workbench) -> None:
    sampler = bench.base_sampler()
    endless = bench.sample(sampler, 0, max_tokens=120)
    bench.store.jobs.claim(BASE, "dead", sample=1)
    assert bench.store.jobs.cancel(endless, "ann") == "asked"
    with bench.worker():
        assert len(bench.tokens(bench.sample(sampler, 1, max_tokens=2))) == 2
    assert bench.store.results.statuses([endless])[endless].state == "cancelled"
