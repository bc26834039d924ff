"""The training client on a real server: order, chunks, custom losses, and input that is refused at the door."""

from __future__ import annotations

import asyncio
import copy
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.probes import loop_lag
from tests.support.server import FakeServer, Reply
from tests.support.training import (
    ADAM,
    PATIENCE,
    make_data,
    number_of,
    open_service,
    open_training,
    seq_ids,
)
from tinsmith.client.loop import background_loop
from tinsmith.client.training import TrainingClient
from tinsmith.errors import (
    InvalidInputError,
    InvalidTypeError,
    MissingExtraError,
    RequestFailedError,
    UnprocessableEntityError,
    WouldDeadlockError,
)
from tinsmith.types import Datum, ForwardBackwardOutput, ImageAssetPointerChunk, ModelInput
from tinsmith.wire import proto as wire_proto


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture
def client(server: FakeServer) -> Iterator[TrainingClient]:
    with open_training(server) as client:
        yield client


def first_tokens(server: FakeServer) -> list[list[int]]:
    """The first token of every example of every forward_backward request, by number."""
    requests = sorted(server.received("forward_backward"), key=number_of)
    return [
        [np.frombuffer(datum.model_input[0].encoded_text.tokens, np.int32)[0] for datum in request.message().data]
        for request in requests
    ]


# --- order -----------------------------------------------------------------------------------------------------------


