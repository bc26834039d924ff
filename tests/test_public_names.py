"""Code written for the official package finds every name here, of the same kind, with the same arguments."""

import asyncio
import builtins
import inspect
import types as builtin_types
import typing
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import tinker
from tinker.lib.retry_handler import RetryConfig as OfficialRetryConfig

import tinsmith
from tests.support.server import FakeServer
from tinsmith import types
from tinsmith.client.retry import RetryConfig

CLIENTS = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient")

OURS_ALONE = {
    ("ServiceClient", "__init__"): {"config"},
    ("RestClient", "__init__"): {"config"},
    ("AdminClient", "__init__"): {"config"},
    ("TrainingClient", "forward_backward_custom"): {"framework"},
    ("TrainingClient", "forward_backward_custom_async"): {"framework"},
}
"""Keyword parameters that we added on purpose."""

RENAMED = {"holder": "session", "_holder": "_connection"}
"""Objects of the SDK's own, which no user makes."""


def kind(value: object) -> str:
    if isinstance(value, builtin_types.ModuleType):
        return "module"
    if not inspect.isclass(value):
        return "text" if isinstance(value, str) else "alias"
    if issubclass(value, Warning):
        return "warning"
    return "exception" if issubclass(value, BaseException) else "class"


@pytest.mark.parametrize("name", tinker.__all__)
def test_every_official_name_exists_and_is_of_the_same_kind(name: str) -> None:
    assert name in tinsmith.__all__
    assert kind(getattr(tinsmith, name)) == kind(getattr(tinker, name))


def test_there_are_as_many_official_names_as_we_think() -> None:
    assert len(tinker.__all__) == 61


def test_every_name_that_is_announced_can_be_loaded() -> None:
    for name in tinsmith.__all__:
        getattr(tinsmith, name)
    assert set(tinsmith.__all__) <= set(dir(tinsmith))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        tinsmith.Nonsense  # noqa: B018


def test_type_checkers_see_every_name_that_is_loaded_on_first_use() -> None:
    source = inspect.getsource(tinsmith)
    for_checkers = source[source.index("if TYPE_CHECKING:") : source.index("_MODULES = ")]
    starred = {*dir(tinsmith.errors), *dir(types)}
    missing = [name for name in tinsmith.__all__ if name not in starred and f" as {name}\n" not in for_checkers]
    assert missing == ["__title__", "__version__"]


# Clients


def public_methods(client: str) -> list[str]:
    return [name for name in dir(getattr(tinker, client)) if not name.startswith("_")]


MADE_BY_USERS = ("ServiceClient", "RestClient", "AdminClient")
METHODS = [(client, method) for client in CLIENTS for method in public_methods(client)]
METHODS += [(client, "__init__") for client in MADE_BY_USERS]


@pytest.mark.parametrize(("client", "method"), METHODS)
def test_every_official_method_exists_and_takes_the_same_arguments(client: str, method: str) -> None:
    official = inspect.getattr_static(getattr(tinker, client), method)
    ours = inspect.getattr_static(getattr(tinsmith, client), method)
    if isinstance(official, property):
        assert isinstance(ours, property)
        return
    assert isinstance(official, staticmethod) == isinstance(ours, staticmethod)
    added = OURS_ALONE.get((client, method), set())
    signature = inspect.signature(_function(ours)).parameters
    if "timeout" in signature and "timeout" not in inspect.signature(_function(official)).parameters:
        added = {*added, "timeout"}  # every method that waits for the server takes one
    assert parameters(ours, without=added) == parameters(official)
    for name in added:
        assert inspect.signature(_function(ours)).parameters[name].kind is inspect.Parameter.KEYWORD_ONLY


def parameters(function: Any, without: set[str] = frozenset()) -> list[tuple[str, Any, Any]]:  # type: ignore[assignment]
    return [
        (RENAMED.get(each.name, each.name), each.kind, each.default)
        for each in inspect.signature(_function(function)).parameters.values()
        if each.name not in without
    ]


def _function(found: Any) -> Callable[..., Any]:
    return typing.cast("Callable[..., Any]", getattr(found, "__func__", found))


@pytest.mark.parametrize("client", CLIENTS)
def test_asynchronous_twins_take_what_their_synchronous_ones_take(client: str) -> None:
    ours = getattr(tinsmith, client)
    twins = [name for name in dir(ours) if name.endswith("_async") and not name.startswith("_")]
    assert twins
    for name in twins:
        function, twin = getattr(ours, name.removesuffix("_async")), getattr(ours, name)
        assert inspect.iscoroutinefunction(twin), name
        assert not inspect.iscoroutinefunction(function), name
        assert parameters(twin) == parameters(function), name


