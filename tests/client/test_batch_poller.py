"""One long poll for all samples of a client, where the server offers it."""

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

import tinsmith
from tests.support.server import FOREVER, Drop, FakeServer, HalfBody, Reply
from tinsmith import types
from tinsmith.client import batch_poller
from tinsmith.client.batch_poller import BatchPoller
from tinsmith.client.config import Config
from tinsmith.client.retry import SYSTEM_CLOCK, RetryPolicy
from tinsmith.client.transport import HttpResponse
from tinsmith.errors import ResponseSummary

PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(max_tokens=4)
FLAGS = {"sample_use_retrieve_futures": True}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(flags=FLAGS) as server:
        yield server


def sampling_client(server: FakeServer, retry_config: Any = None, **settings: Any) -> tinsmith.SamplingClient:
    config = Config(base_url=server.url, api_key="tml-x", telemetry=False, **settings)
    return tinsmith.ServiceClient(config=config).create_sampling_client(None, "tiny/model-1", retry_config)


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


def test_many_samples_wait_in_one_poll(server: FakeServer) -> None:
    client = sampling_client(server)
    server.hold("asample")
    futures = [client.sample(PROMPT, 1, PARAMS) for _ in range(100)]
    server.wait_for("asample", 100)
    server.wait_for("retrieve_futures")
    assert server.received("retrieve_future") == []
    assert len(server.received("retrieve_futures")) == 1
    server.release()
    for future in futures:
        assert future.result(10).sequences
    assert len(server.received("retrieve_future")) == 100
    assert len(server.received("retrieve_futures")) < 20


def test_the_poll_says_for_whom_it_asks(server: FakeServer) -> None:
    client = sampling_client(server)
    client.sample(PROMPT, 1, PARAMS).result(10)
    assert server.received("retrieve_futures")[0].json() == {
        "target": {
            "type": "sampling_session",
            "sampling_session_id": client.sampling_session_id,
            "cloned_sampler_id": 0,
        },
        "prev_cursor": 0,
        "retrieved_request_ids": [],
    }


def test_a_known_size_saves_the_question_for_it(server: FakeServer) -> None:
    server.settings.metadata_only_above = 1
    client = sampling_client(server)
    client.sample(PROMPT, 1, PARAMS).result(10)
    (fetch,) = server.received("retrieve_future")
    assert fetch.json()["allow_metadata_only"] is False


def test_fetched_ids_are_reported_with_the_next_poll_and_the_cursor_moves(server: FakeServer) -> None:
    client = sampling_client(server)
    first = client.sample(PROMPT, 1, PARAMS)
    first.result(10)
    server.hold("asample")
    second = client.sample(PROMPT, 1, PARAMS)
    until(lambda: any(poll.json()["retrieved_request_ids"] for poll in server.received("retrieve_futures")))
    reported = [poll.json() for poll in server.received("retrieve_futures") if poll.json()["retrieved_request_ids"]]
    assert reported[0]["retrieved_request_ids"] == [first.request_id]
    assert reported[0]["prev_cursor"] == 1
    server.release()
    second.result(10)


def test_ids_of_a_poll_that_failed_are_reported_again(server: FakeServer) -> None:
    client = sampling_client(server)
    first = client.sample(PROMPT, 1, PARAMS)
    first.result(10)
    server.script("retrieve_futures", Drop(), Reply(503, json={}))
    server.hold("asample")
    earlier = len(server.received("retrieve_futures"))
    second = client.sample(PROMPT, 1, PARAMS)
    polls = server.wait_for("retrieve_futures", earlier + 3)
    assert [poll.json()["retrieved_request_ids"] for poll in polls[-3:]] == [[first.request_id]] * 3
    server.release()
    second.result(10)


def test_a_completion_that_comes_before_the_acknowledgement_is_not_lost(server: FakeServer) -> None:
    client = sampling_client(server)
    server.hold("asample")
    waiting = client.sample(PROMPT, 1, PARAMS)
    server.wait_for("retrieve_futures")
    early = f"{client.sampling_session_id}:1"
    completions = [{"state": "finished", "request_id": early}]
    server.script("retrieve_futures", Reply(json={"completions": completions, "cursor": 0}))
    server.cut_connections()  # the poll in progress is repeated and meets the script
    poller = client._queue._poller
    assert poller is not None
    until(lambda: early in poller._early)
    server.release()
    assert client.sample(PROMPT, 1, PARAMS).result(10).sequences
    waiting.result(10)


def test_completions_that_nobody_wants_do_not_pile_up(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_poller, "MAX_EARLY", 3)
    client = sampling_client(server)
    client.sample(PROMPT, 1, PARAMS).result(10)
    poller = client._queue._poller
    assert poller is not None
    unwanted = [types.FutureFinished(state="finished", request_id=f"r-{index}") for index in range(10)]
    poller._note(types.FuturesRetrieveResponse(completions=unwanted, cursor=11))
    assert list(poller._early) == ["r-7", "r-8", "r-9"]


def test_a_failed_completion_raises_what_the_server_says(server: FakeServer) -> None:
    client = sampling_client(server)
    server.fail_future("asample", "out of range", "user")
    with pytest.raises(tinsmith.RequestFailedError, match="out of range"):
        client.sample(PROMPT, 1, PARAMS).result(10)
    assert client.sample(PROMPT, 1, PARAMS).result(10).sequences


@pytest.mark.parametrize(
    "fault", [Reply(503, json={}), Reply(408, json={}), Reply(429, json={}), Drop(), HalfBody()], ids=repr
)
def test_a_poll_that_fails_backs_off_and_goes_on(server: FakeServer, fault: Any) -> None:
    client = sampling_client(server)
    server.script("retrieve_futures", fault)
    assert client.sample(PROMPT, 1, PARAMS).result(10).sequences
    first, second = server.received("retrieve_futures")[:2]
    assert second.arrived - first.arrived > 0.3, "it did not back off"


