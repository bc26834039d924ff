"""Samples: what is sent, what comes back, limits, copies, and what is refused at the door."""

import asyncio
import base64
import copy
import gc
import json
import logging
import pickle
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tinsmith
from tests.support.probes import loop_lag
from tests.support.server import FOREVER, FakeServer, Reply
from tinsmith import types
from tinsmith.client import samples
from tinsmith.client import session as sessions
from tinsmith.client.config import Config
from tinsmith.errors import InvalidInputError, InvalidTypeError

PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(max_tokens=4)
SECRET = "tml-hunter2"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


def service_client(server: FakeServer, **settings: Any) -> tinsmith.ServiceClient:
    return tinsmith.ServiceClient(config=Config(base_url=server.url, api_key=SECRET, telemetry=False, **settings))


def sampling_client(server: FakeServer, retry_config: Any = None, **settings: Any) -> tinsmith.SamplingClient:
    return service_client(server, **settings).create_sampling_client(None, "tiny/model-1", retry_config)


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


def numbers(server: FakeServer) -> list[int]:
    return [request.json()["seq_id"] for request in server.received("asample")]


# What is sent and what comes back


def test_a_sample_is_sent_and_its_sequences_come_back(server: FakeServer) -> None:
    client = sampling_client(server)
    response = client.sample(PROMPT, 2, PARAMS).result(10)
    assert [len(sequence.tokens) for sequence in response.sequences] == [4, 4]
    assert [sequence.sequence_id for sequence in response.sequences] == [
        f"{client.sampling_session_id}:0:0",
        f"{client.sampling_session_id}:0:1",
    ]
    (request,) = server.received("asample")
    assert request.headers["x-tinker-sampling-backpressure"] == "1"
    assert request.json() == {
        "sampling_session_id": client.sampling_session_id,
        "seq_id": 0,
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 4, "temperature": 1.0, "top_k": -1, "top_p": 1.0},
        "prompt_logprobs": False,
        "topk_prompt_logprobs": 0,
        "topk_sample_logprobs": 0,
        "prompt_alt_tokens_k": 0,
        "record_stability_info": False,
        "type": "sample",
    }


def test_all_options_are_sent_and_answered(server: FakeServer) -> None:
    client = service_client(server).create_sampling_client(base_model="tiny/model-1", record_stability_info=True)
    targets = types.TensorData.from_numpy(np.array([[1, -1], [2, 3]]))
    response = client.sample(PROMPT, 1, PARAMS, True, 2, 3, targets, 2, 1).result(10)
    (request,) = server.received("asample")
    sent = request.json()
    assert sent["target_prompt_logprobs"] == {"data": [1, -1, 2, 3], "dtype": "int64", "shape": [2, 2]}
    assert (sent["prompt_logprobs"], sent["topk_prompt_logprobs"], sent["topk_sample_logprobs"]) == (True, 2, 3)
    assert (sent["prompt_alt_tokens_k"], sent["prompt_logprobs_last_n"]) == (2, 1)
    assert sent["record_stability_info"] is True
    assert response.prompt_logprobs is not None
    assert response.prompt_logprobs[:2] == [None, None]
    assert response.target_prompt_logprobs is not None
    assert response.prompt_alt_tokens is not None
    assert response.sequences[0].topk_logprobs is not None


def test_log_probabilities_of_a_prompt(server: FakeServer) -> None:
    client = sampling_client(server)
    logprobs = client.compute_logprobs(PROMPT).result(10)
    assert logprobs[0] is None
    assert all(isinstance(value, float) for value in logprobs[1:])
    assert client.compute_logprobs(PROMPT, prompt_logprobs_last_n=1).result(10)[:2] == [None, None]
    request = server.received("asample")[0].json()
    assert request["sampling_params"]["max_tokens"] == 1
    assert request["prompt_logprobs"] is True
    assert request["num_samples"] == 1


