"""Training when the server, the network or the user misbehaves: nothing hangs, nothing is done twice, nothing leaks."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.probes import open_sockets, threads
from tests.support.server import FOREVER, Default, Drop, FakeServer, HalfBody, Hang, Html, Reply
from tests.support.training import (
    ADAM,
    BASE_MODEL,
    KEY,
    PATIENCE,
    VirtualClock,
    make_data,
    open_service,
    open_training,
    seq_ids,
)
from tinsmith.client.connection import Connection
from tinsmith.client.futures import APIFuture, run
from tinsmith.client.loop import background_loop
from tinsmith.client.service import ServiceClient
from tinsmith.client.training import TrainingClient
from tinsmith.errors import (
    APIConnectionError,
    AuthenticationError,
    BadRequestError,
    ClientClosedError,
    PermissionDeniedError,
    RequestExpiredError,
    RequestFailedError,
    TinkerError,
    UnconfirmedOperationError,
)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture
def client(server: FakeServer) -> Iterator[TrainingClient]:
    with open_training(server) as client:
        yield client


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    clock = VirtualClock()
    monkeypatch.setattr(Connection, "clock", clock)
    return clock


def train(client: TrainingClient, first: int = 1) -> APIFuture[Any]:
    return client.forward_backward(make_data(first=first), "cross_entropy")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


# --- cancelling ------------------------------------------------------------------------------------------------------


def cancel(future: APIFuture[Any]) -> None:
    future.cancel()


def time_out_async(future: APIFuture[Any]) -> None:
    with pytest.raises(TimeoutError):
        asyncio.run(future.result_async(0.01))


def wait_for(future: APIFuture[Any]) -> None:
    async def impatient() -> None:
        await asyncio.wait_for(future, 0.01)

    with pytest.raises(TimeoutError):
        asyncio.run(impatient())


def cancel_the_awaiting_task(future: APIFuture[Any]) -> None:
    async def give_up() -> None:
        task = asyncio.ensure_future(future.result_async())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())


WAYS = [cancel, time_out_async, wait_for, cancel_the_awaiting_task]


@pytest.mark.parametrize("give_up", WAYS)
def test_given_up_before_its_turn_it_is_never_sent_and_the_next_follows(
    server: FakeServer, client: TrainingClient, give_up: Callable[[APIFuture[Any]], None]
) -> None:
    server.script("optim_step", Reply(503, json={}, headers={"retry-after": "0.3"}))
    sending = client.optim_step(ADAM)
    server.wait_for("optim_step")
    given_up, following = train(client), client.save_state("next")
    give_up(given_up)
    sending.result(PATIENCE)
    following.result(PATIENCE)
    assert not server.received("forward_backward")
    assert seq_ids(server, "save_weights") == [2]


@pytest.mark.parametrize("give_up", WAYS)
def test_given_up_while_it_is_sent_it_is_sent_and_the_next_follows(
    server: FakeServer, client: TrainingClient, give_up: Callable[[APIFuture[Any]], None]
) -> None:
    server.script("forward_backward", Reply(503, json={}, headers={"retry-after": "0.1"}))
    given_up = train(client)
    server.wait_for("forward_backward")
    give_up(given_up)
    client.optim_step(ADAM).result(PATIENCE)
    assert [number for _, number, _ in server.executed] == [1, 2]


@pytest.mark.parametrize("give_up", WAYS)
def test_given_up_while_its_result_is_awaited_the_next_follows(
    server: FakeServer, client: TrainingClient, give_up: Callable[[APIFuture[Any]], None]
) -> None:
    server.hold("forward_backward")
    given_up = train(client)
    server.wait_for(lambda request: request.headers.get("x-tinker-request-type") == "ForwardBackward")
    give_up(given_up)
    client.optim_step(ADAM).result(PATIENCE)
    assert seq_ids(server) == [1, 2]
    assert given_up.cancelled()


def test_many_operations_cancelled_at_random_leave_no_hole(server: FakeServer, client: TrainingClient) -> None:
    futures = []
    for index in range(200):
        futures.append(train(client, index))
        if index % 3 == 0:
            futures[-1].cancel()
        if index % 7 == 0:
            futures[index // 2].cancel()
    for future in futures:
        if not future.cancelled():
            future.result(PATIENCE)
    client.optim_step(ADAM).result(PATIENCE)
    numbers = seq_ids(server)
    assert numbers == list(range(1, len(numbers) + 1))


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_refused_submission_fails_alone(server: FakeServer, client: TrainingClient) -> None:
    server.script("optim_step", Reply(400, json={"detail": "no"}))
    refused, following = client.optim_step(ADAM), client.optim_step(ADAM)
    with pytest.raises(BadRequestError):
        refused.result(PATIENCE)
    following.result(PATIENCE)
    assert seq_ids(server) == [1, 2]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("refused_number", [1, 2, 3])
def test_one_refused_chunk_of_three_does_not_block_the_next_call(together: bool, refused_number: int) -> None:
    flags = {"fwdbwd_max_chunk_len": 1, "parallel_fwdbwd_chunks": together}
    with FakeServer(flags=flags) as server, open_training(server) as client:
        train(client).result(PATIENCE)  # the dialect is known from here on
        server.script(
            lambda r: r.endpoint == "forward_backward" and r.message().seq_id == 1 + refused_number,
            Reply(400, json={"detail": "bad chunk"}),
        )
        call = client.forward_backward(make_data(3), "cross_entropy")
        step = client.optim_step(ADAM)
        with pytest.raises(BadRequestError, match="bad chunk"):
            call.result(PATIENCE)
        step.result(PATIENCE)
        assert seq_ids(server, "optim_step") == [5 if together else 2 + refused_number]


def test_an_operation_that_fails_on_the_server_does_not_stop_the_next(
    server: FakeServer, client: TrainingClient
) -> None:
    server.fail_future("forward_backward", "bad weights", "user")
    failed, following = train(client), client.optim_step(ADAM)
    with pytest.raises(RequestFailedError, match="bad weights"):
        failed.result(PATIENCE)
    following.result(PATIENCE)


def test_a_forgotten_result_is_a_typed_error_and_the_next_goes_on(server: FakeServer, client: TrainingClient) -> None:
    server.script("retrieve_future", Reply(410, json={"detail": "expired"}))
    with pytest.raises(RequestExpiredError):
        train(client).result(PATIENCE)
    client.optim_step(ADAM).result(PATIENCE)


def test_without_a_token_nothing_was_sent_so_the_number_is_still_free(clock: VirtualClock) -> None:
    with FakeServer(flags={"pjwt_auth_enabled": True}) as server, open_training(server) as client:
        client._connection.account.token._renew_at = 0.0  # it has expired
        server.script("auth/token", Reply(401, json={"detail": "revoked"}))
        with pytest.raises(AuthenticationError):
            train(client).result(PATIENCE)
        client.optim_step(ADAM).result(PATIENCE)
        assert seq_ids(server) == [1]


def test_a_token_that_was_revoked_is_replaced_once() -> None:
    with FakeServer(flags={"pjwt_auth_enabled": True}) as server, open_service(server) as service:
        rest, path = service.rest, "get_server_capabilities"
        rest.get_server_capabilities().result(PATIENCE)
        before = len(server.received("auth/token"))
        server.script(path, Reply(401, json={"detail": "token revoked"}))
        assert rest.get_server_capabilities().result(PATIENCE).supported_models
        assert len(server.received("auth/token")) == before + 1
        server.script(path, Reply(401, json={"detail": "no longer a customer"}), times=2)
        with pytest.raises(AuthenticationError, match="customer"):
            rest.get_server_capabilities().result(PATIENCE)
        assert len(server.received(path)) == 5


def test_a_refused_key_is_not_tried_again(server: FakeServer) -> None:
    server.script("get_server_capabilities", Reply(401, json={"detail": "unknown key"}))
    with open_service(server) as service, pytest.raises(AuthenticationError):
        service.get_server_capabilities()
    assert len(server.received("get_server_capabilities")) == 1


# --- lost answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [Drop(), Drop(executed=True), HalfBody(), Html(502), Reply(503, json={})], ids=repr)
def test_a_submission_in_trouble_is_repeated_and_executed_once(
    server: FakeServer, client: TrainingClient, clock: VirtualClock, step: Any
) -> None:
    server.script("optim_step", step, step, Default())
    client.optim_step(ADAM).result(PATIENCE)
    train(client).result(PATIENCE)
    assert seq_ids(server) == [1, 1, 1, 2]
    assert [number for _, number, _ in server.executed] == [1, 2]


def test_a_silent_server_is_repeated_after_the_timeout(server: FakeServer) -> None:
    with open_training(server, timeout=0.2) as client:
        server.script("optim_step", Hang())
        client.optim_step(ADAM).result(PATIENCE)
        assert seq_ids(server) == [1, 1]


@pytest.mark.parametrize("executed", [True, False])
def test_an_operation_that_was_never_confirmed_is_healed_by_repeating_it(
    server: FakeServer, client: TrainingClient, clock: VirtualClock, executed: bool
) -> None:
    train(client).result(PATIENCE)
    server.script("forward_backward", Drop(executed=executed), times=FOREVER)
    with pytest.raises(APIConnectionError):
        train(client, 5).result(PATIENCE)
    server.clear_script()
    with pytest.raises(UnconfirmedOperationError, match="Repeat exactly"):
        client.optim_step(ADAM).result(PATIENCE)
    with pytest.raises(UnconfirmedOperationError):
        train(client, 6).result(PATIENCE)
    train(client, 5).result(PATIENCE)
    client.optim_step(ADAM).result(PATIENCE)
    assert [number for _, number, _ in server.executed] == [1, 2, 3]
    assert set(seq_ids(server)) == {1, 2, 3}


def test_a_snapshot_that_was_never_confirmed_is_healed_by_another_one(
    server: FakeServer, client: TrainingClient, clock: VirtualClock
) -> None:
    server.script("save_weights_for_sampler", Drop(), times=FOREVER)
    with pytest.raises(APIConnectionError):
        client.save_weights_and_get_sampling_client().result(PATIENCE)
    server.clear_script()
    assert client.save_weights_and_get_sampling_client().sampling_session_id
    client.optim_step(ADAM).result(PATIENCE)
    assert set(seq_ids(server, "save_weights_for_sampler", "optim_step")) == {1, 2}


def test_one_lost_chunk_of_three_is_healed_by_repeating_the_call(clock: VirtualClock) -> None:
    with FakeServer(flags={"fwdbwd_max_chunk_len": 1}) as server, open_training(server) as client:
        train(client).result(PATIENCE)
        server.script(lambda r: r.endpoint == "forward_backward" and r.message().seq_id == 3, Drop(), times=FOREVER)
        with pytest.raises(APIConnectionError):
            client.forward_backward(make_data(3), "cross_entropy").result(PATIENCE)
        server.clear_script()
        assert len(client.forward_backward(make_data(3), "cross_entropy").result(PATIENCE).loss_fn_outputs) == 3
        client.optim_step(ADAM).result(PATIENCE)
        assert [number for _, number, _ in server.executed] == [1, 2, 3, 4, 5]


def test_an_answer_from_something_in_between_does_not_leave_a_hole(
    server: FakeServer, client: TrainingClient, clock: VirtualClock
) -> None:
    train(client).result(PATIENCE)
    server.script("optim_step", Html(200))  # a proxy's login page, say
    with pytest.raises(TinkerError):
        client.optim_step(ADAM).result(PATIENCE)
    with pytest.raises(UnconfirmedOperationError):
        client.save_state("a").result(PATIENCE)
    client.optim_step(ADAM).result(PATIENCE)
    client.save_state("a").result(PATIENCE)


def test_a_server_that_restarts_is_only_a_delay(server: FakeServer, client: TrainingClient) -> None:
    server.hold("forward_backward")
    futures = [train(client, index) for index in range(20)]
    server.wait_for("retrieve_future", 20)
    server.cut_connections()
    server.release()
    for future in futures:
        future.result(PATIENCE)
    assert len(server.executed) == 20


# --- telemetry and secrets -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [Hang(), Reply(503, json={}), Drop(), Html(502)], ids=repr)
def test_telemetry_in_trouble_does_not_delay_the_users_exception(server: FakeServer, step: Any) -> None:
    server.script("telemetry", step, times=FOREVER)
    with open_training(server, telemetry=True) as client:
        server.script("optim_step", Reply(400, json={"detail": "no"}), times=20)
        for _ in range(20):
            with pytest.raises(BadRequestError):
                client.optim_step(ADAM).result(PATIENCE)  # with one telemetry timeout each, patience would end
        server.wait_for("telemetry")
        client.save_state("fine").result(PATIENCE)


def test_the_key_is_in_no_channel_but_the_request_header(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    records: list[Any] = []
    quoting = {"detail": f"key {KEY} may not do this", "headers": {"X-API-Key": KEY}}
    with open_service(server, telemetry=True, hooks=(records.append,)) as service:
        client = service.create_lora_training_client(BASE_MODEL, rank=8)
        caught: list[BaseException] = []
        for endpoint, step in (
            ("optim_step", Reply(403, json=quoting)),
            ("retrieve_future", Reply(403, json=quoting)),
            ("retrieve_future", Reply(403, body=f"<html>{KEY}</html>".encode())),
            ("optim_step", Reply(503, json=quoting, headers={"x-should-retry": "false"})),
            ("optim_step", Reply(200, json={"unexpected": KEY})),
        ):
            server.script(endpoint, step)
            error = client.optim_step(ADAM).exception(PATIENCE)
            assert error is not None
            caught.append(error)
        sampler = service.create_sampling_client(base_model=BASE_MODEL)
        objects = [service, client, sampler, service._connection.config, client.optim_step(ADAM)]
        assert isinstance(caught[0], PermissionDeniedError)
        server.wait_for("telemetry")
        handle, pickled = sampler.get_sampler_handle(), pickle.dumps(sampler)
    for error in caught[:-1]:  # the last one quotes a good answer, which the user asked for
        assert KEY not in f"{error} {error!r} {vars(error)}"
        assert KEY.encode() not in pickle.dumps(error)
    assert KEY not in f"{caplog.text} {records} {objects} {handle}"
    assert KEY.encode() not in pickled
    bodies = b"".join(request.body for request in server.received("telemetry"))
    assert b"PermissionDeniedError" in bodies
    assert KEY.encode() not in b"".join(request.body for request in server.received())


# --- closing ---------------------------------------------------------------------------------------------------------


def clients_threads() -> list[str]:
    """Those of the clients; the coding pool belongs to the process, like the loop."""
    return [name for name in threads() if not name.startswith("tinsmith-coding")]


def test_closing_ends_every_future_and_leaves_no_task_thread_or_socket(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    warm_up = ServiceClient(base_url=server.url, api_key=KEY)
    warm_up.create_lora_training_client(BASE_MODEL, rank=8).optim_step(ADAM).result(PATIENCE)
    warm_up.close("success").result(PATIENCE)
    until(lambda: server.open_connections == 0)
    sockets, alive, tasks = open_sockets(), clients_threads(), set(background_loop()._tasks)

    service = ServiceClient(base_url=server.url, api_key=KEY)
    client = service.create_lora_training_client(BASE_MODEL, rank=8)
    server.hold("forward_backward", "optim_step")
    futures = [train(client, index) for index in range(20)]
    futures.append(client.forward_backward_custom(make_data(), lambda *_: (0.0, [], {}), framework="numpy"))
    futures.append(client.optim_step(ADAM))
    server.wait_for("retrieve_future", 10)
    service.close("errored").result(PATIENCE)
    for future in futures:
        with pytest.raises(ClientClosedError):
            future.result(PATIENCE)
    with pytest.raises(ClientClosedError):
        client.optim_step(ADAM)
    until(lambda: background_loop()._tasks <= tasks)
    until(lambda: server.open_connections == 0 and open_sockets() <= sockets)
    assert clients_threads() == alive
    del client, service, futures, future
    gc.collect()
    run(lambda: asyncio.sleep(0)).result(PATIENCE)
    # Clients that other tests left behind may complain about servers of theirs.
    complaints = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert not [text for text in complaints if server.url in text or "http" not in text]


def test_one_clients_end_does_not_touch_another_of_the_same_account(server: FakeServer) -> None:
    with open_training(server) as survivor:
        service = ServiceClient(base_url=server.url, api_key=KEY)
        doomed = service.create_lora_training_client(BASE_MODEL, rank=8)
        server.script("forward_backward", Hang())
        futures = [doomed.forward_backward(make_data(4, 200_000), "cross_entropy") for _ in range(8)]
        server.wait_for("forward_backward")
        service.close("interrupted").result(PATIENCE)
        for future in futures:
            with pytest.raises(ClientClosedError):
                future.result(PATIENCE)
        for _ in range(3):
            survivor.forward_backward(make_data(4, 20_000), "cross_entropy").result(PATIENCE)


def test_operations_racing_with_the_end_all_come_to_an_end(server: FakeServer) -> None:
    service = ServiceClient(base_url=server.url, api_key=KEY)
    client = service.create_lora_training_client(BASE_MODEL, rank=8)
    futures: list[APIFuture[Any]] = []

    def keep_training() -> None:
        with contextlib.suppress(ClientClosedError):
            futures.extend(train(client) for _ in range(1000))

    workers = [threading.Thread(target=keep_training) for _ in range(3)]
    for worker in workers:
        worker.start()
    server.wait_for("forward_backward", 20)
    service.close("success").result(PATIENCE)
    for worker in workers:
        worker.join(PATIENCE)
    for future in futures:
        assert isinstance(future.exception(PATIENCE), ClientClosedError | None)


def test_a_custom_loss_may_wait_for_another_client_while_large_calls_are_queued_behind_it() -> None:
    with (
        FakeServer(flags={"fwdbwd_dispatch_bytes_semaphore_size": 10}) as server,
        ServiceClient(base_url=server.url, api_key=KEY) as service,
    ):
        client = service.create_lora_training_client(BASE_MODEL, rank=8)
        reference = service.create_lora_training_client(BASE_MODEL, rank=8)
        is_queued = threading.Event()

        def loss(data: Any, logprobs: Any) -> Any:
            is_queued.wait(PATIENCE)
            reference.forward(make_data(1), "cross_entropy").result(PATIENCE)
            return sum(float(values.sum()) for values in logprobs), [values * 0 + 1 for values in logprobs], {}

        custom = client.forward_backward_custom(make_data(1), loss, framework="numpy")
        later = client.forward_backward(make_data(1, 50), "cross_entropy")
        is_queued.set()
        assert "surrogate_loss:sum" in custom.result(PATIENCE).metrics
        assert "loss:sum" in later.result(PATIENCE).metrics


def test_the_key_is_not_shown_by_tools_that_print_local_variables() -> None:
    with FakeServer() as server:
        service = ServiceClient(base_url=server.url, api_key=KEY)
        server.script("create_session", Reply(403, json={"detail": "no"}), times=FOREVER)
        with pytest.raises(PermissionDeniedError) as caught:
            service.create_lora_training_client(BASE_MODEL).result(PATIENCE)
        shown = "".join(traceback.TracebackException.from_exception(caught.value, capture_locals=True).format())
        inner = shown[shown.index("client/connection.py") :]
        assert "call" in inner
        assert KEY not in inner
        service.close("errored").result(PATIENCE)
