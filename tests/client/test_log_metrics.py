"""Metrics of the user's own: sent in order beside the training, and no trouble where nobody wants them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.server import FakeServer, Reply
from tests.support.training import ADAM, PATIENCE, make_data, open_training
from tinsmith.client import connection, metrics_log
from tinsmith.client.training import TrainingClient
from tinsmith.errors import ClientClosedError, InvalidInputError, InvalidTypeError, UnprocessableEntityError

TAKEN = Reply(204)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture
def client(server: FakeServer) -> Iterator[TrainingClient]:
    with open_training(server) as client:
        yield client


def sent(server: FakeServer) -> list[dict[str, Any]]:
    return [request.json() for request in server.received("log_metrics")]


def test_metrics_arrive_as_they_were_called(server: FakeServer, client: TrainingClient) -> None:
    server.script("log_metrics", TAKEN, times=None)
    futures = [client.log_metrics({"reward": number}, step=number) for number in range(20)]
    assert [future.result(PATIENCE) for future in futures] == 20 * [None]
    assert [(body["step"], body["metrics"]) for body in sent(server)] == [
        (number, {"reward": float(number)}) for number in range(20)
    ]
    assert {body["model_id"] for body in sent(server)} == {client.model_id}


def test_a_call_that_is_sent_twice_has_the_same_number(server: FakeServer, client: TrainingClient) -> None:
    server.script("log_metrics", Reply(503, json={}, headers={"retry-after": "0"}), TAKEN, TAKEN)
    for _ in range(2):
        client.log_metrics({"reward": 1.0}).result(PATIENCE)
    assert [body["seq_id"] for body in sent(server)] == [1, 1, 2]


def test_metrics_that_nobody_takes_do_not_pile_up(
    server: FakeServer, client: TrainingClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_log, "MOST_WAITING", 2)
    server.script("log_metrics", Reply(204, delay=1.0), TAKEN)
    with caplog.at_level(logging.WARNING, "tinsmith"):
        futures = [client.log_metrics({"reward": 1.0}, step) for step in range(3)]
        assert [future.result(PATIENCE) for future in futures] == 3 * [None]
    assert [body["step"] for body in sent(server)] == [0, 1]
    assert "Metrics of step 2 are left out: 2 calls wait already." in caplog.text


def test_without_a_step_the_server_chooses_it(server: FakeServer, client: TrainingClient) -> None:
    server.script("log_metrics", TAKEN)
    asyncio.run(_logged(client, {"reward": np.float32(0.5)}))
    assert sent(server)[0].get("step") is None
    assert sent(server)[0]["metrics"] == {"reward": 0.5}


async def _logged(client: TrainingClient, metrics: dict[str, Any]) -> None:
    await (await client.log_metrics_async(metrics))


def test_training_does_not_wait_for_metrics(server: FakeServer, client: TrainingClient) -> None:
    server.script("log_metrics", Reply(204, delay=3.0))
    logged = client.log_metrics({"reward": 1.0})
    server.wait_for("log_metrics")
    client.forward_backward(make_data(), "cross_entropy").result(PATIENCE)
    client.optim_step(ADAM).result(PATIENCE)
    assert not logged.done()


@pytest.mark.parametrize("status", [404, 405, 501])
def test_a_server_that_takes_no_metrics_is_asked_once_and_the_log_says_so(
    server: FakeServer, client: TrainingClient, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    server.script("log_metrics", Reply(status, json={"detail": "what is that?"}), times=None)
    with caplog.at_level(logging.WARNING, "tinsmith"):
        for step in range(3):
            assert client.log_metrics({"reward": 1.0}, step).result(PATIENCE) is None
    assert len(sent(server)) == 1
    told = [record.getMessage() for record in caplog.records if "takes no metrics" in record.getMessage()]
    assert len(told) == 1
    assert f"it answered {status}" in told[0]


def test_a_refusal_is_in_the_future_and_in_the_log_and_later_metrics_are_sent(
    server: FakeServer, client: TrainingClient, caplog: pytest.LogCaptureFixture
) -> None:
    server.script("log_metrics", Reply(422, json={"detail": "too many names"}), TAKEN)
    with caplog.at_level(logging.WARNING, "tinsmith"):
        refused, taken = client.log_metrics({"a": 1.0}, 1), client.log_metrics({"b": 1.0}, 2)
        with pytest.raises(UnprocessableEntityError, match="too many names"):
            refused.result(PATIENCE)
        assert taken.result(PATIENCE) is None
    assert "Metrics of step 1 were not logged" in caplog.text


def test_what_is_not_finite_is_left_out(
    server: FakeServer, client: TrainingClient, caplog: pytest.LogCaptureFixture
) -> None:
    server.script("log_metrics", TAKEN, times=None)
    with caplog.at_level(logging.WARNING, "tinsmith"):
        client.log_metrics({"kl": float("nan"), "reward": 1.0}, 5).result(PATIENCE)
        client.log_metrics({"kl": float("inf")}).result(PATIENCE)
    assert [body["metrics"] for body in sent(server)] == [{"reward": 1.0}]
    assert "The metric 'kl' is nan at step 5, and is left out." in caplog.text


@pytest.mark.parametrize(
    ("metrics", "error"),
    [
        ({}, InvalidInputError),
        ([1.0], InvalidTypeError),
        ({"a": "1"}, InvalidTypeError),
        ({"a": None}, InvalidTypeError),
        ({"a": np.ones(3)}, InvalidTypeError),
        ({1: 1.0}, InvalidTypeError),
    ],
)
def test_bad_metrics_are_refused_at_the_call(
    server: FakeServer, client: TrainingClient, metrics: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match="metrics"):
        client.log_metrics(metrics)
    with pytest.raises(InvalidInputError, match="step"):
        client.log_metrics({"a": 1.0}, "one")  # type: ignore[arg-type]
    assert sent(server) == []


def test_what_was_logged_is_sent_before_the_client_closes(server: FakeServer) -> None:
    server.script("log_metrics", Reply(204, delay=0.05), times=None)
    with open_training(server) as client:
        futures = [client.log_metrics({"reward": number}, step=number) for number in range(10)]
    assert [body["step"] for body in sent(server)] == list(range(10))
    assert [future.result(0) for future in futures] == 10 * [None]


def test_metrics_that_cannot_be_sent_do_not_keep_the_client_from_closing(
    server: FakeServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LAST_WORDS_SECONDS", 0.1)
    server.script("log_metrics", Reply(204, delay=PATIENCE), times=None)
    with caplog.at_level(logging.WARNING, "tinsmith"), open_training(server) as client:
        future = client.log_metrics({"reward": 1.0})
    with pytest.raises(ClientClosedError):
        future.result(PATIENCE)
    assert "Calls of log_metrics that were not sent before the client was closed: 1." in caplog.text
