"""What a worker adds to the audit trail: what became of the operations that were accepted."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from tests.server.workbench import BASE, Workbench
from tinsmith.server.store.records import Failed
from tinsmith.server.suspects import MAX_KILLS

LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)


def trail(bench: Workbench) -> list[tuple[str, str, object]]:
    """Oldest first."""
    events = reversed(bench.store.audit.trail(since=LONG_AGO))
    return [(event.event, event.outcome, event.details.get("request_id")) for event in events]


def test_operations_are_done_or_have_failed_and_steps_are_not_mentioned(bench: Workbench) -> None:
    model = bench.create("s:train:0")
    with bench.worker():
        bench.result(bench.data(model, 1))
        bench.result(bench.step(model, 2))
        path = bench.save(model, 3, "one")
        again = bench.submit("save_weights", model, seq_id=4, payload=b'{"model_id":"s:train:0","path":"one"}')
        assert isinstance(bench.outcome(again), Failed)
        bench.result(bench.load(model, 5, path, optimizer=True))
    assert trail(bench) == [
        ("model_create", "done", f"{model}:0"),
        ("checkpoint_save", "done", f"{model}:3"),
        ("checkpoint_save", "failed", f"{model}:4"),
        ("model_load", "done", f"{model}:5"),
    ]


def test_how_an_operation_ended_is_found_by_the_key_that_it_came_with(bench: Workbench) -> None:
    bench.submit("create_model", "s:train:0", seq_id=0, key_id=7)
    (lost,) = (job.request_id for job in bench.store.jobs.claim(BASE, "dead", train=1))
    for _ in range(MAX_KILLS):
        bench.store.jobs.begin("dead", [lost])
    done = bench.submit("create_model", "s:train:1", seq_id=0, key_id=7)
    other = bench.submit("create_model", "s:train:2", seq_id=0, key_id=8)
    with bench.worker():
        for request_id in (lost, done, other):
            bench.outcome(request_id)
    events = reversed(bench.store.audit.trail(since=LONG_AGO, key_ids=[7]))
    assert [(event.outcome, event.details["request_id"]) for event in events] == [("failed", lost), ("done", done)]


def test_a_failure_is_known_by_its_kind(bench: Workbench, caplog: pytest.LogCaptureFixture) -> None:
    model = bench.create("s:train:0")
    with bench.worker():
        bench.save(model, 1, "one")
        again = bench.submit("save_weights", model, seq_id=2, payload=b'{"model_id":"s:train:0","path":"one"}')
        assert isinstance(bench.outcome(again), Failed)
    newest = bench.store.audit.trail(since=LONG_AGO)[0]
    assert newest.details == {"request_id": again, "category": "user", "reason": "InvalidInputError: path"}
    (line,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert (line.getMessage(), line.__dict__["reason"]) == ("save_weights failed (user)", "InvalidInputError: path")


def test_an_operation_that_no_worker_survived_has_failed(bench: Workbench) -> None:
    model = bench.create("s:train:0")
    jobs = [job.request_id for job in bench.store.jobs.claim(BASE, "dead", train=1)]
    for _ in range(MAX_KILLS):
        bench.store.jobs.begin("dead", jobs)
    with bench.worker():
        assert isinstance(bench.outcome(jobs[0]), Failed)
    assert trail(bench) == [("model_create", "failed", f"{model}:0")]
