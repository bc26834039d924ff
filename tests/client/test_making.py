"""Clients that the server has not made yet: what is called before, and what comes of it if they are never made."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import pickle
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
from tinsmith.errors import ClientClosedError, RequestFailedError

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


def sampling(service: tinsmith.ServiceClient) -> SamplingClient:
    return service.create_sampling_client(base_model=BASE_MODEL)


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
    step, ready = client.optim_step(ADAM), client.future()
    server.wait_for("create_model")
    assert ready.cancel()
    for wait in (step.result, client.result, client.optim_step(ADAM).result):
        with pytest.raises(CancelledError):
            wait(PATIENCE)


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
    futures = [training(service).future(), sampling(service).future()]
    done, _ = concurrent.futures.wait(futures, PATIENCE)
    assert {type(future.result()) for future in done} == {TrainingClient, SamplingClient}


def test_nothing_of_it_is_left_when_it_is_dropped(service: tinsmith.ServiceClient) -> None:
    sampler = sampling(service)
    sampler.sample(PROMPT, 1, PARAMS).result(PATIENCE)
    sampler.future().result(PATIENCE)
    gc.disable()
    try:
        queue = weakref.ref(sampler._queue)
        del sampler
        assert queue() is None
    finally:
        gc.enable()