def test_the_asynchronous_twins_give_the_same(server: FakeServer) -> None:
    client = sampling_client(server)
    waited = client.sample(PROMPT, 1, PARAMS).result(10)

    async def scenario() -> None:
        awaited = await client.sample_async(PROMPT, 1, PARAMS)
        assert awaited.sequences[0].tokens == waited.sequences[0].tokens
        assert (await client.sample(PROMPT, 1, PARAMS)).sequences[0].tokens == waited.sequences[0].tokens
        assert await client.compute_logprobs_async(PROMPT) == await client.compute_logprobs(PROMPT)
        assert await client.get_base_model_async() == "tiny/model-1"

    asyncio.run(scenario())


def test_samples_are_numbered_in_the_order_of_the_calls(server: FakeServer) -> None:
    client = sampling_client(server)
    for future in [client.sample(PROMPT, 1, PARAMS) for _ in range(20)]:
        future.result(10)
    assert sorted(numbers(server)) == list(range(20))


def test_a_server_without_sequence_ids_gives_sequences_without_ids() -> None:
    with FakeServer(dialect="json") as server:
        response = sampling_client(server).sample(PROMPT, 1, PARAMS).result(10)
        assert response.sequences[0].sequence_id == ""
        assert len(response.sequences[0].tokens) == 4


def test_a_wrong_number_of_sequence_ids_is_an_error(server: FakeServer) -> None:
    client = sampling_client(server)
    client.sample(PROMPT, 2, PARAMS).result(10)
    request_id = f"{client.sampling_session_id}:0"
    server.script("asample", Reply(json={"request_id": request_id, "sample_sequence_ids": ["a", "b", "c"]}))
    with pytest.raises(tinsmith.APIResponseValidationError, match="announced 3 sequences and returned 2"):
        client.sample(PROMPT, 2, PARAMS).result(10)
    assert len(server.received("asample")) == 2, "repeating it would not help"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k"),
        ({"include_prompt_logprobs": True, "prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n"),
    ],
)
def test_an_option_that_the_server_ignored_is_an_error(server: FakeServer, options: dict[str, Any], says: str) -> None:
    client = sampling_client(server)
    client.sample(PROMPT, 1, PARAMS, include_prompt_logprobs=True).result(10)
    answer = {"request_id": f"{client.sampling_session_id}:0", "sample_sequence_ids": ["a"]}
    server.script("asample", Reply(json=answer))
    with pytest.raises(tinsmith.UnsupportedByServerError, match=says):
        client.sample(PROMPT, 1, PARAMS, **options).result(10)


def test_more_scored_tokens_than_the_prompt_has_are_no_reason_to_complain(server: FakeServer) -> None:
    tokens = types.ModelInput.from_ints(list(range(1, 11)))
    logprobs = sampling_client(server).compute_logprobs(tokens, prompt_logprobs_last_n=12).result(10)
    assert logprobs.count(None) == 1


def test_a_server_that_returns_no_log_probabilities_is_an_error(server: FakeServer) -> None:
    client = sampling_client(server)
    client.sample(PROMPT, 1, PARAMS).result(10)
    server.script("asample", Reply(json={"request_id": f"{client.sampling_session_id}:0"}))
    with pytest.raises(tinsmith.UnsupportedByServerError, match="no log-probabilities"):
        client.compute_logprobs(PROMPT).result(10)


# What is refused at the door


@pytest.mark.parametrize(
    "arguments",
    [
        ("not a prompt", 1, PARAMS),
        ([1, 2, 3], 1, PARAMS),
        (None, 1, PARAMS),
        (PROMPT, 0, PARAMS),
        (PROMPT, -1, PARAMS),
        (PROMPT, "1", PARAMS),
        (PROMPT, 1, {"max_token": 4}),
        (PROMPT, 1, None),
    ],
    ids=str,
)
def test_a_sample_that_makes_no_sense_is_refused(server: FakeServer, arguments: tuple[Any, Any, Any]) -> None:
    client = sampling_client(server)
    with pytest.raises(InvalidInputError):
        client.sample(*arguments)
    assert server.received("asample") == []


