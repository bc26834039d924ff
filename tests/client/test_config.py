"""Where settings come from, what is refused, and that secrets stay secret."""

import copy
import json
import logging
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tinsmith
from tinsmith.client.config import DEFAULT_BASE_URL, Config, normalise_base_url
from tinsmith.errors import ConfigError, InvalidInputError, InvalidTypeError

KEY = {"TINKER_API_KEY": "tml-environment"}
NOWHERE = Path("/nonexistent/credentials.json")


def from_env(env: dict[str, str], **arguments: Any) -> Config:
    return Config.from_env(env=env, credentials_file=NOWHERE, **arguments)


# Precedence


@pytest.fixture
def credentials(tmp_path: Path) -> Path:
    path = tmp_path / "credentials.json"
    keys = {"one": {"type": "manual", "key": "tml-stored", "name": "laptop"}}
    path.write_text(json.dumps({"version": 1, "default": "one", "keys": keys}))
    return path


@pytest.mark.parametrize(
    ("argument", "environment", "command", "is_stored", "expected"),
    [
        ("tml-argument", "tml-environment", "echo", True, "tml-argument"),
        (None, "tml-environment", "echo", True, "tml-environment"),
        (None, None, "echo", True, None),
        (None, None, None, True, "tml-stored"),
        ("", "", None, True, "tml-stored"),
        ("eyJwt", "tml-environment", "echo", True, "eyJwt"),
        ("malformed", None, "echo", True, None),
        (None, "malformed", "echo", True, None),
    ],
)
def test_a_key_is_looked_for_in_a_fixed_order(
    argument: str | None,
    environment: str | None,
    command: str | None,
    is_stored: bool,
    expected: str | None,
    credentials: Path,
) -> None:
    env = {"TINKER_API_KEY": environment, "TINKER_CREDENTIAL_CMD": command}
    given = {name: value for name, value in env.items() if value is not None}
    file = credentials if is_stored else NOWHERE
    config = Config.from_env(api_key=argument, env=given, credentials_file=file)
    assert config.api_key == expected
    assert config.credential_command == command


@pytest.mark.parametrize(
    ("argument", "variable", "value", "setting", "expected"),
    [
        ({}, None, None, "base_url", DEFAULT_BASE_URL),
        ({}, "TINKER_BASE_URL", "http://env:8000", "base_url", "http://env:8000"),
        ({}, "TINKER_BASE_URL", "", "base_url", DEFAULT_BASE_URL),
        ({"base_url": "http://arg"}, "TINKER_BASE_URL", "http://env", "base_url", "http://arg"),
        ({"base_url": ""}, "TINKER_BASE_URL", "http://env", "base_url", "http://env"),
        ({}, None, None, "project_id", None),
        ({}, "TINKER_PROJECT_ID", "p-env", "project_id", "p-env"),
        ({"project_id": "p-arg"}, "TINKER_PROJECT_ID", "p-env", "project_id", "p-arg"),
        ({}, "TINKER_TAGS", "a, b,,c ", "tags", ("a", "b", "c")),
        ({}, None, None, "tags", ()),
        ({"tags": ("mine",)}, "TINKER_TAGS", "a", "tags", ("mine",)),
        ({}, None, None, "telemetry", True),
        ({}, "TINKER_TELEMETRY", "YES", "telemetry", True),
        ({}, "TINKER_TELEMETRY", "0", "telemetry", False),
        ({}, "TINKER_TELEMETRY", "nonsense", "telemetry", False),
        ({"telemetry": True}, "TINKER_TELEMETRY", "0", "telemetry", True),
        ({"timeout": 5.0}, None, None, "timeout", 5.0),
    ],
)
def test_arguments_win_over_the_environment_which_wins_over_the_defaults(
    argument: dict[str, Any], variable: str | None, value: str | None, setting: str, expected: object
) -> None:
    env = {**KEY, **({variable: value} if variable is not None and value is not None else {})}
    assert getattr(from_env(env, **argument), setting) == expected


