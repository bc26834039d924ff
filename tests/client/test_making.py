"""Clients that the server has not made yet: what is called before, and what comes of it if they are never made."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import gc
import pickle
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest

import tinsmith
from tests.support.server import FakeServer, Reply
from tests.support.training import ADAM, BASE_MODEL, PATIENCE, make_data, open_service, seq_ids
from tinsmith import types
from tinsmith.client.sampling import SamplingClient
from tinsmith.client.training import TrainingClient
from tinsmith.errors import ClientClosedError, InvalidTypeError, RequestFailedError, WouldDeadlockError

PROMPT, PARAMS = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=2)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture
def service(server: FakeServer) -> Iterator[tinsmith.ServiceClient]:
    with open_service(server) as service:
        yield service


def training(service: tinsmith.ServiceClient) -> TrainingClient:
    return service.create_lora_training_client(BASE_MODEL, rank=8)


def sampling(service: tinsmith.ServiceClient, retry_config: Any = None) -> SamplingClient:
    return service.create_sampling_client(base_model=BASE_MODEL, retry_config=retry_config)


# What is called before


def test_operations_leave_in_order_when_the_model_is_there(server: FakeServer, service: tinsmith.ServiceClient) -> None:
    server.hold("create_model")
    server.script("log_metrics", Reply(204))
    client = training(service)
    futures: list[Any] = [
        client.forward_backward(make_data(), "cross_entropy"),
        client.optim_step(ADAM),
        client.save_state("state"),
        client.log_metrics({"reward": 1.0}),
    ]
    sampler = client.save_weights_and_get_sampling_client()
    futures.append(sampler.sample(PROMPT, 1, PARAMS))
    server.wait_for("create_model")
    assert not any(future.done() for future in futures)
    assert repr(client) == "TrainingClient(not ready)"
    assert seq_ids(server) == []
    server.release()
    for future in futures:
        future.result(PATIENCE)
    assert [endpoint for _, _, endpoint in server.executed] == [
        "forward_backward",
        "optim_step",
        "save_weights",
        "save_weights_for_sampler",
    ]
    assert seq_ids(server, "forward_backward", "optim_step", "save_weights", "save_weights_for_sampler") == [1, 2, 3, 4]
    assert repr(client) == f"TrainingClient(model_id={client.model_id!r})"


def test_after_a_load_the_next_operation_has_the_next_number(
    server: FakeServer, service: tinsmith.ServiceClient
) -> None:
    path = training(service).save_state("state").result(PATIENCE).path
    client = service.create_training_client_from_state(path)
    client.optim_step(ADAM).result(PATIENCE)
    assert seq_ids(server, "load_weights", "optim_step") == [1, 2]


def test_samples_leave_when_their_sampler_is_there(server: FakeServer, service: tinsmith.ServiceClient) -> None:
    server.script("create_sampling_session", Reply(503, json={}, delay=0.2))
    client = sampling(service)
    futures = [client.sample(PROMPT, 1, PARAMS) for _ in range(5)]
    futures[1].cancel()
    for number in (0, 2, 3, 4):
        assert futures[number].result(PATIENCE).sequences
    assert len(server.received("asample")) == 4


@pytest.mark.parametrize("make", [training, sampling], ids=["training", "sampling"])
def test_what_is_known_of_it_is_asked_once(
    server: FakeServer, service: tinsmith.ServiceClient, make: Callable[[tinsmith.ServiceClient], Any]
) -> None:
    client = make(service).result(PATIENCE)
    before = len(server.requests)
    for _ in range(3):
        name = client.get_info().model_data.model_name if make is training else client.get_base_model()
        assert name == BASE_MODEL
    assert len(server.requests) == before


def test_a_sampler_may_be_copied_and_pickled_before_it_is_there(
    server: FakeServer, service: tinsmith.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-secret-of-the-tests")
    server.script("create_sampling_session", Reply(503, json={}, delay=0.1))
    client = sampling(service)
    copies = [client.__copy__(), pickle.loads(pickle.dumps(client))]
    for copy in copies:
        assert copy.sample(PROMPT, 1, PARAMS).result(PATIENCE).sequences
        assert copy.get_base_model() == BASE_MODEL
    assert len(server.received("create_sampling_session")) == 2  # once refused
    assert server.received("samplers") == []


# What comes of it


def test_if_the_model_cannot_be_made_every_call_fails_with_the_reason(service: tinsmith.ServiceClient) -> None:
    client = service.create_lora_training_client("no/such-model")
    futures = [client.forward_backward(make_data(), "cross_entropy"), client.optim_step(ADAM)]
    sampler = client.save_weights_and_get_sampling_client()
    waits: list[Callable[[], Any]] = [
        *(future.result for future in futures),
        client.result,
        sampler.result,
        sampler.sample(PROMPT, 1, PARAMS).result,
        client.get_info,
        client.optim_step(ADAM).result,
        client.future().result,
        lambda: client.model_id,
    ]
    for wait in waits:
        with pytest.raises(RequestFailedError, match="no/such-model"):
            wait()
    assert repr(client) == "TrainingClient(not ready)"


def test_if_the_sampler_cannot_be_made_its_samples_give_their_places_back(server: FakeServer) -> None:
    with open_service(server, max_pending=2, when_full="error") as service:
        for _ in range(3):
            server.script("create_sampling_session", Reply(422, json={"detail": "no such weights"}))
            client = sampling(service)
            for sample in [client.sample(PROMPT, 1, PARAMS) for _ in range(2)]:
                with pytest.raises(tinsmith.UnprocessableEntityError, match="no such weights"):
                    sample.result(PATIENCE)
            with pytest.raises(tinsmith.UnprocessableEntityError, match="no such weights"):
                client.sample(PROMPT, 1, PARAMS).result(PATIENCE)
        assert sampling(service).sample(PROMPT, 1, PARAMS).result(PATIENCE).sequences


def test_giving_up_an_operation_does_not_give_up_the_client(
    server: FakeServer, service: tinsmith.ServiceClient
) -> None:
    server.hold("create_model")
    client = training(service)
    given_up, kept = client.optim_step(ADAM), client.optim_step(ADAM)
    server.wait_for("create_model")
    assert given_up.cancel()
    server.release()
    kept.result(PATIENCE)
    assert seq_ids(server) == [1]


def test_giving_up_the_client_ends_what_waits_for_it(server: FakeServer, service: tinsmith.ServiceClient) -> None:
    server.hold("create_model")
    client = training(service)
    step, sampler = client.optim_step(ADAM), client.save_weights_and_get_sampling_client()
    server.wait_for("create_model")
    assert client.cancel()
    with pytest.raises(CancelledError):
        client.result(PATIENCE)
    for wait in (step.result, client.optim_step(ADAM).result, sampler.result, sampler.sample(PROMPT, 1, PARAMS).result):
        with pytest.raises(ClientClosedError, match="given up"):
            wait(PATIENCE)


def test_whoever_stops_waiting_for_a_client_leaves_it_to_others(
    server: FakeServer, service: tinsmith.ServiceClient
) -> None:
    server.hold("create_model")
    client = training(service)

    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            others = tasks.create_task(client.coroutine()), tasks.create_task(client.optim_step(ADAM).coroutine())
            for wait in (asyncio.wait_for(client, 0.01), client.result_async(0.01)):
                with pytest.raises(TimeoutError):
                    await wait
            cancelled = tasks.create_task(client.coroutine())
            await asyncio.sleep(0.01)
            cancelled.cancel()
            server.release()
            assert await others[0] is client

    asyncio.run(scenario())


def test_closing_ends_the_making(server: FakeServer) -> None:
    with open_service(server) as service:
        server.hold("create_model")
        client = training(service)
        step = client.optim_step(ADAM)
        server.wait_for("create_model")
    for wait in (step.result, client.result):
        with pytest.raises(ClientClosedError):
            wait(PATIENCE)


def test_a_timeout_leaves_the_making_going_on(server: FakeServer, service: tinsmith.ServiceClient) -> None:
    server.hold("create_model")
    client = training(service)
    with pytest.raises(TimeoutError):
        client.result(0.01)
    server.release()
    assert client.result(PATIENCE) is client


def test_a_model_that_cannot_be_made_holds_nothing_of_what_was_called(service: tinsmith.ServiceClient) -> None:
    client = service.create_lora_training_client("no/such-model")
    for _ in range(3):
        with pytest.raises(RequestFailedError) as caught:
            client.forward_backward(make_data(), "cross_entropy").result(PATIENCE)
        frames = len(traceback.extract_tb(caught.value.__traceback__))
        assert frames < 20, "each call has added its own"


def test_what_is_called_as_the_model_gets_ready_takes_no_bytes_from_what_was_called_before() -> None:
    with FakeServer(flags={"fwdbwd_dispatch_bytes_semaphore_size": 10}) as server, open_service(server) as service:
        server.hold("create_model")
        client = training(service)
        later: list[Any] = []
        client.add_done_callback(lambda _: later.append(client.forward_backward(make_data(1, 3), "cross_entropy")))
        futures = [client.forward_backward(make_data(first=number), "cross_entropy") for number in range(3)]
        server.wait_for("create_model")
        server.release()
        for future in futures:
            future.result(PATIENCE)
        later[0].result(PATIENCE)
        assert seq_ids(server) == [1, 2, 3, 4]


def test_a_custom_loss_that_waits_for_what_waits_for_it_says_so(service: tinsmith.ServiceClient) -> None:
    client, samplers = training(service), list[SamplingClient]()
    is_queued = threading.Event()

    def loss(_: Any, logprobs: Any) -> Any:
        assert is_queued.wait(PATIENCE)
        samplers[0].sample(PROMPT, 1, PARAMS)

    future = client.forward_backward_custom(make_data(), loss, framework="numpy")
    samplers.append(client.save_weights_and_get_sampling_client())
    is_queued.set()
    with pytest.raises(WouldDeadlockError, match="yet to make"):
        future.result(PATIENCE)
    assert samplers[0].sample(PROMPT, 1, PARAMS).result(PATIENCE).sequences


def test_settings_that_make_no_sense_are_refused_before_anything_is_sent(
    server: FakeServer, service: tinsmith.ServiceClient
) -> None:
    client = training(service).result(PATIENCE)
    for make in (client.save_weights_and_get_sampling_client, functools.partial(sampling, service)):
        with pytest.raises(InvalidTypeError, match="must be a RetryConfig"):
            make(retry_config="often")  # type: ignore[arg-type]
    assert not server.received("save_weights_for_sampler")
    assert not server.received("create_sampling_session")


# As a future


def test_it_can_be_awaited_gathered_and_waited_for(service: tinsmith.ServiceClient) -> None:
    async def scenario() -> list[Any]:
        client = await training(service)
        task = asyncio.create_task(sampling(service).coroutine())
        return [client, await task, *await asyncio.gather(sampling(service), client.create_sampling_client(path))]

    path = training(service).save_weights_for_sampler("a").result(PATIENCE).path
    client, *samplers = asyncio.run(scenario())
    assert isinstance(client, TrainingClient)
    assert all(isinstance(sampler, SamplingClient) for sampler in samplers)
    clients: list[Any] = [training(service), sampling(service)]
    assert all(isinstance(client, tinsmith.APIFuture) for client in clients)
    done, _ = concurrent.futures.wait(clients, PATIENCE)
    assert done == set(clients)
    assert all(client.result() is client and client.done() for client in clients)


def test_nothing_of_it_is_left_when_it_is_dropped(service: tinsmith.ServiceClient) -> None:
    sampler = sampling(service)
    sampler.sample(PROMPT, 1, PARAMS).result(PATIENCE)
    client = training(service).result(PATIENCE)
    gc.disable()
    try:
        references: list[Any] = [weakref.ref(sampler), weakref.ref(sampler._queue)]
        references += [weakref.ref(client), weakref.ref(client._turns)]
        del sampler, client
        assert [reference() for reference in references] == [None] * 4
    finally:
        gc.enable()
