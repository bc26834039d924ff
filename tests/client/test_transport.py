"""One request in, one reply out; every way in which that can fail becomes one of our errors."""

from __future__ import annotations

import asyncio
import gzip
import pickle
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest

from tests.support.probes import open_sockets
from tests.support.server import FOREVER, Drop, FakeServer, HalfBody, Hang, Html, Reply
from tests.support.training import KEY, PATIENCE
from tinsmith.client import transport
from tinsmith.client.config import Config
from tinsmith.client.futures import run
from tinsmith.client.retry import may_have_arrived
from tinsmith.client.transport import HttpRequest, HttpResponse, Traffic, Transport
from tinsmith.errors import APIConnectionError, APITimeoutError, ConfigError

T = TypeVar("T")
PATH = "/api/v1/client/config"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


def on_loop(work: Callable[[Transport], Coroutine[Any, Any, T]], **settings: Any) -> T:
    async def use() -> T:
        transport = Transport(Config(api_key=KEY, **settings))
        try:
            return await work(transport)
        finally:
            await transport.close()

    return run(use).result(PATIENCE)


def send(url: str, timeout: float = 5.0, headers: dict[str, str] | None = None, **settings: Any) -> HttpResponse:
    request = HttpRequest("POST", url, {"x-api-key": KEY, **(headers or {})}, b"{}", timeout)
    return on_loop(lambda transport: transport.send(Traffic.TRAIN, request), **settings)


def test_a_reply_comes_back_with_status_headers_and_body(server: FakeServer) -> None:
    server.script("config", Reply(418, json={"a": 1}, headers={"X-Thing": "tea"}))
    reply = send(server.url + PATH)
    assert (reply.status, reply.body, reply.headers.get("x-thing")) == (418, b'{"a":1}', "tea")


