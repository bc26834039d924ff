"""Connections that bring nothing, or hardly anything, are not kept; an answer reaches whoever is still sending."""

from __future__ import annotations

import gc
import http.client
import json
import re
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.server.api.running import KEY, RunningServer
from tinsmith.server import serve
from tinsmith.server.routes import _call

HEAD = b"GET /api/v1/healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
PATIENCE = 0.3
WAIT_SECONDS = 20.0


@pytest.fixture
def hasty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunningServer:
    monkeypatch.setattr(serve, "_HEAD_SECONDS", PATIENCE)
    return RunningServer(tmp_path)


def connected(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_SECONDS)


def is_broken(connection: socket.socket) -> bool:
    try:
        connection.sendall(b"\r\n")
    except ConnectionError:
        return True
    return False


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_connection_that_sends_nothing_is_closed(hasty: RunningServer) -> None:
    with hasty as server, connected(server) as connection:
        assert is_closed(connection)


def test_a_head_that_comes_byte_by_byte_is_not_waited_for(hasty: RunningServer) -> None:
    with hasty as server, connected(server) as connection:
        end = time.monotonic() + WAIT_SECONDS
        for byte in HEAD * 1000:
            try:
                connection.send(bytes([byte]))
            except OSError:
                break
            time.sleep(PATIENCE / 10)
            assert time.monotonic() < end
        else:
            raise AssertionError("every byte was taken")


def test_an_answer_that_nobody_reads_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_UNREAD_SECONDS", 1)
    with RunningServer(tmp_path) as server, connected(server) as connection:
        asked, end = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n", time.monotonic() + WAIT_SECONDS
        connection.sendall(asked * 200)  # far more than the buffers between us hold
        while not is_broken(connection):
            assert time.monotonic() < end
            time.sleep(0.05)


def test_a_head_in_two_pieces_and_a_second_request_are_served(hasty: RunningServer) -> None:
    with hasty as server, connected(server) as connection:
        for _ in range(2):
            connection.sendall(HEAD[:20])
            connection.sendall(HEAD[20:])
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            assert (answer.status, json.loads(answer.read())) == (200, {"status": "ok"})


