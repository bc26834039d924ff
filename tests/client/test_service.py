"""The service client: making the other clients, from scratch, from checkpoints and from traced losses."""

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

import tinsmith
from tests.support.probes import loop_lag
from tests.support.server import FakeServer, Reply
from tinsmith import types
from tinsmith.client.config import Config
from tinsmith.errors import InvalidInputError

ADAM = {"type": "adamw"}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture
def service(server: FakeServer) -> Iterator[tinsmith.ServiceClient]:
    config = Config(base_url=server.url, api_key="tml-x", telemetry=False)
    with tinsmith.ServiceClient(config=config) as service:
        yield service


# From scratch


def test_a_training_client_is_made_as_asked(server: FakeServer, service: tinsmith.ServiceClient) -> None:
    client = service.create_lora_training_client(
        "tiny/model-1", 8, 7, True, False, True, {"run": "1"}, types.DimuonOptimizerConfig()
    ).result(10)
    (request,) = server.received("create_model")
    assert request.json() == {
        "session_id": "session-0001",
        "model_seq_id": 0,
        "base_model": "tiny/model-1",
        "user_metadata": {"run": "1"},
        "lora_config": {"rank": 8, "seed": 7, "train_unembed": True, "train_mlp": True, "train_attn": False},
        "optimizer_config": {"type": "dimuon", "version": 1},
        "type": "create_model",
    }
    assert client.model_id == "session-0001:train:0"


def test_the_defaults_of_a_training_client(server: FakeServer, service: tinsmith.ServiceClient) -> None:
    asyncio.run(service.create_lora_training_client_async("tiny/model-1"))
    sent = server.received("create_model")[0].json()
    assert sent["lora_config"] == {"rank": 32, "train_unembed": True, "train_mlp": True, "train_attn": True}
    assert sent["optimizer_config"] == ADAM
    assert "user_metadata" not in sent


def test_models_are_numbered_also_when_one_fails(server: FakeServer, service: tinsmith.ServiceClient) -> None:
    with pytest.raises(tinsmith.RequestFailedError, match="not served here"):
        service.create_lora_training_client("unknown/model").result(10)
    service.create_lora_training_client("tiny/model-1").result(10)
    assert [request.json()["model_seq_id"] for request in server.received("create_model")] == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"base_model": ""}, "base_model"),
        ({"base_model": None}, "base_model"),
        ({"base_model": 5}, "base_model"),
        ({"base_model": "m", "rank": 0}, "rank"),
        ({"base_model": "m", "rank": -1}, "rank"),
        ({"base_model": "m", "rank": "8"}, "rank"),
        ({"base_model": "m", "rank": 1.5}, "rank"),
        ({"base_model": "m", "seed": "x"}, "seed"),
        ({"base_model": "m", "train_mlp": False, "train_attn": False, "train_unembed": False}, "Nothing would be"),
        ({"base_model": "m", "user_metadata": ["a"]}, "user_metadata"),
        ({"base_model": "m", "optimizer": "adam"}, "optimizer"),
    ],
    ids=str,
)
def test_a_model_that_makes_no_sense_is_refused(
    server: FakeServer, service: tinsmith.ServiceClient, arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidInputError, match=says):
        service.create_lora_training_client(**arguments)
    assert server.received("create_model") == []


# From checkpoints


def checkpoint(service: tinsmith.ServiceClient) -> str:
    trainer = service.create_lora_training_client("tiny/model-1", rank=4, train_mlp=False)
    return trainer.save_state("a").result(10).path


def test_saved_weights_are_loaded_into_a_new_model(server: FakeServer, service: tinsmith.ServiceClient) -> None:
    path = checkpoint(service)
    client = service.create_training_client_from_state(path, user_metadata={"from": "a"}).result(10)
    created = server.received("create_model")[-1].json()
    assert created["lora_config"] == {"rank": 4, "train_unembed": True, "train_mlp": False, "train_attn": True}
    assert created["user_metadata"] == {"from": "a"}
    (loaded,) = server.received("load_weights")
    assert loaded.json()["optimizer"] is False
    assert loaded.json()["seq_id"] == 1
    assert client.model_id == "session-0001:train:1"


