"""Exports for one pair of eyes: their files encrypted to public keys of the user's, in the age format."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tinsmith.server.checks import refuse

SUFFIX = ".age"


def check_recipients(keys: Sequence[str]) -> None:
    """Refuses what is not a public key, before anything is saved for its owner."""
    _recipients(keys)


def encrypt_files(folder: Path, keys: Sequence[str]) -> None:
    """Puts `NAME.age` in the place of every file; whoever holds one of the private keys can read it."""
    recipients = _recipients(keys)
    for file in [*folder.iterdir()]:
        _pyrage().encrypt_file(str(file), f"{file}{SUFFIX}", recipients)
        file.unlink()


def _recipients(keys: Sequence[str]) -> list[Any]:
    pyrage = _pyrage()
    return [_recipient(pyrage, key) for key in keys]


def _recipient(pyrage: Any, key: str) -> Any:
    form = pyrage.ssh if key.startswith("ssh-") else pyrage.x25519
    try:
        return form.Recipient.from_str(key)
    except pyrage.RecipientError as error:
        # Its beginning only: it may be a private key, sent by mistake.
        raise refuse(
            "age_encryption_recipients",
            f"holds {key[:12]!r}..., which is not a public key ({error}): give keys such as `age-keygen` prints "
            "(age1...), ssh-ed25519 or ssh-rsa ones",
        ) from error


def _pyrage() -> Any:
    """Loaded when it is needed: few exports are encrypted. It brings no type information."""
    return import_module("pyrage")