@pytest.mark.parametrize(
    "options",
    [
        {"topk_prompt_logprobs": -1},
        {"topk_sample_logprobs": -1},
        {"prompt_alt_tokens_k": -1},
        {"prompt_logprobs_last_n": 0, "include_prompt_logprobs": True},
        {"prompt_logprobs_last_n": 1},
        {"target_prompt_logprobs": [[1, 2]]},
        {"target_prompt_logprobs": types.TensorData(data=[1, 2], dtype="int64", shape=[2])},
        {"target_prompt_logprobs": types.TensorData(data=[1.0, 2.0], dtype="float32", shape=[2, 1])},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_make_no_sense_are_refused_by_name(server: FakeServer, options: dict[str, Any]) -> None:
    client = sampling_client(server)
    with pytest.raises(InvalidInputError, match=next(iter(options))):
        client.sample(PROMPT, 1, PARAMS, **options)
    assert server.received("asample") == []


def test_a_refused_sample_takes_no_slot(server: FakeServer) -> None:
    client = sampling_client(server, max_pending=1, when_full="error")
    for _ in range(3):
        with pytest.raises(InvalidInputError):
            client.sample(PROMPT, 0, PARAMS)
    client.sample(PROMPT, 1, PARAMS).result(10)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "Give model_path"),
        ({"model_path": "", "base_model": ""}, "Give model_path"),
        ({"model_path": "run/weights/a"}, "must start with 'tinker://'"),
        ({"model_path": 5}, "model_path"),
        ({"base_model": 5}, "base_model"),
        ({"base_model": "  "}, "base_model"),
        ({"base_model": "tiny/model-1", "retry_config": {"max_connections": 5}}, "RetryConfig"),
    ],
    ids=str,
)
def test_a_sampling_client_that_cannot_be_made_is_refused(
    server: FakeServer, arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidInputError, match=says):
        service_client(server).create_sampling_client(**arguments)


def test_an_existing_sampling_session_can_be_taken_up(server: FakeServer) -> None:
    service = service_client(server)
    first = service.create_sampling_client(base_model="tiny/model-1")
    second = tinsmith.SamplingClient.create(service.holder, sampling_session_id=first.sampling_session_id).result(10)
    assert second.get_base_model() == "tiny/model-1"
    assert len(server.received("create_sampling_session")) == 1


def test_weights_of_a_path_can_be_sampled(server: FakeServer) -> None:
    service = service_client(server)
    trainer = service.create_lora_training_client("tiny/model-1", rank=8)
    path = trainer.save_weights_for_sampler("a").result(10).path
    assert service.create_sampling_client(model_path=path).sample(PROMPT, 1, PARAMS).result(10).sequences
    with pytest.raises(tinsmith.NotFoundError):
        service.create_sampling_client(model_path="tinker://nobody/sampler_weights/a").result(10)


# Room


def test_beyond_the_limit_an_error_is_raised_if_so_wanted(server: FakeServer) -> None:
    client = sampling_client(server, max_pending=2, when_full="error")
    server.hold("asample")
    first, second = client.sample(PROMPT, 1, PARAMS), client.sample(PROMPT, 1, PARAMS)
    with pytest.raises(tinsmith.PendingLimitError, match="raise max_pending"):
        client.sample(PROMPT, 1, PARAMS)

    async def also() -> None:
        await client.sample_async(PROMPT, 1, PARAMS)

    with pytest.raises(tinsmith.PendingLimitError):
        asyncio.run(also())
    server.release()
    first.result(10)
    second.result(10)
    client.sample(PROMPT, 1, PARAMS).result(10)


def test_whoever_got_a_result_finds_room_for_the_next(server: FakeServer) -> None:
    client = sampling_client(server, max_pending=1, when_full="error")
    for _ in range(50):
        client.sample(PROMPT, 1, PARAMS).result(10)


def test_beyond_the_limit_a_thread_waits(server: FakeServer) -> None:
    client = sampling_client(server, max_pending=2)
    server.hold("asample")
    futures = [client.sample(PROMPT, 1, PARAMS) for _ in range(2)]
    third: list[Any] = []
    thread = threading.Thread(target=lambda: third.append(client.sample(PROMPT, 1, PARAMS)))
    thread.start()
    server.wait_for("asample", 2)
    assert thread.is_alive()
    server.release()
    thread.join(10)
    for future in [*futures, *third]:
        future.result(10)


