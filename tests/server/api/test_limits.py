"""One owner can take up so much of the server and no more; what is over is refused with 429, and told when to come."""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zstandard

from tests.server.api.running import MODELS, Answer, RunningServer
from tinsmith.server import quotas
from tinsmith.server.routes import _call
from tinsmith.types import Datum, ModelInput
from tinsmith.wire import proto

KEYS = tuple(f"tml-{number}" for number in range(6))
PROTOBUF = {"content-type": "application/x-protobuf"}
WAIT_SECONDS = 30.0
LARGE_BYTES = 32 * 2**20


@pytest.fixture(autouse=True)
def _count_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "_COUNT_AGAIN_SECONDS", 0.0)


@contextmanager
def limited(state: Path, **limits: Any) -> Iterator[RunningServer]:
    with RunningServer(state, api_keys=KEYS, **limits) as running:
        yield running


def sample(server: RunningServer, sampler_id: str, number: int, *, tokens: int = 1, key: str = KEYS[0]) -> Answer:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1] * tokens}]}
    body = {"sampling_session_id": sampler_id, "seq_id": number, "prompt": prompt, "sampling_params": {"max_tokens": 1}}
    return server.post("asample", body, key=key)


def data(server: RunningServer, model_id: str, number: int) -> Answer:
    inputs: dict[str, Any] = {"target_tokens": [1], "weights": [1.0]}
    prepared = proto.prepare_forward_backward([Datum(ModelInput.from_ints([1]), inputs)], "cross_entropy")
    return server.post("forward_backward", prepared.finish(model_id, number), headers=PROTOBUF, key=KEYS[0])


def assert_too_much(answer: Answer, reason: str) -> None:
    assert answer.status == 429, answer
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert reason in answer.json()["detail"]


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_full_queue_takes_no_more_until_work_is_done(tmp_path: Path) -> None:
    with limited(tmp_path, max_queued_requests=3) as server:
        server.workers.hold("sample")
        sampler_id = server.sampler(key=KEYS[0])
        assert [sample(server, sampler_id, number).status for number in range(3)] == [200] * 3
        assert_too_much(sample(server, sampler_id, 3), "3 requests of this owner wait")
        server.workers.release()
        until(lambda: sample(server, sampler_id, 3).status == 200)


def test_a_queue_is_full_of_bytes_as_well(tmp_path: Path) -> None:
    with limited(tmp_path, max_queued_bytes=2000) as server:
        server.workers.hold("sample")
        sampler_id = server.sampler(key=KEYS[0])
        assert sample(server, sampler_id, 0, tokens=400).status == 200
        assert_too_much(sample(server, sampler_id, 1, tokens=400 + 1), "with 0.0 MiB of an owner may")
        assert sample(server, sampler_id, 2).status == 200


def test_the_backlog_of_one_key_is_none_of_anothers(tmp_path: Path) -> None:
    with limited(tmp_path, max_queued_requests=1) as server:
        server.workers.hold("sample")
        samplers = [server.sampler(key=key) for key in KEYS]
        answers = [sample(server, samplers[number], 0, key=key) for number, key in enumerate(KEYS)]
        assert [answer.status for answer in answers[: quotas.ALL_OWNERS]] == [200] * quotas.ALL_OWNERS
        assert_too_much(answers[-1], "times as many in all")


def test_the_number_that_others_wait_for_is_let_into_a_full_queue(tmp_path: Path) -> None:
    """Otherwise those would fill the queue for ever."""
    with limited(tmp_path, max_queued_requests=2) as server:
        server.workers.hold("forward_backward")
        model_id = server.model(key=KEYS[0])
        assert [data(server, model_id, number).status for number in (2, 3)] == [200, 200]
        assert_too_much(data(server, model_id, 4), "Wait for results first")
        first = data(server, model_id, 1)
        server.workers.release()
        assert "metrics" in server.result(first, key=KEYS[0])


def test_a_restarted_server_knows_its_backlog(tmp_path: Path) -> None:
    with limited(tmp_path) as server:
        server.workers.hold("sample")
        sampler_id = server.sampler(key=KEYS[0])
        assert sample(server, sampler_id, 0).status == 200
    with limited(tmp_path, max_queued_requests=1) as server:
        server.workers.hold("sample")
        assert_too_much(sample(server, sampler_id, 1), "1 requests of this owner wait")


