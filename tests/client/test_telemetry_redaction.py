"""What must not leave the machine: credentials, prompts, tokens, requests, source lines."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from tinsmith.client.hooks import Attempt
from tinsmith.client.redaction import redact
from tinsmith.client.retry import is_user_error
from tinsmith.client.telemetry import TelemetryReporter, telemetry_hook
from tinsmith.errors import (
    APIConnectionError,
    APIResponseValidationError,
    InvalidInputError,
    PermissionDeniedError,
    RequestFailedError,
    ResponseSummary,
    UnprocessableEntityError,
)
from tinsmith.types import RequestErrorCategory

KEY = "tml-4f8aB0c-secret_part"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJ1c2VyIn0.c2lnbmF0dXJl-x_y"
PLAIN = "hunter2-without-a-prefix"
PROMPT = "the patient complains of a headache"


@pytest.mark.parametrize(
    "text",
    [
        f"bad key {KEY}",
        f"(key={KEY})",
        f"jwt {JWT}, expired",
        f"Authorization: Bearer {PLAIN}",
        f"authorization: Basic {PLAIN}",
        f"sent with bearer {PLAIN}",
        f"X-API-Key: {PLAIN}",
        f"x-api-key={PLAIN} ",
        f"{{'x-api-key': '{PLAIN}', 'accept': '*/*'}}",
        f'{{"X-Api-Key": "{PLAIN}"}}',
        f'"{{\\"api_key\\": \\"{PLAIN}\\"}}"',
        f"[(b'X-API-Key', b'{PLAIN}')]",
        f"TINKER_API_KEY={PLAIN}",
        f"TINKER_CREDENTIAL_CMD=vault read --token {PLAIN}",
        f"environ({{'TINKER_API_KEY': '{PLAIN}'}})",
        f"CF-Access-Client-Secret: {PLAIN}",
        f"weights_access_token='{PLAIN}'",
        f"Cookie: session={PLAIN}",
        f"proxy http://user:{PLAIN}@proxy:3128 refused",
        f"GET https://bucket/file.tar?X-Amz-Signature={PLAIN}&x=1 failed",
    ],
)
def test_a_credential_is_removed_in_whatever_form_it_comes(text: str) -> None:
    clean = redact(text)
    assert "[redacted]" in clean
    for secret in (KEY, PLAIN, *JWT.split("."), "secret_part"):
        assert secret not in clean


@pytest.mark.parametrize(
    "text",
    [
        "Request failed: target_tokens missing for self.request_id='req-0025'",
        "max_tokens=5 is too small; num_tokens: 7",
        "tokenizer: Qwen/Qwen3-8B",
        "TINKER_API_KEY is not set",
        "TINKER_BASE_URL=http://127.0.0.1:8000/html-page",
        "rank 48 is above this server's limit of 32",
    ],
)
def test_ordinary_words_stay(text: str) -> None:
    assert redact(text) == text


def test_known_secrets_are_removed_whatever_they_look_like() -> None:
    secrets = {"swordfish", "swordfish-and-more", "", "abc"}
    assert redact("swordfish-and-more, swordfish; abc", secrets) == "[redacted], [redacted]; abc"


def test_the_rest_of_a_dict_survives() -> None:
    assert redact("{'x-api-key': 'k1', 'accept': 'json'}") == "{'x-api-key': [redacted], 'accept': 'json'}"


@pytest.mark.parametrize("piece", ["token", "a", "1 ", "eyJ", "http://", '"', "\\", "x-api-key: '", "1", "tml-", "9,"])
def test_hostile_text_does_not_make_the_patterns_run_away(piece: str) -> None:
    start = time.process_time()
    redact(piece * (80_000 // len(piece)))
    assert time.process_time() - start < 0.5  # a few milliseconds; a pattern that goes back and forth takes seconds


def sent(*errors: BaseException, secrets: tuple[str, ...] = (PLAIN,)) -> tuple[str, list[dict[str, Any]]]:
    """The whole text that leaves, and the events in it."""
    bodies: list[bytes] = []

    async def send(body: bytes) -> None:
        bodies.append(body)

    async def main() -> None:
        reporter = TelemetryReporter(
            send, session_id=None, sdk_version="1", is_user_error=is_user_error, secrets=secrets
        )
        for error in errors:
            reporter.record_exception(error)
        await reporter.close()

    asyncio.run(main())
    return b"".join(bodies).decode(), [event for body in bodies for event in json.loads(body)["events"]]


def raised(error: BaseException) -> BaseException:
    local_value = f"{KEY} {PROMPT}"
    try:
        raise error if local_value else AssertionError
    except type(error) as caught:
        return caught


def test_the_key_is_in_no_event_even_if_the_error_holds_it_everywhere() -> None:
    headers = {"x-api-key": KEY, "authorization": f"Bearer {JWT}", "set-cookie": PLAIN}
    body = {"detail": f"key {KEY} or {PLAIN} is not allowed", "request_headers": headers}
    text, events = sent(
        raised(PermissionDeniedError(f"Error code: 403 - {body}", ResponseSummary(403, headers), body)),
        raised(APIConnectionError(message=f"cannot reach http://user:{PLAIN}@host with {KEY}")),
        raised(RuntimeError(f"{KEY} {JWT} {PLAIN}")),
        raised(RequestFailedError(f"bad {KEY}", "req-1", RequestErrorCategory.Server)),
    )
    assert len(events) == 4
    assert events[0]["event_data"]["message"] == "Error code: 403 - key [redacted] or [redacted] is not allowed"
    for secret in (KEY, JWT, PLAIN, "secret_part", "Bearer"):
        assert secret not in text


def test_what_a_validation_answer_echoes_is_not_sent() -> None:
    echo = {"detail": [{"loc": ["body", "prompt"], "msg": "bad", "input": {"tokens": [101, 102, 103], "text": PROMPT}}]}
    error = UnprocessableEntityError(f"Error code: 422 - {echo}", ResponseSummary(422, {}), echo)
    text, events = sent(raised(error))
    assert events[0]["event_data"] == {
        "error_type": "UnprocessableEntityError",
        "message": "Error code: 422",
        "status_code": 422,
    }
    assert PROMPT not in text


@pytest.mark.parametrize(
    "error",
    [
        ValueError(f"cannot tokenize {PROMPT!r}"),
        KeyError(PROMPT),
        APIResponseValidationError(ResponseSummary(200, {}), {"text": PROMPT}, f"unexpected {PROMPT!r}"),
    ],
)
def test_the_text_of_an_error_that_may_quote_the_user_is_withheld(error: BaseException) -> None:
    text, events = sent(raised(error))
    assert PROMPT not in text
    assert events[0]["error_type"] == type(error).__name__
    assert "withheld" in events[0]["error_message"]


def test_input_that_was_refused_is_named_by_its_kind_alone() -> None:
    text, events = sent(raised(InvalidInputError(f"stop is {PROMPT!r}", field="stop", value=PROMPT)))
    assert PROMPT not in text
    assert events[0]["event_data"] == {"error_type": "InvalidInputError"}


def test_token_lists_and_long_texts_in_a_servers_sentence_are_cut() -> None:
    tokens = list(range(1000, 1400))
    text, events = sent(
        RequestFailedError(f"cannot sample from {tokens}", "req-1", RequestErrorCategory.User),
        APIConnectionError(message="x" * 1_000_000),
    )
    assert events[0]["event_data"]["message"] == "cannot sample from [[numbers]]"
    assert len(text) < 10_000


def test_a_traceback_names_places_and_shows_no_source_and_no_home_folder() -> None:
    def load_private_data() -> None:
        secret_in_source = "in the source line"
        raise KeyError(secret_in_source)

    try:
        try:
            load_private_data()
        except KeyError as cause:
            raise RuntimeError("outer") from cause
    except RuntimeError as error:
        _, events = sent(error)
    lines = events[0]["traceback"].splitlines()
    assert lines[0] == "RuntimeError"
    assert lines[2] == "KeyError"
    assert lines[4].startswith("  tests/client/test_telemetry_redaction.py:")
    assert lines[4].endswith(" in load_private_data")
    assert len(lines) == 5


def test_a_circular_chain_of_causes_ends() -> None:
    one, two = ValueError(), KeyError()
    one.__cause__, two.__cause__ = two, one
    _, events = sent(raised(one))
    assert events[0]["error_type"] == "ValueError"


def test_only_plain_values_of_an_event_are_sent() -> None:
    bodies: list[bytes] = []

    async def send(body: bytes) -> None:
        bodies.append(body)

    async def main() -> None:
        reporter = TelemetryReporter(send, session_id=None, sdk_version="1", is_user_error=is_user_error)
        reporter.record_event(
            "odd",
            {
                "request_headers": {"x-api-key": KEY},
                "tokens": [1, 2, 3],
                "body": PROMPT.encode(),
                "detail": f"key {KEY}",
                "count": 3,
            },
        )
        telemetry_hook(reporter)(Attempt("GET", f"/api/v1/{KEY}", 1, 404, "NotFoundError", 0.1))
        await reporter.close()

    asyncio.run(main())
    events = json.loads(bodies[0])["events"]
    assert events[0]["event_data"] == {"detail": "key [redacted]", "count": 3}
    assert KEY not in bodies[0].decode()


def test_a_secret_learned_later_is_removed_too() -> None:
    bodies: list[bytes] = []
    secrets: set[str] = set()

    async def send(body: bytes) -> None:
        bodies.append(body)

    async def main() -> None:
        reporter = TelemetryReporter(
            send, session_id=None, sdk_version="1", is_user_error=is_user_error, secrets=secrets
        )
        secrets.add("opaque-credential-from-a-command")
        reporter.record_exception(APIConnectionError(message="rejected opaque-credential-from-a-command"))
        await reporter.close()

    asyncio.run(main())
    assert json.loads(bodies[0])["events"][0]["error_message"] == "rejected [redacted]"
