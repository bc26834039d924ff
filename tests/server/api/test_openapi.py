"""The API describes itself completely."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.server.api.running import RunningServer
from tinsmith.server import full_disk
from tinsmith.server.openapi import document
from tinsmith.server.routes import ENDPOINTS

# The endpoints a client may call, as the protocol lists them.
PROTOCOL = """
POST client/config; POST client/dynamic_config; POST auth/token; POST create_session; POST session_heartbeat
POST sessions/{}/finish; POST telemetry; GET get_server_capabilities; GET healthz; POST create_model; POST get_info
POST forward_backward; POST optim_step; POST save_weights; POST save_weights_for_sampler; POST save_weights_external
POST load_weights; POST weights_info; POST copy_weights; POST create_custom_loss; POST retrieve_future
POST retrieve_futures; POST cancel_future; POST create_sampling_session; POST asample; POST join_sampling_session
GET samplers/{}; GET training_runs; GET training_runs/{}; GET training_runs/{}/checkpoints; GET checkpoints
DELETE training_runs/{}/checkpoints/{}/{}; POST training_runs/{}/checkpoints/{}/{}/publish
DELETE training_runs/{}/checkpoints/{}/{}/publish; PUT training_runs/{}/checkpoints/{}/{}/ttl
GET training_runs/{}/checkpoints/{}/{}/external_weights_urls; GET sessions; GET sessions/{}; POST sessions/search
PUT sessions/{}/project; GET sessions/{}/trace_export; GET audit; GET billing/usage/events
GET billing/usage/checkpoints/current; GET auth/apikey/me; DELETE auth/apikey/me
POST forward; POST unload_model; GET training_runs/{}/checkpoints/{}/{}/archive
"""


def test_every_endpoint_of_the_protocol_is_there() -> None:
    served = {f"{one.method} {re.sub('{[^}]*}', '{}', one.path).removeprefix('/api/v1/')}" for one in ENDPOINTS}
    asked = {line.strip() for line in PROTOCOL.replace("\n", ";").split(";") if line.strip()}
    assert asked <= served


def test_every_reference_leads_somewhere() -> None:
    whole = document()

    def references(value: Any) -> set[str]:
        if isinstance(value, dict):
            found = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
            return found.union(*map(references, value.values()))
        return set().union(*map(references, value)) if isinstance(value, list) else set()

    known = {f"#/components/schemas/{name}" for name in whole["components"]["schemas"]}
    assert references(whole) <= known
    assert "#/components/schemas/SampleRequest" in references(whole)


def test_every_operation_says_what_it_is_for_and_has_a_name_of_its_own() -> None:
    operations = [operation for path in document()["paths"].values() for operation in path.values()]
    assert all(operation["summary"] for operation in operations)
    assert len({operation["operationId"] for operation in operations}) == len(operations)


def test_results_are_described_in_both_languages() -> None:
    described = document()["paths"]["/api/v1/retrieve_future"]["post"]["responses"]["200"]["content"]
    assert [*described] == ["application/json", "application/x-protobuf"]


def test_the_description_and_its_page_are_served_without_a_key(server: RunningServer) -> None:
    described = server.call("GET", "/openapi.json", key=None)
    assert json.loads(described.body)["openapi"].startswith("3.1")
    page = server.call("GET", "/docs", key=None)
    assert page.headers["content-type"].startswith("text/html")
    assert b"https://" not in page.body  # it works without a network


def test_health_and_readiness(server: RunningServer) -> None:
    assert server.get("healthz", key=None).json() == {"status": "ok"}
    assert server.call("GET", "/readyz", key=None).json() == {"status": "ready"}
    server.workers.ready = False
    try:
        loading = server.call("GET", "/readyz", key=None)
    finally:
        server.workers.ready = True
    assert (loading.status, loading.json()["detail"]) == (
        503,
        "The base model 'tiny/model-1' is still being loaded. The base model 'tiny/model-2' is still being loaded.",
    )


def test_who_cannot_work_is_not_ready(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.workers.trouble = "its worker has not been heard of for 20 s"
    try:
        stuck = server.call("GET", "/readyz", key=None)
    finally:
        server.workers.trouble = None
    assert stuck.status == 503
    assert "The base model 'tiny/model-2' waits: its worker has not been heard of for 20 s." in stuck.json()["detail"]
    monkeypatch.setattr(full_disk, "KEPT_BYTES", 2**62)
    full = server.call("GET", "/readyz", key=None)
    assert (full.status, full.json()["detail"]) == (503, "The server's disk is full; make room on it.")


def test_the_context_can_be_limited(tmp_path: Path) -> None:
    with RunningServer(tmp_path, max_context=100) as running:
        shown = running.get("get_server_capabilities").json()["supported_models"][0]
    assert shown == {
        "model_name": "tiny/model-1",
        "max_context_length": 100,
        "trainable": True,
        "sampleable": True,
        "input_modalities": ["text"],
    }


def test_metrics_count_requests_and_jobs(server: RunningServer) -> None:
    server.result(server.post("optim_step", {"model_id": server.model(), "seq_id": 1, "adam_params": {}}))
    text = server.call("GET", "/metrics", key=None).body.decode()
    assert 'tinsmith_requests_total{method="POST",route="/api/v1/optim_step",status="200"}' in text
    assert 'tinsmith_ready{base_model="tiny/model-1"} 1.0' in text
    assert "tinsmith_waiting" in text
