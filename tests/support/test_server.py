"""The fake server must itself be right: what it scripts, orders, holds and leaves behind."""

from __future__ import annotations

import asyncio
import http.client
import json
import mmap
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support import probes
from tests.support.server import FOREVER, Default, Drop, FakeServer, HalfBody, Hang, Html, Reply, spawned_server
from tinsmith.wire import tinker_pb2 as pb

PROTOBUF = "application/x-protobuf"


class Caller:
    """A plain HTTP client with one connection."""

    def __init__(self, url: str) -> None:
        self.connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> http.client.HTTPResponse:
        fields = {"x-api-key": "tml-test", "content-type": "application/json"}
        fields |= {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        self.connection.request(method, path if path.startswith("/") else f"/api/v1/{path}", data, fields)
        return self.connection.getresponse()

    def post(self, endpoint: str, body: Any = None, **headers: str) -> Any:
        with self.call("POST", endpoint, body, **headers) as response:
            return json.loads(response.read())

    def get(self, path: str) -> Any:
        with self.call("GET", path) as response:
            return json.loads(response.read())

    def status(self, endpoint: str, body: Any = None, **headers: str) -> int:
        with self.call("POST", endpoint, body, **headers) as response:
            response.read()
            return response.status

    def model(self) -> str:
        session = self.post("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0"})["session_id"]
        asked = {"session_id": session, "model_seq_id": 0, "base_model": "tiny/model-1", "lora_config": {"rank": 8}}
        return str(self.result(self.post("create_model", asked))["model_id"])

    def step(self, model_id: str, seq_id: int) -> Any:
        return self.post("optim_step", {"model_id": model_id, "seq_id": seq_id, "adam_params": {}})

    def sampler(self) -> str:
        session = self.post("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0"})["session_id"]
        asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny/model-1"}
        return str(self.post("create_sampling_session", asked)["sampling_session_id"])

    def sample(self, sampler: str, seq_id: int = 0, num_samples: int = 1) -> Any:
        asked = {"sampling_session_id": sampler, "seq_id": seq_id, "num_samples": num_samples}
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
        return self.post("asample", {**asked, "prompt": prompt, "sampling_params": {"max_tokens": 4}})

    def result(self, acknowledged: Any) -> Any:
        return self.post("retrieve_future", {"request_id": acknowledged["request_id"]})


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


@pytest.fixture
def caller(server: FakeServer) -> Iterator[Caller]:
    made = Caller(server.url)
    yield made
    made.connection.close()


def loss_request(model_id: str, seq_id: int, weights: list[float]) -> bytes:
    message = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.asarray([1, 2], "<i4").tobytes()
    datum.loss_fn_inputs["target_tokens"].CopyFrom(
        pb.Tensor(dense=np.asarray([2, 3], "<i8").tobytes(), dtype=pb.DTYPE_INT64, shape=[2])
    )
    datum.loss_fn_inputs["weights"].CopyFrom(
        pb.Tensor(dense=np.asarray(weights, "<f4").tobytes(), dtype=pb.DTYPE_FLOAT32, shape=[2])
    )
    return bytes(message.SerializeToString())


def test_scripted_answers_come_in_order_and_then_the_usual_one(server: FakeServer, caller: Caller) -> None:
    server.script("client/config", Reply(429, headers={"retry-after": "4"}), Default(), Html(502))
    with caller.call("POST", "client/config") as first:
        assert (first.status, first.headers["Retry-After"], first.read()) == (429, "4", b"null")
    assert caller.post("client/config") == {}
    assert caller.status("client/config") == 502
    assert caller.post("client/config") == {}


def test_a_script_can_repeat_and_be_cleared(server: FakeServer, caller: Caller) -> None:
    server.script("telemetry", Reply(503), times=2)
    assert [caller.status("telemetry") for _ in range(3)] == [503, 503, 200]
    server.script("telemetry", Reply(503), times=FOREVER)
    assert {caller.status("telemetry") for _ in range(5)} == {503}
    server.clear_script("telemetry")
    assert caller.status("telemetry") == 200


def test_a_rule_names_whole_path_segments_or_asks_a_function(server: FakeServer, caller: Caller) -> None:
    server.script("config", Reply(418))
    assert caller.status("client/dynamic_config") == 200
    assert caller.status("client/config") == 418
    server.script(lambda request: request.headers["x-marked"] == "yes", Reply(418))
    assert caller.status("client/config", x_marked="no") == 200
    assert caller.status("client/config", x_marked="yes") == 418


