"""Server-sent events: the decoder agrees with a slow reading of the standard, however the bytes are split."""

import asyncio
import gc
import itertools
import tracemalloc
from collections.abc import AsyncIterator, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.errors import InvalidInputError, StreamAlreadyConsumed
from tinsmith.wire.stream import AsyncEventStream, EventStream, ServerSentEvent, SSEDecoder, encode_event

FIELD_NAMES = ["data", "event", "id", "retry", "", "other", "datax", " data", "\ufeffdata"]
VALUES = ["", " ", "x", "  two", "7", "07", "-1", "1e3", "٣", "né€😀", "a:b", "\0", "[DONE]"]
LINES = st.one_of(
    st.builds("{}{}{}".format, st.sampled_from(FIELD_NAMES), st.sampled_from([":", ": ", ""]), st.sampled_from(VALUES)),
    st.just(""),
    st.text(max_size=8),
)
LINE_ENDS = st.sampled_from([b"\n", b"\r", b"\r\n", b"\n\n", b"\r\r", b"\r\n\r\n"])
TEXT_STREAMS = st.builds(
    lambda mark, parts: mark + b"".join(line.encode() + end for line, end in parts),
    st.sampled_from([b"", b"\xef\xbb\xbf", b"\xef\xbb"]),
    st.lists(st.tuples(LINES, LINE_ENDS), max_size=12),
)
STREAMS = st.one_of(TEXT_STREAMS, st.binary(max_size=60), st.builds(bytes.__add__, TEXT_STREAMS, st.binary(max_size=8)))


def _decoded(pieces: list[bytes]) -> list[ServerSentEvent]:
    decoder = SSEDecoder()
    return [event for piece in pieces for event in decoder.feed(piece)]


def _reference(stream: bytes) -> list[ServerSentEvent]:
    """The standard's own steps, on the whole text at once."""
    text = stream.decode("utf-8", "replace").removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    events, data, name, last_id, retry = [], "", "", "", None
    for line in text.split("\n")[:-1]:
        if line == "":
            if data != "":
                events.append(ServerSentEvent(data.removesuffix("\n"), name or "message", last_id, retry))
            data, name = "", ""
            continue
        if line.startswith(":"):
            continue
        field, value = line.split(":", 1) if ":" in line else (line, "")
        value = value.removeprefix(" ")
        if field == "data":
            data += value + "\n"
        elif field == "event":
            name = value
        elif field == "id" and "\0" not in value:
            last_id = value
        elif field == "retry" and value and all(digit in "0123456789" for digit in value):
            retry = int(value)
    return events


def _cut(stream: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(stream) + 1) for place in places), len(stream)]
    return [stream[start:end] for start, end in itertools.pairwise(edges)]


@given(STREAMS)
def test_the_decoder_reads_what_the_standard_says(stream: bytes) -> None:
    assert _decoded([stream]) == _reference(stream)


@given(STREAMS, st.lists(st.integers(0, 400), max_size=12))
def test_any_split_gives_the_events_of_the_unsplit_stream(stream: bytes, places: list[int]) -> None:
    assert _decoded(_cut(stream, places)) == _decoded([stream])


@given(STREAMS)
def test_single_bytes_give_the_events_of_the_unsplit_stream(stream: bytes) -> None:
    assert _decoded([bytes([byte]) for byte in stream]) == _decoded([stream])


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_an_event_is_given_out_as_soon_as_its_blank_line_ends(end: bytes) -> None:
    """With CR alone the decoder must not wait for a byte that may never come."""
    decoder = SSEDecoder()
    assert list(decoder.feed(b"data: now" + end)) == []
    assert list(decoder.feed(end)) == [ServerSentEvent("now")]


def test_every_field_arrives() -> None:
    stream = b": hello\nid: 4\nretry: 250\nevent: delta\ndata: one\ndata: two\n\ndata: three\n\n"
    assert _decoded([stream]) == [
        ServerSentEvent("one\ntwo", "delta", "4", 250),
        ServerSentEvent("three", "message", "4", 250),
    ]


def test_a_byte_order_mark_is_dropped_at_the_start_and_only_there() -> None:
    stream = b"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\n"
    for place in range(5):
        assert _decoded([stream[:place], stream[place:]]) == [ServerSentEvent("a")]


def test_an_id_with_a_nul_is_ignored() -> None:
    assert _decoded([b"id: 1\ndata: a\n\nid: 2\0\ndata: b\n\n"])[1].id == "1"


def test_an_event_cut_off_by_the_end_of_the_stream_is_not_reported() -> None:
    assert _decoded([b"data: whole\n\ndata: half\n"]) == [ServerSentEvent("whole")]


def test_events_not_taken_out_yet_are_kept_for_the_next_read() -> None:
    decoder = SSEDecoder()
    decoder.feed(b"data: a\n\ndata: b\n\nda")
    assert [event.data for event in decoder.feed(b"ta: c\n\n")] == ["a", "b", "c"]


TOO_LONG = {
    "a data line": b"data: " + b"x" * 200 + b"\n\n",
    "many data lines": b"data: 0123456789\n" * 20 + b"\n",
    "a line that never ends": b"x" * 200,
    "a comment": b":" + b"x" * 200 + b"\n",
}


