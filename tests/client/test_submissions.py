"""How a training request is sent: in which dialect, and what makes two requests the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.server import FOREVER, Drop, FakeServer, Html, Reply
from tests.support.training import PATIENCE, VirtualClock, make_config, make_data
from tinsmith.client.connection import Connection
from tinsmith.client.futures import run
from tinsmith.client.retry import Retry, RetryPolicy
from tinsmith.client.submissions import ForwardBackwardSubmission, JsonSubmission
from tinsmith.errors import APIConnectionError, BadRequestError, InternalServerError, UnprocessableEntityError
from tinsmith.types import AdamParams, OptimStepRequest, SaveWeightsForSamplerRequest, UntypedAPIFuture

ACCEPTED = Reply(json={"request_id": "r-1"})
JSON, PROTOBUF = "application/json", "application/x-protobuf"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture
def connection(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connection]:
    monkeypatch.setattr(Connection, "clock", VirtualClock())
    connection = Connection(make_config(server))
    connection.run(connection.flags).result(PATIENCE)
    yield connection
    run(connection.close).result(PATIENCE)


def submission(connection: Connection, *, forward_only: bool = False, first: int = 1) -> ForwardBackwardSubmission:
    made = ForwardBackwardSubmission(
        connection, "m", make_data(2, first=first), "cross_entropy", {"a": 1.0, "b": "text"}, forward_only, False
    )
    made.encode()
    return made


def send(connection: Connection, what: ForwardBackwardSubmission | JsonSubmission, number: int = 7) -> UntypedAPIFuture:
    retry = Retry(RetryPolicy(max_seconds=100), clock=connection.clock)
    return connection.run(lambda: what.send(number, retry)).result(PATIENCE)


def dialects(server: FakeServer) -> list[str]:
    return [request.headers["content-type"] for request in server.received("forward_backward")]


def test_a_small_request_gets_its_number_when_it_is_sent(server: FakeServer, connection: Connection) -> None:
    server.script("optim_step", ACCEPTED)
    request = OptimStepRequest(optim_params=AdamParams(), model_id="m", seq_id=1)
    send(connection, JsonSubmission(connection, "/api/v1/optim_step", request), 42)
    sent = server.received("optim_step")[0].json()
    assert (sent["seq_id"], sent["model_id"]) == (42, "m")
    assert "adam_params" in sent


def test_protobuf_is_sent_and_stays_once_it_was_understood(server: FakeServer, connection: Connection) -> None:
    server.script("forward_backward", ACCEPTED)
    assert send(connection, submission(connection)).request_id == "r-1"
    assert connection.account.dialect == "protobuf"
    server.script("forward_backward", Reply(422, json={"detail": "bad weights"}))
    with pytest.raises(UnprocessableEntityError, match="bad weights"):
        send(connection, submission(connection))
    assert dialects(server) == [PROTOBUF, PROTOBUF]


@pytest.mark.parametrize(
    "refusal",
    [Reply(400, json={"detail": "no"}), Reply(415, json={}), Reply(422, json={}), Reply(500, body=b"Server Error")],
    ids=repr,
)
def test_a_server_that_refuses_protobuf_and_takes_json_gets_json_from_then_on(
    server: FakeServer, connection: Connection, refusal: Any
) -> None:
    encoded_before = submission(connection, first=50)
    server.script("forward_backward", refusal, ACCEPTED, ACCEPTED)
    send(connection, submission(connection))
    send(connection, encoded_before, 8)
    assert connection.account.dialect == "json"
    assert dialects(server) == [PROTOBUF, JSON, JSON]
    first, second = (request.json() for request in server.received("forward_backward")[1:])
    assert (first["model_id"], first["seq_id"], second["seq_id"]) == ("m", 7, 8)
    assert first["forward_backward_input"]["loss_fn"] == "cross_entropy"
    assert len(first["forward_backward_input"]["data"]) == 2


def test_forward_only_has_a_path_of_its_own_in_json(server: FakeServer, connection: Connection) -> None:
    connection.account.dialect = "json"
    server.script("forward", ACCEPTED)
    send(connection, submission(connection, forward_only=True))
    assert "forward_input" in server.received("forward")[0].json()


def test_when_neither_is_understood_the_first_answer_counts(server: FakeServer, connection: Connection) -> None:
    server.script("forward_backward", Reply(422, json={"detail": "first"}), Reply(400, json={"detail": "second"}))
    with pytest.raises(UnprocessableEntityError, match="first"):
        send(connection, submission(connection))
    assert connection.account.dialect == "unknown"
    server.script("forward_backward", Reply(400, json={"detail": "first"}), Drop())
    with pytest.raises(BadRequestError, match="first"):
        send(connection, submission(connection))


def test_a_server_in_trouble_is_not_taken_for_one_that_speaks_json(server: FakeServer, connection: Connection) -> None:
    trouble = [Reply(503, json={}), Html(502), Drop(), Reply(429, json={}), Reply(400, body=b""), Reply(500, json={})]
    server.script("forward_backward", *trouble, ACCEPTED)
    send(connection, submission(connection))
    assert dialects(server) == [PROTOBUF] * 7
    assert connection.account.dialect == "protobuf"


def test_a_bare_500_in_both_dialects_is_trouble_and_tried_again(server: FakeServer, connection: Connection) -> None:
    bare = Reply(500, body=b"Internal Server Error")
    server.script("forward_backward", bare, bare, bare, ACCEPTED)
    send(connection, submission(connection))
    assert dialects(server) == [PROTOBUF, JSON, PROTOBUF, PROTOBUF]
    connection.account.dialect = "unknown"
    server.script("forward_backward", bare, times=FOREVER)
    with pytest.raises(InternalServerError):
        send(connection, submission(connection))


def test_a_repetition_is_the_same_request_byte_for_byte_but_for_the_key(
    server: FakeServer, connection: Connection
) -> None:
    server.script("forward_backward", Drop(), ACCEPTED)
    send(connection, submission(connection))
    one, two = server.received("forward_backward")
    assert one.body == two.body
    assert one.headers["x-idempotency-key"] == two.headers["x-idempotency-key"]


def test_a_server_that_never_answers_ends_in_a_connection_error(server: FakeServer, connection: Connection) -> None:
    server.script("forward_backward", Drop(), times=FOREVER)
    with pytest.raises(APIConnectionError):
        send(connection, submission(connection))


def test_equal_requests_have_equal_fingerprints_and_others_do_not(connection: Connection) -> None:
    assert submission(connection).fingerprint == submission(connection).fingerprint
    assert submission(connection).fingerprint != submission(connection, first=9).fingerprint
    assert submission(connection).fingerprint != submission(connection, forward_only=True).fingerprint
    connection.account.dialect = "json"
    assert submission(connection).fingerprint == submission(connection).fingerprint
    assert submission(connection).fingerprint != submission(connection, first=9).fingerprint


def test_numbers_do_not_make_a_repeated_snapshot_another_one(connection: Connection) -> None:
    def snapshot(number: int, **fields: Any) -> JsonSubmission:
        request = SaveWeightsForSamplerRequest(model_id="m", sampling_session_seq_id=number, seq_id=number, **fields)
        return JsonSubmission(connection, "/api/v1/save_weights_for_sampler", request)

    assert snapshot(1).fingerprint == snapshot(2).fingerprint
    assert snapshot(1).fingerprint != snapshot(1, path="named").fingerprint