def test_a_dropped_request_has_no_answer_but_may_have_had_its_effect(server: FakeServer, caller: Caller) -> None:
    model_id = caller.model()
    server.script("optim_step", Drop(), Drop(executed=True))
    for expected in ([], [(model_id, 1, "optim_step")]):
        with pytest.raises(http.client.RemoteDisconnected):
            caller.step(model_id, 1)
        assert server.executed == expected


def test_half_a_body_is_cut_off(server: FakeServer, caller: Caller) -> None:
    server.script("client/config", HalfBody(b'{"a', announced=50))
    with caller.call("POST", "client/config") as response, pytest.raises(http.client.IncompleteRead) as cut:
        response.read()
    assert cut.value.partial == b'{"a'


def test_requests_are_recorded_with_all_there_is_to_know(server: FakeServer, caller: Caller) -> None:
    caller.post("client/config", {"sdk_version": "1"}, x_custom="Kept As Sent")
    caller.call("GET", "training_runs?limit=3&project_id=a%20b").read()
    first, second = server.requests
    assert (first.method, first.path, first.json()) == ("POST", "/api/v1/client/config", {"sdk_version": "1"})
    assert first.headers["X-CUSTOM"] == first.headers["x-custom"] == "Kept As Sent"
    assert "x-other" not in first.headers
    assert second.query == {"limit": "3", "project_id": "a b"}
    assert first.connection == second.connection == server.accepted_connections == 1
    assert first.arrived <= second.arrived


def test_a_chunked_request_body_is_put_together(server: FakeServer, caller: Caller) -> None:
    parts = iter([b'{"sdk_', b'version": "2"}'])
    caller.connection.request("POST", "/api/v1/client/config", parts, {"X-API-Key": "tml-test"}, encode_chunked=True)
    assert caller.connection.getresponse().read() == b"{}"
    assert server.requests[0].json() == {"sdk_version": "2"}


def test_a_request_without_a_key_is_refused(server: FakeServer, caller: Caller) -> None:
    caller.connection.request("GET", "/api/v1/healthz")
    with caller.connection.getresponse() as response:
        assert response.status == 401


def test_operations_run_in_the_order_of_their_numbers(server: FakeServer, caller: Caller) -> None:
    model_id = caller.model()
    for seq_id in (3, 2, 1):
        caller.step(model_id, seq_id)
    assert [seq_id for _, seq_id, _ in server.executed] == [1, 2, 3]


def test_a_repeated_submission_finds_its_first_answer(server: FakeServer, caller: Caller) -> None:
    model_id = caller.model()
    assert caller.step(model_id, 1) == caller.step(model_id, 1)
    assert len(server.executed) == 1


def test_a_refused_submission_uses_up_its_number(server: FakeServer, caller: Caller) -> None:
    model_id = caller.model()
    server.script("optim_step", Reply(400, json={"detail": "no"}), Reply(503))
    caller.step(model_id, 1)
    caller.step(model_id, 2)
    assert server.executed == []
    caller.step(model_id, 2)
    assert server.executed == [(model_id, 2, "optim_step")]


def test_losses_and_gradients_are_those_of_the_formula(server: FakeServer, caller: Caller) -> None:
    model_id = caller.model()
    acknowledged = caller.post("forward_backward", loss_request(model_id, 1, [0.5, -2.0]), content_type=PROTOBUF)
    with caller.call(
        "POST", "retrieve_future", {"request_id": acknowledged["request_id"]}, accept=PROTOBUF
    ) as response:
        output = pb.ForwardBackwardOutput.FromString(response.read())
    logprobs = np.frombuffer(output.loss_fn_outputs[0].fields["logprobs"].data, "<f4")
    assert output.metrics["loss:sum"] == pytest.approx(-0.5 * logprobs[0] + 2.0 * logprobs[1])
    assert server.model(model_id).policy.gradient == pytest.approx(-1.5)
    before = output.metrics["loss:sum"]
    assert caller.result(caller.step(model_id, 2))["metrics"]["grad_norm"] == pytest.approx(1.5)
    again = caller.post("forward_backward", loss_request(model_id, 3, [0.5, -2.0]), content_type=PROTOBUF)
    assert abs(caller.result(again)["metrics"]["loss:sum"]) < abs(before)


