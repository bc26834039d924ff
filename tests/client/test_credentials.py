"""The credentials file and the credential command."""

import json
from pathlib import Path

import pytest

from tinsmith.client.credentials import check_key, run_credential_command, stored_key
from tinsmith.errors import ConfigError


def write(path: Path, document: object) -> Path:
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


@pytest.mark.parametrize("kind", ["manual", "generated"])
def test_the_default_key_of_the_file_is_found(kind: str, tmp_path: Path) -> None:
    keys = {"a": {"type": kind, "key": "tml-a", "name": "a"}, "b": {"type": kind, "key": "tml-b", "name": "b"}}
    path = write(tmp_path / "credentials.json", {"version": 1, "default": "b", "keys": keys})
    assert stored_key(path) == "tml-b"


@pytest.mark.parametrize("document", [{"version": 1, "keys": {}}, {"version": 1, "default": None, "keys": {}}])
def test_a_file_without_a_default_holds_no_key(document: object, tmp_path: Path) -> None:
    assert stored_key(write(tmp_path / "credentials.json", document)) is None


def test_no_file_is_no_key(tmp_path: Path) -> None:
    assert stored_key(tmp_path / "missing" / "credentials.json") is None
    assert stored_key(write(tmp_path / "file", "") / "credentials.json") is None


@pytest.mark.parametrize(
    "document",
    ["", "not json", "[]", "3", {"default": "gone", "keys": {}}, {"default": "a"}, {"default": "a", "keys": {"a": 3}}],
)
def test_a_broken_file_is_named_with_the_remedy(document: object, tmp_path: Path) -> None:
    path = write(tmp_path / "credentials.json", document)
    with pytest.raises(ConfigError, match="Repair it or remove it") as caught:
        stored_key(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_no_text_is_named_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "credentials.json"
    path.write_bytes(b"\xff\xfe tml-secret")
    with pytest.raises(ConfigError, match="Repair it") as caught:
        stored_key(path)
    assert "secret" not in str(caught.value)


def test_the_command_prints_the_credential() -> None:
    assert run_credential_command("echo '  tml-from-command  '") == "tml-from-command"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("true", "printed nothing"),
        ("echo tml-secret; exit 3", "status 3"),
        ("no-such-command-anywhere", "status 127"),
        ("printf 'tml-secret\\nmore'", "characters that no key has"),
        ("printf 'tml-secr\\303\\274t'", "characters that no key has"),
    ],
)
def test_a_command_that_gives_no_credential_is_an_error_without_the_output(command: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        run_credential_command(command)
    assert "secr" not in str(caught.value)


def test_a_command_that_hangs_is_ended_and_not_quoted() -> None:
    with pytest.raises(ConfigError, match=r"did not finish within 0.2 s") as caught:
        run_credential_command("sleep 60 # secret", timeout=0.2)
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_the_command_does_not_read_our_input() -> None:
    with pytest.raises(ConfigError, match="printed nothing"):
        run_credential_command("cat")


def test_a_good_key_passes() -> None:
    assert check_key("tml-x", "here") == "tml-x"
    assert check_key("eyJhbGciOi.x.y", "here") == "eyJhbGciOi.x.y"
