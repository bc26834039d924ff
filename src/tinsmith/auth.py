"""Whether this machine has a credential, and whether the server takes it."""

from __future__ import annotations

import os

from tinsmith.client.config import Config
from tinsmith.client.connection import Call, Connection
from tinsmith.client.credentials import has_key_prefix, stored_key
from tinsmith.client.transport import Traffic

__all__ = ["get_tinker_token", "raise_if_tinker_not_accessible", "tinker_has_credentials"]


def get_tinker_token() -> str | None:
    """The API key found on this machine, or None. Runs no command and sends nothing."""
    key = os.environ.get("TINKER_API_KEY") or stored_key()
    return key if key and has_key_prefix(key) else None


def tinker_has_credentials() -> bool:
    """Whether there is a key, or a command that would give one. Sends nothing."""
    return bool(os.environ.get("TINKER_CREDENTIAL_CMD")) or get_tinker_token() is not None


def raise_if_tinker_not_accessible() -> None:
    """Asks the server once, without retries, and raises a `TinkerError` if it cannot be used."""
    connection = Connection(Config.from_env())
    call = Call("GET", "/api/v1/get_server_capabilities", traffic=Traffic.REST, retries=False)
    connection.run(lambda: connection.call(call)).result()
