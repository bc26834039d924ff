"""How much may be asked for at once, and what is refused before it costs anything."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.serving import wait_until
from tests.server.openai.talking import MODEL, SECONDS, Talking
from tinsmith.server.openai import plan

HELLO = {"role": "user", "content": "fox"}


def ask(talking: Talking, path: str, **body: Any) -> Any:
    return talking.call("POST", f"/v1/{path}", {"model": MODEL, "max_tokens": 1, **body})


def refused(talking: Talking, path: str, **body: Any) -> str:
    """The parameter that it is for."""
    answer = ask(talking, path, **body)
    assert answer.status == 400, answer
    return str(answer.json()["error"]["param"])


def test_many_messages_are_refused_by_what_they_are_together(talking: Talking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_CHARACTERS_OF_A_TOKEN", 1)
    monkeypatch.setattr(plan.ModelText, "encode", None)  # it does not come to that
    assert refused(talking, "chat/completions", messages=[HELLO] * 200) == "messages"


def test_many_prompts_are_refused_by_what_they_are_together(talking: Talking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_CHARACTERS_OF_A_TOKEN", 1)
    monkeypatch.setattr(plan, "_CHARACTERS_AT_ONCE", 600)
    assert ask(talking, "completions", prompt=["fox " * 50] * 3).status == 200
    assert refused(talking, "completions", prompt=["fox " * 50] * 4) == "prompt"


def test_a_prompt_that_is_told_again_counts(talking: Talking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MAX_SCORES", 100)
    tokens = [5] * 30
    assert ask(talking, "completions", prompt=tokens, n=3, echo=True).status == 200
    assert refused(talking, "completions", prompt=tokens, n=4, echo=True) == "echo"
    assert ask(talking, "completions", prompt=tokens, n=3, echo=True, logprobs=0).status == 200
    assert ask(talking, "completions", prompt=tokens, n=3, logprobs=5).status == 200
    assert refused(talking, "completions", prompt=tokens, echo=True, logprobs=5) == "logprobs"


def test_every_choice_is_told_with_the_prompt_it_belongs_to(talking: Talking) -> None:
    answer = ask(talking, "completions", prompt=["fox", "dog"], n=2, echo=True, logprobs=1).json()
    assert [choice["text"][:3] for choice in answer["choices"]] == ["fox", "fox", "dog", "dog"]


def test_the_worker_is_told_how_many_choices_a_request_asks_for(talking: Talking) -> None:
    assert ask(talking, "completions", prompt="fox", n=5).status == 200
    assert talking.workers.executed[-1].samples == 5


def test_a_variable_of_a_template_may_have_any_name(talking: Talking) -> None:
    variables = {"self": 1, "variables": 2, "text": 3, "options": 4}
    answer = ask(talking, "chat/completions", messages=[HELLO], chat_template_kwargs=variables)
    assert answer.status == 200, answer


def test_arguments_of_a_call_that_are_too_deep_stay_text(talking: Talking) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a":' * 100_000}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    answer = ask(talking, "chat/completions", messages=[HELLO, said])
    assert answer.status == 200, answer


def test_a_request_whose_key_is_revoked_ends_soon(tmp_path: Path) -> None:
    with Talking(tmp_path, api_keys=("tml-first",)) as running, ThreadPoolExecutor(1) as thread:
        key = running.store.keys.create("anna", "laptop").plain
        running.workers.hold("sample")
        try:
            body = {"model": MODEL, "prompt": "fox"}
            asked = thread.submit(running.call, "POST", "/v1/completions", body, key=key)
            wait_until(lambda: bool(running.samples()), SECONDS, "nothing was submitted")
            assert running.call("DELETE", "/api/v1/auth/apikey/me", key=key).status == 204
            begun = time.monotonic()
            assert asked.result(SECONDS).status == 401
            assert time.monotonic() - begun < 10.0
        finally:
            running.workers.release()
