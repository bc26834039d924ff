"""Server-sent events: bytes in, events out, and back.

The decoder follows the event-stream format of the HTML standard: lines end in CR, LF or CRLF, a leading byte order
mark is dropped, lines of one event's `data` are joined by LF, an event without `data` is not reported, an event cut
off by the end of the stream neither. Bytes that are not UTF-8 become U+FFFD.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from tinsmith.errors import InvalidInputError, StreamAlreadyConsumed

MAX_EVENT_BYTES = 8 * 1024 * 1024
"""The largest event accepted unless told otherwise: far above any real one, far below what hurts."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LINE_END = re.compile(rb"[\r\n]")
_TEXT_LINE_END = re.compile(r"\r\n|\r|\n")
_MILLISECONDS = re.compile(rb"[0-9]{1,15}")


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One event. `id` and `retry` are the last ones the stream has named, in this event or an earlier one."""

    data: str
    event: str = "message"
    id: str = ""
    retry: int | None = None
    """Milliseconds to wait before connecting again."""


class SSEDecoder:
    """Cuts a byte stream into events, wherever the reads happen to split it.

    It holds one unfinished event and whatever has been fed but not yet taken out, nothing else. An event of more than
    `max_event_bytes` is an InvalidInputError, raised as soon as it is known to be too long and again by every later
    read: the place where the next event begins is lost.
    """

    def __init__(self, *, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._unread = bytearray()
        self._searched = 0  # so many unread bytes are known to hold no line end: a long line is not searched twice
        self._at_start = True
        self._after_cr = False
        self._data = bytearray()  # each data line with an LF behind it
        self._event = ""
        self._id = ""
        self._retry: int | None = None

    def feed(self, chunk: bytes) -> Iterator[ServerSentEvent]:
        """Take in one read; the iterator gives every event that is complete by now."""
        self._unread += chunk
        return self._events()

    def _events(self) -> Iterator[ServerSentEvent]:
        while (line := self._next_line()) is not None:
            if line:
                self._take_field(line)
            elif (event := self._finish_event()) is not None:
                yield event

    def _next_line(self) -> bytes | None:
        self._skip_rest_of_line_end()
        found = _LINE_END.search(self._unread, self._searched)
        end = len(self._unread) if found is None else found.start()
        self._refuse_too_long(end)
        if found is None:
            self._searched = end
            return None
        line = bytes(self._unread[:end])
        self._after_cr = self._unread[end] == ord("\r")
        self._searched = 0
        del self._unread[: end + 1]
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(_BYTE_ORDER_MARK)
        return line

    def _skip_rest_of_line_end(self) -> None:
        """A CR ends its line at once, since the next byte may be long in coming; an LF after it belongs to it."""
        if self._after_cr and self._unread:
            self._after_cr = False
            if self._unread[0] == ord("\n"):
                del self._unread[0]

    def _refuse_too_long(self, line_bytes: int) -> None:
        if len(self._data) + line_bytes > self._max_event_bytes:
            raise InvalidInputError(
                f"The event stream holds an event of more than {self._max_event_bytes} bytes. "
                "Close the stream; raise max_event_bytes if such events are expected.",
                field="max_event_bytes",
                value=self._max_event_bytes,
            )

    def _take_field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")  # a comment begins with the colon, so its name is empty
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data += value + b"\n"
        elif name == b"event":
            self._event = _text(value)
        elif name == b"id" and b"\0" not in value:
            self._id = _text(value)
        elif name == b"retry" and _MILLISECONDS.fullmatch(value):
            self._retry = int(value)

    def _finish_event(self) -> ServerSentEvent | None:
        data, name = self._data, self._event
        self._data, self._event = bytearray(), ""
        if not data:
            return None
        return ServerSentEvent(_text(data[:-1]), name or "message", self._id, self._retry)


class EventStream:
    """The events of a response body. It can be read once; leaving early closes the body.

    A loop that breaks off closes the body when the loop's iterator is dropped; `with` or `close()` do it at once.
    """

    def __init__(self, body: Iterable[bytes], *, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._body = body
        self._decoder = SSEDecoder(max_event_bytes=max_event_bytes)
        self._consumed = False

    def __iter__(self) -> Iterator[ServerSentEvent]:
        _refuse_second_reading(self._consumed)
        self._consumed = True
        return self._events()

    def _events(self) -> Iterator[ServerSentEvent]:
        try:
            for chunk in self._body:
                yield from self._decoder.feed(chunk)
        finally:
            self.close()

    def close(self) -> None:
        """Close the body, if it can be closed; the stream counts as read from now on."""
        self._consumed = True
        close = getattr(self._body, "close", None)
        if close is not None:
            close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncEventStream:
    """The events of an asynchronous response body. It can be read once; leaving early closes the body.

    A loop that breaks off leaves its iterator to the event loop, which closes it a little later; `async with` or
    `aclose()` do it at once.
    """

    def __init__(self, body: AsyncIterable[bytes], *, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._body = body
        self._decoder = SSEDecoder(max_event_bytes=max_event_bytes)
        self._consumed = False

    def __aiter__(self) -> AsyncIterator[ServerSentEvent]:
        _refuse_second_reading(self._consumed)
        self._consumed = True
        return self._events()

    async def _events(self) -> AsyncIterator[ServerSentEvent]:
        try:
            async for chunk in self._body:
                for event in self._decoder.feed(chunk):
                    yield event
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Close the body, if it can be closed; the stream counts as read from now on."""
        self._consumed = True
        close = getattr(self._body, "aclose", None)
        if close is not None:
            await close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def encode_event(data: str, *, event: str = "", id: str | None = None, retry: int | None = None) -> bytes:
    """One event in the form every decoder reads.

    The format has no way to tell line ends apart: CR and CRLF inside `data` arrive as LF.
    """
    lines = [f"data: {line}" for line in _TEXT_LINE_END.split(data)]
    if event:
        lines.insert(0, f"event: {_one_line('event', event)}")
    if id is not None:
        lines.insert(0, f"id: {_one_line('id', id)}")
    if retry is not None:
        if retry < 0:
            raise InvalidInputError(f"retry is a number of milliseconds, not {retry}.", field="retry", value=retry)
        lines.insert(0, f"retry: {retry}")
    return "\n".join([*lines, "", ""]).encode()


def _one_line(field: str, value: str) -> str:
    if any(character in value for character in "\r\n\0"):
        raise InvalidInputError(
            f"{field} {value!r} holds a line end or a NUL, which an event stream cannot carry there.",
            field=field,
            value=value,
        )
    return value


def _text(value: bytes | bytearray) -> str:
    return value.decode("utf-8", "replace")


def _refuse_second_reading(consumed: bool) -> None:
    if consumed:
        raise StreamAlreadyConsumed(
            "This event stream has been read or closed; keep what you need from the first pass."
        )
