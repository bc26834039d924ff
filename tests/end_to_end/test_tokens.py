"""A server that has its clients swap their key for a token: both packages do so, and everything works as before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.compat.runner import Runner
from tests.end_to_end.comparing import differences
from tests.end_to_end.serving import KEY, OTHER_KEY, ServerProcess

MODEL = "tiny/model-1"


@pytest.fixture(scope="module")
def exchanging(tmp_path_factory: pytest.TempPathFactory, models: Mapping[str, Path]) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("tokens"), {MODEL: models[MODEL]}, "--token-exchange") as running:
        yield running


def test_without_the_option_keys_are_sent_as_they_are(server: ServerProcess) -> None:
    assert not server.post("client/config", {"sdk_version": "1"}).json().get("pjwt_auth_enabled")


@pytest.mark.parametrize("script", ["token_exchange", "supervised_loop", "save_and_load_again", "seeded_sampling"])
def test_both_packages_work_with_tokens(
    exchanging: ServerProcess, official_runner: Runner, our_runner: Runner, script: str
) -> None:
    theirs, ours = (runner.run(script, exchanging.url) for runner in (official_runner, our_runner))
    assert differences(theirs, ours) == []


def test_a_token_stands_for_the_owner_of_its_key(exchanging: ServerProcess, our_runner: Runner) -> None:
    who, _ = our_runner.run("token_exchange", exchanging.url)
    token = exchanging.post("auth/token", {}).json()["jwt"]
    session = exchanging.post("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "1"}, key=token)
    found = exchanging.post("sessions/search", {"session_id": session.json()["session_id"]}, key=KEY).json()["sessions"]
    assert [one["owner"] for one in found] == [who["user_urn"]]
    assert exchanging.call("GET", "/api/v1/sessions", key=OTHER_KEY).json() == {"sessions": []}
    assert exchanging.call("GET", "/api/v1/sessions", key=token[:-3] + "abc").status == 401
