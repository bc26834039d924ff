"""Who is asking: API keys, short-lived tokens made from them, and signatures on download URLs."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tinsmith.errors import ConfigError
from tinsmith.server.audit import command_line
from tinsmith.server.config import ServerConfig
from tinsmith.server.recent import Latest, Recent
from tinsmith.server.store import LOCAL_OWNER, Store
from tinsmith.server.store.keys import Keys
from tinsmith.server.store.records import ApiKey

log = logging.getLogger(__name__)

T = TypeVar("T")

TOKEN_SECONDS = 3600
"""Clients renew a token five minutes before it ends, so it must last much longer than that."""

_REMEMBER_SECONDS = 5.0
"""How long a checked credential is taken for good, if no key changes meanwhile: a token may last so much longer."""


EARLIER_SECRET = "secret"
_SECRET_BYTES = 32


class Caller(msgspec.Struct, frozen=True):
    """The owner on whose behalf a request is made, and the key that proved it; no key on a server without keys."""

    owner: str
    key: ApiKey | None = None


class Secret:
    """A random number that stays in the database; what it signed, a server on that database said."""

    def __init__(self, value: bytes) -> None:
        self._value = value

    @classmethod
    def of(cls, store: Store, state: Path) -> Secret:
        """Made on first use. Earlier releases had it in the state folder, from where it is taken."""
        earlier = state / EARLIER_SECRET
        made = _earlier(earlier) or secrets.token_hex(_SECRET_BYTES)
        found = cls(bytes.fromhex(store.identity.secret(made)))
        earlier.unlink(missing_ok=True)
        return found

    def signature(self, message: str) -> str:
        return _base64(hmac.digest(self._value, message.encode(), hashlib.sha256))

    def has_signed(self, message: str, signature: str) -> bool:
        return hmac.compare_digest(self.signature(message).encode(), signature.encode())

    def token(self, claims: dict[str, Any]) -> str:
        """A JSON web token (RFC 7519) with an HS256 signature."""
        head = _base64(msgspec.json.encode({"alg": "HS256", "typ": "JWT"}))
        content = f"{head}.{_base64(msgspec.json.encode(claims))}"
        return f"{content}.{self.signature(content)}"

    def claims(self, token: str) -> dict[str, Any] | None:
        """What a token of ours says; `None` for anything else. The algorithm in its head is never asked."""
        content, _, signature = token.rpartition(".")
        if not self.has_signed(content, signature):
            return None
        claims: dict[str, Any] = msgspec.json.decode(_unbase64(content.partition(".")[2]))
        return claims


class Authority:
    """Decides who a credential belongs to. `now` is in seconds since 1970."""

    def __init__(self, config: ServerConfig, store: Store, now: Callable[[], float] = time.time) -> None:
        self.secret = Secret.of(store, config.state)
        self._store = store
        self._now = now
        for number, key in enumerate(config.api_keys, start=1):
            store.keys.register(key, f"configured-{number}", address=command_line())
        if not config.is_loopback and not store.keys.all():
            raise ConfigError(
                f"Without an API key, everybody who reaches {config.host} could use this server. Make one with "
                "`tinsmith keys create`, or choose one and pass it with --api-key (it must start with 'tml-'), or bind "
                "to 127.0.0.1."
            )
        self.takes_any_key = config.takes_any_key
        self._has_keys = False

    def identify(self, credential: str) -> Caller | None:
        """The caller, looked up in the store; `None` if the credential is no good."""
        if not self.needs_key():
            return Caller(LOCAL_OWNER)
        return self._by_token(credential) if credential.startswith("eyJ") else self._by_key(credential)

    def owner_of(self, key_id: int | None) -> str | None:
        """Whose key this is; `None` once it was revoked. No key is the owner's on a server without keys."""
        if key_id is None:
            return None if self.needs_key() else LOCAL_OWNER
        key = self._store.keys.get(key_id)
        return None if key is None else key.owner

    def needs_key(self) -> bool:
        """Whether it matters which key is shown."""
        self._has_keys = self._has_keys or bool(self._store.keys.all())  # the first one may be made at any time
        return self._has_keys and not self.takes_any_key

    def token_for(self, caller: Caller) -> str:
        now = int(self._now())
        return self.secret.token(
            {
                "iss": "tinsmith",
                "sub": caller.owner,
                "org_id": "local",
                "email": "",
                "iat": now,
                "exp": now + TOKEN_SECONDS,
                "key": caller.key.key_id if caller.key else None,
            }
        )

    def revoke(self, caller: Caller, address: str | None) -> None:
        if caller.key is not None:
            self._store.keys.revoke(caller.key.key_id, address=address)

    def _by_key(self, credential: str) -> Caller | None:
        key = self._store.keys.verify(credential)
        return None if key is None else Caller(key.owner, key)

    def _by_token(self, credential: str) -> Caller | None:
        """A token is good as long as the key it was made from."""
        claims = self.secret.claims(credential)
        if claims is None or claims["exp"] <= self._now():
            return None
        key = self._store.keys.get(claims["key"])
        return None if key is None else Caller(key.owner, key)


class Door:
    """Lets in whoever showed a good credential a moment ago, as long as no key has changed since.

    Every request waits for a look at the keys that began after it came, so that a revocation counts at once, wherever
    it was made. With SQLite that takes microseconds; with PostgreSQL, requests that come together share one look.
    """

    def __init__(
        self, authority: Authority, keys: Keys, threads: Executor, now: Callable[[], float] = time.time
    ) -> None:
        self._authority = authority
        self._threads = threads
        self._watch = keys.watch()
        self._changes = Latest(lambda: self._in_thread(keys.changes))
        self._remembered: Recent[tuple[int, str], Caller] = Recent(_REMEMBER_SECONDS, now)

    async def caller(self, credential: str) -> Caller | None:
        """`None` if the credential is no good."""
        if self._authority.takes_any_key:
            return Caller(LOCAL_OWNER)
        changes = self._watch()
        place = await self._changes.get() if changes is None else changes, _digest(credential)
        caller = self._remembered.get(place)
        if caller is None:
            caller = await self._in_thread(partial(self._authority.identify, credential))
            if caller is not None:
                self._remembered.put(place, caller)
        return caller

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _earlier(file: Path) -> str | None:
    """Not if it is empty or cut off, as a power cut could leave it: with an empty one, everybody could sign."""
    try:
        value = bytes.fromhex(file.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return value.hex() if len(value) == _SECRET_BYTES else None


def _digest(credential: str) -> str:
    """Keys are not kept in memory as they are."""
    return hashlib.sha256(credential.encode(errors="replace")).hexdigest()


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _unbase64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