@pytest.mark.parametrize("name", TOO_LONG)
@pytest.mark.parametrize("piece_bytes", [1, 7, 1000])
def test_an_event_beyond_the_bound_is_a_typed_error_after_the_events_before_it(name: str, piece_bytes: int) -> None:
    stream = b"data: fine\n\n" + TOO_LONG[name] + b"data: later\n\n"
    decoder, events = SSEDecoder(max_event_bytes=100), []
    pieces = (stream[start : start + piece_bytes] for start in range(0, len(stream), piece_bytes))
    with pytest.raises(InvalidInputError, match="more than 100 bytes"):
        events.extend(event for piece in pieces for event in decoder.feed(piece))
    assert events == [ServerSentEvent("fine")]
    with pytest.raises(InvalidInputError):
        list(decoder.feed(b"\n\n"))


def test_memory_does_not_grow_with_the_stream() -> None:
    decoder, chunk = SSEDecoder(), b"id: 1\ndata: " + b"x" * 4096 + b"\n\n"
    for _ in range(10):
        list(decoder.feed(chunk))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        assert sum(1 for _ in range(2000) for _ in decoder.feed(chunk)) == 2000
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 20_000
    assert peak - before < 100_000


class Body:
    """A response body that notices being closed and how far it was read."""

    def __init__(self, chunks: list[bytes]) -> None:
        self.chunks = chunks
        self.read = 0
        self.closed = False

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self.chunks:
            self.read += 1
            yield chunk

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self.chunks:
            self.read += 1
            yield chunk

    def close(self) -> None:
        self.closed = True

    async def aclose(self) -> None:
        self.closed = True


THREE = [b"data: 1\n\nda", b"ta: 2\n\n", b"data: 3\n\n"]


def test_a_stream_gives_its_events_one_read_at_a_time() -> None:
    body = Body(THREE)
    events = iter(EventStream(body))
    assert next(events).data == "1"
    assert body.read == 1
    assert [event.data for event in events] == ["2", "3"]
    assert body.closed


def test_a_second_pass_over_a_stream_is_an_error() -> None:
    stream = EventStream(THREE)
    assert len(list(stream)) == 3
    with pytest.raises(StreamAlreadyConsumed):
        list(stream)


def test_breaking_out_of_a_stream_closes_the_body() -> None:
    body = Body(THREE)
    for event in EventStream(body):
        assert event.data == "1"
        break
    gc.collect()
    assert body.closed
    assert body.read == 1


def test_leaving_a_with_block_closes_the_body_and_ends_the_stream() -> None:
    body = Body(THREE)
    with EventStream(body) as stream:
        pass
    assert body.closed
    with pytest.raises(StreamAlreadyConsumed):
        list(stream)


def test_an_error_in_the_body_passes_through_and_closes_it() -> None:
    class Torn(Body):
        def __iter__(self) -> Iterator[bytes]:
            yield from super().__iter__()
            raise ConnectionResetError

    body = Torn(THREE[:1])
    with pytest.raises(ConnectionResetError):
        list(EventStream(body))
    assert body.closed


def test_an_async_stream_gives_its_events_once() -> None:
    async def scenario() -> None:
        body = Body(THREE)
        stream = AsyncEventStream(body)
        assert [event.data async for event in stream] == ["1", "2", "3"]
        assert body.closed
        with pytest.raises(StreamAlreadyConsumed):
            [event async for event in stream]

    asyncio.run(scenario())


def test_leaving_an_async_with_block_closes_the_body_at_once() -> None:
    async def scenario() -> None:
        body = Body(THREE)
        async with AsyncEventStream(body) as stream:
            async for event in stream:
                assert event.data == "1"
                break
        assert body.closed
        assert body.read == 1

    asyncio.run(scenario())


def test_cancelling_the_reader_of_an_async_stream_closes_the_body() -> None:
    class Waiting(Body):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield b"data: 1\n\n"
            await asyncio.Event().wait()

    async def scenario() -> None:
        body, first = Waiting([]), asyncio.Event()

        async def read() -> None:
            async for _ in AsyncEventStream(body):
                first.set()

        reader = asyncio.create_task(read())
        await first.wait()
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert body.closed

    asyncio.run(scenario())


@given(
    st.text(),
    st.text().filter(lambda text: not set(text) & set("\r\n\0")),
    st.none() | st.text().filter(lambda text: not set(text) & set("\r\n\0")),
    st.none() | st.integers(0, 10**9),
)
def test_an_encoded_event_reads_back(data: str, event: str, id: str | None, retry: int | None) -> None:
    (read,) = _decoded([encode_event(data, event=event, id=id, retry=retry)])
    expected_data = data.replace("\r\n", "\n").replace("\r", "\n")
    assert read == ServerSentEvent(expected_data, event or "message", id or "", retry)


@pytest.mark.parametrize("arguments", [{"event": "a\nb"}, {"id": "a\rb"}, {"id": "a\0b"}, {"retry": -1}])
def test_what_an_event_cannot_carry_is_refused(arguments: dict[str, object]) -> None:
    (field,) = arguments
    with pytest.raises(InvalidInputError) as caught:
        encode_event("data", **arguments)
    assert caught.value.field == field
