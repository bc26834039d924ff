"""Settings that cannot be served are refused before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinsmith.errors import ConfigError
from tinsmith.server.config import ServerConfig
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