def test_a_key_has_so_many_models_and_no_more(tmp_path: Path) -> None:
    with limited(tmp_path, max_models=2) as server:
        session_id = server.session(key=KEYS[0])
        made = [server.model(session_id, number, key=KEYS[0]) for number in range(2)]
        body = {"session_id": session_id, "model_seq_id": 2, "base_model": MODELS[0]}
        refused = server.result(server.post("create_model", body, key=KEYS[0]), key=KEYS[0])
        assert "this owner has 2 already" in refused["error"]
        assert server.model(session_id, 1, key=KEYS[0]) == made[1], "the same request again is no new model"
        assert server.model(key=KEYS[1])


def test_models_made_in_the_same_moment_do_not_pass_the_limit_together(tmp_path: Path) -> None:
    with limited(tmp_path, max_models=3) as server:
        session_id = server.session(key=KEYS[0])
        body = {"session_id": session_id, "base_model": MODELS[0]}
        with ThreadPoolExecutor(8) as pool:
            answers = pool.map(
                lambda number: server.post("create_model", {**body, "model_seq_id": number}, key=KEYS[0]), range(8)
            )
            results = [server.result(answer, key=KEYS[0]) for answer in answers]
        assert sum("model_id" in result for result in results) == 3
        assert sum("this owner has 3 already" in str(result.get("error")) for result in results) == 5


def test_a_key_keeps_so_much_and_no_more(tmp_path: Path) -> None:
    with limited(tmp_path, max_checkpoint_bytes=100_000) as server:
        model_id = server.model(key=KEYS[0])

        def save(endpoint: str, number: int, **fields: Any) -> Any:
            body = {"model_id": model_id, "seq_id": number, **fields}
            return server.result(server.post(endpoint, body, key=KEYS[0]), key=KEYS[0])

        path = save("save_weights", 1, path="first")["path"]
        for number, endpoint in enumerate(("save_weights", "save_weights_for_sampler", "save_weights_external"), 2):
            assert "the checkpoints of this owner take up" in save(endpoint, number, path="more")["error"]
        assert server.post("copy_weights", {"source_path": path}, key=KEYS[0]).status == 422
        runs = server.get("training_runs", key=KEYS[0]).json()["training_runs"]
        assert [each["training_run_id"] for each in runs] == [model_id], "what is refused leaves no run"
        assert "sampling_session_id" in save("save_weights_for_sampler", 5, sampling_session_seq_id=0)
        run = f"/api/v1/training_runs/{model_id}/checkpoints"
        assert server.call("DELETE", f"{run}/weights/first", key=KEYS[0]).status == 204
        assert save("save_weights", 6, path="second")["path"]


def test_so_many_requests_are_open_at_once_and_no_more(tmp_path: Path) -> None:
    with limited(tmp_path, max_open_requests=2) as server:
        server.workers.hold("sample")
        sampler_id = server.sampler(key=KEYS[0])
        pending = sample(server, sampler_id, 0)
        polls = [threading.Thread(target=server.result, args=(pending,), kwargs={"key": KEYS[0]}) for _ in range(2)]
        for poll in polls:
            poll.start()
        until(lambda: len(server.app.state.services.waiting) == 2)
        assert_too_much(server.get("sessions", key=KEYS[0]), "2 requests of this owner are open")
        assert server.get("sessions", key=KEYS[1]).status == 200
        server.workers.release()
        for poll in polls:
            poll.join(WAIT_SECONDS)
        assert server.get("sessions", key=KEYS[0]).status == 200


def large_archive(server: RunningServer, key: str) -> str:
    """The path and query of a download that is far larger than the buffers between server and reader."""
    model_id = server.model(key=key)
    saved = server.post("save_weights", {"model_id": model_id, "seq_id": 1, "path": "x"}, key=key)
    assert server.result(saved, key=key)["path"]
    (weights,) = server.config.checkpoints.glob("*/weights/x/adapter_model.safetensors")
    os.truncate(weights, LARGE_BYTES)
    url: str = server.get(f"training_runs/{model_id}/checkpoints/weights/x/archive", key=key).json()["url"]
    return url.removeprefix(server.url)