def test_access_headers_come_from_the_environment_and_arguments_win() -> None:
    env = {**KEY, "CLOUDFLARE_ACCESS_CLIENT_ID": "id", "CLOUDFLARE_ACCESS_CLIENT_SECRET": "secret"}
    assert from_env(env).default_headers == {"CF-Access-Client-Id": "id", "CF-Access-Client-Secret": "secret"}
    overridden = from_env(env, default_headers={"CF-Access-Client-Id": "mine"})
    assert overridden.default_headers["CF-Access-Client-Id"] == "mine"


def test_the_environment_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-before")
    config = Config.from_env()
    monkeypatch.setenv("TINKER_API_KEY", "tml-after")
    assert config.api_key == "tml-before"


def test_the_constructor_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", "http://env")
    assert Config(api_key="tml-x").base_url == DEFAULT_BASE_URL


# Base URLs


@pytest.mark.parametrize(
    ("given", "normal"),
    [
        ("http://host", "http://host"),
        ("http://host/", "http://host"),
        ("http://host///", "http://host"),
        (" http://host ", "http://host"),
        ("HTTP://HOST", "http://host"),
        ("http://host:80", "http://host"),
        ("http://host:", "http://host"),
        ("https://host:443/", "https://host"),
        ("http://host:443", "http://host:443"),
        ("https://host:80", "https://host:80"),
        ("http://host:8000/Path/", "http://host:8000/Path"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("http://[FE80::1]/", "http://[fe80::1]"),
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
    ],
)
def test_a_server_has_one_spelling(given: str, normal: str) -> None:
    assert normalise_base_url(given) == normal
    assert Config(base_url=given, api_key="tml-x").account == Config(base_url=normal, api_key="tml-x").account


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://host", "https://host"),
        ("http://host", "http://host:8000"),
        ("http://host", "http://host/path"),
        ("http://host/path", "http://host/Path"),
        ("http://localhost", "http://127.0.0.1"),
    ],
)
def test_different_servers_stay_different(one: str, other: str) -> None:
    assert normalise_base_url(one) != normalise_base_url(other)


@pytest.mark.parametrize(
    "url",
    [
        "host",
        "host:8000",
        "ftp://host",
        "http://",
        "http:///path",
        "http://host:port",
        "http://host:99999",
        "http://[::1",
        "http://ho st",
        "http://host/a b",
        "http://host?query=1",
        "http://host#fragment",
    ],
)
def test_what_is_no_base_url_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(ConfigError, match="base_url"):
        from_env(KEY, base_url=url)


@pytest.mark.parametrize("end", ["/v1", "/api/v1", "/api/v1/", "/oai/api/v1"])
def test_a_base_url_that_names_the_api_too_is_refused_with_the_right_one(end: str) -> None:
    with pytest.raises(ConfigError, match=r"the client adds the (\S+) itself\. Use http://host:8000/prefix\."):
        from_env(KEY, base_url=f"http://host:8000/prefix{end}")


@pytest.mark.parametrize("url", ["http://user:hunter2@host", "ftp://user:hunter2@host", "http://hunter2@host/?a=b"])
def test_a_password_in_the_base_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_env(KEY, base_url=url)
    assert "hunter2" not in str(caught.value)


def test_a_base_url_of_the_wrong_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="it must be a text"):
        from_env(KEY, base_url=5)


# Keys


@pytest.mark.parametrize(
    "key", ["sk-secret", "secret", "Tml-secret", " tml-secret", "tml-sec ret", "tml-sec\nret", "tml-ü"]
)
def test_what_cannot_be_a_key_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_env({}, api_key=key)
    assert "the argument api_key" in str(caught.value)
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError, match="TINKER_API_KEY"):
        from_env({"TINKER_API_KEY": key})
    with pytest.raises(ConfigError):
        Config(api_key=key)


def test_no_key_at_all_says_what_to_do() -> None:
    for make in (lambda: from_env({}), Config):
        with pytest.raises(ConfigError, match="set TINKER_API_KEY"):
            make()


def test_a_key_of_the_wrong_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="it must be a text"):
        from_env({}, api_key=b"tml-x")


# Settings


