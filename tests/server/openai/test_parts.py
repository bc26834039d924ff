"""The small parts: text without its stop, calls of tools, and where requests without a session take place."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.end_to_end.serving import wait_until
from tests.server.openai.talking import MODEL, SECONDS, Talking
from tests.server.store.making import new_checkpoint
from tests.support.tiny_tokenizer import byte_level_bpe
from tinsmith.server.auth import LOCAL_OWNER
from tinsmith.server.openai import places, tool_calls
from tinsmith.server.openai.choices import Choice, Ending
from tinsmith.server.texts import ModelText
from tinsmith.text.fast_tokenizer import Tokenizer


class _Text(ModelText):
    def __init__(self) -> None:
        self._tokenizer = Tokenizer(byte_level_bpe())

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer


TEXT = _Text()
LETTERS = st.text("ab ", max_size=30)
STOPS = st.lists(st.text("ab ", min_size=1, max_size=3), max_size=3)


def as_far_as_drawn(tokens: list[int], stops: list[str]) -> list[int]:
    """The worker ends a sample with the token that completes a stop."""
    ends = (end for end in range(len(tokens)) if any(stop in TEXT.decode(tokens[:end]) for stop in stops))
    return tokens[: next(ends, len(tokens))]


@given(LETTERS, STOPS, st.booleans())
def test_a_text_ends_before_its_first_stop_however_it_comes(text: str, stops: list[str], is_scored: bool) -> None:
    tokens = as_far_as_drawn(TEXT.encode(text), stops)
    text = TEXT.decode(tokens)
    choice = Choice(TEXT, Ending(texts=stops), is_scored=is_scored)
    told, scored = "", []
    for token in tokens:
        choice.add([token], [-1.0], [])
        piece = choice.take()
        told, scored = told + piece.text, scored + piece.scored
        assert text.startswith(told)
    choice.end()
    piece = choice.take()
    told, scored = told + piece.text, scored + piece.scored
    cut = min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))
    assert told == text[:cut]
    if is_scored:
        expected = [token for index, token in enumerate(tokens) if len(TEXT.decode(tokens[:index])) < cut]
        assert [each.token for each in scored] == expected


def test_the_token_that_ends_a_sample_is_no_part_of_it() -> None:
    choice = Choice(TEXT, Ending(tokens={5}), is_scored=True)
    tokens = [*TEXT.encode("fox"), 5]
    choice.add(tokens, [-1.0] * len(tokens), [])
    choice.end()
    piece = choice.take()
    assert (piece.text, len(piece.scored)) == ("fox", len(tokens) - 1)


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        ("no call", "no call", []),
        ('<tool_call>\n{"name": "f", "arguments": {"a": {"b": 1}}}\n</tool_call>', "", ["f"]),
        ('Well.\n<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>', "Well.", ["f", "g"]),
        ('<tool_call>{"name": "f", "arguments": </tool_call>', None, []),
        ('<tool_call>{"name": 3}</tool_call>', None, []),
        ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>.', ".", ["f"]),
        ('<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 100_000 + "}}</tool_call>", None, []),
    ],
)
def test_calls_of_tools_are_found_in_what_was_written(text: str, content: str | None, names: list[str]) -> None:
    left, calls = tool_calls.find(text, "x")
    assert left == (text if content is None else content)
    assert [call["function"]["name"] for call in calls] == names
    assert len({call["id"] for call in calls}) == len(calls)


def test_beginnings_of_calls_without_an_end_take_little_time() -> None:
    text, begun = "<tool_call>{}" * 20_000, time.process_time()
    assert tool_calls.find(text, "x") == (text, [])
    assert time.process_time() - begun < 1.0


def complete(talking: Talking, **body: Any) -> Any:
    answer = talking.call("POST", "/v1/completions", {"model": MODEL, "prompt": "fox", "max_tokens": 3, **body})
    assert answer.status == 200, answer
    return answer.json()


def sessions(talking: Talking) -> list[dict[str, Any]]:
    found = talking.post("sessions/search", {"display_name": places.NAME}).json()["sessions"]
    return cast("list[dict[str, Any]]", found)


def look(talking: Talking) -> None:
    """As it is done every minute."""
    kept = talking.app.state.services.places
    asyncio.run_coroutine_threadsafe(kept._look(), talking.workers.loop).result(SECONDS)


def test_an_owner_has_one_session_for_all_models_and_requests(own: Talking) -> None:
    for model in (MODEL, "tiny/model-2", MODEL):
        complete(own, model=model)
    (session,) = sessions(own)
    members = own.get(f"sessions/{session['session_id']}").json()
    assert len(members["sampler_ids"]) == 2
    kept = own.store.sessions.get(session["session_id"], LOCAL_OWNER)
    assert kept is not None
    assert kept.tags == (places.TAG,)


def test_a_session_that_its_owner_has_ended_is_followed_by_another(
    own: Talking,
) -> None:
    complete(own)
    (session,) = sessions(own)
    own.post(f"sessions/{session['session_id']}/finish", {"reason": {"type": "success"}, "detail": None})
    complete(own)  # what it had begun goes on
    look(own)
    complete(own)
    assert len(sessions(own)) == 2


def test_a_session_that_nobody_uses_any_more_ends(own: Talking, monkeypatch: pytest.MonkeyPatch) -> None:
    complete(own)
    kept = own.app.state.services.places
    with own.stream():
        monkeypatch.setattr(places, "KEPT_SECONDS", -1.0)
        look(own)
        assert sessions(own)[0]["status"]["type"] == "active"
    wait_until(lambda: not any(place.num_open for place in kept._places.values()), SECONDS, "it stays open")
    look(own)
    assert sessions(own)[0]["status"]["type"] == "client_finished"


def test_checkpoints_of_a_base_model_that_is_not_served_are_not_listed(talking: Talking) -> None:
    for name, base_model in (("served", MODEL), ("gone", "tiny/gone")):
        talking.store.checkpoints.save(new_checkpoint(name, owner=LOCAL_OWNER, base_model=base_model))
    listed = {each["id"].rpartition("/")[2] for each in talking.call("GET", "/v1/models").json()["data"]}
    assert "served" in listed
    assert "gone" not in listed


def test_a_refusal_for_too_much_says_when_to_come_again(own: Talking) -> None:
    own.app.state.services.open_requests._open.most = 0
    answer = own.call("POST", "/v1/completions", {"model": MODEL, "prompt": "fox"})
    own.app.state.services.open_requests._open.most = 100
    assert answer.status == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["type"] == "rate_limit_error"


def test_of_several_prompts_none_is_sampled_if_one_is_refused(own: Talking) -> None:
    own.workers.hold("sample")
    own.app.state.services.backlog._requests.most = 2
    answer = own.call("POST", "/v1/completions", {"model": MODEL, "prompt": ["a", "b", "c", "d"]})
    assert (answer.status, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    asked = own.store.jobs.cancel_asked(MODEL, "stand-in")
    assert all(name in asked or own.state(name) == "cancelled" for name in own.samples())
    own.workers.release()


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (b"not json", {}, 400, None),
        (b"[]", {}, 400, None),
        (b"{}", {"content-type": "text/plain"}, 415, None),
        (b'{"model": "x", "prompt": ' + b"[" * 100_000, {}, 400, None),
        (b'{"prompt": "x"}', {}, 400, None),
        (b" " * (17 * 2**20), {}, 413, "request_too_large"),
    ],
    ids=["no JSON", "no object", "wrong type", "too deep", "no model", "too large"],
)
def test_every_refusal_has_openais_form(
    talking: Talking, body: bytes, headers: dict[str, str], status: int, code: str | None
) -> None:
    answer = talking.call("POST", "/v1/completions", body, headers=headers)
    assert answer.status == status, answer.body
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert talking.call("GET", "/v1/completions").json()["error"]["message"].startswith("GET /v1/completions")
    for place in ("/v1/responses", "/v1/embeddings", "/oai/api/v1/responses"):
        unknown = talking.call("POST", place, {"model": MODEL})
        assert (unknown.status, unknown.json()["error"]["code"]) == (404, "not_found")
        assert "The endpoints are: GET /v1/models," in unknown.json()["error"]["message"]
        assert "GET /v1/models/{model}, " in unknown.json()["error"]["message"]
        assert "POST /v1/chat/completions." in unknown.json()["error"]["message"]
    assert talking.call("GET", "/v1/models", key=None).json()["error"]["code"] == "invalid_api_key"


def test_a_reward_that_is_no_number_is_refused(talking: Talking) -> None:
    for wrong in ("much", [1], "nan", 10**400):
        body = {"model": MODEL, "prompt": "fox", "metadata": {"reward": wrong}}
        refused = talking.call("POST", "/v1/completions", body)
        assert (refused.status, refused.json()["error"]["param"]) == (400, "metadata")


def test_a_reward_that_is_null_is_as_good_as_none(talking: Talking) -> None:
    body = {"model": MODEL, "prompt": "fox", "max_tokens": 1, "metadata": {"reward": None}}
    assert talking.call("POST", "/v1/completions", body).status == 200


def test_tokens_that_there_are_not_are_refused_as_the_prompt(talking: Talking) -> None:
    for wrong in ([-1], [10**6]):
        refused = talking.call("POST", "/v1/completions", {"model": MODEL, "prompt": wrong})
        assert (refused.status, refused.json()["error"]["param"]) == (400, "prompt")