@contextmanager
def begun_download(server: RunningServer, link: str) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_SECONDS)
    connection.request("GET", link)
    with contextlib.closing(connection), connection.getresponse() as answer:
        yield answer


def test_a_download_is_an_open_request_of_its_reader_until_it_ends(tmp_path: Path) -> None:
    with limited(tmp_path, max_open_requests=2) as server:
        link = large_archive(server, KEYS[0])
        with begun_download(server, link) as first, begun_download(server, link) as second:
            assert (first.status, second.status) == (200, 200)
            assert_too_much(server.call("GET", link, key=None), "Send fewer at a time")
            assert_too_much(server.get("sessions", key=KEYS[0]), "Send fewer at a time")
            assert server.get("sessions", key=KEYS[1]).status == 200
            assert len(first.read()) > LARGE_BYTES
            until(lambda: server.get("sessions", key=KEYS[0]).status == 200)
        until(lambda: not server.app.state.services.open_requests._open.amounts())


def test_a_download_that_is_not_read_is_broken_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_call, "_SILENCE_SECONDS", 0.5)
    caplog.set_level(logging.INFO)
    with (
        limited(tmp_path, max_open_requests=1) as server,
        begun_download(server, large_archive(server, KEYS[0])) as answer,
    ):
        until(lambda: server.get("sessions", key=KEYS[0]).status == 200)
        with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
            answer.read()
    assert "A download was broken off: it was not read, or too slowly." in caplog.messages
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]


def test_a_download_that_is_broken_off_leaves_no_file_open(tmp_path: Path) -> None:
    with limited(tmp_path, max_open_requests=1) as server:
        with begun_download(server, large_archive(server, KEYS[0])):
            assert open_files_below(tmp_path / "checkpoints")
        until(lambda: not open_files_below(tmp_path / "checkpoints"))


def open_files_below(folder: Path) -> list[str]:
    """Of this process, in which the server runs, too."""
    held = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            held.append(os.readlink(descriptor))
    return [file for file in held if file.startswith(f"{folder}/")]


def test_bodies_on_their_way_are_bounded_together(tmp_path: Path) -> None:
    with limited(tmp_path, max_incoming_bytes=20_000) as server:
        for _ in range(3):  # what was held is given back, whatever became of the request
            assert_too_much(server.post("asample", {"prompt": [1] * 9000}, key=KEYS[0]), "MiB of an owner are taken")
            bomb = zstandard.compress(bytes(30_000))
            headers = {**PROTOBUF, "content-encoding": "zstd"}
            assert_too_much(server.post("forward_backward", bomb, headers=headers, key=KEYS[0]), "Send fewer requests")
            assert server.post("asample", {"prompt": [1] * 3000}, key=KEYS[0]).status == 422


def test_json_takes_up_what_it_is_decoded_to(tmp_path: Path) -> None:
    with limited(tmp_path, max_incoming_bytes=10 * 2**20) as server:
        sizes = {2**20 - 100: 422, 2**20 + 100: 422, 2**21: 429}
        for size, status in sizes.items():
            assert server.post("asample", b"{" + b" " * size + b"}", key=KEYS[0]).status == status


def test_a_value_of_any_length_is_not_sent_back(server: RunningServer) -> None:
    refused = server.post("get_info", {"model_id": "x" * 1_000_000})
    assert refused.status == 404
    assert len(refused.body) < 2000
    failed = server.post("optim_step", {"model_id": server.model(), "seq_id": 1, "adam_params": {"beta" * 99_999: 1}})
    assert len(server.result(failed)["error"]) < 2000


def test_what_is_refused_is_written_down_only_so_often(tmp_path: Path) -> None:
    """A refusal is kept for a day, like any result: without a limit a key could fill the database with them."""
    with limited(tmp_path, max_paperwork_bytes=20 * 1024, paperwork_bytes_per_second=1) as server:
        model_id = server.model(key=KEYS[0])

        def step(number: int) -> Answer:
            body = {"model_id": model_id, "seq_id": number, "adam_params": {"learning_rate": "high"}}
            return server.post("optim_step", body, key=KEYS[0])

        answers = [step(number) for number in range(1, 31)]
        assert {answer.status for answer in answers} == {200, 429}
        refused = next(answer for answer in answers if answer.status == 429)
        assert "Too much was refused" in refused.json()["detail"]
        assert 1 <= int(refused.headers["retry-after"]) <= 2048, "a second for each byte of one more row"
        accepted = sum(answer.status == 200 for answer in answers)
        assert len(server.store.results.statuses([f"{model_id}:{number}" for number in range(1, 31)])) == accepted
        # Good operations are none of that, and the number that was refused so was not used up.
        body = {"model_id": model_id, "seq_id": accepted + 1, "adam_params": {}}
        assert server.result(server.post("optim_step", body, key=KEYS[0]), key=KEYS[0])["metrics"]["step"] == 1
        assert server.session(key=KEYS[1])


