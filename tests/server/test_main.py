"""A state folder has one server."""

from pathlib import Path

import pytest
from filelock import FileLock

from tinsmith.errors import ConfigError
from tinsmith.server.config import ServerConfig
from tinsmith.server.main import serve
from tinsmith.server.models import ModelSource


def test_a_second_server_on_the_same_state_folder_is_refused(tmp_path: Path) -> None:
    config = ServerConfig(models=(ModelSource("tiny", str(tmp_path)),), state=tmp_path)
    with FileLock(tmp_path / "serve.lock"), pytest.raises(ConfigError, match="Another server uses the state folder"):
        serve(config, on_ready=print)