def test_a_held_result_stays_pending_until_released(server: FakeServer, caller: Caller) -> None:
    server.settings.long_poll = 0.01
    server.settings.queue_state = ("paused_capacity", "busy")
    sampler = caller.sampler()
    server.hold("asample")
    asked = {"request_id": caller.sample(sampler)["request_id"]}
    with caller.call("POST", "retrieve_future", asked) as pending:
        assert pending.status == 408
        shown = json.loads(pending.read())
        assert (shown["type"], shown["queue_state"], shown["queue_state_reason"]) == (
            "try_again",
            "paused_capacity",
            "busy",
        )
    server.settings.pending_status = 200
    assert caller.post("retrieve_future", asked)["type"] == "try_again"
    server.release()
    assert caller.post("retrieve_future", asked)["type"] == "sample"


def test_releasing_wakes_a_waiting_poll(server: FakeServer, caller: Caller) -> None:
    sampler = caller.sampler()
    server.hold("asample")
    acknowledged = caller.sample(sampler)
    answers: list[Any] = []
    poll = threading.Thread(target=lambda: answers.append(caller.result(acknowledged)))
    poll.start()
    server.wait_for("retrieve_future")
    server.release("asample")
    poll.join(10)
    assert answers[0]["type"] == "sample"


def test_an_operation_can_be_made_to_fail(server: FakeServer, caller: Caller) -> None:
    model_id = caller.model()
    server.fail_future("optim_step", "out of luck", category="server")
    assert caller.result(caller.step(model_id, 1)) == {"error": "out of luck", "category": "server"}
    assert caller.result(caller.step(model_id, 2))["metrics"]["step"] == 1


def test_a_large_result_may_be_announced_before_it_is_sent(server: FakeServer, caller: Caller) -> None:
    server.settings.metadata_only_above = 10
    asked = {"request_id": caller.sample(caller.sampler())["request_id"]}
    announced = caller.post("retrieve_future", {**asked, "allow_metadata_only": True}, accept=PROTOBUF)
    with caller.call("POST", "retrieve_future", {**asked, "allow_metadata_only": False}, accept=PROTOBUF) as response:
        assert announced == {"status": "complete_metadata", "response_payload_size": len(response.read())}


def test_the_batch_poller_reports_each_completion_once(server: FakeServer, caller: Caller) -> None:
    sampler = caller.sampler()
    server.fail_future("asample")
    for seq_id in (0, 1):
        caller.sample(sampler, seq_id)
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0}
    asked = {"target": target, "prev_cursor": 0, "retrieved_request_ids": []}
    found = caller.post("retrieve_futures", asked)
    assert [completion["state"] for completion in found["completions"]] == ["failed", "finished"]
    server.settings.long_poll = 0.01
    done = [completion["request_id"] for completion in found["completions"]]
    after = caller.post("retrieve_futures", {**asked, "prev_cursor": found["cursor"], "retrieved_request_ids": done})
    assert after == {"completions": [], "cursor": found["cursor"]}
    assert caller.status("retrieve_future", {"request_id": done[0]}) == 410


def test_a_cancelled_sample_fails(server: FakeServer, caller: Caller) -> None:
    server.hold("asample")
    acknowledged = caller.sample(caller.sampler())
    caller.post("cancel_future", {"request_id": acknowledged["request_id"]})
    assert server.cancelled == [acknowledged["request_id"]]
    assert caller.result(acknowledged)["category"] == "user"


def test_sampling_twice_gives_the_same_and_each_sample_an_id(server: FakeServer, caller: Caller) -> None:
    sampler = caller.sampler()
    first, second = caller.sample(sampler, 0, 3), caller.sample(sampler, 1, 3)
    assert len({*first["sample_sequence_ids"], *second["sample_sequence_ids"]}) == 6
    assert caller.result(first) == caller.result(second)


def test_exported_files_can_be_fetched_whole_and_in_parts(server: FakeServer, caller: Caller) -> None:
    model_id = caller.model()
    acknowledged = caller.post("save_weights_external", {"model_id": model_id, "seq_id": 1, "path": "out"})
    path = caller.result(acknowledged)["path"]
    checkpoint = path.removeprefix("tinker://").replace(model_id, f"training_runs/{model_id}/checkpoints", 1)
    urls = caller.get(f"{checkpoint}/external_weights_urls")["urls"]
    target = urls["adapter_model.safetensors"].removeprefix(server.url)
    whole = caller.call("GET", target).read()
    with caller.call("GET", target, range="bytes=1000-1999") as part:
        assert (part.status, part.headers["Content-Range"]) == (206, f"bytes 1000-1999/{len(whole)}")
        assert part.read() == whole[1000:2000]
    with caller.call("GET", target, range=f"bytes={len(whole)}-") as beyond:
        beyond.read()
        assert beyond.status == 416


