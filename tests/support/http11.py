"""HTTP/1.1 on asyncio's protocol interface: small, quick, and under our control down to the last byte.

A framework would refuse to send half a body or to hang up without an answer; tests of a client need both.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from functools import cached_property
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import parse_qsl, unquote

import msgspec

from tinsmith.wire import tinker_pb2

END_OF_HEAD = b"\r\n\r\n"
_REASONS = {status.value: status.phrase for status in HTTPStatus}


class Headers(Mapping[str, str]):
    """Header fields by name, whatever the case, looked up in the head as it arrived: most are never asked for."""

    def __init__(self, head: bytes) -> None:
        self._head = head
        self._lower = head.lower()

    def __getitem__(self, name: str) -> str:
        at = self._lower.find(b"\r\n" + name.lower().encode("latin-1") + b":")
        if at < 0:
            raise KeyError(name)
        start = at + len(name) + 3
        end = self._head.find(b"\r\n", start)
        return self._head[start : end if end >= 0 else None].strip().decode("latin-1")

    def __iter__(self) -> Iterator[str]:
        lines = self._lower.decode("latin-1").split("\r\n")[1:]
        return iter(dict.fromkeys(line.partition(":")[0] for line in lines))

    def __len__(self) -> int:
        return len(list(iter(self)))


class Recorded:
    """One request as it arrived. What is not needed to frame it is parsed when somebody asks."""

    def __init__(self, head: bytes, headers: Headers, body: bytes, connection: int) -> None:
        method, target, _ = head.split(b"\r\n", 1)[0].split(b" ", 2)
        path, _, query = target.decode("ascii").partition("?")
        self.method = method.decode("ascii")
        self.path = unquote(path) if "%" in path else path
        self.headers = headers
        self.body = body
        self.connection = connection
        self.arrived = time.monotonic()
        self._query = query

    @cached_property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(self._query, keep_blank_values=True))

    @property
    def endpoint(self) -> str:
        """The path after `/api/v1/`."""
        return self.path.rpartition("/api/v1/")[2]

    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    def message(self) -> Any:
        """The body as a `ForwardBackwardRequest`, the only message that travels in this direction."""
        return tinker_pb2.ForwardBackwardRequest.FromString(self.content())

    def content(self) -> bytes:
        """The body with its content encoding undone."""
        if self.headers.get("content-encoding") != "zstd":
            return self.body
        import zstandard

        return zstandard.ZstdDecompressor().decompressobj().decompress(self.body)

    def __repr__(self) -> str:
        return f"<{self.method} {self.path} {len(self.body)} bytes on connection {self.connection}>"


def render(status: int, body: bytes, headers: Mapping[str, str]) -> bytes:
    """The bytes of an answer. A body always comes with its length: a 400 without one counts as a proxy's fault."""
    lines = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Unknown')}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if status != HTTPStatus.NO_CONTENT and "content-length" not in headers:
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join(lines).encode("latin-1") + END_OF_HEAD + body


class Application(Protocol):
    """What a connection talks to."""

    def opened(self, connection: Connection) -> int:
        """Take note of a connection and give it a number."""

    def closed(self, connection: Connection) -> None: ...

    def handle(self, request: Recorded, connection: Connection) -> None:
        """See to it that `connection.answer` or `connection.hang_up` is called, now or later."""


class Connection(asyncio.Protocol):
    """One client connection: requests in, answers out, one at a time and in order."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._awaited = 0
        self._answering = False
        self._last = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self.number = self._application.opened(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._application.closed(self)

    def data_received(self, data: bytes) -> None:
        self._pieces.append(data)
        self._num_bytes += len(data)
        if not self._answering and self._num_bytes >= self._awaited:
            self._next_request()

    def answer(self, data: bytes) -> None:
        """Send an answer and turn to the next request. A client that has gone is not an error."""
        if self._transport.is_closing():
            return
        self._transport.write(data)
        self._answering = False
        if self._last:
            self._transport.close()
        elif self._pieces:
            asyncio.get_running_loop().call_soon(self._next_request)

    def hang_up(self, data: bytes = b"") -> None:
        """Close after the given bytes, which need not be a whole answer."""
        if data:
            self._transport.write(data)
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def _next_request(self) -> None:
        if self._answering or self._transport.is_closing() or (request := self._take()) is None:
            return
        self._answering = True
        self._application.handle(request, self)

    def _take(self) -> Recorded | None:
        """The next whole request, or None while it is still arriving."""
        buffer = b"".join(self._pieces)
        self._pieces = [buffer]
        end = buffer.find(END_OF_HEAD)
        if end < 0:
            return None
        start = end + len(END_OF_HEAD)
        head = buffer[:end]
        headers = Headers(head)
        if headers.get("transfer-encoding") == "chunked":
            found = _unchunk(buffer, start)
            if found is None:
                return None
            body, used = found
        else:
            used = start + int(headers.get("content-length", 0))
            if len(buffer) < used:
                self._awaited = used  # a large body comes in many pieces, most of which need no look at the head
                return None
            body = buffer[start:used]
        self._awaited = 0
        self._num_bytes -= used
        self._pieces = [buffer[used:]] if self._num_bytes else []
        self._last = headers.get("connection", "").lower() == "close"
        return Recorded(head, headers, body, self.number)


def _unchunk(buffer: bytes, at: int) -> tuple[bytes, int] | None:
    """A chunked body and where it ends, or None while it is still arriving."""
    body = bytearray()
    while (line_end := buffer.find(b"\r\n", at)) >= 0:
        size = int(buffer[at:line_end].split(b";")[0], 16)
        start, after = line_end + 2, line_end + 4 + size
        if len(buffer) < after:
            return None
        body += buffer[start : start + size]
        at = after
        if size == 0:
            return bytes(body), at
    return None