@pytest.mark.parametrize("client", CLIENTS)
def test_the_annotations_of_every_public_method_can_be_resolved(client: str) -> None:
    ours = getattr(tinsmith, client)
    for name, method in inspect.getmembers(ours, inspect.isfunction):
        if not name.startswith("_") and method.__module__.startswith("tinsmith."):
            hints = typing.get_type_hints(method, localns=names_for_checkers())
            assert "return" in hints, name


def names_for_checkers() -> dict[str, Any]:
    """What our modules import for type checkers alone."""
    import torch

    from tinsmith.text.fast_tokenizer import Tokenizer

    return {"Tokenizer": Tokenizer, "torch": torch}


def test_results_are_of_the_declared_types() -> None:
    with FakeServer() as server, tinsmith.ServiceClient(base_url=server.url, api_key="tml-x") as service:
        sampler = service.create_sampling_client(base_model="tiny/model-1")
        trainer = service.create_lora_training_client("tiny/model-1", rank=8)
        prompt, params = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=2)
        optimizer = types.AdamParams()
        check(service.get_server_capabilities(), tinsmith.ServiceClient.get_server_capabilities)
        check(sampler, tinsmith.ServiceClient.create_sampling_client)
        check(trainer, tinsmith.ServiceClient.create_lora_training_client)
        check(sampler.sample(prompt, 1, params), tinsmith.SamplingClient.sample)
        check(sampler.compute_logprobs(prompt), tinsmith.SamplingClient.compute_logprobs)
        check(sampler.get_base_model(), tinsmith.SamplingClient.get_base_model)
        check(trainer.get_info(), tinsmith.TrainingClient.get_info)
        check(trainer.optim_step(optimizer), tinsmith.TrainingClient.optim_step)
        check(trainer.save_state("a"), tinsmith.TrainingClient.save_state)
        check(service.rest.list_training_runs(), tinsmith.RestClient.list_training_runs)
        check(service.rest.get_session("session-0001"), tinsmith.RestClient.get_session)
        check(asyncio.run(sampler.sample_async(prompt, 1, params)), tinsmith.SamplingClient.sample_async)
        check(asyncio.run(service.rest.list_sessions_async()), tinsmith.RestClient.list_sessions_async)
        check(service.get_console_url(), tinsmith.ServiceClient.get_console_url)


def check(value: object, method: Callable[..., Any]) -> None:
    """The value is what the method's annotation says, and so is the result of a future."""
    declared = typing.get_type_hints(method, localns=names_for_checkers())["return"]
    origin = typing.get_origin(declared) or declared
    assert isinstance(value, origin), f"{method.__name__} returned {value!r}"
    if isinstance(value, Future) and declared is not origin:  # a client is a future of itself
        (result_type,) = typing.get_args(declared)
        assert isinstance(value.result(30), typing.get_origin(result_type) or result_type), method.__name__


# Errors and settings


OFFICIAL_ERRORS = [name for name in tinker.__all__ if kind(getattr(tinker, name)) == "exception"]


@pytest.mark.parametrize("name", OFFICIAL_ERRORS)
def test_errors_descend_from_the_same_errors(name: str) -> None:
    official = {base.__name__ for base in getattr(tinker, name).__mro__}
    ours = {base.__name__ for base in getattr(tinsmith, name).__mro__}
    assert official <= ours


def test_the_errors_of_a_client_are_still_caught_as_what_they_used_to_be() -> None:
    assert issubclass(tinsmith.ClientClosedError, RuntimeError)
    assert issubclass(tinsmith.InvalidInputError, ValueError)
    assert issubclass(tinsmith.InvalidTypeError, TypeError)
    assert issubclass(tinsmith.UnsupportedByServerError, RuntimeError)
    assert issubclass(tinsmith.ExperimentalWarning, FutureWarning)


def test_retry_settings_have_the_official_fields_and_defaults() -> None:
    official, ours = OfficialRetryConfig(), RetryConfig()
    names = [name for name in OfficialRetryConfig.__dataclass_fields__ if name != "retryable_exceptions"]
    assert len(names) == 7
    assert {name: getattr(ours, name) for name in names} == {name: getattr(official, name) for name in names}
    assert {builtins.TimeoutError, tinsmith.APIConnectionError} <= set(ours.retryable_exceptions)
    assert hash(ours) == hash(RetryConfig())


@pytest.mark.parametrize("wrong", [0, -1])
def test_a_limit_on_connections_that_lets_none_through_is_refused(wrong: int) -> None:
    with pytest.raises(ValueError, match="max_connections"):
        RetryConfig(max_connections=wrong)