def test_a_fatal_error_reaches_every_waiter_and_later_samples_try_again(server: FakeServer) -> None:
    client = sampling_client(server)
    server.hold("asample")
    server.script("retrieve_futures", Reply(403, json={"detail": "not yours"}))
    futures = [client.sample(PROMPT, 1, PARAMS) for _ in range(3)]
    with pytest.raises(tinsmith.PermissionDeniedError, match="not yours"):
        futures[0].result(10)
    server.release()
    assert client.sample(PROMPT, 1, PARAMS).result(10).sequences
    for future in futures:
        future.cancel()


def test_a_server_that_answers_at_once_with_nothing_is_not_stormed(server: FakeServer) -> None:
    client = sampling_client(server)
    server.hold("asample")
    server.script("retrieve_futures", Reply(json={"completions": [], "cursor": 0}), times=FOREVER)
    future = client.sample(PROMPT, 1, PARAMS)
    server.wait_for("retrieve_futures")
    time.sleep(1.2)
    assert len(server.received("retrieve_futures")) <= 5
    future.cancel()


def test_waiting_ends_when_nothing_finishes_for_too_long(server: FakeServer) -> None:
    server.settings.long_poll = 0.05
    client = sampling_client(server, tinsmith.RetryConfig(progress_timeout=0.3))
    server.hold("asample")
    with pytest.raises(tinsmith.NoProgressError, match="progress_timeout"):
        client.sample(PROMPT, 1, PARAMS).result(10)


def test_a_malformed_answer_is_a_typed_error(server: FakeServer) -> None:
    client = sampling_client(server)
    server.script("retrieve_futures", Reply(json={"nonsense": 1}))
    with pytest.raises(tinsmith.APIResponseValidationError, match="retrieve_futures"):
        client.sample(PROMPT, 1, PARAMS).result(10)


def test_nobody_waiting_means_no_polling(server: FakeServer) -> None:
    server.settings.long_poll = 0.05
    client = sampling_client(server)
    client.sample(PROMPT, 1, PARAMS).result(10)
    poller = client._queue._poller
    assert poller is not None
    until(lambda: poller._task is None)
    polls = len(server.received("retrieve_futures"))
    time.sleep(0.2)
    assert len(server.received("retrieve_futures")) == polls


def test_a_cancelled_sample_leaves_no_waiter_behind(server: FakeServer) -> None:
    client = sampling_client(server)
    server.hold("asample")
    futures = [client.sample(PROMPT, 1, PARAMS) for _ in range(5)]
    server.wait_for("retrieve_futures")
    poller = client._queue._poller
    assert poller is not None
    until(lambda: len(poller._waiters) == 5)
    for future in futures:
        future.cancel()
    until(lambda: not poller._waiters and poller._task is None)
    server.release()
    assert client.sample(PROMPT, 1, PARAMS).result(10).sequences


def test_closing_ends_the_wait_of_all(server: FakeServer) -> None:
    config = Config(base_url=server.url, api_key="tml-x", telemetry=False)
    service = tinsmith.ServiceClient(config=config)
    client = service.create_sampling_client(base_model="tiny/model-1")
    server.hold("asample")
    futures = [client.sample(PROMPT, 1, PARAMS) for _ in range(5)]
    server.wait_for("retrieve_futures")
    service.close("success").result(10)
    for future in futures:
        with pytest.raises(tinsmith.ClientClosedError):
            future.result(10)


def test_only_the_limit_of_the_user_counts(server: FakeServer) -> None:
    server.flags["sample_max_concurrent_requests"] = 5
    client = sampling_client(server)
    modest = sampling_client(server, tinsmith.RetryConfig(max_connections=2))
    for each in (client, modest):
        each.sample(PROMPT, 1, PARAMS).result(10)
    assert [client._queue.lane.max_unfinished, modest._queue.lane.max_unfinished] == [None, 2]


class FailingConnection:
    """Fails the first poll, and lets somebody else come in the moment that it fails."""

    clock = SYSTEM_CLOCK
    last_progress = 0.0

    def __init__(self) -> None:
        self.loop = self
        self.polls = 0
        self.in_the_moment_of_failure: Callable[[], object] = lambda: None

    def start_task(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return asyncio.get_running_loop().create_task(coroutine)

    def retry_policy(self, max_seconds: float) -> RetryPolicy:
        return RetryPolicy(max_seconds=max_seconds)

    async def guard(self, coroutine: Coroutine[Any, Any, Any], *, report: bool) -> Any:
        try:
            return await coroutine
        except tinsmith.ConflictError:
            self.in_the_moment_of_failure()
            raise

    async def call(self, call: Any, retry: Any) -> HttpResponse:
        self.polls += 1
        await asyncio.sleep(0)
        if self.polls == 1:
            raise tinsmith.ConflictError("no", ResponseSummary(409, {}))
        completions = [{"state": "finished", "request_id": name} for name in ("a", "b")]
        return HttpResponse(200, {}, json.dumps({"completions": completions, "cursor": 2}).encode())


def test_one_who_comes_in_the_moment_of_a_failure_is_served() -> None:
    async def scenario() -> None:
        connection = FailingConnection()
        poller = BatchPoller(connection, "s", 0, 10.0)  # type: ignore[arg-type]
        late: list[asyncio.Task[int | None]] = []
        connection.in_the_moment_of_failure = lambda: late.append(asyncio.create_task(poller.wait("b")))
        with pytest.raises(tinsmith.ConflictError):
            await poller.wait("a")
        assert await asyncio.wait_for(late[0], 5) is None

    asyncio.run(scenario())