def test_submitting_and_cancelling_by_turns_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with limited(tmp_path, max_paperwork_bytes=10 * 1024, paperwork_bytes_per_second=1) as server:
        monkeypatch.setattr(server.workers, "_claim", list)
        sampler_id = server.sampler(key=KEYS[0])
        cancelled = []
        for number in range(12):
            request_id = sample(server, sampler_id, number).json()["request_id"]
            cancelled.append(server.post("cancel_future", {"request_id": request_id}, key=KEYS[0]).status)
        assert cancelled == [200] * cancelled.count(200) + [429] * cancelled.count(429)
        assert cancelled.count(429) > 2


@pytest.mark.parametrize("made", ["session", "sampler", "loss", "link", "move"])
def test_things_that_cost_nothing_to_make_are_bounded(tmp_path: Path, made: str) -> None:
    with limited(tmp_path, max_paperwork_bytes=40 * 1024, paperwork_bytes_per_second=1) as server:
        session_id = server.session(key=KEYS[0])
        model_id = server.model(session_id, key=KEYS[0])
        saved = server.post("save_weights", {"model_id": model_id, "seq_id": 1, "path": "x"}, key=KEYS[0])
        assert server.result(saved, key=KEYS[0])["path"]

        def make(number: int) -> Answer:
            if made == "session":
                return server.post("create_session", {"tags": ["x" * 900], "sdk_version": "1"}, key=KEYS[0])
            if made == "sampler":
                body = {"session_id": session_id, "sampling_session_seq_id": number, "base_model": MODELS[0]}
                return server.post("create_sampling_session", body, key=KEYS[0])
            if made == "loss":
                return server.post("create_custom_loss", custom_loss(session_id, number), key=KEYS[0])
            if made == "move":
                move = {"project_id": f"{number}" + "x" * 900}
                return server.call("PUT", f"/api/v1/sessions/{session_id}/project", move, key=KEYS[0])
            return server.get(f"training_runs/{model_id}/checkpoints/weights/x/archive", key=KEYS[0])

        answers = [make(number) for number in range(50)]
        assert answers[0].status in (200, 204), answers[0]
        assert answers[-1].status == 429
        assert 5 < sum(answer.status != 429 for answer in answers) < 45
        if made == "loss":
            assert server.result(answers[0], key=KEYS[0])["loss_id"]


def custom_loss(session_id: str, number: int) -> dict[str, Any]:
    nodes = [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
        {"op": "call_method", "name": "sum", "target": "sum", "args": [{"ref": "logprobs"}]},
        {"op": "output", "name": "output", "target": "output", "args": [{"tuple": [{"ref": "sum"}, {"dict": {}}]}]},
    ]
    place = {"session_id": session_id, "custom_loss_seq_id": number, "name": "mine"}
    return {**place, "inputs": [{"name": "logprobs", "rank": 1}], "graph": {"format": 1, "nodes": nodes}}


def test_saves_that_wait_together_do_not_pass_the_limit(tmp_path: Path) -> None:
    """Each was let in when there was room; how much there is left is seen when it is written."""
    with limited(tmp_path, max_checkpoint_bytes=150_000) as server:
        model_id = server.model(key=KEYS[0])
        server.workers.hold("save_weights")
        saves = [
            server.post("save_weights", {"model_id": model_id, "seq_id": number, "path": f"n{number}"}, key=KEYS[0])
            for number in range(1, 6)
        ]
        server.workers.release()
        results = [server.result(save, key=KEYS[0]) for save in saves]
        assert ["path" in result for result in results] == [True, True, False, False, False]
        assert "cannot be saved" in results[-1]["error"]
        assert len(list((tmp_path / "checkpoints").glob("*/*/*"))) == 2
