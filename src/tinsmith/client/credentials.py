"""Where API keys come from besides an argument: the credentials file and the credential command."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tinsmith.errors import ConfigError

CREDENTIALS_FILE = Path("~/.tinker/credentials.json")
KEY_PREFIXES = ("tml-", "eyJ")
COMMAND_TIMEOUT_SECONDS = 60.0


class Secret(str):
    """Text that tools which print local variables must not show."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


def has_key_prefix(key: str) -> bool:
    return key.startswith(KEY_PREFIXES)


def check_key(key: str, source: str) -> str:
    """Returns the key, or refuses one that cannot be a key; the key itself never appears in the message."""
    if not has_key_prefix(key):
        raise ConfigError(
            f"The API key from {source} does not start with 'tml-' (or 'eyJ' for a JWT). "
            "Check that the whole key was copied and that no other value was put there."
        )
    return _check_characters(key, f"The API key from {source}")


def _check_characters(secret: str, what: str) -> str:
    """It travels in an HTTP header."""
    if not (secret.isascii() and secret.isprintable()) or " " in secret:
        raise ConfigError(f"{what} holds characters that no key has (blank, line break or non-ASCII). Copy it again.")
    return secret


def stored_key(path: Path | None = None) -> str | None:
    """The default key of the credentials file, or None when there is no file or no default in it."""
    path = (path or CREDENTIALS_FILE).expanduser()
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({type(error).__name__}). Repair it or remove it.") from error
    try:
        default = document.get("default")
        return str(document["keys"][default]["key"]) if default else None
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} does not have the form {{'version': 1, 'default': id, 'keys': {{id: {{'key': ...}}}}}}. "
            "Repair it or remove it."
        ) from error


def run_credential_command(command: str, timeout: float = COMMAND_TIMEOUT_SECONDS) -> str:
    """Runs the user's command and returns what it printed. Blocking: call it from a worker thread."""
    try:
        # The variable is documented to hold a shell command, written by the user who runs this process.
        done = subprocess.run(
            command,
            shell=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        # Not chained: that error quotes the command, which may hold a secret.
        raise ConfigError(
            f"TINKER_CREDENTIAL_CMD did not finish within {timeout:g} s. Run it by hand to see why."
        ) from None
    token = done.stdout.strip()
    if done.returncode != 0 or not token:
        raise ConfigError(
            f"TINKER_CREDENTIAL_CMD exited with status {done.returncode} and printed "
            f"{'something' if token else 'nothing'}. It must print a credential and exit with 0; run it by hand."
        )
    return _check_characters(token, "What TINKER_CREDENTIAL_CMD printed")