def test_beyond_the_limit_coroutines_wait_without_blocking_their_loop(server: FakeServer) -> None:
    client = sampling_client(server, max_pending=2)
    server.hold("asample")

    async def scenario() -> None:
        with loop_lag(asyncio.get_running_loop()) as lag:
            samples = [asyncio.create_task(client.sample_async(PROMPT, 1, PARAMS)) for _ in range(100)]
            await asyncio.to_thread(server.wait_for, "asample", 2)
            await asyncio.sleep(0.05)
            assert len(server.received("asample")) == 2
            server.release()
            await asyncio.gather(*samples)
        assert lag.worst < 1.0

    asyncio.run(scenario())


def test_a_cancelled_wait_for_room_takes_none(server: FakeServer) -> None:
    client = sampling_client(server, max_pending=1)
    server.hold("asample")
    held = client.sample(PROMPT, 1, PARAMS)

    async def scenario() -> None:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.sample_async(PROMPT, 1, PARAMS), 0.02)

    asyncio.run(scenario())
    server.release()
    held.result(10)
    client.sample(PROMPT, 1, PARAMS).result(10)
    assert len(server.received("asample")) == 2


def test_a_done_callback_that_would_wait_for_room_for_ever_is_told(server: FakeServer) -> None:
    client = sampling_client(server, max_pending=1)
    raised: list[Exception] = []
    answered = threading.Event()

    def again(_: Any) -> None:
        try:
            client.sample(PROMPT, 1, PARAMS)
            client.sample(PROMPT, 1, PARAMS)
        except tinsmith.WouldDeadlockError as error:
            raised.append(error)
        answered.set()

    client.sample(PROMPT, 1, PARAMS).add_done_callback(again)
    assert answered.wait(10)
    assert len(raised) == 1


def test_queued_samples_hold_no_task_and_no_request(server: FakeServer) -> None:
    client = sampling_client(server, tinsmith.RetryConfig(max_connections=3)).result(10)
    server.hold("asample")
    tasks = client._connection.loop._tasks
    before = len(tasks)
    futures = [client.sample(PROMPT, 1, PARAMS) for _ in range(500)]
    server.wait_for("asample", 3)
    until(lambda: len(client._queue.lane._waiting) == 497)
    assert len(tasks) - before <= 2 * 3  # one for the sample, one for the request on its way
    server.release()
    for future in futures:
        future.result(20)


def test_a_limit_of_the_user_counts_and_the_server_may_lower_it(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "tinsmith"),
        FakeServer(flags={"sample_max_concurrent_requests": 5}) as server,
    ):
        modest = sampling_client(server, tinsmith.RetryConfig(max_connections=2))
        greedy = sampling_client(server, tinsmith.RetryConfig(max_connections=100))
        silent = sampling_client(server)
        for client in (modest, greedy, silent):
            client.sample(PROMPT, 1, PARAMS).result(10)
        assert [client._queue.lane.max_unfinished for client in (modest, greedy, silent)] == [2, 5, 5]
    assert "max_connections is 100; the server allows 5." in caplog.text
    assert caplog.text.count("the server allows") == 1


