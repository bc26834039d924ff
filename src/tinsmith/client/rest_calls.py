"""What the session-less clients share: a connection, and one-line calls on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import urlencode

from tinsmith._version import PROTOCOL_VERSION
from tinsmith.client import futures
from tinsmith.client.config import Config, check_config
from tinsmith.client.connection import Call, Connection
from tinsmith.client.futures import APIFuture
from tinsmith.client.transport import Traffic
from tinsmith.errors import InvalidInputError
from tinsmith.types._model import Model

M = TypeVar("M", bound=Model)


class RestCalls:
    def __init__(
        self,
        _connection: Connection | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        config: Config | None = None,
    ) -> None:
        if _connection is not None and (base_url or api_key or config is not None):
            raise InvalidInputError("A connection was given together with base_url, api_key or config; pass one kind.")
        if config is not None and (base_url or api_key):
            raise InvalidInputError("A config was given together with base_url or api_key; put them into the config.")
        if _connection is None:
            settings = Config.from_env(base_url=base_url, api_key=api_key) if config is None else check_config(config)
            _connection = Connection(settings)
        self._connection = _connection

    def get_telemetry(self) -> None:
        """Kept for old callers; there is nothing to get."""

    def close(self) -> APIFuture[None]:
        """Ends calls in progress and closes the connections."""
        return futures.run(self._connection.close, self._connection.loop)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(base_url={self._connection.config.base_url!r})"

    def _get(
        self, result_type: type[M], path: str, method: str, query: Mapping[str, Any] | None = None
    ) -> APIFuture[M]:
        return self._connection.run(lambda: self._fetch(result_type, path, method, query))

    async def _fetch(self, result_type: type[M], path: str, method: str, query: Mapping[str, Any] | None = None) -> M:
        call = Call(
            "GET", path + query_string(query), traffic=Traffic.REST, headers=sdk_headers(type(self).__name__, method)
        )
        return await self._connection.call_for(result_type, call)

    def _post(self, result_type: type[M], path: str, method: str, body: bytes) -> APIFuture[M]:
        call = Call("POST", path, body, Traffic.REST, headers=sdk_headers(type(self).__name__, method))
        return self._connection.run(lambda: self._connection.call_for(result_type, call))

    def _change(self, verb: str, path: str, method: str, body: bytes = b"") -> APIFuture[None]:
        """A call whose answer has no content. A conflict is final: repeating it would not change the answer."""
        call = Call(verb, path, body, Traffic.REST, headers=sdk_headers(type(self).__name__, method), idempotent=False)

        async def change() -> None:
            await self._connection.call(call)

        return self._connection.run(change)


def sdk_headers(client: str, method: str) -> dict[str, str]:
    """What the hosted service counts its calls by."""
    return {"x-sdk-version": PROTOCOL_VERSION, "x-sdk-method": f"{client}.{method}"}


def query_string(query: Mapping[str, Any] | None) -> str:
    given = {name: value for name, value in (query or {}).items() if value is not None}
    return f"?{urlencode(given)}" if given else ""
