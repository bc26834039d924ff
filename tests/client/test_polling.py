"""Results are fetched patiently: whatever the server answers, it is read, waited for, or turned into a typed error."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.server import FOREVER, Drop, FakeServer, HalfBody, Html, Reply
from tests.support.training import KEY, PATIENCE, VirtualClock, make_config
from tinsmith.client.connection import Connection
from tinsmith.client.futures import APIFuture, run
from tinsmith.client.hooks import TRAINING, Attempt, QueueStateChange, Record
from tinsmith.client.polling import ResultKind, retrieve
from tinsmith.client.training import FORWARD_BACKWARD, OPTIM_STEP
from tinsmith.errors import (
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    BadRequestError,
    NoProgressError,
    NotFoundError,
    PermissionDeniedError,
    RequestExpiredError,
    RequestFailedError,
    TinkerError,
)
from tinsmith.types import ForwardBackwardOutput, OptimStepResponse, RequestErrorCategory, TensorData
from tinsmith.wire import json as wire_json
from tinsmith.wire import proto as wire_proto

STEP = Reply(json={"metrics": {"a": 1.0}})
OUTPUT = ForwardBackwardOutput(
    loss_fn_output_type="scalar",
    loss_fn_outputs=[{"logprobs": TensorData([1.0, 2.0], dtype="float32")}],
    metrics={"loss:sum": 2.0},
)
PROTOBUF = {"content-type": "application/x-protobuf"}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    clock = VirtualClock()
    monkeypatch.setattr(Connection, "clock", clock)
    return clock


class Poller:
    """Asks for one result, over and over if need be."""

    def __init__(self, server: FakeServer, **settings: Any) -> None:
        self.server = server
        self.records: list[Record] = []
        self.connection = Connection(make_config(server, hooks=(self.records.append,), **settings))

    def start(self, kind: ResultKind[Any] = OPTIM_STEP, **options: Any) -> APIFuture[Any]:
        return self.connection.run(lambda: retrieve(self.connection, kind, "id-1", subject=TRAINING, **options))

    def fetch(self, *steps: Any, kind: ResultKind[Any] = OPTIM_STEP, **options: Any) -> Any:
        self.server.script("retrieve_future", *steps)
        return self.start(kind, **options).result(PATIENCE)

    @property
    def num_polls(self) -> int:
        return len(self.server.received("retrieve_future"))

    def states(self) -> list[tuple[str, str | None]]:
        return [(record.state, record.reason) for record in self.records if isinstance(record, QueueStateChange)]


@pytest.fixture
def poller(server: FakeServer, clock: VirtualClock) -> Iterator[Poller]:
    poller = Poller(server)
    yield poller
    run(poller.connection.close).result(PATIENCE)


def pending(state: str | None = None, reason: str | None = None, status: int = 408) -> Reply:
    return Reply(status, json={"type": "try_again", "queue_state": state, "queue_state_reason": reason})


# --- asking ----------------------------------------------------------------------------------------------------------


def test_polls_say_what_they_are_and_count_up(poller: Poller) -> None:
    poller.fetch(pending(), pending(), STEP, roundtrip=0.25)
    first, second, third = poller.server.received("retrieve_future")
    assert first.json() == {"request_id": "id-1", "allow_metadata_only": True}
    assert first.headers["x-tinker-request-type"] == "OptimStep"
    assert first.headers["x-tinker-create-promise-roundtrip-time"] == "0.25"
    assert "x-tinker-create-promise-roundtrip-time" not in second.headers
    iterations = [request.headers["x-tinker-request-iteration"] for request in (first, second, third)]
    assert iterations == ["0", "1", "2"]
    assert {request.headers["x-stainless-retry-count"] for request in (first, second, third)} == {"0"}
    assert first.headers["accept"] == "application/json"


@pytest.mark.parametrize(
    "answer",
    [
        Reply(408, body=b""),
        Reply(408, json={"detail": "Timeout waiting for result"}),
        Reply(408, json=["strange"]),
        Reply(408, body=b"{broken", headers={"content-type": "application/json"}),
        Html(408),
        Reply(200, json={"type": "try_again"}),
        Reply(200, json={"type": "try_again", "queue_state": ["strange"], "queue_state_reason": 5}),
        pending("active"),
    ],
    ids=repr,
)
def test_every_form_of_not_yet_is_waited_for(poller: Poller, answer: Any) -> None:
    assert poller.fetch(answer, answer, STEP) == OptimStepResponse(metrics={"a": 1.0})


@pytest.mark.parametrize("status", [200, 408])
def test_a_server_that_answers_not_yet_at_once_is_asked_twice_a_second_at_most(
    poller: Poller, clock: VirtualClock, status: int
) -> None:
    poller.server.script("retrieve_future", pending(status=status), times=400)
    poller.server.script("retrieve_future", STEP)
    poller.start().result(PATIENCE)
    assert clock.time - 1000.0 >= 395 / 2
    assert clock.slept[0] <= 0.05  # yet a result that is nearly there is not missed by much
    assert max(clock.slept) <= 1.0


@pytest.mark.parametrize("step", [Reply(503, json={}), Reply(429, json={}), Html(502), Drop(), HalfBody()], ids=repr)
def test_a_server_in_trouble_is_asked_less_and_less(poller: Poller, clock: VirtualClock, step: Any) -> None:
    poller.server.script("retrieve_future", step, times=30)
    poller.server.script("retrieve_future", STEP)
    poller.start().result(PATIENCE)
    assert len(clock.slept) == 30
    assert sum(clock.slept[:2]) >= 1.0
    assert all(7.5 <= pause <= 10 for pause in clock.slept[5:])


def test_retry_after_is_obeyed(poller: Poller, clock: VirtualClock) -> None:
    poller.fetch(Reply(429, json={}, headers={"retry-after": "33"}), STEP)
    assert clock.slept == [33.0]


def test_trouble_in_between_does_not_add_up(poller: Poller) -> None:
    steps = [Reply(503, json={}), Reply(400, body=b""), Reply(400, body=b""), pending()] * 10
    assert poller.fetch(*steps, STEP).metrics == {"a": 1.0}


def test_each_poll_is_one_record_that_counts_its_own_tries(poller: Poller) -> None:
    poller.fetch(pending(), Reply(503, json={}), pending(), STEP)
    attempts = [record for record in poller.records if isinstance(record, Attempt) and "future" in record.path]
    assert [(attempt.number, attempt.status) for attempt in attempts] == [(1, 408), (1, 503), (2, 408), (1, 200)]


# --- reading ---------------------------------------------------------------------------------------------------------


def test_a_protobuf_result_is_read(poller: Poller) -> None:
    body = wire_proto.encode_forward_backward_output(OUTPUT)
    result = poller.fetch(Reply(body=body, headers=PROTOBUF), kind=FORWARD_BACKWARD)
    assert result.metrics == {"loss:sum": 2.0}
    assert result.loss_fn_outputs[0]["logprobs"].tolist() == [1.0, 2.0]
    assert poller.server.received("retrieve_future")[0].headers["accept"] == "application/x-protobuf"


def test_a_json_result_is_read_where_protobuf_is_usual(poller: Poller) -> None:
    body = wire_json.encode(OUTPUT)
    result = poller.fetch(Reply(body=body, headers={"content-type": "application/json"}), kind=FORWARD_BACKWARD)
    assert result.loss_fn_outputs[0]["logprobs"].tolist() == [1.0, 2.0]


def test_a_large_json_result_is_read_off_the_loop(poller: Poller) -> None:
    large = Reply(json={"metrics": {f"m{index}:sum": float(index) for index in range(50_000)}})
    assert len(poller.fetch(large).metrics) == 50_000


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (Reply(body=b"\xff\xff\xff", headers=PROTOBUF), FORWARD_BACKWARD),
        (Reply(body=b"", headers=PROTOBUF), OPTIM_STEP),
        (Reply(json={"loss_fn_outputs": 3}), FORWARD_BACKWARD),
        (Reply(json={"metrics": "none"}), OPTIM_STEP),
        (Reply(json=[1, 2]), OPTIM_STEP),
        (Reply(json=None), OPTIM_STEP),
        (Reply(body=b""), OPTIM_STEP),
        (Html(200), OPTIM_STEP),
        (Reply(body=b'{"metrics": {', headers={"content-type": "application/json"}), OPTIM_STEP),
        (Reply(json={"status": "complete_metadata", "response_payload_size": "big"}), FORWARD_BACKWARD),
        (Reply(json={"status": "complete_metadata", "response_payload_size": -1}), FORWARD_BACKWARD),
    ],
    ids=lambda value: value.request_type if isinstance(value, ResultKind) else repr(value),
)
def test_an_answer_without_sense_is_a_validation_error_that_names_the_request(
    poller: Poller, step: Any, kind: ResultKind[Any]
) -> None:
    with pytest.raises(APIResponseValidationError, match=f"{kind.request_type} id-1 cannot be read"):
        poller.fetch(step, kind=kind)
    assert poller.num_polls == 1


def test_a_large_result_is_asked_for_within_the_byte_budget(poller: Poller) -> None:
    budget = poller.connection.account.response_bytes
    body = wire_proto.encode_forward_backward_output(OUTPUT)
    size = {"status": "complete_metadata", "response_payload_size": 60_000_000}
    poller.connection.run(poller.connection.flags).result(PATIENCE)
    before = budget._balance
    seen = []
    poller.server.script("retrieve_future", Reply(json=size), pending(), Reply(body=body, headers=PROTOBUF))
    hooked = Poller(poller.server)
    hooked.connection.hooks.hooks += (lambda record: seen.append(budget._balance),)
    assert hooked.start(FORWARD_BACKWARD).result(PATIENCE).metrics == {"loss:sum": 2.0}
    asked = [request.json()["allow_metadata_only"] for request in poller.server.received("retrieve_future")]
    assert asked == [True, False, False]
    assert min(seen) == before - 60_000_000
    assert budget._balance == before
    run(hooked.connection.close).result(PATIENCE)


def test_large_results_wait_for_each_other(poller: Poller) -> None:
    connection = poller.connection
    connection.run(connection.flags).result(PATIENCE)
    budget = connection.account.response_bytes
    body = wire_proto.encode_forward_backward_output(OUTPUT)
    poller.server.script("retrieve_future", Reply(body=body, headers=PROTOBUF), times=FOREVER)

    async def overdraw() -> None:
        await budget.acquire(budget._balance + 1)

    run(overdraw).result(PATIENCE)
    future = poller.start(FORWARD_BACKWARD, payload_size=1000)
    run(lambda: asyncio.sleep(0)).result(PATIENCE)
    assert poller.num_polls == 0
    connection.loop.post(budget.release, 10)
    assert future.result(PATIENCE).metrics == {"loss:sum": 2.0}


def test_a_cancelled_fetch_gives_back_its_bytes(poller: Poller) -> None:
    connection = poller.connection
    connection.run(connection.flags).result(PATIENCE)
    before = connection.account.response_bytes._balance
    poller.server.script("retrieve_future", Reply(json={}, delay=30.0))
    future = poller.start(FORWARD_BACKWARD, payload_size=1000)
    poller.server.wait_for("retrieve_future")
    future.cancel()
    while connection._tasks:
        run(lambda: asyncio.sleep(0)).result(PATIENCE)
    assert connection.account.response_bytes._balance == before


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "category"),
    [
        ("user", RequestErrorCategory.User),
        ("User", RequestErrorCategory.User),
        ("USER", RequestErrorCategory.User),
        ("Server", RequestErrorCategory.Server),
        ("unknown", RequestErrorCategory.Unknown),
        ("brand_new", RequestErrorCategory.Unknown),
        (None, RequestErrorCategory.Unknown),
    ],
)
def test_a_failed_operation_carries_its_category_in_any_spelling(
    poller: Poller, said: str | None, category: RequestErrorCategory
) -> None:
    with pytest.raises(RequestFailedError, match="OptimStep id-1 failed on the server: no such thing") as caught:
        poller.fetch(Reply(json={"error": "no such thing", "category": said}))
    assert (caught.value.category, caught.value.request_id) == (category, "id-1")


@pytest.mark.parametrize("error", [{"message": "nested"}, ["list"], 7])
def test_a_failure_in_an_unusual_form_is_still_a_failure(poller: Poller, error: object) -> None:
    with pytest.raises(RequestFailedError):
        poller.fetch(Reply(json={"error": error}))


def test_a_null_error_is_no_failure(poller: Poller) -> None:
    assert poller.fetch(Reply(json={"metrics": {"a": 2.0}, "error": None})).metrics == {"a": 2.0}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, BadRequestError),
        (401, AuthenticationError),
        (403, PermissionDeniedError),
        (404, NotFoundError),
        (410, RequestExpiredError),
        (418, APIStatusError),
    ],
)
def test_a_refused_poll_is_a_typed_error_and_a_value_error_for_old_code(
    poller: Poller, status: int, kind: type[APIStatusError]
) -> None:
    with pytest.raises(kind) as caught:
        poller.fetch(Reply(status, json={"detail": "no"}))
    assert isinstance(caught.value, TinkerError)
    assert isinstance(caught.value, ValueError)
    assert KEY not in str(vars(caught.value))
    assert poller.num_polls == 1


# --- telling and giving up -------------------------------------------------------------------------------------------


def test_a_change_of_the_queue_reaches_hooks_once_and_the_log_once(
    poller: Poller, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tinsmith"):
        poller.fetch(
            *[pending()] * 2,
            *[pending("paused_capacity", "all machines are busy")] * 5,
            *[pending("active")] * 3,
            *[pending("something_new")] * 2,
            STEP,
        )
    assert poller.states() == [
        ("paused_capacity", "all machines are busy"),
        ("active", None),
        ("unknown", None),
    ]
    assert [record.getMessage() for record in caplog.records] == [
        "Training is paused by the server: all machines are busy."
    ]


def test_an_operation_that_shows_no_sign_of_life_is_given_up(server: FakeServer, clock: VirtualClock) -> None:
    poller = Poller(server, progress_timeout=60.0)
    server.script("retrieve_future", pending(), times=FOREVER)
    with pytest.raises(NoProgressError, match=r"id-1 is still pending.*60 s.*progress_timeout") as caught:
        poller.start().result(PATIENCE)
    assert isinstance(caught.value, APITimeoutError)
    assert 60 <= clock.time - 1000.0 <= 62
    run(poller.connection.close).result(PATIENCE)


def test_a_paused_operation_and_one_beside_others_that_finish_are_not_given_up(
    server: FakeServer, clock: VirtualClock
) -> None:
    poller = Poller(server, progress_timeout=60.0)
    assert poller.fetch(*[pending("paused_capacity")] * 300, STEP).metrics == {"a": 1.0}
    assert clock.time - 1000.0 > 60

    def stay_alive(record: Record) -> None:
        poller.connection.last_progress = clock.now()

    poller.connection.hooks.hooks += (stay_alive,)
    assert poller.fetch(*[pending()] * 300, STEP).metrics == {"a": 1.0}
    run(poller.connection.close).result(PATIENCE)


def test_an_outage_longer_than_the_progress_timeout_ends_in_its_own_error(
    server: FakeServer, clock: VirtualClock
) -> None:
    poller = Poller(server, progress_timeout=100.0)
    poller.connection.run(poller.connection.flags).result(PATIENCE)
    server.script("retrieve_future", Reply(503, json={"detail": "gone"}), times=FOREVER)
    with pytest.raises(APIStatusError, match="gone"):
        poller.start().result(PATIENCE)
    assert 80 <= clock.time - 1000.0 <= 100
    run(poller.connection.close).result(PATIENCE)
