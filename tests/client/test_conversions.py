"""Exports and imports on the side of the client, where the server is not one of ours or breaks off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import tinsmith
from tests.support.script import Html, Reply
from tests.support.server import FakeServer
from tinsmith.errors import APIConnectionError, InvalidInputError, NotFoundError, UnsupportedByServerError
from tinsmith.wire import tar

PATH = "tinker://run/weights/name"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


@pytest.fixture
def rest(server: FakeServer) -> Iterator[tinsmith.RestClient]:
    config = tinsmith.Config.from_env(base_url=server.url, api_key="tml-x", retry_budget=5.0, telemetry=False)
    client = tinsmith.RestClient(config=config)
    yield client
    client.close().result()


def test_a_server_that_makes_no_exports_and_takes_no_adapters_is_named(
    rest: tinsmith.RestClient, server: FakeServer, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedByServerError, match=server.url):
        rest.export_checkpoint(PATH, tmp_path / "out").result()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes(b"x")
    server.script("import_weights", Html(404))
    with pytest.raises(UnsupportedByServerError, match=server.url):
        rest.import_adapter(tmp_path, "a/b").result()
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_is_not_there_is_not_taken_for_a_server_that_makes_no_exports(
    rest: tinsmith.RestClient, server: FakeServer, tmp_path: Path
) -> None:
    server.script("export", Reply(404, {"detail": "There is no checkpoint tinker://run/weights/name."}))
    with pytest.raises(NotFoundError):
        rest.export_checkpoint(PATH, tmp_path / "out").result()


@pytest.mark.parametrize(
    "body",
    [
        tar.head("name/one", 1000) + b"x" * 500,
        tar.head("name/one", 3) + b"abc" + tar.padding(3),
        b"no tar at all" * 100,
    ],
    ids=["file", "end", "text"],
)
def test_an_export_that_breaks_off_leaves_nothing_behind(
    rest: tinsmith.RestClient, server: FakeServer, tmp_path: Path, body: bytes
) -> None:
    server.script("export", Reply(200, body=body))
    with pytest.raises(APIConnectionError, match="The export broke off"):
        rest.export_checkpoint(PATH, tmp_path / "out").result()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["name/../../escaped", "name"])
def test_a_server_cannot_write_outside_the_folder(
    rest: tinsmith.RestClient, server: FakeServer, tmp_path: Path, name: str
) -> None:
    body = tar.head(name, 3) + b"abc" + tar.padding(3) + tar.END
    server.script("export", Reply(200, body=body))
    (tmp_path / "inner").mkdir()
    with pytest.raises((APIConnectionError, InvalidInputError), match="outside the folder"):
        rest.export_checkpoint(PATH, tmp_path / "inner" / "out").result()
    assert [path.name for path in tmp_path.rglob("*")] == ["inner"]