def test_optimizer_state_is_loaded_on_demand(server: FakeServer, service: tinsmith.ServiceClient) -> None:
    path = checkpoint(service)
    service.create_training_client_from_state_with_optimizer(path).result(10)
    asyncio.run(service.create_training_client_from_state_with_optimizer_async(path))
    assert [request.json()["optimizer"] for request in server.received("load_weights")] == [True, True]
    asyncio.run(service.create_training_client_from_state_async(path))
    assert server.received("load_weights")[-1].json()["optimizer"] is False


def test_a_server_may_create_and_load_in_one_call() -> None:
    with (
        FakeServer(flags={"create_model_via_load_weights": True}) as server,
        tinsmith.ServiceClient(base_url=server.url, api_key="tml-x") as service,
    ):
        path = checkpoint(service)
        client = service.create_training_client_from_state(
            path, "tiny/model-1", {"a": "b"}, "tml-other", types.AdamOptimizerConfig()
        ).result(10)
        (request,) = server.received("load_weights")
        assert request.json() == {
            "session_id": "session-0001",
            "model_seq_id": 1,
            "base_model": "tiny/model-1",
            "user_metadata": {"a": "b"},
            "path": path,
            "optimizer": False,
            "optimizer_config": ADAM,
            "weights_access_token": "tml-other",
            "type": "load_weights",
        }
        assert client.model_id == "session-0001:train:1"
        assert server.received("weights_info") == []
        client.optim_step(types.AdamParams()).result(10)
        assert server.received("optim_step")[0].json()["seq_id"] == 1


def test_the_token_of_another_account_is_used_where_it_is_needed_only(
    server: FakeServer, service: tinsmith.ServiceClient
) -> None:
    path = checkpoint(service)
    service.create_training_client_from_state(path, weights_access_token="tml-other").result(10)
    (asked,) = server.received("weights_info")
    assert asked.headers["x-api-key"] == "tml-other"
    (loaded,) = server.received("load_weights")
    assert loaded.json()["weights_access_token"] == "tml-other"
    assert loaded.headers["x-api-key"] == "tml-x"
    with pytest.raises(tinsmith.ConfigError, match="weights_access_token"):
        service.create_training_client_from_state(path, weights_access_token="secret")


@pytest.mark.parametrize("path", ["", "a", "tinker://run", "tinker://run/weights/", 5, None], ids=repr)
def test_what_is_no_checkpoint_path_is_refused(service: tinsmith.ServiceClient, path: Any) -> None:
    for make in (
        service.create_training_client_from_state,
        service.create_training_client_from_state_with_optimizer,
        lambda path: service.download_checkpoint(path, "/nonexistent"),
        service.copy_weights,
    ):
        with pytest.raises(InvalidInputError):
            make(path)


def test_a_checkpoint_without_an_adapter_is_refused(server: FakeServer, service: tinsmith.ServiceClient) -> None:
    path = checkpoint(service)
    server.script("weights_info", Reply(json={"base_model": "tiny/model-1", "is_lora": False}))
    with pytest.raises(tinsmith.UnsupportedByServerError, match="no LoRA adapter"):
        service.create_training_client_from_state(path).result(10)


# Losses


def loss(logprobs: Any, advantages: Any) -> Any:
    value = -(logprobs * advantages).sum()
    return value, {"custom/size:sum": value}


def test_a_traced_loss_is_created_once_per_session(service: tinsmith.ServiceClient) -> None:
    handle = service.create_custom_loss(loss, {"logprobs": 1, "advantages": 1}).result(20)
    assert handle.loss_id is None
    with pytest.raises(InvalidInputError, match="keep and reuse its handle"):
        service.create_custom_loss(loss, {"logprobs": 1, "advantages": 1}).result(20)


def test_a_loss_whose_upload_failed_may_be_created_again() -> None:
    with (
        FakeServer(flags={"custom_loss_server_side": True}) as server,
        tinsmith.ServiceClient(base_url=server.url, api_key="tml-x") as service,
    ):
        server.script("create_custom_loss", Reply(422, json={"detail": "too clever"}))
        with pytest.raises(tinsmith.UnprocessableEntityError):
            service.create_custom_loss(loss, {"logprobs": 1, "advantages": 1}).result(20)
        handle = service.create_custom_loss(loss, {"logprobs": 1, "advantages": 1}).result(20)
        assert handle.loss_id == "session-0001:loss:1:id"


