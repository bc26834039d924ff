"""Exports encrypted to public keys: whoever has a private key reads them, and nobody else."""

from pathlib import Path
from typing import Any

import pyrage
import pytest

from tinsmith.errors import InvalidInputError
from tinsmith.server.age import check_recipients, encrypt_files

SSH_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHsKLqeplhpW+uObz5dvMgjz1OxfM/XXUB+VHtZ6isGN anna@example"


@pytest.fixture
def anna() -> Any:
    return pyrage.x25519.Identity.generate()


@pytest.fixture
def bert() -> Any:
    return pyrage.x25519.Identity.generate()


def test_every_recipient_reads_every_file(tmp_path: Path, anna: Any, bert: Any) -> None:
    contents = {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(range(256)) * 1000}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    encrypt_files(tmp_path, [str(anna.to_public()), str(bert.to_public()), SSH_KEY])
    encrypted = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    for reader in (anna, bert):
        read = {name: pyrage.decrypt(content, [reader]) for name, content in encrypted.items()}
        assert read == {f"{name}.age": content for name, content in contents.items()}


def test_nobody_else_reads_them(tmp_path: Path, anna: Any, bert: Any) -> None:
    (tmp_path / "secret").write_bytes(b"weights")
    encrypt_files(tmp_path, [str(anna.to_public())])
    (file,) = tmp_path.iterdir()
    assert b"weights" not in file.read_bytes()
    with pytest.raises(pyrage.DecryptError):
        pyrage.decrypt(file.read_bytes(), [bert])


@pytest.mark.parametrize("key", ["", "age1x", "ssh-ed25519 AAAA", "ssh-dss AAAA", "anna@example"])
def test_what_is_not_a_public_key_is_refused(key: str, anna: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"age_encryption_recipients holds .* not a public key"):
        check_recipients([str(anna.to_public()), key])


def test_a_private_key_sent_by_mistake_is_not_repeated(anna: Any) -> None:
    with pytest.raises(InvalidInputError) as refusal:
        check_recipients([str(anna)])
    assert str(anna) not in str(refusal.value)
