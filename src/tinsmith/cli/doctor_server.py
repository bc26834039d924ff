"""The key and the server: whether there is one, whether it answers, and whether it takes the key."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, NamedTuple

from tinsmith.cli.doctor_places import state_folder
from tinsmith.cli.doctor_report import Check, fault, ok
from tinsmith.cli.failures import explain
from tinsmith.cli.options import Options
from tinsmith.errors import (
    APIConnectionError,
    APIStatusError,
    AuthenticationError,
    ConfigError,
    PermissionDeniedError,
    TinkerError,
)

if TYPE_CHECKING:
    from tinsmith.client.config import Config
    from tinsmith.client.connection import Connection

ANSWER_SECONDS = 3.0
"""For one request; there are five, and one of the first three that gets no answer is the last."""
COMMAND_SECONDS = 3.0
NO_KEY_AT_ALL = "tml-none"
"""Sent where there is no key, to learn whether the server lives and takes any."""


class Answers(NamedTuple):
    models: list[str]
    version: str
    milliseconds: float
    readiness: list[Check]


def is_local(options: Options) -> bool:
    from tinsmith.client.config import LOCAL

    return _base_url(options) == LOCAL


def check_server(options: Options) -> list[Check]:
    if is_local(options):
        return [ok("API key", "the server of this machine takes any"), *_local()]
    key = _key(options)
    return [key, *_remote(options, has_key=key.status == "ok")]


def _base_url(options: Options) -> str:
    from tinsmith.client.config import DEFAULT_BASE_URL

    return options.base_url or os.environ.get("TINKER_BASE_URL") or DEFAULT_BASE_URL


# The key


def _key(options: Options) -> Check:
    from tinsmith.client.config import NO_KEY
    from tinsmith.client.credentials import CREDENTIALS_FILE, check_key, run_credential_command, stored_key

    remedy = explain(ConfigError(NO_KEY)).remedy
    environment, command = os.environ.get("TINKER_API_KEY"), os.environ.get("TINKER_CREDENTIAL_CMD")
    try:
        for key, source in ((options.api_key, "--api-key"), (environment, "TINKER_API_KEY")):
            if key:
                return _masked(check_key(key, source), source)
        if command:
            run_credential_command(command, COMMAND_SECONDS)
            return ok("API key", "TINKER_CREDENTIAL_CMD prints one")
        if key := stored_key():
            return _masked(check_key(key, str(CREDENTIALS_FILE)), str(CREDENTIALS_FILE))
    except ConfigError as error:
        return fault("API key", str(error), remedy)
    return fault("API key", "there is none", remedy)


def _masked(key: str, source: str) -> Check:
    return ok("API key", f"{key[:4]}... from {source}")


# The server


def _remote(options: Options, *, has_key: bool) -> list[Check]:
    from tinsmith.client.config import Config

    timeout = min(options.timeout, ANSWER_SECONDS)
    key = options.api_key if has_key else NO_KEY_AT_ALL
    try:
        config = Config.from_env(
            base_url=options.base_url,
            api_key=key,
            timeout=timeout,
            connect_timeout=timeout,
            retry_budget=0,
            telemetry=False,
        )
    except ConfigError as error:
        return [fault("Server", str(error), "Correct --base-url or TINKER_BASE_URL.")]
    return _asked(config, has_key=has_key)


def _asked(config: Config, *, has_key: bool) -> list[Check]:
    where = config.base_url
    try:
        answers = _ask(config)
    except (AuthenticationError, PermissionDeniedError) as error:
        reachable = ok("Server", f"{where} answers")
        if not has_key:
            return [reachable]
        remedy = "Check that the key belongs to this server: --api-key, TINKER_API_KEY or `tinsmith auth login`."
        return [reachable, fault("Key accepted", f"no, the server answers with {error.status_code}", remedy)]
    except TinkerError as error:
        failure = explain(error)
        told = f"{where}: {' '.join(filter(None, (failure.headline.rstrip('.') + '.', failure.details)))}"
        return [fault("Server", told, failure.remedy or "Check --base-url and --api-key.")]
    models = ", ".join(answers.models) or "none"
    told = f"{where}, {answers.version}, {answers.milliseconds:.0f} ms, models: {models}"
    return [ok("Server", told), *answers.readiness, *([ok("Key accepted", "yes")] if has_key else [])]


def _ask(config: Config) -> Answers:
    from tinsmith.client import futures
    from tinsmith.client.connection import Call, Connection
    from tinsmith.client.transport import Traffic
    from tinsmith.types import GetServerCapabilitiesResponse

    connection = Connection(config)
    call = Call("GET", "/api/v1/get_server_capabilities", traffic=Traffic.REST)
    try:
        connection.run(lambda: connection.call(call)).result()
        started = time.monotonic()  # with the connection made and the settings of the server known
        found = connection.run(lambda: connection.call_for(GetServerCapabilitiesResponse, call)).result()
        milliseconds = (time.monotonic() - started) * 1000
        models = [model.model_name or "(unnamed)" for model in found.supported_models]
        return Answers(models, _version(connection), milliseconds, _readiness(connection))
    finally:
        futures.run(connection.close, connection.loop).result()


def _version(connection: Connection) -> str:
    """Servers of ours say who they are in their description of the API; others need not have one."""
    from tinsmith.client.connection import Call
    from tinsmith.client.transport import Traffic

    call = Call("GET", "/openapi.json", traffic=Traffic.REST, retries=False)
    try:
        info = json.loads(connection.run(lambda: connection.call(call)).result().body)["info"]
        return f"{info['title']} {info['version']}"
    except (TinkerError, ValueError, KeyError, TypeError):
        return "of unknown make"


def _readiness(connection: Connection) -> list[Check]:
    """Servers of ours say whether all their models can work, and if not, why; of others it is not known."""
    from tinsmith.client.connection import Call
    from tinsmith.client.transport import Traffic

    call = Call("GET", "/readyz", traffic=Traffic.REST, retries=False)
    try:
        answer = json.loads(connection.run(lambda: connection.call(call)).result().body)
    except APIStatusError as error:
        reason = error.body.get("detail") if isinstance(error.body, dict) else None
        if error.status_code != 503 or not isinstance(reason, str):
            return []
        remedy = "If it has just been started, wait and run the command again; else the log of the server says more."
        return [fault("Server ready", f"no: {reason}", remedy)]
    except (TinkerError, ValueError):
        return []
    return [ok("Server ready", "yes")] if answer == {"status": "ready"} else []


def _local() -> list[Check]:
    """Whether the server of this machine runs; that it does not is no fault, for it comes when it is needed."""
    from tinsmith.client.config import Config
    from tinsmith.client.local import LOCAL_KEY
    from tinsmith.sharing import SharedFolder

    state = state_folder()
    sleeping = ok("Server", f"local, not running; started when it is needed, with its state in {state}")
    if not (state / "local" / "server.json").exists():
        return [sleeping]
    server = SharedFolder(state).announced()
    if server is None:
        return [sleeping]
    config = Config(
        base_url=server.url, api_key=LOCAL_KEY, proxy="", timeout=ANSWER_SECONDS, retry_budget=0, telemetry=False
    )
    try:
        answers = _ask(config)
    except APIConnectionError:  # what a killed server left behind
        return [sleeping]
    told = f"local, running at {server.url}, {answers.version}, models: {', '.join(answers.models)}"
    return [ok("Server", told), *answers.readiness]