def test_a_large_prompt_is_encoded_and_its_result_read_off_the_loop(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = sampling_client(server)
    on_loop: dict[str, list[bool]] = {"_encode": [], "_check_answered": []}

    def watch(name: str) -> Any:
        real = getattr(samples, name)

        def watched(*args: Any) -> Any:
            on_loop[name].append(client._connection.loop.is_current_thread())
            return real(*args)

        return watched

    for name in on_loop:
        monkeypatch.setattr(samples, name, watch(name))
    client.compute_logprobs(PROMPT).result(10)
    large = types.ModelInput.from_ints(list(range(1, 1000)) * 100)
    assert len(client.compute_logprobs(large).result(30)) == 99_900
    assert on_loop == {"_encode": [True, False], "_check_answered": [True, False]}


# Cancelling


def test_cancelling_a_queued_sample_sends_nothing_and_frees_its_place(server: FakeServer) -> None:
    client = sampling_client(server, tinsmith.RetryConfig(max_connections=1), max_pending=2, when_full="error")
    server.hold("asample")
    running, queued = client.sample(PROMPT, 1, PARAMS), client.sample(PROMPT, 1, PARAMS)
    server.wait_for("asample")
    assert queued.cancel()
    until(lambda: client._connection.account.pending._taken == 1)
    third = client.sample(PROMPT, 1, PARAMS)
    server.release()
    running.result(10)
    third.result(10)
    assert len(server.received("asample")) == 2
    assert queued.cancelled()


def test_cancelling_while_it_is_submitted_frees_its_place(server: FakeServer) -> None:
    client = sampling_client(server, tinsmith.RetryConfig(max_connections=1))
    server.script("asample", Reply(json={}, delay=60))
    doomed = client.sample(PROMPT, 1, PARAMS)
    server.wait_for("asample")
    doomed.cancel()
    client.sample(PROMPT, 1, PARAMS).result(10)
    until(lambda: client._connection.account.pending._taken == 0)
    assert client._connection.account.sample_gate._submitting == 0


@pytest.mark.parametrize("enabled", [True, False])
def test_cancelling_while_the_server_works_on_it_tells_the_server_if_it_wants_to_know(enabled: bool) -> None:
    with FakeServer(dynamic_flags={"sample_cancel_enabled": enabled}) as server:
        client = sampling_client(server)
        server.wait_for("client/dynamic_config")
        until(lambda: client._connection.account.dynamic_flags.sample_cancel_enabled is enabled)
        server.hold("asample")
        doomed = client.sample(PROMPT, 1, PARAMS)
        server.wait_for("retrieve_future")
        doomed.cancel()
        with pytest.raises(CancelledError):
            doomed.result(10)
        if enabled:
            (told,) = server.wait_for("cancel_future")
            assert told.json() == {"request_id": doomed.request_id}
        server.release()
        client.sample(PROMPT, 1, PARAMS).result(10)
        until(lambda: client._connection.account.pending._taken == 0)
        assert len(server.received("cancel_future")) == int(enabled)


def test_a_sample_cancelled_while_it_is_submitted_is_cancelled_when_the_server_has_answered() -> None:
    with FakeServer(dynamic_flags={"sample_cancel_enabled": True}) as server:
        client = sampling_client(server)
        until(lambda: client._connection.account.dynamic_flags.sample_cancel_enabled)
        server.script("asample", Reply(200, json={"request_id": "late", "sample_sequence_ids": ["a"]}, delay=0.3))
        future = client.sample(PROMPT, 1, PARAMS)
        server.wait_for("asample", 1)
        future.cancel()
        (told,) = server.wait_for("cancel_future", 1)
        assert told.json() == {"request_id": "late"}


def test_a_place_is_given_back_once_however_many_threads_cancel(server: FakeServer) -> None:
    client = sampling_client(server, tinsmith.RetryConfig(max_connections=1))
    server.hold("asample")
    futures = [client.sample(PROMPT, 1, PARAMS) for _ in range(200)]
    threads = [threading.Thread(target=lambda: [future.cancel() for future in futures]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: client._connection.account.pending._taken == 0)
    client.sample(PROMPT, 1, PARAMS)
    assert client._connection.account.pending._taken == 1


def test_an_asyncio_timeout_cancels_on_the_server_too() -> None:
    with FakeServer(dynamic_flags={"sample_cancel_enabled": True}) as server:
        client = sampling_client(server)
        until(lambda: client._connection.account.dynamic_flags.sample_cancel_enabled)
        server.hold("asample")

        async def scenario() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.sample_async(PROMPT, 1, PARAMS), 0.3)

        asyncio.run(scenario())
        server.wait_for("cancel_future")


def test_a_finished_sample_cannot_be_cancelled(server: FakeServer) -> None:
    client = sampling_client(server)
    done = client.sample(PROMPT, 1, PARAMS)
    done.result(10)
    assert not done.cancel()
    assert client._connection.account.pending._taken == 0


# Copies


def test_copies_use_numbers_of_their_own(server: FakeServer) -> None:
    client = sampling_client(server)
    copies = [client, copy.copy(client), copy.deepcopy(client)]
    for each in copies:
        for _ in range(2):
            each.sample(PROMPT, 1, PARAMS).result(10)
    used = numbers(server)
    assert len(set(used)) == 6
    assert len({number // samples.NUMBERS_PER_CLONE for number in used}) == 3
    assert used[:2] == [0, 1]


def test_processes_with_the_same_seed_still_use_different_numbers(server: FakeServer) -> None:
    client = sampling_client(server)
    for _ in range(3):
        random.seed(0)
        copy.copy(client).sample(PROMPT, 1, PARAMS).result(10)
    assert len(set(numbers(server))) == 3


def test_the_server_gives_out_the_numbers_of_copies_if_it_wants_to() -> None:
    with FakeServer(flags={"sample_join_sampling_session": True}) as server:
        client = sampling_client(server)
        clone = copy.copy(client)
        for future in [clone.sample(PROMPT, 1, PARAMS) for _ in range(5)]:
            future.result(10)
        client.sample(PROMPT, 1, PARAMS).result(10)
        assert len(server.received("join_sampling_session")) == 1
        assert sorted(numbers(server)) == [0, *(samples.NUMBERS_PER_CLONE + index for index in range(5))]


def test_a_pickled_client_works_and_carries_no_key(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    client = sampling_client(server)
    pickled = pickle.dumps(client)
    assert b"hunter2" not in pickled
    monkeypatch.setenv("TINKER_API_KEY", "tml-of-the-other-process")
    loaded = pickle.loads(pickled)
    assert loaded.sample(PROMPT, 1, PARAMS).result(10).sequences
    assert loaded.get_base_model() == "tiny/model-1"
    (request,) = server.received("asample")
    assert request.headers["x-api-key"] == "tml-of-the-other-process"
    assert request.json()["seq_id"] >= samples.NUMBERS_PER_CLONE


def test_a_handle_works_and_carries_no_key(server: FakeServer) -> None:
    service = service_client(server)
    client = service.create_sampling_client(base_model="tiny/model-1", record_stability_info=True)
    handle = client.get_sampler_handle()
    assert b"hunter2" not in base64.urlsafe_b64decode(handle)
    loaded = tinsmith.SamplingClient.from_sampler_handle(handle, api_key="tml-other")
    assert loaded.sample(PROMPT, 1, PARAMS).result(10).sequences
    (request,) = server.received("asample")
    assert request.headers["x-api-key"] == "tml-other"
    assert request.json()["record_stability_info"] is True


def test_copies_from_another_process_share_a_connection_and_keep_the_session_alive(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "HEARTBEAT_SECONDS", 0.02)
    original = sampling_client(server)
    handle = original.get_sampler_handle()
    original._session._keeper.cancel()  # type: ignore[union-attr]
    loaded = [tinsmith.SamplingClient.from_sampler_handle(handle, api_key="tml-other") for _ in range(3)]
    assert len({id(each._connection) for each in loaded}) == 1
    seen = len(server.received("session_heartbeat"))
    beats = server.wait_for("session_heartbeat", seen + 3)
    assert beats[-1].headers["x-api-key"] == "tml-other"
    assert len(server.received("create_session")) == 1
    del loaded
    gc.collect()
    until(lambda: len(sessions._inherited) == 0)


@pytest.mark.parametrize(
    "handle", ["", "nonsense", "%%%", 5, None, base64.urlsafe_b64encode(b"[]").decode(), "e30=", "üü"]
)
def test_what_is_no_handle_is_refused(handle: Any) -> None:
    with pytest.raises(InvalidInputError, match="get_sampler_handle"):
        tinsmith.SamplingClient.from_sampler_handle(handle, api_key="tml-x")


@pytest.mark.parametrize("field", ["base_url", "session_id", "sampling_session_id"])
def test_a_handle_with_a_damaged_field_is_refused(server: FakeServer, field: str) -> None:
    state = json.loads(base64.urlsafe_b64decode(sampling_client(server).get_sampler_handle()))
    for damage in (5, None):
        handle = base64.urlsafe_b64encode(json.dumps({**state, field: damage}).encode()).decode()
        with pytest.raises(InvalidInputError, match="no sampler handle"):
            tinsmith.SamplingClient.from_sampler_handle(handle, api_key="tml-x")


def test_a_pickled_client_samples_in_another_process(server: FakeServer) -> None:
    code = """
import pickle, sys
import tinsmith
client = pickle.loads(bytes.fromhex(sys.argv[1]))
sampled = client.sample(tinsmith.ModelInput.from_ints([1]), 1, tinsmith.SamplingParams(max_tokens=3)).result(20)
print(len(sampled.sequences))
"""
    pickled = pickle.dumps(sampling_client(server)).hex()
    done = subprocess.run(
        [sys.executable, "-c", code, pickled],
        env={"TINKER_API_KEY": "tml-worker"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "1", done.stderr
    assert server.received(lambda request: request.path.endswith("/finish")) == []


# The rest


def test_a_client_shows_its_id_and_no_secret(server: FakeServer) -> None:
    client = sampling_client(server)
    assert repr(client.result(10)) == "SamplingClient(sampling_session_id='session-0001:sample:0')"
    assert client.get_telemetry() is None


def test_old_callers_may_tell_of_queue_states(server: FakeServer) -> None:
    seen: list[Any] = []
    client = sampling_client(server, hooks=(seen.append,))
    client.on_queue_state_change("paused_capacity", "busy")
    changes = [record for record in seen if isinstance(record, tinsmith.QueueStateChange)]
    assert changes == [tinsmith.QueueStateChange("paused_capacity", "busy", client.sampling_session_id)]


def test_a_tokenizer_is_that_of_the_base_model(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from tinsmith.client import tokenizers

    monkeypatch.setattr(tokenizers, "get_tokenizer", lambda name, tokenizer_id=None: f"tokenizer of {name}")
    client = sampling_client(server)
    tokenizer: Any = client.get_tokenizer()
    assert tokenizer == "tokenizer of tiny/model-1"
    assert asyncio.run(client.get_tokenizer_async()) == tokenizer


def test_a_server_may_say_which_tokenizer_it_is(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tinsmith.client import tokenizers

    monkeypatch.setattr(tokenizers, "get_tokenizer", lambda name, tokenizer_id: tokenizer_id)
    folder_of_another_machine = "/home/of/another/machine"
    for said, used in [("hub/id", "hub/id"), (str(tmp_path), str(tmp_path)), (folder_of_another_machine, None)]:
        client = sampling_client(server)
        answer = {"sampler_id": client.sampling_session_id, "base_model": "tiny/model-1", "tokenizer_id": said}
        server.script(f"samplers/{client.sampling_session_id}", Reply(json=answer))
        tokenizer: Any = client.get_tokenizer()
        assert tokenizer == used


def test_the_server_is_asked_once_however_many_samples_wait_for_its_flags(server: FakeServer) -> None:
    server.script("client/config", Reply(json={}, delay=0.05))
    client = sampling_client(server)
    for future in [client.sample(PROMPT, 1, PARAMS) for _ in range(50)]:
        future.result(10)
    assert len(server.received("client/config")) == 1


def test_an_error_of_the_user_is_raised_with_its_type(server: FakeServer) -> None:
    client = sampling_client(server)
    server.script("asample", Reply(422, json={"detail": "prompt too long"}), times=FOREVER)
    with pytest.raises(tinsmith.UnprocessableEntityError, match="prompt too long"):
        client.sample(PROMPT, 1, PARAMS).result(10)
    assert len(server.received("asample")) == 1
    assert isinstance(InvalidTypeError("x"), InvalidInputError)
