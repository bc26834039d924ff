"""Streams, looked at byte by byte: what is sent when, and what becomes of those that nobody reads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from tests.end_to_end.serving import wait_until
from tests.server.openai.talking import SECONDS, Talking
from tinsmith.server import streams
from tinsmith.server.messages import Drawn
from tinsmith.server.openai import answers
from tinsmith.server.streams import RedrawnError, Streams, Watch


def test_what_may_be_the_beginning_of_a_stop_is_not_sent_before_it_is_certain(talking: Talking) -> None:
    with talking.stream(stop=["END"]) as stream:
        (request_id,) = stream.request_ids
        events = stream.events()
        end = talking.draw(request_id, "one E")
        assert next(events)["choices"][0]["text"] == "one "
        end = talking.draw(request_id, "N", end)
        end = talking.draw(request_id, "try", end)
        assert next(events)["choices"][0]["text"] == "ENtry"
        talking.draw(request_id, " two END three", end)
        assert next(events)["choices"][0]["text"] == " two "


def test_no_character_is_sent_in_halves(talking: Talking) -> None:
    tokens = talking.tokenizer.encode("a 中 b")
    with talking.stream() as stream:
        (request_id,) = stream.request_ids
        for place, token in enumerate(tokens):
            talking.workers.draw(Drawn(request_id, 0, place, [token], [-1.0]))
        pieces = []
        for event in stream.events():
            pieces.append(event["choices"][0]["text"])
            if "".join(pieces) == "a 中 b":
                break
        assert not any("\ufffd" in piece for piece in pieces)


def test_who_waits_is_told_that_the_server_lives(talking: Talking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "KEEP_ALIVE_SECONDS", 0.05)
    with talking.stream() as stream:
        lines = stream.lines()
        assert [next(lines), next(lines)] == [": waiting", ": waiting"]


def test_a_stream_that_is_closed_is_not_worked_for(talking: Talking) -> None:
    with talking.stream() as stream:
        (request_id,) = stream.request_ids
        talking.draw(request_id, "some text")
        assert next(stream.events())
        stream.close()
        wait_until(
            lambda: talking.state(request_id) != "queued" or is_cancelled(talking, request_id), SECONDS, "it waits"
        )
        wait_until(lambda: is_cancelled(talking, request_id), SECONDS, "it was not cancelled")


def is_cancelled(talking: Talking, request_id: str) -> bool:
    """Or about to be, by a worker that has it already."""
    asked = talking.store.jobs.cancel_asked("tiny/model-1", "stand-in")
    return request_id in asked or talking.state(request_id) in ("cancelled", "failed")


def test_a_reader_that_does_not_read_is_given_up(talking: Talking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MOST_UNREAD", 100_000)
    text, hub = "fox " * 10_000, talking.app.state.services.streams
    with talking.stream() as stream:
        (request_id,) = stream.request_ids
        watch, end, is_stuck = hub._watches[request_id], 0, False
        while not is_stuck:  # until the buffers of the network are full
            end = talking.draw(request_id, text, end)
            is_stuck = not soon(lambda: len(watch._known[0]) == end and watch._num_unread == 0)  # noqa: B023
        assert not is_cancelled(talking, request_id)
        for _ in range(10):
            end = talking.draw(request_id, text, end)
        wait_until(lambda: is_cancelled(talking, request_id), SECONDS, "it was not cancelled")
        wait_until(lambda: len(hub) == 0, SECONDS, "it is watched on")


def soon(is_so: Callable[[], bool]) -> bool:
    end = time.monotonic() + 1.0
    while not (found := is_so()) and time.monotonic() < end:
        time.sleep(0.002)
    return found


def test_a_server_that_stops_ends_its_streams_in_words(own: Talking) -> None:
    with own.stream() as stream:
        (request_id,) = stream.request_ids
        own.draw(request_id, "some text")
        lines = stream.lines()
        assert "some text" in next(lines)
        own._api.should_exit = True
        rest = list(lines)
        wait_until(lambda: is_cancelled(own, request_id), SECONDS, "it was not cancelled")
    assert '"code":"unavailable"' in rest[0]
    assert rest[-1] == "data: [DONE]"


def test_samples_of_several_prompts_come_side_by_side(talking: Talking) -> None:
    with talking.stream(prompt=["fox", "dog"], logprobs=1) as stream:
        first, second = stream.request_ids
        events = stream.events()
        talking.draw(second, "woof")
        event = next(events)
        assert (event["choices"][0]["index"], event["choices"][0]["text"]) == (1, "woof")
        talking.draw(first, "yip")
        event = next(events)
        assert (event["choices"][0]["index"], event["choices"][0]["text"]) == (0, "yip")
        assert event["choices"][0]["logprobs"]["token_logprobs"][0] == -1.0


# --- the hub ---------------------------------------------------------------------------------------------------------


def watched() -> tuple[Streams, Watch, asyncio.Event, asyncio.Event]:
    hub, news, too_slow = Streams(), asyncio.Event(), asyncio.Event()
    return hub, Watch(2, news, too_slow), news, too_slow


def drawn(start: int, *tokens: int, index: int = 0) -> Drawn:
    return Drawn("r", index, start, list(tokens), [-0.5] * len(tokens))


def test_what_is_known_is_not_passed_on_again() -> None:
    hub, watch, news, _ = watched()
    with hub.watching("r", watch):
        hub.hear([drawn(0, 1, 2), drawn(0, 7, index=1), Drawn("of others", 0, 0, [9], [0.0])])
        assert news.is_set()
        hub.hear([drawn(0, 1, 2, 3), drawn(9, 1)])  # drawn again; and something was lost before the second
        found = [(each.index, each.start, each.tokens) for each in watch.take() if each.tokens]
        assert found == [(0, 0, [1, 2]), (1, 0, [7]), (0, 2, [3])]
    hub.hear([drawn(3, 4)])
    assert watch.take() == []
    assert len(hub) == 0


def test_a_sample_that_comes_out_differently_is_an_error() -> None:
    hub, watch, _, _ = watched()
    with hub.watching("r", watch):
        hub.hear([drawn(0, 1, 2)])
        watch.take()
        hub.hear([drawn(0, 1, 5, 6)])
        with pytest.raises(RedrawnError):
            watch.take()


def test_a_reader_may_be_behind_by_so_much_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MOST_UNREAD", 3)
    monkeypatch.setattr(streams, "MOST_STEPS", 1)
    hub, watch, _, too_slow = watched()
    with hub.watching("r", watch):
        hub.hear([drawn(0, 1, 2, 3)])
        assert not too_slow.is_set()
        watch.take()
        hub.hear([drawn(3, 4, 5, 6, 7)])
        assert too_slow.is_set()
        too_slow.clear()
        watch.hear(drawn(0, 1, 2, 3, 4, 5, 6, 7, 8, 9))  # the whole at the end, however much of it is new
        assert not too_slow.is_set()