@pytest.mark.parametrize(
    "setting",
    [
        {"timeout": 0},
        {"timeout": -1},
        {"timeout": "60"},
        {"timeout": None},
        {"timeout": float("nan")},
        {"connect_timeout": 0},
        {"retry_budget": -1},
        {"progress_timeout": True},
        {"max_pending": 0},
        {"max_inflight": 0},
        {"when_full": "explode"},
        {"nonsense": 1},
    ],
    ids=str,
)
def test_a_setting_that_makes_no_sense_is_refused_by_name(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        from_env(KEY, **setting)


def test_no_retries_and_no_limit_can_be_asked_for() -> None:
    config = from_env(KEY, retry_budget=0, max_inflight=None, timeout=float("inf"))
    assert config.retry_budget == 0


@pytest.mark.parametrize("client", [tinsmith.ServiceClient, tinsmith.RestClient, tinsmith.AdminClient])
def test_a_plain_dictionary_is_no_config(client: type) -> None:
    for wrong in ({"api_key": "tml-x"}, {}, "http://host"):
        with pytest.raises(InvalidTypeError, match="it must be a Config"):
            client(config=wrong)


@pytest.mark.parametrize("client", [tinsmith.ServiceClient, tinsmith.RestClient, tinsmith.AdminClient])
def test_a_config_and_settings_it_holds_exclude_each_other(client: type) -> None:
    with pytest.raises(InvalidInputError, match="config"):
        client(config=Config(api_key="tml-x"), base_url="http://host")


def test_a_config_cannot_be_changed() -> None:
    config = Config(api_key="tml-x", default_headers={"a": "b"})
    with pytest.raises(AttributeError):
        config.timeout = 5  # type: ignore[misc]
    with pytest.raises(TypeError):
        config.default_headers["a"] = "c"  # type: ignore[index]


# Secrets


@pytest.fixture
def secretive() -> Config:
    return Config(
        api_key="tml-hunter2",
        credential_command="echo hunter2",
        default_headers={"CF-Access-Client-Secret": "hunter2"},
        proxy="http://user:hunter2@proxy",
    )


def test_secrets_are_not_shown(secretive: Config) -> None:
    assert "hunter2" not in repr(secretive)
    assert "hunter2" not in str(secretive)
    assert "hunter2" not in str(secretive.account)
    assert "CF-Access-Client-Secret" in repr(secretive)


def test_a_config_is_not_pickled(secretive: Config) -> None:
    with pytest.raises(TypeError, match=r"Config.from_env\(\) in the other process"):
        pickle.dumps(secretive)


def test_a_config_may_be_copied_in_this_process(secretive: Config) -> None:
    assert copy.copy(secretive).api_key == secretive.api_key


# The log


@pytest.fixture
def clean_log() -> Iterator[logging.Logger]:
    logger = logging.getLogger("tinsmith")
    before = logger.level, list(logger.handlers)
    yield logger
    logger.level, logger.handlers = before


def test_the_log_is_shown_on_demand_and_only_ours(clean_log: logging.Logger) -> None:
    root_before = logging.root.level, list(logging.root.handlers)
    from_env({**KEY, "TINKER_LOG": "debug"})
    from_env({**KEY, "TINKER_LOG": "info"})
    assert clean_log.level == logging.INFO
    assert len(clean_log.handlers) == 1
    assert (logging.root.level, list(logging.root.handlers)) == root_before


@pytest.mark.parametrize("value", ["", "DEBUG", "warning", "nonsense"])
def test_other_values_of_the_log_setting_do_nothing(value: str, clean_log: logging.Logger) -> None:
    before = clean_log.level, list(clean_log.handlers)
    from_env({**KEY, "TINKER_LOG": value})
    assert (clean_log.level, list(clean_log.handlers)) == before


def test_the_log_really_reaches_stderr() -> None:
    code = "import tinsmith; tinsmith.ServiceClient(base_url='http://127.0.0.1:9')"
    env = {**KEY, "TINKER_LOG": "info", "TINKER_SUBPROCESS_SAMPLING": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "TINKER_SUBPROCESS_SAMPLING is set and not needed" in done.stderr


def test_side_process_sampling_is_accepted_with_a_note(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tinsmith"):
        from_env({**KEY, "TINKER_SUBPROCESS_SAMPLING": "1", "TINKER_FEATURE_GATES": "async_sampling"})
    assert "not needed" in caplog.text
