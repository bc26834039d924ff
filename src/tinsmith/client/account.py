"""What belongs to one (server, key) pair and is shared by every client of it in this process.

Server flags, the exchanged token, the dialect the server speaks, and the limits. Accounts are found through a weak
registry: the last client that lets go of one ends it, and two accounts never share anything.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal
from weakref import WeakValueDictionary

import msgspec

from tinsmith.client.config import Config
from tinsmith.client.credentials import Secret, run_credential_command
from tinsmith.client.limits import ByteBudget, PendingSlots, SampleGate
from tinsmith.client.once import Once
from tinsmith.errors import ClientClosedError, ConfigError, TinkerError
from tinsmith.types import ClientConfigResponse, ClientDynamicConfigResponse

logger = logging.getLogger(__name__)

REFRESH_BEFORE_EXPIRY_SECONDS = 300.0
MUST_REFRESH_SECONDS = 60.0
REFRESH_RETRY_SECONDS = 60.0
MIN_LIFETIME_SECONDS = 20.0

Dialect = Literal["unknown", "protobuf", "json"]


class Account:
    """Made and used on the background loop, except for `pending`, which callers' threads use."""

    def __init__(self, config: Config, loop: asyncio.AbstractEventLoop) -> None:
        defaults = ClientConfigResponse()
        self.pending = PendingSlots()
        self.sample_gate = SampleGate(loop, defaults.sample_dispatch_bytes_semaphore_size)
        self.training_bytes = ByteBudget(defaults.fwdbwd_dispatch_bytes_semaphore_size)
        self.response_bytes = ByteBudget(defaults.inflight_response_bytes_semaphore_size)
        self.dynamic_flags = ClientDynamicConfigResponse()
        self.cancellations = asyncio.Semaphore(self.dynamic_flags.sample_cancel_max_batch_size)
        """How many samples are cancelled at the server at the same time."""
        self.dialect: Dialect = "unknown"
        """How forward_backward is sent: protobuf is tried first, and a server that refuses it gets JSON."""
        self.flags: ClientConfigResponse | None = None
        self.token = Token(config)
        self._loading: Once[ClientConfigResponse] = Once()

    async def load_flags(self, fetch: Callable[[], Awaitable[ClientConfigResponse]]) -> ClientConfigResponse:
        """Fetches the flags once, however many clients ask at the same time."""
        if self.flags is not None:
            return self.flags

        async def load() -> ClientConfigResponse:
            flags = await fetch()
            self._apply(flags)
            return flags

        return await self._loading.do(load)

    def _apply(self, flags: ClientConfigResponse) -> None:
        self.token.use_flags(flags)
        self.sample_gate.resize(flags.sample_dispatch_bytes_semaphore_size)
        self.training_bytes.resize(flags.fwdbwd_dispatch_bytes_semaphore_size)
        self.response_bytes.resize(flags.inflight_response_bytes_semaphore_size)
        self.flags = flags

    def use_dynamic_flags(self, flags: ClientDynamicConfigResponse) -> None:
        if flags.sample_cancel_max_batch_size != self.dynamic_flags.sample_cancel_max_batch_size:
            self.cancellations = asyncio.Semaphore(max(1, flags.sample_cancel_max_batch_size))
        self.dynamic_flags = flags