@pytest.mark.parametrize("base", ["", "/base"])
def test_tls_with_a_server_that_speaks_plain_http_is_told(base: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        host = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(APIConnectionError, match=f"The server speaks plain HTTP; use http://{host}{base}\\."):
            send(f"https://{host}{base}{PATH}")


def test_compressed_replies_are_unpacked(server: FakeServer) -> None:
    server.script("config", Reply(body=gzip.compress(b"plain"), headers={"content-encoding": "gzip"}))
    assert send(server.url + PATH).body == b"plain"


@pytest.mark.parametrize("step", [Drop(), HalfBody(), Reply(body=b"x", headers={"content-length": "many"})])
def test_an_answer_that_breaks_off_is_a_connection_error_and_may_have_arrived(server: FakeServer, step: Any) -> None:
    server.script("config", step)
    with pytest.raises(APIConnectionError) as caught:
        send(server.url + PATH)
    assert not isinstance(caught.value, APITimeoutError)
    assert may_have_arrived(caught.value)


def test_a_connection_that_is_reset_while_the_server_thinks_may_have_arrived(server: FakeServer) -> None:
    server.script("config", Hang())

    async def cut(transport: Transport) -> Exception:
        request = HttpRequest("POST", server.url + PATH, {}, b"{}", 10.0)
        sending = asyncio.ensure_future(transport.send(Traffic.TRAIN, request))
        await asyncio.to_thread(server.wait_for, "config")
        await asyncio.to_thread(server.cut_connections)
        with pytest.raises(APIConnectionError) as caught:
            await sending
        return caught.value

    assert may_have_arrived(on_loop(cut))


def test_silence_ends_in_a_timeout_that_names_the_call(server: FakeServer) -> None:
    server.script("config", Hang())
    with pytest.raises(APITimeoutError, match=r"POST http://.*/client/config gave no answer within 0\.1 s") as caught:
        send(server.url + PATH, timeout=0.1)
    assert isinstance(caught.value, TimeoutError)
    assert may_have_arrived(caught.value)


def test_a_body_that_comes_too_slowly_ends_in_a_timeout_too(server: FakeServer) -> None:
    server.script("config", Reply(json={}, delay=5.0))
    with pytest.raises(APITimeoutError):
        send(server.url + PATH, timeout=0.1)


def test_a_closed_port_is_a_connection_error_and_nothing_has_arrived() -> None:
    with pytest.raises(APIConnectionError, match="refused") as caught:
        send("http://127.0.0.1:1/x")
    assert not may_have_arrived(caught.value)


def test_an_unknown_host_is_a_connection_error_and_nothing_has_arrived() -> None:
    with pytest.raises(APIConnectionError) as caught:
        send("http://host.invalid/x")
    assert not may_have_arrived(caught.value)


def test_a_connection_that_is_never_made_ends_after_the_connect_timeout() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:  # they fill the backlog
            each.setblocking(False)
            each.connect_ex(listener.getsockname())
        with pytest.raises(APITimeoutError, match="no connection") as caught:
            send(f"http://127.0.0.1:{listener.getsockname()[1]}/x", connect_timeout=0.1)
        for each in waiting:
            each.close()
    assert not may_have_arrived(caught.value)


@pytest.mark.parametrize("key", ["tml-with\nnewline", "tml-with\0zero"])
def test_a_key_that_http_cannot_carry_is_refused_without_being_shown(server: FakeServer, key: str) -> None:
    with pytest.raises(ConfigError, match="character HTTP forbids") as caught:
        send(server.url + PATH, headers={"x-api-key": key})
    assert "tml-with" not in str(caught.value)
    assert b"tml-with" not in pickle.dumps(caught.value)


def test_errors_do_not_show_the_query_of_a_signed_link() -> None:
    with pytest.raises(APIConnectionError) as caught:
        send("http://127.0.0.1:1/file?signature=hush")
    assert "hush" not in str(caught.value)
    assert caught.value.request is not None
    assert "hush" not in caught.value.request.url


def test_redirects_are_not_followed_here(server: FakeServer) -> None:
    server.script("config", Reply(307, body=b"", headers={"location": server.url + "/stats"}))
    assert send(server.url + PATH).status == 307
    assert server.paths() == [PATH]


def test_html_is_a_reply_like_any_other(server: FakeServer) -> None:
    server.script("config", Html(502))
    assert send(server.url + PATH).status == 502


def test_connections_are_reused_and_closed_at_the_end(server: FakeServer) -> None:
    before = open_sockets()

    async def many(transport: Transport) -> None:
        request = HttpRequest("POST", server.url + PATH, {"x-api-key": KEY}, b"{}", 5.0)
        for _ in range(10):
            await transport.send(Traffic.TRAIN, request)

    on_loop(many)
    assert server.accepted_connections == 1
    _until(lambda: server.open_connections == 0)
    assert open_sockets() <= before


def test_a_cancelled_request_closes_its_connection_and_frees_its_place(server: FakeServer) -> None:
    server.script("config", Hang(), times=60)

    async def cancel_many(transport: Transport) -> int:
        request = HttpRequest("POST", server.url + PATH, {"x-api-key": KEY}, b"{}", 30.0)
        sending = [asyncio.ensure_future(transport.send(Traffic.TRAIN, request)) for _ in range(50)]
        await asyncio.to_thread(server.wait_for, "config", 50)
        for each in sending:
            each.cancel()
        await asyncio.gather(*sending, return_exceptions=True)
        await asyncio.to_thread(server.clear_script)
        return (await transport.send(Traffic.TRAIN, request)).status

    assert on_loop(cancel_many) == 200
    _until(lambda: server.open_connections == 0)


def test_each_class_of_traffic_has_a_pool_of_its_own(server: FakeServer) -> None:
    server.script("retrieve_future", Hang(), times=FOREVER)

    async def poll_and_train(transport: Transport) -> int:
        poll = HttpRequest("POST", server.url + "/api/v1/retrieve_future", {"x-api-key": KEY}, b"{}", 30.0)
        train = poll._replace(url=server.url + PATH)
        polls = [asyncio.ensure_future(transport.send(Traffic.TRAIN_POLL, poll)) for _ in range(250)]
        await asyncio.to_thread(server.wait_for, "retrieve_future", 20)
        status = (await transport.send(Traffic.TRAIN, train)).status
        for each in polls:
            each.cancel()
        await asyncio.gather(*polls, return_exceptions=True)
        return status

    assert on_loop(poll_and_train) == 200
    assert len(server.received("retrieve_future")) <= Traffic.TRAIN_POLL.max_in_flight


@pytest.mark.parametrize("files", [64, 256, 1024, 1 << 20])
def test_without_tls_all_pools_together_leave_the_program_files_to_open(
    files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_open_file_limit", lambda: files)
    limits = [transport._max_in_flight(Config(base_url="http://x", api_key=KEY), traffic) for traffic in Traffic]
    assert all(limit >= 4 for limit in limits)
    assert sum(limits) <= max(files // 2, 4 * len(limits)) + 4 * len(limits)
    over_tls = [transport._max_in_flight(Config(base_url="https://x", api_key=KEY), traffic) for traffic in Traffic]
    assert over_tls == [traffic.max_in_flight for traffic in Traffic]


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
