"""Keys, tokens made from them, and a server without any."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from tests.server.api.running import RunningServer
from tinsmith.errors import ConfigError
from tinsmith.server.auth import TOKEN_SECONDS, Authority, Secret
from tinsmith.server.config import ServerConfig
from tinsmith.server.models import ModelSource
from tinsmith.server.store import Store

MODELS = (ModelSource("m", "/nowhere"),)


def test_without_keys_on_loopback_everybody_is_local(server: RunningServer) -> None:
    assert server.get("auth/apikey/me", key="tml-whatever").json()["name"] == "local"
    assert server.get("auth/apikey/me", key=None).status == 401


def test_without_keys_the_server_answers_to_names_of_its_own_machine_alone(tmp_path: Path) -> None:
    """A web page could let its own name lead to this machine, and would be let in."""
    with RunningServer(tmp_path) as running:
        for name, status in (("localhost", 200), ("[::1]:8000", 200), ("evil.example:8000", 403), ("127.0.0.1.x", 403)):
            assert running.get("auth/apikey/me", headers={"Host": name}).status == status
        refused = running.get("auth/apikey/me", headers={"Host": "evil.example"})
        assert "not to 'evil.example'" in refused.body.decode()
        made = running.store.keys.create("anna", "laptop")
        assert running.get("auth/apikey/me", key=made.plain, headers={"Host": "evil.example"}).status == 200


def test_the_first_key_is_noticed_while_the_server_runs(tmp_path: Path) -> None:
    with RunningServer(tmp_path) as running:
        assert running.get("auth/apikey/me", key="tml-any").status == 200
        made = running.store.keys.create("anna", "laptop")
        assert running.get("auth/apikey/me", key="tml-any").status == 401
        assert running.get("auth/apikey/me", key=made.plain).status == 200


def test_without_keys_on_another_address_the_server_does_not_start(tmp_path: Path) -> None:
    config = ServerConfig(models=MODELS, host="0.0.0.0", state=tmp_path)
    store = Store(config.database_url)
    with pytest.raises(ConfigError, match=r"tinsmith keys create.*--api-key"):
        Authority(config, store)
    store.close()


def test_a_key_that_no_client_would_send_is_refused_and_not_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="number 2 must start with 'tml-'") as error:
        ServerConfig(models=MODELS, state=tmp_path, api_keys=("tml-good", "my-password"))
    assert "my-password" not in str(error.value)


def test_a_key_made_in_the_store_is_accepted_and_then_revoked_by_its_holder(tmp_path: Path) -> None:
    with RunningServer(tmp_path, api_keys=("tml-first",)) as running:
        made = running.store.keys.create("anna", "laptop", note="for tests")
        me = running.get("auth/apikey/me", key=made.plain).json()
        assert (me["key_id"], me["name"], me["note"]) == (made.key.key_id, "laptop", "for tests")
        assert running.call("DELETE", "/api/v1/auth/apikey/me", key=made.plain).status == 204
        assert running.get("auth/apikey/me", key=made.plain).status == 401
        assert running.get("auth/apikey/me", key="tml-first").status == 200


def claims(token: str) -> dict[str, object]:
    payload = token.split(".")[1]
    decoded: dict[str, object] = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    return decoded


def test_a_token_stands_for_its_key_until_either_ends(tmp_path: Path) -> None:
    now = [1_000_000.0]
    config = ServerConfig(models=MODELS, state=tmp_path, api_keys=("tml-a",))
    store = Store(config.database_url)
    authority = Authority(config, store, now=lambda: now[0])
    caller = authority.identify("tml-a")
    assert caller is not None
    token = authority.token_for(caller)
    assert authority.identify(token) == caller
    assert claims(token)["exp"] == now[0] + TOKEN_SECONDS
    # Another server's token, a changed one, and one without a signature.
    assert authority.identify(Secret(b"other").token(claims(token))) is None
    assert authority.identify(token[:-2] + "xx") is None
    assert authority.identify(token.rpartition(".")[0] + ".") is None
    now[0] += TOKEN_SECONDS
    assert authority.identify(token) is None
    fresh = authority.token_for(caller)
    authority.revoke(caller, None)
    assert authority.identify(fresh) is None
    store.close()


def test_the_secret_stays_the_same_over_restarts_and_for_every_server_on_a_database(tmp_path: Path) -> None:
    for beginning in ("new", "of an earlier release"):
        state = tmp_path / beginning
        state.mkdir()
        store = Store(f"sqlite:///{state}/tinsmith.db")
        if beginning != "new":
            (state / "secret").write_text("5ec7e7" * 10 + "abcd")
        first, second = Secret.of(store, state), Secret.of(store, tmp_path / "elsewhere")
        assert second.has_signed("message", first.signature("message"))
        earlier = Secret(b"\x5e\xc7\xe7" * 10 + b"\xab\xcd")
        assert earlier.has_signed("message", first.signature("message")) == (beginning != "new")
        assert not (state / "secret").exists()
        store.close()


@pytest.mark.parametrize("left", [b"", b"5ec7e7", bytes(64), b"\xff" * 64])
def test_what_a_power_cut_left_of_an_earlier_secret_signs_nothing(tmp_path: Path, left: bytes) -> None:
    (tmp_path / "secret").write_bytes(left)
    store = Store(f"sqlite:///{tmp_path}/tinsmith.db")
    secret = Secret.of(store, tmp_path)
    for known in (b"", b"\x5e\xc7\xe7", bytes(32)):
        assert not Secret(known).has_signed("message", secret.signature("message"))
    assert len(store.identity.secret("")) == 64
    assert not (tmp_path / "secret").exists()
    store.close()


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("example.com", False)],
)
def test_only_this_machine_counts_as_loopback(host: str, is_loopback: bool) -> None:
    assert ServerConfig(models=MODELS, host=host).is_loopback == is_loopback
