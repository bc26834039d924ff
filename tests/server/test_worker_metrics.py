"""What workers count, told in pieces and added up over their lives."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tinsmith.server.engine.engine import EngineUsage
from tinsmith.server.messages import Figure
from tinsmith.server.store.records import Done, Failed, Job
from tinsmith.server.worker_metrics import Told, Worked, WorkerMetrics, families, worked

WORK = "tinsmith_work_seconds_total"


def value(told: Told, name: str, **labels: str) -> float:
    found = [figure.value for figure in told.figures() if (figure.name, figure.labels) == (name, labels)]
    return found[0] if found else 0.0


class Life:
    """A worker process, heard by what outlives it."""

    def __init__(self, told: Told) -> None:
        self.messages: list[list[Figure]] = []
        self._told = told
        told.begin_anew()
        self.metrics = WorkerMetrics(self._hear)

    def _hear(self, figures: Any) -> None:
        self.messages.append(list(figures))
        self._told.hear(figures)


def job(**fields: Any) -> Job:
    known = {
        "request_id": "m:1",
        "kind": "optim_step",
        "owner": "ann",
        "session_id": "s",
        "base_model": "tiny",
        "model_id": "m",
        "sampler_id": None,
        "seq_id": 1,
        "size": 1,
        "payload": b"",
        "created": datetime.now(UTC),
        "attempts": 0,
    }
    return Job(**{**known, **fields})


def usage(**fields: int) -> EngineUsage:
    return EngineUsage(**{**dict.fromkeys(EngineUsage._fields, 0), **fields})


def test_counters_do_not_go_back_when_a_worker_dies() -> None:
    told, seen = Told(), []
    for seconds in (2.0, 0.5, 1.0):
        life = Life(told)
        seen.append(value(told, WORK, operation="sample"))
        life.metrics.worked("sample", seconds)
        life.metrics.tell()
        seen.append(value(told, WORK, operation="sample"))
    assert seen == [0, 2, 2, 2.5, 2.5, 3.5]


def test_counters_begin_at_zero() -> None:
    told = Told()
    Life(told).metrics.tell()
    found = {figure.place for figure in told.figures()}
    assert found >= {
        ("tinsmith_held_up_total", "disk"),
        ("tinsmith_held_up_total", "database"),
        ("tinsmith_snapshots_total", "failed"),
        ("tinsmith_jobs_finished_total", "save_weights", "failed"),
        ("tinsmith_wait_seconds_count", "sampling"),
    }


def test_a_job_that_was_over_a_limit_is_counted_as_that() -> None:
    told = Told()
    life = Life(told)
    for reason in ("checkpoint_bytes", "InvalidInputError: path"):
        life.metrics.finished("save_weights", Failed(error="no", category="user", reason=reason))
    life.metrics.tell()
    refused = [figure for figure in told.figures() if figure.name == "tinsmith_quota_refusals_total"]
    assert refused == [Figure("tinsmith_quota_refusals_total", {"limit": "checkpoint_bytes"}, 1.0)]
    (family,) = (one for one in families({"tiny": told.figures()}) if one.name == "tinsmith_jobs_finished")
    assert family.samples
    assert worked(told.figures()) == Worked(0.0, 2.0)


def test_what_a_dead_worker_held_is_gone() -> None:
    told = Told()
    life = Life(told)
    life.metrics.look(3, usage(kv_blocks=10, kv_blocks_used=4, token_budget=512))
    life.metrics.tell()
    assert value(told, "tinsmith_models", place="memory") == 3
    assert value(told, "tinsmith_kv_blocks", state="used") == 4
    assert value(told, "tinsmith_kv_blocks", state="free") == 6
    told.begin_anew()
    assert value(told, "tinsmith_models", place="memory") == 0


def test_only_what_has_changed_is_told() -> None:
    life = Life(Told())
    life.metrics.tell()
    life.metrics.tell()
    life.metrics.worked("sample", 1.0)
    life.metrics.tell()
    first, second = life.messages
    assert len(first) > 10
    assert second == [Figure(WORK, {"operation": "sample"}, 1.0)]


def test_the_engines_counts_are_taken_over_once() -> None:
    told = Told()
    metrics = Life(told).metrics
    for tokens in (100, 150):
        metrics.look(0, usage(trained_tokens=tokens, sampled_tokens=tokens, found_prompt_tokens=tokens))
        metrics.tell()
    assert value(told, "tinsmith_training_tokens_total") == 150
    assert value(told, "tinsmith_sampled_tokens_total") == 150
    assert value(told, "tinsmith_prompt_tokens_total", source="cache") == 150


def test_waits_are_counted_once_for_a_job_and_never_below_zero() -> None:
    told = Told()
    metrics = Life(told).metrics
    soon = datetime.now(UTC) + timedelta(hours=1)  # the clock was set back since
    metrics.begun([job(), job(attempts=1), job(kind="sample", created=soon)])
    metrics.tell()
    assert value(told, "tinsmith_wait_seconds_count", kind="training") == 1
    assert value(told, "tinsmith_wait_seconds_count", kind="sampling") == 1
    assert value(told, "tinsmith_wait_seconds_sum", kind="sampling") == 0


def test_what_happened_to_workers_is_added_to_what_they_told() -> None:
    told = Told()
    life = Life(told)
    life.metrics.gave_up(2)
    life.metrics.tell()
    told.add("tinsmith_jobs_given_up_total", 3)
    told.add("tinsmith_worker_restarts_total")
    told.begin_anew()
    told.add("tinsmith_worker_restarts_total")
    assert value(told, "tinsmith_jobs_given_up_total") == 5
    assert value(told, "tinsmith_worker_restarts_total") == 2


def test_figures_are_shown_under_the_name_of_their_base_model() -> None:
    told = Told()
    life = Life(told)
    life.metrics.finished("sample", Done(result=b"", content_type=""))
    life.metrics.wrote_snapshot(1000, 0.5)
    life.metrics.replayed(7, 1.5)
    life.metrics.tell()
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families({"tiny": told.figures()})
        for sample in family.samples
    }
    assert samples["tinsmith_jobs_finished_total", "tiny", "sample", "done"] == 1
    assert samples["tinsmith_snapshots_total", "tiny", "written"] == 1
    assert samples["tinsmith_snapshot_bytes_total", "tiny"] == 1000
    assert samples["tinsmith_replayed_operations_total", "tiny"] == 7


def test_a_replay_is_told_while_it_lasts() -> None:
    told = Told()
    metrics = Life(told).metrics
    metrics.tell()
    metrics.replaying(True)
    assert value(told, "tinsmith_models", place="replayed") == 1
    metrics.replaying(False)
    assert value(told, "tinsmith_models", place="replayed") == 0


@pytest.mark.parametrize("count", [1, 1000])
def test_telling_is_due_once_a_second_at_most(count: int) -> None:
    metrics = Life(Told()).metrics
    assert metrics.is_due
    for _ in range(count):
        metrics.tell()
    assert not metrics.is_due


def test_a_model_that_was_only_read_was_not_replayed() -> None:
    told = Told()
    metrics = Life(told).metrics
    for operations in (0, 3, 0):
        metrics.replayed(operations, 1.5)
    metrics.tell()
    assert value(told, "tinsmith_replays_total") == 1
    assert value(told, "tinsmith_replayed_operations_total") == 3
    assert value(told, "tinsmith_replay_seconds_total") == 1.5
