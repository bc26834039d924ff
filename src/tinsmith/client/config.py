"""Every setting of the SDK in one frozen record; the environment is read here, once, and nowhere else."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NoReturn
from urllib.parse import urlsplit

import msgspec

from tinsmith.client.credentials import Secret, check_key, has_key_prefix, stored_key
from tinsmith.client.logs import show_log
from tinsmith.errors import ConfigError, InvalidTypeError

logger = logging.getLogger(__name__)

DEFAULT_BASE_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"
LOCAL = "local"
"""As a base URL: the server of this machine, started if need be."""
_DEFAULT_PORTS = {"http": 80, "https": 443}
_OUR_OWN = ("/oai/api/v1", "/api/v1", "/v1")
"""What comes after a base URL; other programs want it to be a part."""
_TRUE = frozenset({"1", "true", "yes", "on"})
NO_KEY = (
    "No API key. Pass api_key=..., set TINKER_API_KEY, or set TINKER_CREDENTIAL_CMD. "
    "A server of your own that has no keys configured takes any key, such as 'tml-local'. "
    "To work on this machine alone, without a key, set TINKER_BASE_URL=local."
)

HookFunction = Callable[[Any], None]


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """What a client needs to know. `Config.from_env()` finds the rest in the environment; the constructor does not."""

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
    """Seconds that one call may spend on retries before its error is raised; 0 means none."""
    progress_timeout: float = 7200.0
    """Seconds that an accepted operation may show no sign of life before `NoProgressError`."""
    proxy: str | None = None
    """Proxy URL; None leaves HTTP_PROXY and its relatives in force, `""` means no proxy whatever they say."""

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
        """Arguments win over the environment, which wins over the credentials file and the defaults.

        The base URL "local" becomes the address of this machine's own server, which is started if it does not run.
        `TINKER_LOG=debug` or `info` also shows this package's log on stderr.
        """
        unknown = settings.keys() - set(cls.__struct_fields__)
        if unknown:
            legal = ", ".join(cls.__struct_fields__)
            raise ConfigError(f"There is no setting {', '.join(sorted(unknown))}. The settings are: {legal}.")
        env = os.environ if env is None else env
        _obey_log_settings(env)
        address = base_url or env.get("TINKER_BASE_URL") or DEFAULT_BASE_URL
        if address == LOCAL:
            access = _local_access(api_key, env)
        else:
            access = _remote_access(address, api_key, env, credentials_file)
        from_environment = access | {
            "project_id": project_id or env.get("TINKER_PROJECT_ID") or None,
            "tags": tuple(tag.strip() for tag in env.get("TINKER_TAGS", "").split(",") if tag.strip()),
            "default_headers": {**_access_headers(env), **(default_headers or {})},
            "telemetry": env.get("TINKER_TELEMETRY", "1").strip().lower() in _TRUE,
        }
        return cls(**{**from_environment, **settings})

    def __post_init__(self) -> None:
        force_setattr = msgspec.structs.force_setattr
        force_setattr(self, "base_url", normalise_base_url(self.base_url))
        force_setattr(self, "default_headers", MappingProxyType(dict(self.default_headers)))
        force_setattr(self, "tags", tuple(self.tags))
        if self.api_key is not None:
            checked = check_key(self.api_key, "the argument api_key")
            force_setattr(self, "api_key", Secret(checked))
        elif self.credential_command is None:
            raise ConfigError(NO_KEY)
        for name in ("timeout", "connect_timeout", "progress_timeout", "max_pending", "max_inflight"):
            _check_positive(name, getattr(self, name))
        if self.retry_budget != 0:  # which means: no retries
            _check_positive("retry_budget", self.retry_budget)
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


def check_config(config: object) -> Config:
    """Settings travel in a `Config` and in nothing else."""
    if not isinstance(config, Config):
        raise InvalidTypeError(
            f"config is a {type(config).__name__}; it must be a Config, such as Config.from_env(timeout=30).",
            field="config",
        )
    return config


def find_static_key(env: Mapping[str, str] | None = None, credentials_file: Path | None = None) -> str | None:
    """The key of the environment or the credentials file; None if there is none that can be one."""
    key = (os.environ if env is None else env).get("TINKER_API_KEY") or stored_key(credentials_file)
    return key if key and has_key_prefix(key) else None


def has_credential_command(env: Mapping[str, str] | None = None) -> bool:
    return bool((os.environ if env is None else env).get("TINKER_CREDENTIAL_CMD"))


def normalise_base_url(url: str) -> str:
    """One spelling per server, so that clients of one account find each other."""
    if not isinstance(url, str):
        raise ConfigError(f"base_url is {url!r}; it must be a text.")
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"base_url is not a URL ({error}). It looks like http://host:port.") from None
    if "@" in parts.netloc:
        raise ConfigError("base_url holds a user name or password; pass the key as api_key instead.")
    scheme = parts.scheme.lower()
    if scheme not in _DEFAULT_PORTS or not parts.hostname or any(map(str.isspace, url.strip())):
        raise ConfigError(
            f"base_url is {url!r}; it must look like http://host:port or https://host/path (see TINKER_BASE_URL)."
        )
    if parts.query or parts.fragment:
        raise ConfigError(f"base_url is {url!r}; it must not have a query or a fragment.")
    path = parts.path.rstrip("/")
    if found := next((end for end in _OUR_OWN if path.endswith(end)), None):
        base = url.strip().rstrip("/").removesuffix(found)
        raise ConfigError(f"base_url is {url!r}; the client adds the {found} itself. Use {base}.")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    suffix = "" if port is None or port == _DEFAULT_PORTS[scheme] else f":{port}"
    return f"{scheme}://{host}{suffix}{path}"


def _check_positive(name: str, value: object) -> None:
    if value is None and name == "max_inflight":
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{name} is {value!r}; it must be a number greater than 0.")


def _remote_access(
    base_url: str, api_key: str | None, env: Mapping[str, str], credentials_file: Path | None
) -> dict[str, Any]:
    command = env.get("TINKER_CREDENTIAL_CMD") or None
    key = _find_key(api_key, env, command, credentials_file)
    return {"base_url": base_url, "api_key": key, "credential_command": command}


def _local_access(api_key: str | None, env: Mapping[str, str]) -> dict[str, Any]:
    """The credentials in the environment are for another server, and a proxy cannot find this one."""
    from tinsmith.client.local import DEFAULT_STATE, LOCAL_KEY, local_server

    state = Path(env.get("TINSMITH_STATE") or DEFAULT_STATE)
    url = local_server(state, env.get("TINSMITH_LOCAL_MODEL", ""))
    return {"base_url": url, "api_key": api_key or LOCAL_KEY, "proxy": ""}


def _find_key(
    argument: str | None, env: Mapping[str, str], command: str | None, credentials_file: Path | None
) -> str | None:
    for key, source in ((argument, "the argument api_key"), (env.get("TINKER_API_KEY"), "TINKER_API_KEY")):
        if key is not None and not isinstance(key, str):
            raise ConfigError(f"The API key from {source} is a {type(key).__name__}; it must be a text.")
        if key and command and not has_key_prefix(key):
            return None  # a malformed key gives way to a configured command
        if key:
            return check_key(key, source)
    if command:
        return None
    if key := stored_key(credentials_file):
        return check_key(key, "the credentials file")
    raise ConfigError(NO_KEY)


def _access_headers(env: Mapping[str, str]) -> dict[str, str]:
    names = {
        "CF-Access-Client-Id": "CLOUDFLARE_ACCESS_CLIENT_ID",
        "CF-Access-Client-Secret": "CLOUDFLARE_ACCESS_CLIENT_SECRET",
    }
    return {header: env[variable] for header, variable in names.items() if env.get(variable)}


def _obey_log_settings(env: Mapping[str, str]) -> None:
    level = env.get("TINKER_LOG")
    if level in ("debug", "info"):
        show_log(level)
    if env.get("TINKER_SUBPROCESS_SAMPLING"):
        logger.info("TINKER_SUBPROCESS_SAMPLING is set and not needed: sampling does not block other work here.")
