"""A server that cannot start says why and ends; a model that cannot be loaded does not hinder the others."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

import tinsmith
from tests.end_to_end.serving import KEY, ServerProcess, failed_start, wait_until
from tinsmith.errors import RequestFailedError

GOOD, BROKEN = "tiny/model-1", "tiny/broken"


@pytest.fixture
def model(models: Mapping[str, Path], tmp_path: Path) -> Path:
    """A model folder to spoil."""
    return Path(shutil.copytree(models[GOOD], tmp_path / "model"))


def test_what_makes_a_start_impossible_is_a_line_of_the_log_for_programs(tmp_path: Path) -> None:
    line = json.loads(failed_start(tmp_path, "--log-format=json", "--model=/nothing"))
    assert (line["level"], line["logger"]) == ("critical", "tinsmith.server")
    assert "'/nothing' is not a folder" in line["message"]


def test_the_log_tells_of_the_start_and_of_the_end(models: Mapping[str, Path], tmp_path: Path) -> None:
    with ServerProcess(tmp_path, {GOOD: models[GOOD]}, "--log-format=json", "--max-models=7") as server:
        url = server.url
    said = [json.loads(line)["message"] for line in server.log().splitlines()]
    begins = f"Tinsmith {tinsmith.__version__} starts on 127.0.0.1"
    (start,) = (message for message in said if message.startswith(begins))
    assert str(tmp_path) in start
    assert "7 models" in start
    assert f"Loading {GOOD} ..." in said
    assert f"Ready at {url}." in said
    assert said[-2:] == ["SIGTERM: the server stops.", "Stopped."]


def _without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _with_half_the_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def _without_a_tensor(folder: Path) -> None:
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.norm.weight"]
    save_file(tensors, weights)


def _of_another_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"]}))


SPOILED: Mapping[Callable[[Path], None], str] = {
    _without_weights: "lacks model.safetensors",
    _with_half_the_weights: "Fetch it again",
    _without_a_tensor: "has no tensor model.norm.weight",
    _of_another_architecture: "MambaForCausalLM, which is not supported",
}


@pytest.mark.parametrize("spoil", SPOILED, ids=lambda spoil: spoil.__name__.strip("_"))
def test_a_model_that_cannot_be_served_is_named_with_what_is_wrong(
    model: Path, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(model)
    said = failed_start(tmp_path / "state", f"--model=mine={model}")
    assert SPOILED[spoil] in said
    assert str(model) in said or "'mine'" in said


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_what_else_can_be_wrong_at_the_start_is_said_in_one_line(model: Path, tmp_path: Path, taken_port: int) -> None:
    served = f"--model={model}"
    (tmp_path / "file").touch()
    assert "Choose another with --state" in failed_start(tmp_path / "file" / "state", served)
    state = tmp_path / "state"
    assert "Choose others with --host and --port" in failed_start(state, served, f"--port={taken_port}")
    unreachable = failed_start(state, served, "--database=postgresql://ann:secret@127.0.0.1:1/tinsmith")
    assert "The database cannot be opened" in unreachable
    assert "secret" not in unreachable
    (tmp_path / "junk.db").write_text("no database\n" * 1000)
    damaged = failed_start(tmp_path / "other", served, f"--database=sqlite:///{tmp_path / 'junk.db'}")
    assert f"The database {tmp_path / 'junk.db'} cannot be read" in damaged
    assert "--ray is empty" in failed_start(tmp_path / "other", served, "--ray=")


@pytest.mark.one_machine("on a cluster such a start is refused")
def test_beside_a_model_that_cannot_be_loaded_the_other_is_served(
    models: Mapping[str, Path], model: Path, tmp_path: Path
) -> None:
    _without_a_tensor(model)
    with (
        ServerProcess(tmp_path / "state", {GOOD: models[GOOD], BROKEN: model}) as server,
        tinsmith.ServiceClient(base_url=server.url, api_key=KEY) as client,
    ):
        ready = server.call("GET", "/readyz")
        assert ready.status == 503
        assert "'tiny/broken' cannot be loaded" in ready.json()["detail"]
        assert {one.model_name: one.trainable for one in client.get_server_capabilities().supported_models} == {
            GOOD: True,
            BROKEN: False,
        }
        with pytest.raises(RequestFailedError, match=r"has no tensor model\.norm\.weight"):
            client.create_lora_training_client(BROKEN, rank=4).result(10)
        assert client.create_lora_training_client(GOOD, rank=4).get_info().model_data.model_name == GOOD
        wait_until(lambda: len(server.workers()) == 1, 30, "the worker that was given up is still there")
