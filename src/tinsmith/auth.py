"""Whether this machine has a credential, and whether the server takes it."""

from __future__ import annotations

from tinsmith.client import futures
from tinsmith.client.config import Config, find_static_key, has_credential_command
from tinsmith.client.connection import Call, Connection
from tinsmith.client.transport import Traffic

__all__ = ["get_tinker_token", "raise_if_tinker_not_accessible", "tinker_has_credentials"]


def get_tinker_token() -> str | None:
    """The API key found on this machine, or None. Runs no command and sends nothing."""
    return find_static_key()


def tinker_has_credentials() -> bool:
    """Whether there is a key, or a command that would give one. Sends nothing."""
    return has_credential_command() or find_static_key() is not None


def raise_if_tinker_not_accessible() -> None:
    """Asks the server once, without retries, and raises a `TinkerError` if it cannot be used."""
    connection = Connection(Config.from_env(retry_budget=0, telemetry=False))
    call = Call("GET", "/api/v1/get_server_capabilities", traffic=Traffic.REST)
    try:
        connection.run(lambda: connection.call(call)).result()
    finally:
        futures.run(connection.close, connection.loop).result()
