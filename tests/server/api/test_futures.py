"""Results: when they come, in which form, and what is said if they do not."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.end_to_end.serving import wait_until
from tests.server.api.running import Answer, RunningServer
from tinsmith.server.messages import Replay
from tinsmith.server.routes import futures
from tinsmith.server.store import StoreUnavailableError
from tinsmith.server.store.database import Database
from tinsmith.server.store.records import Status
from tinsmith.wire import proto

PROTOBUF = {"accept": "application/x-protobuf"}


def step(server: RunningServer, model_id: str, number: int) -> Answer:
    return server.post("optim_step", {"model_id": model_id, "seq_id": number, "adam_params": {}})


def sample(server: RunningServer, sampler_id: str, number: int = 0, **fields: Any) -> Answer:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    body = {"sampling_session_id": sampler_id, "seq_id": number, "num_samples": 1, "prompt": prompt, **fields}
    return server.post("asample", {"sampling_params": {"max_tokens": 2}, "type": "sample", **body})


def poll(server: RunningServer, request_id: str, **options: Any) -> Answer:
    return server.post("retrieve_future", {"request_id": request_id}, **options)


@pytest.fixture
def impatient(tmp_path: Path) -> Any:
    """Long polls end almost at once here."""
    with RunningServer(tmp_path, long_poll_seconds=0.05, inline_result_bytes=10) as running:
        yield running


def test_a_result_can_be_fetched_again_and_again(server: RunningServer) -> None:
    request_id = step(server, server.model(), 1).json()["request_id"]
    assert (
        poll(server, request_id).json()
        == poll(server, request_id).json()
        == {"metrics": {"grad_norm": 0.0, "moment": 0.0, "step": 1}}
    )


def test_the_worker_is_told_how_many_samples_a_request_asks_for(server: RunningServer) -> None:
    server.result(sample(server, server.sampler(), num_samples=5))
    assert server.workers.executed[-1].samples == 5


def test_a_poll_tells_what_the_worker_waits_for_or_does_again(impatient: RunningServer) -> None:
    mine, other = impatient.model(), impatient.model()
    impatient.workers.hold("optim_step")
    jobs = [step(impatient, model_id, 1).json()["request_id"] for model_id in (mine, other)]

    def reasons() -> list[str]:
        answers = [poll(impatient, request_id) for request_id in jobs]
        assert [(answer.status, answer.json()["queue_state"]) for answer in answers] == [(408, "paused_capacity")] * 2
        return [answer.json()["queue_state_reason"] for answer in answers]

    impatient.workers.trouble = "the server's disk is full; work goes on when there is room"
    assert reasons() == ["the server's disk is full; work goes on when there is room"] * 2
    impatient.workers.trouble = None
    impatient.workers.replaying = Replay(model_id=mine, replayed=120, total=357)
    assert reasons() == [
        "rebuilding after a restart: 120 of 357 operations replayed",
        "rebuilding another model after a restart: 120 of 357 operations replayed",
    ]
    impatient.workers.replaying = None
    assert poll(impatient, jobs[0]).json()["queue_state"] == "active"


FULL = "the server's disk is full; work goes on when there is room"


def numbered_poll(server: RunningServer, request_id: str, number: int) -> Answer:
    return poll(server, request_id, headers={"x-tinker-request-iteration": str(number)}, timeout=60)


@pytest.fixture
def patient(tmp_path: Path) -> Any:
    with RunningServer(tmp_path, long_poll_seconds=300) as running:
        yield running


def test_a_poll_ends_when_work_comes_to_a_halt_and_the_next_one_waits(patient: RunningServer) -> None:
    model_id = patient.model()
    patient.workers.hold("optim_step")
    request_id = step(patient, model_id, 1).json()["request_id"]
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(numbered_poll, patient, request_id, 3)
        wait_until(lambda: len(patient.app.state.services.waiting) == 1, 30, "the poll does not wait")
        patient.workers.trouble = FULL
        assert waits.result().json()["queue_state_reason"] == FULL
        waits = pool.submit(numbered_poll, patient, request_id, 4)
        wait_until(lambda: len(patient.app.state.services.waiting) == 1, 30, "the poll does not wait")
        patient.workers.release()
        assert waits.result().status == 200


def test_a_first_poll_tells_of_a_halt_that_began_before(patient: RunningServer) -> None:
    model_id = patient.model()
    patient.workers.hold("optim_step")
    request_id = step(patient, model_id, 1).json()["request_id"]
    patient.workers.trouble = FULL
    assert numbered_poll(patient, request_id, 0).json()["queue_state_reason"] == FULL


@pytest.mark.parametrize("served", [True, False])
def test_of_work_that_stands_still_the_first_poll_tells_and_all_others_wait(
    impatient: RunningServer, served: bool
) -> None:
    model = "tiny/model-1"
    status = Status(
        request_id="s:1", kind="forward", owner="ann", base_model=model, state="queued", outcome=None, is_held_up=False
    )
    impatient.workers.ready = False
    services = SimpleNamespace(workers=impatient.workers, models={model: None} if served else {})

    def looks(number: int) -> list[bool]:
        request = SimpleNamespace(headers={"x-tinker-request-iteration": str(number)})
        call: Any = SimpleNamespace(services=services, request=request)
        halts = futures._halts(call, status.request_id)
        return [halts(status) for _ in range(3)]

    assert looks(0) == [False, True, True]
    assert looks(1) == looks(2) == [False, False, False]


def test_a_database_out_of_reach_is_a_pause_for_those_who_wait_and_a_503_for_those_who_submit(
    impatient: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model_id = impatient.model()
    impatient.workers.hold("optim_step")
    first = step(impatient, model_id, 1)
    request_id = first.json()["request_id"]

    def gone(*_: Any, **__: Any) -> None:
        raise StoreUnavailableError("SELECT", {}, Exception("connection refused\nIs the server running?"))

    with monkeypatch.context() as cut:
        cut.setattr(futures, "_AWAY_SECONDS", 0.01)
        cut.setattr(Database, "read", gone)
        cut.setattr(Database, "write", gone)
        for _ in range(3):
            waits = poll(impatient, request_id)
            assert (waits.status, waits.json()["queue_state"]) == (408, "paused_capacity")
            assert "the server's database is out of reach" in waits.json()["queue_state_reason"]
        refused = step(impatient, model_id, 2)
        assert (refused.status, refused.headers["retry-after"]) == (503, "5")
    impatient.workers.release()
    assert impatient.result(step(impatient, model_id, 2))
    assert impatient.result(first)["metrics"]["step"] == 1
    told = [record for record in caplog.records if record.name == "tinsmith.server.waiting"]
    assert {record.exc_info for record in told} == {None}
    assert "so those who wait for results wait on: " in told[0].message
    assert "Is the server" not in told[0].message
    assert "Work goes on after" in told[-1].message


def test_a_result_that_is_not_there_yet_is_a_408_with_try_again(impatient: RunningServer) -> None:
    model_id = impatient.model()
    impatient.workers.hold("optim_step")
    request_id = step(impatient, model_id, 1).json()["request_id"]
    pending = poll(impatient, request_id)
    assert (pending.status, pending.json()) == (
        408,
        {"type": "try_again", "request_id": request_id, "queue_state": "active"},
    )
    impatient.workers.ready = False
    assert poll(impatient, request_id).json()["queue_state_reason"] == "tiny/model-1 is being loaded"
    early = step(impatient, model_id, 3).json()["request_id"]
    assert (
        "the lower number (seq_id) 2 of this model has not arrived"
        in poll(impatient, early).json()["queue_state_reason"]
    )
    impatient.workers.release()


def test_a_lost_message_costs_a_second_and_not_the_result(server: RunningServer) -> None:
    server.workers.is_silent = True
    try:
        assert server.result(step(server, server.model(), 1))["metrics"]["step"] == 1
    finally:
        server.workers.is_silent = False


def test_all_who_wait_are_answered_by_one_query(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler_id = server.sampler()
    server.workers.hold("sample")
    ids = [sample(server, sampler_id, number).json()["request_id"] for number in range(20)]
    queries: list[int] = []
    everybody_waits = threading.Event()
    statuses = server.store._database.read

    def counted(work: Any) -> Any:
        found = statuses(work)
        if isinstance(found, dict) and found and all(isinstance(one, Status) for one in found.values()):
            queries.append(len(found))
            everybody_waits.set() if sum(queries) >= 20 else None
        return found

    monkeypatch.setattr(server.store._database, "read", counted)
    with ThreadPoolExecutor(20) as pool:
        answers = [pool.submit(poll, server, request_id, headers=PROTOBUF) for request_id in ids]
        assert everybody_waits.wait(10)
        server.workers.release()
        assert {answer.result().status for answer in answers} == {200}
    # Every poll asks once when it comes; what finishes together is found together.
    assert max(queries) > 1
    assert len(queries) < 2 * 20


def test_a_failed_operation_is_a_200_with_error_and_category(server: RunningServer) -> None:
    model_id = server.model()
    refused = server.post("optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {"beta1": 7}})
    answer = poll(server, refused.json()["request_id"])
    assert answer.status == 200
    assert answer.json() == {
        "error": "adam_params.beta1 is 7.0, but must be at least 0 and below 1",
        "category": "user",
    }
    assert server.result(step(server, model_id, 2))["metrics"]["step"] == 1


def test_an_operation_that_a_restored_server_never_got_is_told_as_that(server: RunningServer) -> None:
    run = server.model()
    server.result(server.post("optim_step", {"model_id": run, "seq_id": 1, "adam_params": {}}))
    answer = poll(server, f"{run}:65")
    assert answer.status == 410
    assert f"does not know operation 65 of {run}; it has those up to 1." in answer.json()["detail"]
    assert "restored" not in poll(server, f"{run}:{'9' * 5000}").json()["detail"]


def test_an_unknown_request_is_404_and_one_of_an_own_session_410(server: RunningServer) -> None:
    sampler_id = server.sampler()
    assert poll(server, "nobody:sample:0:1").status == 404
    assert poll(server, f"{sampler_id}:99").status == 410


def test_a_sample_comes_as_protobuf_or_as_json_by_accept(server: RunningServer) -> None:
    acknowledged = sample(server, server.sampler(), prompt_logprobs=True).json()
    assert len(acknowledged["sample_sequence_ids"]) == 1
    fetched = poll(server, acknowledged["request_id"], headers=PROTOBUF)
    assert fetched.headers["content-type"] == "application/x-protobuf"
    response = proto.decode_sample_response(fetched.body)
    old = poll(server, acknowledged["request_id"], headers={"accept": "application/json"}).json()
    assert old["type"] == "sample"
    assert old["sequences"][0]["tokens"] == response.sequences[0].tokens
    assert old["prompt_logprobs"] == response.prompt_logprobs


def test_of_a_large_result_the_size_comes_first_if_the_client_allows(impatient: RunningServer) -> None:
    request_id = sample(impatient, impatient.sampler()).json()["request_id"]
    body = {"request_id": request_id, "allow_metadata_only": True}
    announced = impatient.post("retrieve_future", body, headers=PROTOBUF)
    while announced.status == 408:
        announced = impatient.post("retrieve_future", body, headers=PROTOBUF)
    whole = poll(impatient, request_id, headers=PROTOBUF)
    assert announced.json() == {"status": "complete_metadata", "response_payload_size": len(whole.body)}


def test_a_repeated_submission_finds_its_first_answer(server: RunningServer) -> None:
    model_id = server.model()
    first, again = step(server, model_id, 1), step(server, model_id, 1)
    assert first.json() == again.json()
    server.result(step(server, model_id, 2))
    assert [job.seq_id for job in server.workers.executed if job.model_id == model_id] == [0, 1, 2]


def test_later_numbers_wait_for_earlier_ones(server: RunningServer) -> None:
    model_id = server.model()
    late = step(server, model_id, 2)
    server.result(step(server, model_id, 1))
    assert server.result(late)["metrics"]["step"] == 2


# The batch poller


def batch(
    server: RunningServer, sampler_id: str, cursor: int = 0, clone: int = 0, fetched: Any = (), **fields: Any
) -> Any:
    target = {"type": "sampling_session", "sampling_session_id": sampler_id, "cloned_sampler_id": clone}
    body = {"target": target, "prev_cursor": cursor, "retrieved_request_ids": list(fetched), **fields}
    return server.post("retrieve_futures", body)


def test_samples_that_finished_since_the_cursor_are_announced(server: RunningServer) -> None:
    sampler_id = server.sampler()
    ids = {sample(server, sampler_id, number).json()["request_id"] for number in range(3)}
    seen: dict[str, int] = {}
    cursor = 0
    while len(seen) < 3:
        answer = batch(server, sampler_id, cursor).json()
        seen |= {one["request_id"]: one["response_payload_uncompressed_size"] for one in answer["completions"]}
        cursor = answer["cursor"]
    assert seen.keys() == ids
    assert all(seen.values())


def test_a_batch_poll_is_woken_by_the_sample_it_waits_for(server: RunningServer) -> None:
    sampler_id = server.sampler()
    with ThreadPoolExecutor(1) as pool:
        polled = pool.submit(batch, server, sampler_id)
        request_id = sample(server, sampler_id).json()["request_id"]
        assert [one["request_id"] for one in polled.result().json()["completions"]] == [request_id]


def test_each_clone_hears_of_its_own_samples_only(impatient: RunningServer) -> None:
    sampler_id = impatient.sampler()
    joined = impatient.post("join_sampling_session", {"sampling_session_id": sampler_id}).json()["client_counter"]
    request_id = sample(impatient, sampler_id, joined * 1_000_000_000).json()["request_id"]
    found = batch(impatient, sampler_id, clone=joined).json()
    while not found["completions"]:
        found = batch(impatient, sampler_id, clone=joined).json()
    assert [one["request_id"] for one in found["completions"]] == [request_id]
    assert batch(impatient, sampler_id).json() == {"completions": [], "cursor": 0}


def test_fetched_samples_are_freed(server: RunningServer) -> None:
    sampler_id = server.sampler()
    request_id = sample(server, sampler_id).json()["request_id"]
    cursor = batch(server, sampler_id).json()["cursor"]
    later = sample(server, sampler_id, 1)
    batch(server, sampler_id, cursor, fetched=[request_id])
    assert poll(server, request_id).status == 410
    assert poll(server, later.json()["request_id"], headers=PROTOBUF).status == 200


@pytest.mark.parametrize("seconds", [0, 0.05, -1])
def test_a_batch_poll_waits_no_longer_than_it_asks_to(tmp_path: Path, seconds: float) -> None:
    with RunningServer(tmp_path, long_poll_seconds=600.0) as running:
        sampler_id = running.sampler()
        assert batch(running, sampler_id, timeout=seconds).json() == {"completions": [], "cursor": 0}
        request_id = sample(running, sampler_id).json()["request_id"]
        assert poll(running, request_id, headers=PROTOBUF).status == 200
        (found,) = batch(running, sampler_id, timeout=seconds).json()["completions"]
        assert found["request_id"] == request_id
        assert batch(running, sampler_id, fetched=[request_id], timeout=seconds).status == 200
        assert poll(running, request_id).status == 410


# Cancelling


def test_a_cancelled_sample_fails_at_once_and_never_runs(server: RunningServer) -> None:
    sampler_id = server.sampler()
    server.workers.hold("sample")
    request_id = sample(server, sampler_id).json()["request_id"]
    assert server.post("cancel_future", {"request_id": request_id}).status == 200
    server.workers.release()
    answer = poll(server, request_id).json()
    assert answer["category"] == "user"
    assert request_id not in [job.request_id for job in server.workers.executed]


@pytest.mark.parametrize(("reason", "is_wanted"), [("success", True), ("errored", False), ("interrupted", False)])
def test_samples_of_a_client_that_broke_off_are_not_drawn(server: RunningServer, reason: str, is_wanted: bool) -> None:
    session_id = server.session()
    server.workers.hold("sample")
    asked = sample(server, server.sampler(session_id))
    finished = server.post(f"sessions/{session_id}/finish", {"reason": {"type": reason}, "detail": None})
    assert finished.status == 204
    server.workers.release()
    assert ("sequences" in server.result(asked)) == is_wanted


def test_stopping_the_server_ends_its_long_polls(tmp_path: Path) -> None:
    with RunningServer(tmp_path) as running:
        model_id = running.model()
        running.workers.hold("optim_step")
        request_id = step(running, model_id, 1).json()["request_id"]
        pool = ThreadPoolExecutor(1)
        polled = pool.submit(poll, running, request_id)
        while not len(running.app.state.services.waiting):
            threading.Event().wait(0.01)
    assert polled.result().status == 408
    pool.shutdown()
