"""Every setting of the SDK in one frozen record; the environment is read here, once, and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NoReturn
from urllib.parse import urlsplit

import msgspec

from tinsmith.client.credentials import check_key, has_key_prefix, stored_key
from tinsmith.errors import ConfigError

DEFAULT_BASE_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"
_DEFAULT_PORTS = {"http": 80, "https": 443}
_TRUE = frozenset({"1", "true", "yes", "on"})

HookFunction = Callable[[Any], None]


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """What a client needs to know. Build it with `Config.from_env()`; the constructor takes final values."""

    base_url: str = DEFAULT_BASE_URL
    """Normalised: lower-case scheme and host, no default port, no trailing slash."""
    api_key: str | None = None
    """A key (`tml-...`) or a JWT (`eyJ...`). None means that `credential_command` supplies it."""
    credential_command: str | None = None
    """Shell command that prints a credential; used when there is no key, or when the server asks for it."""
    project_id: str | None = None
    tags: tuple[str, ...] = ()
    default_headers: Mapping[str, str] = {}
    """Sent with every request, over our own."""

    timeout: float = 60.0
    """Seconds for one HTTP request. Long polls, heartbeats and telemetry have their own, shorter limits."""
    connect_timeout: float = 5.0
    retry_budget: float = 300.0
    """Seconds that one call may spend on retries before its error is raised."""
    progress_timeout: float = 7200.0
    """Seconds that an accepted operation may show no sign of life before `NoProgressError`."""
    proxy: str | None = None
    """Proxy URL; None leaves HTTP_PROXY and its relatives in force."""

    max_pending: int = 16_384
    """Unfinished samples per account. `when_full` says what `sample()` does beyond that."""
    when_full: Literal["block", "error"] = "block"
    max_inflight: int | None = None
    """Unfinished training operations per model; None pipelines freely, 1 waits for each result."""
    parallel_chunks: bool | None = None
    """Whether the chunks of one call are sent together; None leaves it to the server."""

    telemetry: bool = True
    """Whether errors and session events are reported to the server. Local hooks do not depend on it."""
    hooks: tuple[HookFunction, ...] = ()
    """Functions called with one frozen record per HTTP attempt, queue-state change and backoff."""

    @classmethod
    def from_env(
        cls,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        project_id: str | None = None,
        default_headers: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        credentials_file: Path | None = None,
        **settings: Any,
    ) -> Config:
        """Arguments win over the environment, which wins over the credentials file and the defaults."""
        env = os.environ if env is None else env
        command = env.get("TINKER_CREDENTIAL_CMD") or None
        try:
            return cls(
                base_url=normalise_base_url(base_url or env.get("TINKER_BASE_URL") or DEFAULT_BASE_URL),
                api_key=_find_key(api_key, env, command, credentials_file),
                credential_command=command,
                project_id=project_id or env.get("TINKER_PROJECT_ID") or None,
                tags=tuple(tag.strip() for tag in env.get("TINKER_TAGS", "").split(",") if tag.strip()),
                default_headers=MappingProxyType({**_access_headers(env), **(default_headers or {})}),
                telemetry=settings.pop("telemetry", env.get("TINKER_TELEMETRY", "1").strip().lower() in _TRUE),
                **settings,
            )
        except TypeError as error:
            legal = ", ".join(cls.__struct_fields__)
            raise ConfigError(f"{error}. The settings are: {legal}.") from None

    def __post_init__(self) -> None:
        positive = ("timeout", "connect_timeout", "retry_budget", "progress_timeout", "max_pending")
        for name in (*positive, "max_inflight"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value!r}; it must be greater than 0.")
        if self.when_full not in ("block", "error"):
            raise ConfigError(f"when_full is {self.when_full!r}; it must be 'block' or 'error'.")

    @property
    def account(self) -> tuple[str, str]:
        """What limits, pools and flags are shared by: the server and a digest of the credential."""
        credential = self.api_key or f"command:{self.credential_command}"
        return self.base_url, sha256(credential.encode()).hexdigest()

    def __repr__(self) -> str:
        shown = {name: getattr(self, name) for name in self.__struct_fields__}
        shown["api_key"] = self.api_key and f"{self.api_key[:4]}..."
        shown["credential_command"] = self.credential_command and "..."
        shown["default_headers"] = dict.fromkeys(self.default_headers, "...")
        shown["proxy"] = self.proxy and "..."
        return f"Config({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("A Config holds secrets and is not pickled; call Config.from_env() in the other process.")


def normalise_base_url(url: str) -> str:
    """One spelling per server, so that clients of one account find each other."""
    parts = urlsplit(url.strip())
    scheme = parts.scheme.lower()
    if scheme not in _DEFAULT_PORTS or not parts.hostname:
        raise ConfigError(
            f"base_url is {url!r}; it must look like http://host:port or https://host/path (see TINKER_BASE_URL)."
        )
    if parts.username or parts.password:
        raise ConfigError("base_url holds a user name or password; pass the key as api_key instead.")
    if parts.query or parts.fragment:
        raise ConfigError(f"base_url is {url!r}; it must not have a query or a fragment.")
    try:
        port = parts.port
    except ValueError:
        raise ConfigError(f"base_url is {url!r}; its port is not a number from 0 to 65535.") from None
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    suffix = "" if port is None or port == _DEFAULT_PORTS[scheme] else f":{port}"
    return f"{scheme}://{host}{suffix}{parts.path.rstrip('/')}"


def _find_key(
    argument: str | None, env: Mapping[str, str], command: str | None, credentials_file: Path | None
) -> str | None:
    for key, source in ((argument, "the argument api_key"), (env.get("TINKER_API_KEY"), "TINKER_API_KEY")):
        if key and command and not has_key_prefix(key):
            return None  # a malformed key gives way to a configured command
        if key:
            return check_key(key, source)
    if command:
        return None
    if key := stored_key(credentials_file):
        return check_key(key, "the credentials file")
    raise ConfigError(
        "No API key. Pass api_key=..., set TINKER_API_KEY, or set TINKER_CREDENTIAL_CMD. "
        "A server of your own that has no keys configured takes any key, such as 'tml-local'."
    )


def _access_headers(env: Mapping[str, str]) -> dict[str, str]:
    names = {
        "CF-Access-Client-Id": "CLOUDFLARE_ACCESS_CLIENT_ID",
        "CF-Access-Client-Secret": "CLOUDFLARE_ACCESS_CLIENT_SECRET",
    }
    return {header: env[variable] for header, variable in names.items() if env.get(variable)}
