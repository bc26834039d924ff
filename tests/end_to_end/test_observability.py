"""A real server watched while clients train, sample, fail and die: its metrics, its logs and its audit trail."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import tinsmith
from tests.docs.pages import DOCS
from tests.end_to_end.serving import KEY, OTHER_KEY, ServerProcess, wait_until
from tinsmith import types
from tinsmith.cli.main import run

MODEL = "tiny/model-1"
WORD = "quetzalcoatl"
TOKENS = [201, 13, 207, 17, 211, 19]
DATUM = types.Datum(types.ModelInput.from_ints(TOKENS), {"target_tokens": TOKENS, "weights": [1.0] * len(TOKENS)})
MANY_SECONDS = 120.0

Samples = dict[tuple[str, ...], float]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, models: Mapping[str, Path]) -> Iterator[ServerProcess]:
    options = ("--log-format=json", "--log-level=debug")
    with ServerProcess(tmp_path_factory.mktemp("watched"), {MODEL: models[MODEL]}, *options) as running:
        work(running)
        yield running


def work(server: ServerProcess) -> None:
    """What a client does with the package: train, save, publish, sample, all about one word and some tokens."""
    with tinsmith.ServiceClient(base_url=server.url, api_key=KEY, user_metadata={"about": WORD}) as client:
        trainer = client.create_lora_training_client(MODEL, rank=4, seed=1)
        trainer.forward_backward([DATUM, DATUM], "cross_entropy").result(60)
        trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result(60)
        saved = trainer.save_state("kept").result(60)
        client.rest.publish_checkpoint_from_tinker_path(saved.path).result(60)
        sampler = trainer.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=8, seed=1, stop=[WORD])
        sampler.sample(types.ModelInput.from_ints(TOKENS * 4), 2, params).result(60)


def samples(server: ServerProcess) -> Samples:
    text = server.call("GET", "/metrics").body.decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def lines(server: ServerProcess) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.log().splitlines()]


# Metrics


def test_the_work_of_the_worker_is_counted(server: ServerProcess) -> None:
    wait_until(lambda: ("tinsmith_sampled_tokens_total", MODEL) in samples(server), MANY_SECONDS, "nothing was told")
    wait_until(lambda: samples(server)["tinsmith_sampled_tokens_total", MODEL] >= 16, MANY_SECONDS, "not all was told")
    found = samples(server)
    assert found["tinsmith_training_rows_total", MODEL] >= 2
    assert found["tinsmith_training_tokens_total", MODEL] >= 2 * len(TOKENS)
    assert found["tinsmith_training_batch_tokens", MODEL] > 0
    assert found["tinsmith_work_seconds_total", MODEL, "forward_backward"] > 0
    assert found["tinsmith_work_seconds_total", MODEL, "sample"] > 0
    assert found["tinsmith_jobs_finished_total", MODEL, "optim_step", "done"] == 1
    assert found["tinsmith_wait_seconds_count", MODEL, "training"] >= 4
    assert found["tinsmith_wait_seconds_count", MODEL, "sampling"] == 1
    assert found["tinsmith_decoded_samples_total", MODEL] >= found["tinsmith_decode_steps_total", MODEL] > 0
    assert found["tinsmith_kv_blocks", MODEL, "free"] > 0
    assert found["tinsmith_models", MODEL, "memory"] == 1
    assert found["tinsmith_submission_seconds_count",] >= 5


def test_the_documented_metrics_are_those_of_the_page(server: ServerProcess) -> None:
    page = (DOCS / "how-to" / "watch-what-happens.md").read_text(encoding="utf-8")
    documented = {
        name: set(labels.split())
        for name, labels in re.findall(r"^\| `(tinsmith_\w+)` \|(?: `([\w ]+)`)? \|", page, re.MULTILINE)
    }
    text = server.call("GET", "/metrics").body.decode()
    shown = {name for name, _ in re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE)}
    assert len(shown) > 30
    assert documented.keys() == shown
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name, labels in documented.items():
        used = families[name.removesuffix("_total")].samples
        assert {frozenset(sample.labels.keys() - {"le"}) for sample in used} <= {frozenset(labels)}, name


def test_no_counter_goes_back_when_a_worker_is_killed(server: ServerProcess) -> None:
    with tinsmith.ServiceClient(base_url=server.url, api_key=KEY) as client:
        trainer = client.create_lora_training_client(MODEL, rank=4, seed=1)
        trainer.forward_backward([DATUM], "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=1e-3))
        path = trainer.save_state("before").result(60).path
        client.create_training_client_from_state_with_optimizer(path).result(10)
        wait_until(
            lambda: samples(server).get(("tinsmith_snapshots_total", MODEL, "written"), 0) > 0, 60, "no snapshot"
        )
        before = samples(server)
        server.kill_worker()
        trainer.forward([DATUM], "cross_entropy").result(MANY_SECONDS)
    wait_until(
        lambda: samples(server)["tinsmith_replays_total", MODEL] > before["tinsmith_replays_total", MODEL],
        MANY_SECONDS,
        "the model was not built again",
    )
    after = samples(server)
    assert after["tinsmith_snapshot_bytes_total", MODEL] > 0
    assert after["tinsmith_replayed_operations_total", MODEL] >= before["tinsmith_replayed_operations_total", MODEL] + 2
    assert after["tinsmith_worker_restarts_total", MODEL] == before["tinsmith_worker_restarts_total", MODEL] + 1
    rising = [place for place in before if re.search(r"_(total|count|sum|bucket)$", place[0])]
    assert len(rising) > 100
    assert [place for place in rising if after[place] < before[place]] == []


# Logs


def test_lines_say_which_request_of_whom_about_what(server: ServerProcess) -> None:
    found = lines(server)
    steps = [line for line in found if line.get("route") == "/api/v1/optim_step"]
    assert steps
    for line in steps:
        assert line["logger"] == "tinsmith.server.access"
        assert (line["level"], line["method"], line["status"], line["address"]) == ("debug", "POST", 200, "127.0.0.1")
        assert line["request_id"].startswith(line["model_id"])
        assert line["model_id"].startswith(line["session_id"])
        assert line["owner"].startswith("key-")
        assert line["seconds"] > 0
    published = [line for line in found if line.get("route", "").endswith("/publish")]
    assert {line["level"] for line in published} == {"info"}
    assert any(line.get("base_model") == MODEL for line in found), "the worker's lines too"


def test_neither_prompts_nor_tokens_nor_secrets_are_logged_whatever_fails(server: ServerProcess) -> None:
    secret, token = f"tml-{WORD}", "eyJ" + WORD
    session = server.post("create_session", {"tags": [WORD], "user_metadata": {WORD: WORD}, "sdk_version": WORD}).json()
    session_id = session["session_id"]
    base = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": MODEL}
    sampler = server.post("create_sampling_session", base).json()["sampling_session_id"]
    text = {"chunks": [{"type": "encoded_text", "tokens": TOKENS}]}
    bad = {"chunks": [{"type": "encoded_text", "tokens": [*TOKENS, 987654321]}]}
    request = {"sampling_session_id": sampler, "sampling_params": {"max_tokens": 2, "stop": [WORD]}, "prompt": text}
    server.result(server.post("asample", {**request, "seq_id": 0}))
    for number, more in enumerate(
        [{"prompt": bad}, {"prompt": WORD}, {"sampling_params": {"stop": {WORD: TOKENS}}}], 1
    ):
        server.post("asample", {**request, "seq_id": number, **more})
    for body in (WORD.encode(), json.dumps({WORD: TOKENS}).encode(), b"\xff" + WORD.encode(), b"[" * 100_000):
        for content_type in ("application/json", "application/x-protobuf", WORD):
            for endpoint in ("asample", "forward_backward", "create_model", "retrieve_future", "telemetry"):
                server.post(endpoint, body, headers={"content-type": content_type})
    server.post("forward_backward", WORD.encode(), headers={"content-encoding": "zstd"})
    for key in (secret, token):
        assert server.post("asample", request, key=key).status == 401
    server.call("GET", f"/api/v1/{WORD}?{WORD}={WORD}")
    server.call("GET", f"/api/v1/audit?day={WORD}")
    server.call("GET", f"/api/v1/files/a/weights/b/c?expires=1&signature={WORD}")
    server.post("load_weights", {"session_id": session_id, "model_seq_id": 9, "weights_access_token": secret})
    log = server.log()
    assert all(json.loads(line)["message"] for line in log.splitlines())
    for hidden in (WORD, KEY, OTHER_KEY, "987654321", "201, 13, 207", "[201,13", "201 13 207"):
        assert hidden not in log, [line for line in log.splitlines() if hidden in line][:3]


# The audit trail


def test_operations_are_in_the_trail_when_they_come_and_when_they_are_done(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--format", "json", "audit", *server.place()]) == 0
    events = json.loads(capsys.readouterr().out)["events"]
    (published,) = [event for event in events[::-1] if event["event"] == "checkpoint_publish"][:1]
    saves = [event for event in events if event["tinker_path"] == published["tinker_path"]]
    assert [(event["event"], event["outcome"]) for event in saves] == [
        ("checkpoint_publish", "done"),
        ("checkpoint_save", "done"),
        ("checkpoint_save", "accepted"),
    ]
    assert saves[1]["details"] == saves[2]["details"], "one request"
    assert (saves[2]["key"], saves[2]["address"]) == ("configured-1", "127.0.0.1")
    made = [event for event in events if (event["event"], event["model_id"]) == ("model_create", saves[0]["model_id"])]
    assert [event["outcome"] for event in made] == ["done", "accepted"]