def test_a_body_that_never_ends_does_not_hold_up_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serve, "_GRACE_SECONDS", 4)
    with RunningServer(tmp_path) as server, connected(server) as connection:
        connection.sendall(
            b"POST /api/v1/create_session HTTP/1.1\r\nhost: localhost\r\nx-api-key: tml-x\r\n"
            b"expect: 100-continue\r\ncontent-length: 5000\r\n\r\n"
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 100 "), "it is being waited for"
        server.__exit__()
        assert is_closed(connection)
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_body_that_trickles_is_not_waited_for(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_call, "_SILENCE_SECONDS", PATIENCE)
    with connected(server) as connection:
        connection.sendall(
            b"POST /api/v1/asample HTTP/1.1\r\nhost: localhost\r\nx-api-key: tml-x\r\ncontent-length: 5000\r\n\r\n"
        )
        connection.setblocking(False)
        received, end = b"", time.monotonic() + WAIT_SECONDS
        while b"\r\n\r\n" not in received:
            assert time.monotonic() < end
            try:
                connection.send(b" ")
                received += connection.recv(4096)
            except BlockingIOError:
                pass
            time.sleep(PATIENCE / 10)
    assert received.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/api/v1/forward_backward", None, 401),
        ("/api/v1/client/config", KEY, 200),
        ("/api/v1/create_session", KEY, 413),
        ("/no/such/path", KEY, 404),
    ],
)
def test_who_is_answered_in_the_middle_of_sending_gets_the_answer(
    server: RunningServer, path: str, key: str | None, status: int
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_SECONDS)
    size = 900_000 if status == 404 else 8_000_000
    connection.request("POST", path, b"x" * size, {"x-api-key": key or "", "content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == status
    assert json.loads(answer.read())
    connection.close()


def test_what_is_not_http_in_the_middle_of_a_body_leaves_no_trace_of_a_fault(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with connected(server) as connection:
        connection.sendall(
            b"POST /api/v1/create_session HTTP/1.1\r\nhost: localhost\r\nx-api-key: tml-x\r\n"
            b"transfer-encoding: chunked\r\n\r\n5\r\nabcdeNOT A CHUNK\r\n"
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")
        assert connection.recv(1000) != b""
    assert server.get("healthz").status == 200
    assert not [record for record in caplog.records if record.exc_info]


def received(connection: socket.socket) -> bytes:
    """All that comes until the connection is closed."""
    pieces = []
    try:
        while piece := connection.recv(65536):
            pieces.append(piece)
    except ConnectionResetError:
        pass
    return b"".join(pieces)


def send_for_ever(connection: socket.socket, piece: bytes) -> None:
    for _ in range(1000):
        connection.sendall(piece)


CHUNKED = b"POST /api/v1/client/config HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n"


@pytest.mark.parametrize(
    "begun",
    [
        b"GET /",
        b"GET / HTTP/1.1\r\nx-a",
        b"GET / HTTP/1.1\r\nx-a: ",
        CHUNKED + b"\r\n5;",
        CHUNKED + b"\r\n2\r\n{}\r\n0\r\nx-a: ",
    ],
    ids=["path", "name", "value", "chunk extension", "trailer"],
)
def test_what_is_no_body_may_not_be_endless(server: RunningServer, begun: bytes) -> None:
    with connected(server) as connection:
        connection.sendall(begun)
        with pytest.raises(ConnectionError):
            send_for_ever(connection, b"x" * 65536)


def test_many_headers_are_as_bad_as_a_long_one(server: RunningServer) -> None:
    with connected(server) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n")
        with pytest.raises(ConnectionError):
            send_for_ever(connection, b"x-a: b\r\n" * 1000)


def test_a_head_that_is_too_long_is_refused_with_its_limit(server: RunningServer) -> None:
    with connected(server) as connection:
        connection.sendall(b"GET /api/v1/healthz HTTP/1.1\r\nhost: localhost\r\nx-a: " + b"x" * 66_000)
        said = received(connection)
    assert said.startswith(b"HTTP/1.1 400 ")
    assert said.endswith(b"The head of the request is longer than 65536 bytes.")


def test_a_key_that_follows_the_last_chunk_opens_nothing(tmp_path: Path) -> None:
    with RunningServer(tmp_path, api_keys=(KEY,)) as server, connected(server) as connection:
        trailer = f"x-api-key: {KEY}\r\nconnection: close\r\n\r\n".encode()
        connection.sendall(CHUNKED + b"connection: close\r\n\r\n2\r\n{}\r\n0\r\n" + trailer)
        assert received(connection).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("hosts", [b"", b"host: localhost\r\nhost: elsewhere\r\n"], ids=["none", "two"])
def test_a_request_must_have_one_host(server: RunningServer, hosts: bytes) -> None:
    with connected(server) as connection:
        connection.sendall(b"GET /api/v1/healthz HTTP/1.1\r\n" + hosts + b"\r\n")
        assert received(connection).startswith(b"HTTP/1.1 400 ")


def test_what_is_not_http_behind_a_request_gets_no_answer_that_seems_to_be_for_it(server: RunningServer) -> None:
    with connected(server) as connection:
        connection.sendall(HEAD + b"NO HTTP\r\n\r\n")
        assert b"400" not in received(connection)


def test_what_is_not_http_in_the_body_of_a_second_request_is_no_answer_to_the_first(server: RunningServer) -> None:
    with connected(server) as connection:
        connection.sendall(HEAD + CHUNKED + b"\r\nNO CHUNK\r\n")
        assert b"400" not in received(connection)


def test_requests_that_come_before_an_answer_are_not_kept_without_end(server: RunningServer) -> None:
    """A few bytes make a request, which takes kilobytes: whoever does not read the answers would have all kept."""
    last = HEAD.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    with connected(server) as connection:
        connection.sendall(HEAD * 1000 + last)
        assert received(connection).count(b"HTTP/1.1 200 ") < 1000


def test_a_connection_that_was_reset_in_the_middle_of_a_head_is_forgotten_at_once(tmp_path: Path) -> None:
    """And not only when the head is due: what had come of it would be kept as long."""
    with RunningServer(tmp_path) as server:
        end = time.monotonic() + WAIT_SECONDS
        with connected(server) as connection:
            connection.sendall(b"GET /" + b"x" * 60_000)
            while not [1 for each in connections() if getattr(each, "url", b"")]:
                assert time.monotonic() < end
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        while connections():
            assert time.monotonic() < end
            time.sleep(0.05)


def connections() -> list[serve.PatientOnce]:
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, serve.PatientOnce)]


def test_requests_that_come_at_once_are_answered_in_their_order(server: RunningServer) -> None:
    missing = HEAD.replace(b"healthz", b"missing")
    last = HEAD.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    with connected(server) as connection:
        connection.sendall(HEAD + missing + last)
        said = received(connection)
    assert re.findall(rb"HTTP/1\.1 (\d+)", said) == [b"200", b"404", b"200"]


def test_the_rest_of_a_body_that_was_answered_already_is_not_waited_for(hasty: RunningServer) -> None:
    with hasty as server, connected(server) as connection:
        connection.sendall(b"POST /no/such HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5000\r\n\r\n{")
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert (answer.status, answer.read()[:1]) == (404, b"{")
        connection.sendall(b" ")
        assert is_closed(connection)


def test_nothing_is_heard_behind_a_request_for_another_protocol(server: RunningServer) -> None:
    upgrade = HEAD.replace(b"\r\n\r\n", b"\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n")
    with connected(server) as connection:
        connection.sendall(upgrade)
        said = received(connection)
    assert said.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in said


@pytest.mark.parametrize("piece", [10_000, 7])
def test_a_request_for_another_protocol_has_its_body_read(server: RunningServer, piece: int) -> None:
    """Clients that would rather speak HTTP/2, as Java's, ask for it with every request."""
    head = f"POST /api/v1/create_session HTTP/1.1\r\nhost: localhost\r\nx-api-key: {KEY}\r\ncontent-length: 34\r\n"
    request = head.encode() + b'connection: upgrade\r\nupgrade: h2c\r\n\r\n{"tags": [], "sdk_version": "1.0"}'
    with connected(server) as connection:
        for start in range(0, len(request), piece):
            connection.sendall(request[start : start + piece])
        assert received(connection).startswith(b"HTTP/1.1 200 ")


def test_a_server_may_have_as_many_connections_as_the_system_allows() -> None:
    script = (
        "import resource; from tinsmith.server.serve import allow_many_connections;"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE);"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard)); allow_many_connections();"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] in (hard, 65536))"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True, timeout=WAIT_SECONDS).strip() == "True"
