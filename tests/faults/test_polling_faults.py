"""Waiting for results while the server or the network misbehaves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.server import FOREVER, Default, Drop, FakeServer, HalfBody, Hang, Html, Reply
from tests.support.training import ADAM, PATIENCE, VirtualClock, make_data, open_training
from tinsmith.client import polling
from tinsmith.client.connection import Connection
from tinsmith.client.hooks import Attempt, QueueStateChange
from tinsmith.errors import NoProgressError, PermissionDeniedError


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    clock = VirtualClock()
    monkeypatch.setattr(Connection, "clock", clock)
    return clock


@pytest.mark.parametrize("step", [Drop(), Drop(executed=True), HalfBody(), Html(503), Reply(429, json={})], ids=repr)
def test_a_result_whose_answer_was_lost_is_fetched_again(server: FakeServer, clock: VirtualClock, step: Any) -> None:
    with open_training(server) as client:
        server.script("retrieve_future", step, step, step)
        assert client.forward_backward(make_data(), "cross_entropy").result(PATIENCE).metrics["loss:sum"] > 0


def test_a_poll_that_is_never_answered_is_repeated_after_its_timeout(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polling, "POLL_TIMEOUT_SECONDS", 0.2)
    with open_training(server) as client:
        server.script("retrieve_future", Hang())
        client.optim_step(ADAM).result(PATIENCE)
    assert server.received("retrieve_future")[-1].headers["x-stainless-read-timeout"] == "0.2"


def test_long_polls_cut_off_in_the_middle_are_taken_up_again(server: FakeServer) -> None:
    with open_training(server) as client:
        server.hold("optim_step")
        future = client.optim_step(ADAM)
        for polls in (2, 3, 4):  # the first one was for the model
            server.wait_for("retrieve_future", polls)
            server.cut_connections()
        server.release()
        assert future.result(PATIENCE).metrics is not None


def test_a_server_without_long_polls_is_paced(clock: VirtualClock) -> None:
    with FakeServer(long_poll=0.0) as server, open_training(server) as client:
        server.hold("optim_step")
        began = clock.time
        future = client.optim_step(ADAM)
        server.wait_for("retrieve_future", 200)
        server.release()
        future.result(PATIENCE)
        polls = len(server.received("retrieve_future"))
    assert polls <= 5 + 2 * (clock.time - began)


def test_many_waiting_operations_report_a_pause_each_but_the_log_says_it_once(
    caplog: pytest.LogCaptureFixture, clock: VirtualClock
) -> None:
    records: list[Any] = []
    with FakeServer(long_poll=0.0) as server, open_training(server, hooks=(records.append,)) as client:
        server.settings.queue_state = ("paused_capacity", "no machine is free")
        server.hold("optim_step")
        futures = [client.optim_step(ADAM) for _ in range(10)]
        server.wait_for("retrieve_future", 60)
        server.release()
        for future in futures:
            future.result(PATIENCE)
    changes = [record for record in records if isinstance(record, QueueStateChange)]
    assert len({change.request_id for change in changes}) == len(changes) <= 10
    assert caplog.text.count("no machine is free") == 1


def test_a_refused_poll_ends_its_own_operation_only(server: FakeServer) -> None:
    with open_training(server) as client:
        server.hold("optim_step")
        one, two = client.optim_step(ADAM), client.optim_step(ADAM)
        server.wait_for("retrieve_future", 3)
        server.script("retrieve_future", Reply(403, json={"detail": "not yours"}), Default())
        server.cut_connections()
        server.wait_for("retrieve_future", 5)
        server.release()
        outcomes = [future.exception(PATIENCE) for future in (one, two)]
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["NoneType", PermissionDeniedError.__name__]


def test_an_operation_that_never_ends_is_given_up_and_the_next_goes_on(clock: VirtualClock) -> None:
    with FakeServer(long_poll=0.0) as server, open_training(server, progress_timeout=30.0) as client:
        server.hold("optim_step")
        with pytest.raises(NoProgressError):
            client.optim_step(ADAM).result(PATIENCE)
        client.save_state("a").result(PATIENCE)


def test_every_poll_is_visible_to_hooks(server: FakeServer, clock: VirtualClock) -> None:
    records: list[Any] = []
    with open_training(server, hooks=(records.append,)) as client:
        server.script("retrieve_future", Reply(503, json={}), times=4)
        client.optim_step(ADAM).result(PATIENCE)
    polls = [record for record in records if isinstance(record, Attempt) and record.path.endswith("retrieve_future")]
    assert [poll.status for poll in polls] == [200, 503, 503, 503, 503, 200]
    assert [poll.retry_in_seconds is None for poll in polls] == [True, False, False, False, False, True]


def test_an_outage_of_polls_does_not_hold_up_submissions(server: FakeServer) -> None:
    with open_training(server) as client:
        server.script("retrieve_future", Hang(), times=FOREVER)
        futures = [client.optim_step(ADAM) for _ in range(30)]
        server.wait_for("optim_step", 30)
        for future in futures:
            future.cancel()