def test_lists_are_paged(server: FakeServer, caller: Caller) -> None:
    models = [caller.model() for _ in range(3)]
    page = caller.get("training_runs?limit=2&offset=1")
    assert [run["training_run_id"] for run in page["training_runs"]] == models[1:]
    assert page["cursor"] == {"offset": 1, "limit": 2, "total_count": 3}
    found = caller.post("sessions/search", {"limit": 2})
    rest = caller.post("sessions/search", {"limit": 2, "cursor": found["next_cursor"]})
    assert [len(found["sessions"]), len(rest["sessions"]), rest["next_cursor"]] == [2, 1, None]


def test_the_json_dialect_is_an_older_server() -> None:
    with FakeServer(dialect="json") as server:
        caller = Caller(server.url)
        model_id = caller.model()
        assert caller.status("client/dynamic_config") == 404
        assert caller.status("forward_backward", loss_request(model_id, 1, [1, 1]), content_type=PROTOBUF) == 422
        tensors = {"target_tokens": {"data": [2, 3], "dtype": "int64"}, "weights": {"data": [1.0, 1.0]}}
        datum = {"model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}, "loss_fn_inputs": tensors}
        work = {"data": [datum], "loss_fn": "cross_entropy"}
        output = caller.result(caller.post("forward", {"model_id": model_id, "forward_input": work}))
        assert len(output["loss_fn_outputs"][0]["logprobs"]["data"]) == 2
        acknowledged = caller.sample(caller.sampler())
        assert "sample_sequence_ids" not in acknowledged
        assert len(caller.result(acknowledged)["sequences"][0]["tokens"]) == 4
        caller.connection.close()


def test_stopping_leaves_nothing_behind() -> None:
    threads, sockets = probes.threads(), probes.open_sockets()
    with FakeServer() as server:
        server.script("client/config", Hang(), Reply(delay=3600))
        callers = [Caller(server.url) for _ in range(3)]
        for caller in callers[:2]:
            caller.connection.request("POST", "/api/v1/client/config", b"{}", {"X-API-Key": "tml-test"})
        server.hold("asample")
        acknowledged = callers[2].sample(callers[2].sampler())
        callers[2].connection.request(
            "POST", "/api/v1/retrieve_future", json.dumps(acknowledged).encode(), {"X-API-Key": "tml-test"}
        )
        server.wait_for("retrieve_future")
        server.wait_for("client/config", 2)
    for caller in callers:
        caller.connection.close()
    assert (probes.threads(), probes.open_sockets()) == (threads, sockets)


def test_a_bug_of_the_server_fails_the_test() -> None:
    server = FakeServer().start()
    caller = Caller(server.url)
    assert caller.status("get_info", {}) == 500
    caller.connection.close()
    with pytest.raises(AssertionError, match="KeyError"):
        server.__exit__(None)


def test_the_server_runs_as_a_process_of_its_own() -> None:
    with spawned_server("--flags", '{"sample_use_retrieve_futures": true}', "--answer", "telemetry=503") as url:
        caller = Caller(url)
        assert caller.post("client/config") == {"sample_use_retrieve_futures": True}
        assert caller.status("telemetry") == 503
        assert caller.get("/stats")["requests"]["/api/v1/telemetry"] == 1
        caller.connection.close()


def test_the_lag_probe_sees_a_stall() -> None:
    async def stalled_for(seconds: float) -> float:
        with probes.loop_lag(asyncio.get_running_loop()) as lag:
            await asyncio.sleep(0.01)
            time.sleep(seconds)  # noqa: ASYNC251 - the stall to be seen
            await asyncio.sleep(0.01)
        return lag.worst

    assert asyncio.run(stalled_for(0.2)) >= 0.19


def test_memory_and_threads_can_be_counted() -> None:
    before = probes.rss()
    # A mapping of its own: the allocator may serve a large object from pages that are resident already.
    with mmap.mmap(-1, 50_000_000) as held:
        held.write(bytes(50_000_000))
        assert probes.rss() - before > 40_000_000
    assert probes.native_threads() >= len(probes.threads()) >= 1
