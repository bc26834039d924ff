"""Settings that cannot be served are refused before anything is started."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tinsmith.errors import ConfigError
from tinsmith.server.config import ServerConfig
from tinsmith.server.messages import WorkerSettings
from tinsmith.server.models import ModelSource


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"shard_base": "always"}, r"train_workers is 1.*--train-workers 2"),
        ({"shard_base": "always", "train_workers": 2, "device": "mps"}, r"'mps'.*--device cpu"),
    ],
)
def test_a_base_model_that_cannot_be_sharded_is_refused(tmp_path: Path, options: dict[str, object], what: str) -> None:
    models = (ModelSource("tiny", str(tmp_path)),)
    with pytest.raises(ConfigError, match=what):
        ServerConfig(models=models, **options)  # type: ignore[arg-type]
    ServerConfig(models=models, **{**options, "shard_base": "auto"})  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", ["sqlite", "sqlite+pysqlite"])
def test_a_relative_database_is_the_same_file_for_workers_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.chdir(tmp_path)
    models = (ModelSource("tiny", "/nowhere"),)
    expected = f"{scheme}:///{tmp_path}/some/where.db"
    for said in (f"{scheme}:///some/where.db", expected):
        assert ServerConfig(models=models, database=said).database_url == expected
    elsewhere = "postgresql://ann@host/tinsmith"
    assert ServerConfig(models=models, database=elsewhere).database_url == elsewhere


def test_a_storage_that_no_other_process_finds_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'memory://x', which each process has for itself.*s3://bucket/prefix"):
        ServerConfig(models=(ModelSource("tiny", "/nowhere"),), storage="memory://x")


def test_settings_show_no_secrets() -> None:
    url = "postgresql://ann:hunter2@host/tinsmith"
    config = ServerConfig(models=(ModelSource("tiny", "/nowhere"),), database=url, api_keys=("tml-hunter2",))
    worker = WorkerSettings(base_model="tiny", folder="/nowhere", database=url, state="/state")
    for settings in (config, worker, msgspec.structs.replace(worker, role="sample")):
        assert "hunter2" not in f"{settings} {settings!r}"
        assert "tiny" in repr(settings)
    assert "database=''" in repr(ServerConfig(models=config.models))