# The rest


def test_capabilities_name_the_models(service: tinsmith.ServiceClient) -> None:
    models = [model.model_name for model in service.get_server_capabilities().supported_models]
    assert "tiny/model-1" in models
    assert asyncio.run(service.get_server_capabilities_async()) == service.get_server_capabilities()
    assert service.rest.get_server_capabilities().result(10) == service.get_server_capabilities()


def test_asynchronous_calls_do_not_block_the_callers_loop(server: FakeServer, service: tinsmith.ServiceClient) -> None:
    server.script("create_session", Reply(json={"session_id": "session-0001"}, delay=0.3))
    server.script("create_model", Reply(422, json={"detail": "late"}, delay=0.3))

    async def scenario() -> None:
        with loop_lag(asyncio.get_running_loop()) as lag:
            with pytest.raises(tinsmith.UnprocessableEntityError):
                await service.create_lora_training_client_async("tiny/model-1")
            await asyncio.sleep(0)
        assert lag.worst < 0.25

    asyncio.run(scenario())


def test_an_asynchronous_block_closes_the_client(server: FakeServer) -> None:
    async def scenario() -> None:
        async with tinsmith.ServiceClient(base_url=server.url, api_key="tml-x") as service:
            await service.create_sampling_client_async(base_model="tiny/model-1")

    asyncio.run(scenario())
    (finish,) = server.received(lambda request: request.path.endswith("/finish"))
    assert finish.json()["reason"] == {"type": "success"}


def test_the_console_shows_the_session(service: tinsmith.ServiceClient) -> None:
    assert service.get_console_url().endswith("/sessions")
    service.create_sampling_client(base_model="tiny/model-1").result(10)
    assert service.get_console_url().endswith("/sessions/session-0001")


def test_a_client_shows_no_secret(service: tinsmith.ServiceClient) -> None:
    assert "tml-x" not in repr(service)
    assert service.get_telemetry() is None


def test_headers_of_ones_own_are_sent(server: FakeServer) -> None:
    service = tinsmith.ServiceClient(
        base_url=server.url, api_key="tml-x", default_headers_overrides={"X-Mine": "1", "user-agent": "me"}
    )
    service.get_server_capabilities()
    assert {request.headers["x-mine"] for request in server.requests} == {"1"}
    assert {request.headers["user-agent"] for request in server.requests} == {"me"}


def test_a_model_can_be_unloaded_where_the_server_knows_how() -> None:
    with (
        FakeServer(dialect="json") as server,
        tinsmith.ServiceClient(base_url=server.url, api_key="tml-x", display_name="old server") as service,
    ):
        client = service.create_lora_training_client("tiny/model-1")
        assert client.unload_model().result(10).model_id == client.model_id
        (request,) = server.received("unload_model")
        assert request.json() == {"model_id": client.model_id, "type": "unload_model"}


def test_a_server_that_cannot_unload_says_so(service: tinsmith.ServiceClient) -> None:
    client = service.create_lora_training_client("tiny/model-1")
    with pytest.raises(tinsmith.TinkerError):
        client.unload_model().result(10)


# Time limits


def test_every_blocking_method_takes_a_timeout(server: FakeServer, service: tinsmith.ServiceClient) -> None:
    server.hold("create_model")
    with pytest.raises(TimeoutError):
        service.create_lora_training_client("tiny/model-1").result(0.05)
    with pytest.raises(TimeoutError):
        asyncio.run(service.create_lora_training_client("tiny/model-1").result_async(0.05))
    server.release("create_model")
    blocking = {
        tinsmith.ServiceClient: ["get_server_capabilities", "download_checkpoint"],
        tinsmith.TrainingClient: ["result", "get_info", "get_tokenizer"],
        tinsmith.SamplingClient: ["result", "get_base_model", "get_tokenizer"],
    }
    for client, methods in blocking.items():
        for method in methods:
            for name in (method, f"{method}_async"):
                assert inspect.signature(getattr(client, name)).parameters["timeout"].default is None
