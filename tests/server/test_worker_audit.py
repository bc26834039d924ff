"""What a worker adds to the audit trail: what became of the operations that were accepted."""

from __future__ import annotations

from datetime import UTC, datetime

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


def test_an_operation_that_no_worker_survived_has_failed(bench: Workbench) -> None:
    model = bench.create("s:train:0")
    jobs = [job.request_id for job in bench.store.jobs.claim(BASE, "dead", train=1)]
    for _ in range(MAX_KILLS):
        bench.store.jobs.begin("dead", jobs)
    with bench.worker():
        assert isinstance(bench.outcome(jobs[0]), Failed)
    assert trail(bench) == [("model_create", "failed", f"{model}:0")]
