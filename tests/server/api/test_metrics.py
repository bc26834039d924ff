"""The page of metrics: everything that is counted here, and nothing that a client could choose."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.end_to_end.serving import wait_until
from tests.server.api.running import MODELS, RunningServer
from tinsmith.server import quotas
from tinsmith.server.messages import Figure
from tinsmith.server.reasons import LIMITS
from tinsmith.server.store import StoreUnavailableError
from tinsmith.server.store.records import QueueDepth

CANARY = "canary-7f3a"


@pytest.fixture
def own(tmp_path: Path) -> Iterator[RunningServer]:
    with RunningServer(tmp_path) as running:
        yield running


def samples(server: RunningServer) -> dict[tuple[str, ...], float]:
    text = server.call("GET", "/metrics", key=None).body.decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_requests_are_counted_by_route_and_submissions_timed(own: RunningServer) -> None:
    run = own.model()
    own.post("optim_step", {"model_id": run, "seq_id": 1, "adam_params": {}})
    own.get(f"training_runs/{run}")
    own.get(f"training_runs/{CANARY}")
    own.get(f"{CANARY}/{CANARY}")
    assert own.call(CANARY.upper().replace("-", ""), "/api/v1/healthz").status == 400  # no method of HTTP
    own.call("MKCOL", "/api/v1/healthz")
    found = samples(own)
    assert found["tinsmith_requests_total", "POST", "/api/v1/optim_step", "200"] == 1
    assert found["tinsmith_requests_total", "GET", "/api/v1/training_runs/{run_id}", "200"] == 1
    assert found["tinsmith_requests_total", "GET", "/api/v1/training_runs/{run_id}", "404"] == 1
    assert found["tinsmith_requests_total", "unknown", "unknown", "404"] == 1
    assert found["tinsmith_requests_total", "unknown", "unknown", "405"] == 1
    assert found["tinsmith_submission_seconds_count",] == 2
    assert found["tinsmith_request_seconds_count", "/api/v1/optim_step"] == 1


def test_who_asks_together_gets_one_page(own: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no key, so nobody may keep the database busy with it."""
    many, asked, have_come, depths = 16, 0, threading.Event(), own.store.jobs.depths

    def slow() -> list[QueueDepth]:
        nonlocal asked
        asked += 1
        assert have_come.wait(30)
        return depths()

    monkeypatch.setattr(own.store.jobs, "depths", slow)
    with ThreadPoolExecutor(many) as threads:
        pages = [threads.submit(samples, own) for _ in range(many)]
        wait_until(lambda: len(own._api.server_state.tasks) == many, 30, "not all have come")
        have_come.set()
        assert all(("tinsmith_waiting",) in page.result() for page in pages)
    assert asked <= 2, "one for those who came first, and one for those who came while it was written"


def test_no_name_of_a_client_is_on_the_page(own: RunningServer) -> None:
    session = own.post("create_session", {"tags": [CANARY], "user_metadata": {CANARY: CANARY}, "sdk_version": CANARY})
    session_id = session.json()["session_id"]
    run = own.model(session_id)
    own.post("save_weights", {"model_id": run, "seq_id": 1, "path": CANARY})
    body = {"session_id": session_id, "model_seq_id": 1, "base_model": CANARY, "lora_config": {"rank": 8}}
    own.post("create_model", body)
    page = own.call("GET", "/metrics", key=None).body.decode()
    assert CANARY not in page
    assert session_id not in page
    assert "tml-" not in page


def test_what_waits_is_shown_with_the_age_of_the_oldest(own: RunningServer) -> None:
    run, sampler = own.model(), own.sampler()
    own.workers.hold("optim_step", "sample")
    own.post("optim_step", {"model_id": run, "seq_id": 2, "adam_params": {}})  # waits for number 1
    body = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": []}, "sampling_params": {"max_tokens": 1}}
    own.post("asample", {**body, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]}})
    found = samples(own)
    assert found["tinsmith_jobs", MODELS[0], "training", "optim_step", "queued"] == 1
    assert 0 <= found["tinsmith_oldest_job_seconds", MODELS[0], "training"] < 3600
    assert found["tinsmith_models", MODELS[0], "disk"] == 1
    assert found["tinsmith_disk_free_bytes",] > 0
    own.workers.release()


def test_what_is_refused_because_of_a_limit_is_counted_by_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotas, "_COUNT_AGAIN_SECONDS", 0.0)
    with RunningServer(tmp_path, max_models=1, max_queued_requests=1) as running:
        run = running.model()
        running.workers.hold("optim_step")
        first = running.post("optim_step", {"model_id": run, "seq_id": 1, "adam_params": {}})
        assert running.post("optim_step", {"model_id": run, "seq_id": 2, "adam_params": {}}).status == 429
        running.workers.release()
        running.result(first)
        body = {"session_id": running.session(), "model_seq_id": 0, "base_model": MODELS[0], "lora_config": {"rank": 8}}
        running.post("create_model", body)
        found = samples(running)
    assert found["tinsmith_quota_refusals_total", "queued"] == 1
    assert found["tinsmith_quota_refusals_total", "models"] == 1


def test_limits_are_on_the_page_before_they_are_met_and_count_wherever_that_is(
    own: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = samples(own)
    assert {limit: found["tinsmith_quota_refusals_total", limit] for limit in LIMITS} == dict.fromkeys(LIMITS, 0)
    told = [Figure("tinsmith_quota_refusals_total", {"limit": "checkpoint_bytes"}, 2.0)]
    monkeypatch.setattr(own.workers, "figures", lambda base_model: told)
    assert samples(own)["tinsmith_quota_refusals_total", "checkpoint_bytes"] == 2 * len(MODELS)


def test_the_page_is_there_without_a_database(own: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> None:
        raise StoreUnavailableError("SELECT", {}, Exception("gone"))

    monkeypatch.setattr(own.store.jobs, "depths", gone)
    samples(own)
    found = samples(own)
    assert found["tinsmith_database_errors_total",] >= 1
    assert found["tinsmith_ready", MODELS[0]] == 1
    assert "tinsmith_jobs" not in {name for name, *_ in found}


def test_figures_of_workers_are_on_the_page(own: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    told = [Figure("tinsmith_models", {"place": "memory"}, 1.0), Figure("tinsmith_sampled_tokens_total", {}, 7.0)]
    monkeypatch.setattr(own.workers, "figures", lambda base_model: told if base_model == MODELS[0] else ())
    own.model()
    own.model()
    found = samples(own)
    assert found["tinsmith_sampled_tokens_total", MODELS[0]] == 7
    assert found["tinsmith_models", MODELS[0], "memory"] == 1
    assert found["tinsmith_models", MODELS[0], "disk"] == 1


def test_every_metric_has_a_text_and_a_name_of_ours(own: RunningServer) -> None:
    page = own.call("GET", "/metrics", key=None).body.decode()
    described = re.findall(r"^# HELP (\w+) (\S.*)$", page, re.MULTILINE)
    assert len(described) > 30
    assert all(name.startswith("tinsmith_") for name, _ in described)
    assert "_created" not in page