def test_operations_arrive_in_call_order_with_consecutive_numbers_from_many_threads(
    server: FakeServer, client: TrainingClient
) -> None:
    order, called, futures = threading.Lock(), [], []

    def train(thread: int) -> None:
        for index in range(10):
            with order:
                first = 1000 * thread + index
                called.append([first])
                futures.append(client.forward_backward(make_data(first=first), "cross_entropy"))
                futures.append(client.optim_step(ADAM))

    threads = [threading.Thread(target=train, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for future in futures:
        future.result(PATIENCE)
    assert seq_ids(server) == list(range(1, 81))
    assert first_tokens(server) == called
    assert [number for _, number, _ in server.executed] == list(range(1, 81))


def test_the_optimizer_step_is_sent_before_the_first_result_is_there(
    server: FakeServer, client: TrainingClient
) -> None:
    server.hold("forward_backward")
    forward_backward = client.forward_backward(make_data(), "cross_entropy")
    step = client.optim_step(ADAM)
    server.wait_for("optim_step")
    assert not forward_backward.done()
    server.release()
    assert forward_backward.result(PATIENCE).metrics["loss:sum"] > 0
    assert step.result(PATIENCE).metrics is not None
    assert forward_backward.request_id is not None


def test_with_max_inflight_one_every_result_is_waited_for(server: FakeServer) -> None:
    with open_training(server, max_inflight=1) as client:
        server.hold("forward_backward")
        forward_backward, step = client.forward_backward(make_data(), "cross_entropy"), client.optim_step(ADAM)
        server.wait_for(lambda request: request.headers.get("x-tinker-request-type") == "ForwardBackward")
        assert not server.received("optim_step")
        server.release()
        forward_backward.result(PATIENCE)
        step.result(PATIENCE)


@pytest.mark.parametrize(
    ("flag", "setting", "together"),
    [(True, None, True), (False, None, False), (True, False, False), (False, True, True)],
)
def test_chunks_leave_together_the_first_one_last_or_one_by_one(
    flag: bool, setting: bool | None, together: bool
) -> None:
    with (
        FakeServer(flags={"fwdbwd_max_chunk_len": 1, "parallel_fwdbwd_chunks": flag}) as server,
        open_training(server, parallel_chunks=setting) as client,
    ):
        future, step = client.forward_backward(make_data(3), "cross_entropy"), client.optim_step(ADAM)
        assert len(future.result(PATIENCE).loss_fn_outputs) == 3
        step.result(PATIENCE)
        arrived = seq_ids(server)
    assert sorted(arrived[:2]) == ([2, 3] if together else [1, 2])
    assert arrived[2:] == ([1, 4] if together else [3, 4])


def test_the_servers_limits_decide_the_chunks_and_the_result_is_that_of_one_request() -> None:
    examples = [*make_data(3, num_tokens=5), *make_data(4, num_tokens=50, first=100)]
    results = []
    for flags in ({}, {"fwdbwd_max_chunk_len": 2}, {"fwdbwd_max_chunk_bytes_count": 700}):
        with FakeServer(flags=flags) as server, open_training(server) as client:
            output = client.forward_backward(examples, "cross_entropy").result(PATIENCE)
            results.append((len(server.received("forward_backward")), output))
    assert [count for count, _ in results] == [1, 4, 5]
    whole = results[0][1]
    for _, output in results[1:]:
        assert output.metrics["loss:sum"] == pytest.approx(whole.metrics["loss:sum"])
        assert [each["logprobs"].tolist() for each in output.loss_fn_outputs] == [
            each["logprobs"].tolist() for each in whole.loss_fn_outputs
        ]


def test_bodies_are_compressed_where_the_server_asks_for_it() -> None:
    with FakeServer(flags={"proto_compress_fwdbwd": True}) as server, open_training(server) as client:
        client.forward_backward(make_data(), "cross_entropy").result(PATIENCE)
        assert server.received("forward_backward")[0].headers["content-encoding"] == "zstd"


def test_the_async_twins_give_the_same_futures(server: FakeServer, client: TrainingClient) -> None:
    async def train() -> list[Any]:
        futures = [
            await client.forward_async(make_data(), "cross_entropy"),
            await client.forward_backward_async(make_data(), "cross_entropy"),
            await client.optim_step_async(ADAM),
            await client.save_state_async("a"),
            await client.save_weights_for_sampler_async("b"),
        ]
        return [await future for future in futures]

    outputs = asyncio.run(train())
    assert outputs[3].path == f"tinker://{client.model_id}/weights/a"
    assert outputs[4].path == f"tinker://{client.model_id}/sampler_weights/b"
    assert seq_ids(server, "forward_backward", "optim_step", "save_weights", "save_weights_for_sampler") == [
        1,
        2,
        3,
        4,
        5,
    ]


def test_reading_a_result_twice_gives_the_same(client: TrainingClient) -> None:
    def loss(data: list[Datum], logprobs: list[Any]) -> Any:
        return sum((each**2).sum() for each in logprobs), {"mine": 1.0}

    future = client.forward_backward_custom(make_data(2), loss)
    first = dict(future.result(PATIENCE).metrics)
    assert dict(future.result().metrics) == first
    assert asyncio.run(_awaited(future)).metrics == first


async def _awaited(future: Any) -> Any:
    return await future


def test_unloading_comes_after_what_was_called_before() -> None:
    with FakeServer(dialect="json") as server, open_training(server) as client:
        futures = [client.forward_backward(make_data(), "cross_entropy") for _ in range(5)]
        assert client.unload_model().result(PATIENCE).model_id == client.model_id
        assert server.paths("unload_model")
        arrived = [request.endpoint for request in server.received() if "future" not in request.endpoint]
        assert arrived.index("unload_model") > max(
            index for index, name in enumerate(arrived) if name == "forward_backward"
        )
        for future in futures:
            future.result(PATIENCE)


# --- input that is refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda c: c.forward_backward([], "cross_entropy"), InvalidInputError, "data is empty"),
        (lambda c: c.forward([{"tokens": [1]}], "cross_entropy"), InvalidTypeError, r"data\[0\] is a dict"),
        (lambda c: c.forward_backward(make_data(), "cross entropy"), InvalidInputError, "cross_entropy"),
        (lambda c: c.optim_step(), InvalidTypeError, "AdamParams"),
        (lambda c: c.optim_step({"lr": 1}), InvalidTypeError, "AdamParams"),
        (lambda c: c.optim_step(ADAM, adam_params=ADAM), InvalidInputError, "Both"),
        (lambda c: c.save_state("a", ttl_seconds="a week"), InvalidTypeError, "ttl_seconds"),
        (lambda c: c.save_weights_external("a", age_encryption_recipients=["x"] * 11), InvalidInputError, "11 age"),
        (lambda c: c.create_sampling_client("file:///x"), InvalidInputError, "tinker://"),
        (lambda c: c.forward_backward_custom([], lambda *_: None), InvalidInputError, "empty"),
        (lambda c: c.forward_backward(None, "cross_entropy"), InvalidTypeError, "data must be a list of Datum"),
        (lambda c: c.forward(make_data()[0], "cross_entropy"), InvalidTypeError, "data must be a list of Datum"),
        (lambda c: c.forward_backward_custom(None, print), InvalidTypeError, "data must be a list of Datum"),
        (lambda c: c.forward_backward_custom(make_data(), print, framework="jax"), InvalidInputError, "torch, numpy"),
        (lambda c: c.forward_backward_custom(make_data(), 5, framework="numpy"), InvalidTypeError, "a function"),
        (lambda c: c.forward_backward_custom(make_data(), "ppo"), InvalidTypeError, "forward_backward\\(\\)"),
        (lambda c: c.save_weights_external("a", age_encryption_recipients="age1x"), InvalidTypeError, "into a list"),
        (lambda c: c.save_state(""), InvalidInputError, "needs a name"),
        (lambda c: c.save_state(None), InvalidInputError, "needs a name"),
        (lambda c: c.save_weights_for_sampler(3), InvalidInputError, "needs a name"),
        (lambda c: c.save_weights_external(""), InvalidInputError, "needs a name"),
        (lambda c: c.save_state("a", ttl_seconds=3_599), InvalidInputError, "3,600.*315,360,000"),
        (lambda c: c.save_weights_for_sampler("a", 315_360_001), InvalidInputError, "3,600.*315,360,000"),
        (lambda c: c.save_weights_external("a", -1), InvalidInputError, "3,600.*315,360,000"),
    ],
)
def test_bad_arguments_are_refused_on_the_spot_and_nothing_is_sent(
    server: FakeServer, client: TrainingClient, call: Callable[[Any], Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        call(client)
    assert seq_ids(server) == []


def test_data_that_cannot_be_encoded_uses_no_number(server: FakeServer, client: TrainingClient) -> None:
    pointer = ModelInput(chunks=[ImageAssetPointerChunk(format="png", location="tinker://x")])
    failed = client.forward_backward([*make_data(), Datum(pointer, {})], "cross_entropy")
    step = client.optim_step(ADAM)
    with pytest.raises(InvalidInputError, match=r"data\[1\].*ImageAssetPointerChunk"):
        failed.result(PATIENCE)
    step.result(PATIENCE)
    assert seq_ids(server) == [1]


def test_a_refused_loss_configuration_surfaces_as_the_servers_first_answer(
    server: FakeServer, client: TrainingClient
) -> None:
    server.script("forward_backward", Reply(422, json={"detail": "the data is at fault"}))
    failed, step = client.forward_backward(make_data(), "cross_entropy"), client.optim_step(ADAM)
    with pytest.raises(UnprocessableEntityError, match="the data is at fault"):
        failed.result(PATIENCE)
    assert step.result(PATIENCE).metrics is not None
    assert seq_ids(server, "optim_step") == [2]


def test_it_can_be_neither_copied_nor_pickled_and_says_why(client: TrainingClient) -> None:
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="same number"):
            attempt(client)
    assert repr(client) == f"TrainingClient(model_id={client.model_id!r})"


# --- custom losses ---------------------------------------------------------------------------------------------------


def squared(data: list[Datum], logprobs: list[np.ndarray]) -> tuple[float, list[np.ndarray], dict[str, float]]:
    return sum(float((each**2).sum()) for each in logprobs), [2 * each for each in logprobs], {"mine": 1.0}


def test_a_custom_loss_takes_two_numbers_with_nothing_in_between(server: FakeServer, client: TrainingClient) -> None:
    stop = threading.Event()

    def intrude() -> None:
        while not stop.is_set():
            client.optim_step(ADAM).result(PATIENCE)

    intruder = threading.Thread(target=intrude)
    intruder.start()
    outputs = [client.forward_backward_custom(make_data(), squared, framework="numpy") for _ in range(10)]
    for output in outputs:
        assert output.result(PATIENCE).metrics["mine"] == 1.0
    stop.set()
    intruder.join()
    messages = [request.message() for request in server.received("forward_backward")]
    forward = [message.seq_id for message in messages if message.forward_only]
    assert [message.seq_id for message in messages if not message.forward_only] == [number + 1 for number in forward]


def test_a_torch_loss_without_torch_is_refused_before_anything_is_sent(
    server: FakeServer, client: TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match=r"tinsmith\[torch\]"):
        client.forward_backward_custom(make_data(), squared)
    assert seq_ids(server) == []


def test_torch_is_imported_by_the_thread_that_runs_the_loss_and_not_by_the_caller() -> None:
    code = """if True:
        import sys
        from tests.support.server import FakeServer
        from tests.support.training import PATIENCE, make_data, open_training
        def loss(data, logprobs):
            return sum(each.sum() for each in logprobs), {}
        with FakeServer() as server, open_training(server) as client:
            server.hold("forward_backward")
            future = client.forward_backward_custom(make_data(), loss)
            assert "torch" not in sys.modules
            server.release()
            future.result(PATIENCE)
            assert "torch" in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_custom_loss_runs_off_the_loop_and_holds_up_nobody_else(server: FakeServer) -> None:
    with open_service(server) as service:
        one, two = (service.create_lora_training_client("tiny/model-1", rank=8) for _ in range(2))
        computing, release = threading.Event(), threading.Event()

        def slow(data: list[Datum], logprobs: list[np.ndarray]) -> Any:
            computing.set()
            assert release.wait(PATIENCE)
            return squared(data, logprobs)

        custom = one.forward_backward_custom(make_data(), slow, framework="numpy")
        behind = one.optim_step(ADAM)
        assert computing.wait(PATIENCE)
        two.forward_backward(make_data(), "cross_entropy").result(PATIENCE)
        assert not custom.done()
        assert not behind.done()
        release.set()
        custom.result(PATIENCE)
        behind.result(PATIENCE)


@pytest.mark.parametrize("error", [ValueError("my mistake"), StopIteration(), SystemExit(1), asyncio.CancelledError()])
def test_whatever_a_custom_loss_raises_reaches_its_future_and_the_next_goes_on(
    server: FakeServer, client: TrainingClient, error: BaseException
) -> None:
    def broken(data: list[Datum], logprobs: list[np.ndarray]) -> Any:
        raise error

    failed, step = client.forward_backward_custom(make_data(), broken, framework="numpy"), client.optim_step(ADAM)
    with pytest.raises((ValueError, RuntimeError)):
        failed.result(PATIENCE)
    step.result(PATIENCE)
    assert seq_ids(server) == [1, 2]


def test_a_custom_loss_may_wait_for_another_client_of_the_account_however_large_the_data() -> None:
    with FakeServer(flags={"fwdbwd_dispatch_bytes_semaphore_size": 10}) as server, open_service(server) as service:
        trained, reference = (service.create_lora_training_client("tiny/model-1", rank=8) for _ in range(2))

        def with_reference(data: list[Datum], logprobs: list[np.ndarray]) -> Any:
            reference.forward(data, "cross_entropy").result(PATIENCE)
            return squared(data, logprobs)

        trained.forward_backward_custom(make_data(4), with_reference, framework="numpy").result(PATIENCE)


def test_a_custom_loss_that_waits_for_its_own_client_is_told_that_it_would_wait_for_ever(
    client: TrainingClient,
) -> None:
    def greedy(data: list[Datum], logprobs: list[np.ndarray]) -> Any:
        client.forward(data, "cross_entropy").result()
        return squared(data, logprobs)

    with pytest.raises(WouldDeadlockError, match="use another client"):
        client.forward_backward_custom(make_data(), greedy, framework="numpy").result(PATIENCE)
    client.optim_step(ADAM).result(PATIENCE)


def test_a_failed_forward_pass_fails_the_custom_loss(server: FakeServer, client: TrainingClient) -> None:
    server.fail_future("forward_backward", "out of memory", "server")
    with pytest.raises(RequestFailedError, match="out of memory"):
        client.forward_backward_custom(make_data(), squared, framework="numpy").result(PATIENCE)
    client.optim_step(ADAM).result(PATIENCE)


def test_cancelling_a_custom_loss_cancels_both_its_passes(server: FakeServer, client: TrainingClient) -> None:
    server.hold("optim_step")
    server.script("optim_step", Reply(503, json={}, headers={"retry-after": "0.3"}))
    blocker = client.optim_step(ADAM)
    custom = client.forward_backward_custom(make_data(), squared, framework="numpy")
    custom.cancel()
    step = client.optim_step(ADAM)
    server.wait_for("optim_step", 3)
    server.release()
    blocker.result(PATIENCE)
    step.result(PATIENCE)
    assert not server.received("forward_backward")
    assert seq_ids(server) == [1, 1, 2]


# --- servers that speak JSON only ------------------------------------------------------------------------------------


@pytest.mark.parametrize("refusal", [422, 500])
def test_a_json_only_server_is_found_out_and_everything_works(refusal: int) -> None:
    def loss(data: list[Datum], logprobs: list[Any]) -> Any:
        return sum(each.sum() for each in logprobs), {}

    with FakeServer(dialect="json") as server, open_training(server) as client:
        server.api.protobuf_refusal = refusal
        output = client.forward_backward(make_data(2), "cross_entropy").result(PATIENCE)
        assert isinstance(output, ForwardBackwardOutput)
        assert len(client.forward(make_data(2), "cross_entropy").result(PATIENCE).loss_fn_outputs) == 2
        assert "surrogate_loss:sum" in client.forward_backward_custom(make_data(2), loss).result(PATIENCE).metrics
        client.optim_step(ADAM).result(PATIENCE)
        kinds = [request.headers["content-type"] for request in server.received("forward_backward")]
        assert kinds == ["application/x-protobuf", "application/json", "application/json"]
        assert len(server.received("forward")) == 2


def test_pipelined_calls_all_learn_that_a_server_speaks_json_only() -> None:
    with FakeServer(dialect="json", flags={"fwdbwd_max_chunk_len": 1}) as server, open_training(server) as client:
        futures = [client.forward_backward(make_data(3), "cross_entropy") for _ in range(4)]
        for future in futures:
            assert len(future.result(PATIENCE).loss_fn_outputs) == 3
        protobuf = [r for r in server.received("forward_backward") if "protobuf" in r.headers["content-type"]]
        assert len(protobuf) <= 3  # at most the chunks of the first call


# --- stalls ----------------------------------------------------------------------------------------------------------


def test_bodies_are_encoded_in_threads_made_for_that(
    server: FakeServer, client: TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, prepare = [], wire_proto.prepare_forward_backward

    def noting(*args: Any, **options: Any) -> Any:
        names.append(threading.current_thread().name)
        return prepare(*args, **options)

    monkeypatch.setattr(wire_proto, "prepare_forward_backward", noting)
    client.forward_backward(make_data(), "cross_entropy").result(PATIENCE)
    assert names[0].startswith("tinsmith-coding")


def test_encoding_a_large_chunk_does_not_stall_the_loop(server: FakeServer, client: TrainingClient) -> None:
    large = make_data(12, num_tokens=100_000)
    client.forward_backward(make_data(), "cross_entropy").result(PATIENCE)
    with loop_lag(background_loop().asyncio_loop) as lag:
        future = client.forward_backward(large, "cross_entropy")
        server.wait_for("forward_backward", 2)
        time.sleep(0.01)
    future.cancel()
    assert lag.worst < 0.25


def test_an_async_snapshot_does_not_block_the_callers_loop(server: FakeServer, client: TrainingClient) -> None:
    server.hold("save_weights_for_sampler")

    async def snapshot() -> tuple[Any, int]:
        saving = asyncio.ensure_future(client.save_weights_and_get_sampling_client_async())
        ticks = 0
        while not server.received("save_weights_for_sampler"):
            ticks += 1
            await asyncio.sleep(0.001)
        server.release()
        return await saving, ticks

    sampler, _ = asyncio.run(snapshot())
    assert sampler.sampling_session_id