class Token:
    """The credential that goes into requests: the key itself, or a JWT exchanged for it."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.time) -> None:
        self._config = config
        self._clock = clock
        self._exchange_enabled = False
        self._prefers_command = False
        self._jwt: str | None = None
        self._renew_at = 0.0
        """From here on calls wait for a new token."""
        self._renew_ahead_at = 0.0
        """From here on a new token is fetched in the background."""
        self._exchanging: Once[None] = Once()
        self._refresh: asyncio.Task[None] | None = None

    def use_flags(self, flags: ClientConfigResponse) -> None:
        if not flags.pjwt_auth_enabled and self._config.api_key is None:
            raise ConfigError(
                "This server takes API keys as they are, and TINKER_CREDENTIAL_CMD alone gives none it accepts. "
                "Set TINKER_API_KEY or pass api_key=..."
            )
        self._exchange_enabled = flags.pjwt_auth_enabled
        self._prefers_command = flags.pjwt_auth_enabled and flags.credential_default_source == "credential_cmd"

    async def raw(self) -> str:
        """The user's own credential."""
        key, command = self._config.api_key, self._config.credential_command
        if key is not None and (not self._prefers_command or key.startswith("eyJ")):
            return key
        if command is None:
            raise ConfigError("This server wants a credential from a command. Set TINKER_CREDENTIAL_CMD.")
        return Secret(await asyncio.to_thread(run_credential_command, command))

    async def current(self, exchange: Callable[[str], Awaitable[str]]) -> str:
        """The credential to send now. `exchange` turns the user's own into a JWT."""
        if not self._exchange_enabled:
            return await self.raw()
        now = self._clock()
        if self._jwt is None or now >= self._renew_at:
            await self._renew(exchange)
        elif now >= self._renew_ahead_at and self._refresh is None:
            self._refresh = asyncio.get_running_loop().create_task(self._renew_quietly(exchange))
        assert self._jwt is not None
        return self._jwt

    def discard(self, token: str) -> bool:
        """Forgets a token the server no longer takes. False for the user's own credential: there is no other."""
        if self._jwt == token:
            self._jwt = None
        return self._exchange_enabled

    async def _renew(self, exchange: Callable[[str], Awaitable[str]]) -> None:
        async def renew() -> None:
            self._keep(await exchange(await self.raw()))

        await self._exchanging.do(renew)

    def _keep(self, jwt: str) -> None:
        """The margins shrink with the lifetime, so that a short-lived token is not renewed at every call."""
        now = self._clock()
        expires = _expiry(jwt)
        # One that looks expired on arrival was made by a clock that differs from ours; it is good all the same.
        lifetime = max(expires - now, MIN_LIFETIME_SECONDS)
        self._renew_at = now + lifetime - min(MUST_REFRESH_SECONDS, lifetime / 4)
        self._renew_ahead_at = now + lifetime - min(REFRESH_BEFORE_EXPIRY_SECONDS, lifetime / 2)
        self._jwt = Secret(jwt)

    async def _renew_quietly(self, exchange: Callable[[str], Awaitable[str]]) -> None:
        """Ahead of time and in the background: no call waits, and a failure keeps the token in use."""
        self._renew_ahead_at = self._clock() + REFRESH_RETRY_SECONDS
        try:
            await self._renew(exchange)
        except ClientClosedError:
            self._renew_ahead_at = 0.0  # the client that asked is gone; the next one asks again
        except TinkerError as error:
            logger.warning("The access token could not be renewed ahead of time (%s); keeping the old one.", str(error))
        finally:
            self._refresh = None

    async def claims(self, exchange: Callable[[str], Awaitable[str]]) -> dict[str, Any] | None:
        """What the JWT says about the user, or None for a plain key."""
        token = await self.current(exchange)
        if self._exchange_enabled:
            return jwt_claims(token)
        claims = jwt_claims(token) if token.startswith("eyJ") else {}
        return claims if str(claims.get("iss", "")).startswith("passport-") else None


def jwt_claims(jwt: str) -> dict[str, Any]:
    """The payload of a JWT; the signature is the server's business. Empty when it cannot be read."""
    try:
        payload = jwt.split(".")[1]
        claims = msgspec.json.decode(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except (IndexError, ValueError, msgspec.DecodeError):
        return {}
    return claims if isinstance(claims, dict) else {}


def _expiry(jwt: str) -> float:
    expiry = jwt_claims(jwt).get("exp")
    return float(expiry) if isinstance(expiry, int | float) else float("inf")


_registry: WeakValueDictionary[tuple[str, str], Account] = WeakValueDictionary()
_registry_lock = threading.Lock()


def account_of(config: Config, loop: asyncio.AbstractEventLoop) -> Account:
    """The account of a configuration, the same object for everyone who names the same server and key."""
    with _registry_lock:
        account = _registry.get(config.account)
        if account is None:
            account = _registry[config.account] = Account(config, loop)
        return account
