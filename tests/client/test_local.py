"""Local mode without a model: who counts as a user, what is refused, and what a failed start says."""

from __future__ import annotations

import io
import platform
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tinsmith.client import local
from tinsmith.client.config import Config
from tinsmith.client.local import local_server
from tinsmith.errors import APIConnectionError, APITimeoutError, ConfigError, MissingExtraError
from tinsmith.sharing import RunningServer, SharedFolder

USER = """
import sys
from pathlib import Path
from tinsmith.sharing import SharedFolder
lock = SharedFolder(Path(sys.argv[1])).register()
print("registered", flush=True)
sys.stdin.readline()
"""


def running_server(**changes: Any) -> RunningServer:
    facts: dict[str, Any] = {"url": "http://127.0.0.1:9", "model": "", "host": platform.node(), "pid": 1, "started": ""}
    return RunningServer(**facts | changes)


@pytest.fixture
def folder(tmp_path: Path) -> SharedFolder:
    return SharedFolder(tmp_path)


@pytest.fixture
def living(folder: SharedFolder) -> Iterator[SharedFolder]:
    """A folder whose server lives, as far as locks can tell."""
    with folder.server_lock().acquire(timeout=0):
        yield folder


def executable(folder: Path, script: str) -> str:
    """A program that stands for Python, and so for the server."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


# Who is there


def test_a_killed_user_no_longer_counts_and_leaves_nothing(folder: SharedFolder, tmp_path: Path) -> None:
    command = [sys.executable, "-c", USER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as user:
        assert user.stdout is not None
        assert user.stdout.readline() == b"registered\n"
        assert not folder.is_unused()
        user.kill()
    assert folder.is_unused()
    assert list(tmp_path.glob("local/users/*")) == []


def test_what_a_dead_server_wrote_does_not_make_it_live(folder: SharedFolder) -> None:
    folder.announce(running_server())
    assert not folder.server_lives()


def test_a_server_that_lives_is_used(living: SharedFolder, tmp_path: Path) -> None:
    living.announce(running_server(url="http://127.0.0.1:12345"))
    assert local_server(tmp_path) == "http://127.0.0.1:12345"
    assert not living.is_unused()


def test_a_process_counts_once_however_many_clients_it_makes(living: SharedFolder, tmp_path: Path) -> None:
    living.announce(running_server())
    for _ in range(3):
        local_server(tmp_path)
    assert len(list(tmp_path.glob("local/users/*"))) == 1


# Settings


def test_the_credentials_and_proxies_of_other_servers_are_left_alone(living: SharedFolder, tmp_path: Path) -> None:
    living.announce(running_server())
    env = {
        "TINKER_BASE_URL": "local",
        "TINKER_API_KEY": "tml-hosted",
        "TINKER_CREDENTIAL_CMD": "echo secret",
        "TINSMITH_STATE": str(tmp_path),
    }
    config = Config.from_env(env=env)
    assert (config.api_key, config.credential_command, config.proxy) == ("tml-local", None, "")
    assert Config.from_env(env=env, api_key="tml-mine").api_key == "tml-mine"


# Refusals


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(MissingExtraError, match=r"'uvicorn'.*pip install 'tinsmith\[local\]'"):
        local_server(tmp_path)


def test_a_server_of_another_model_is_named(living: SharedFolder, tmp_path: Path) -> None:
    living.announce(running_server(model="mine=/models/mine", pid=77))
    with pytest.raises(ConfigError, match=r"process 77.* serves mine=/models/mine, not the embedded.*TINSMITH_STATE"):
        local_server(tmp_path)


def test_a_server_on_another_machine_is_named(living: SharedFolder, tmp_path: Path) -> None:
    living.announce(running_server(host="elsewhere"))
    with pytest.raises(ConfigError, match="another machine, elsewhere"):
        local_server(tmp_path)


def test_a_state_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    SharedFolder(tmp_path / "above" / "state")
    assert stat.S_IMODE((tmp_path / "above" / "state").stat().st_mode) == 0o700


def test_a_state_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file cannot be used: .*TINSMITH_STATE"):
        local_server(tmp_path / "file")


def test_a_model_that_is_not_there_is_refused_by_the_server(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"The local server cannot start.*there is no folder '/nowhere'"):
        local_server(tmp_path, "tiny=/nowhere")
    assert not SharedFolder(tmp_path).server_lives()


# Starts that fail


def test_a_server_that_dies_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", executable(tmp_path, "echo out of luck >&2; exit 3"))
    with pytest.raises(APIConnectionError, match=r"status 3 .*out of luck.*server\.log"):
        local_server(tmp_path)


def test_a_server_that_says_nothing_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", executable(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 600"))
    monkeypatch.setattr(local, "SILENCE_SECONDS", 1.0)
    with pytest.raises(APITimeoutError, match="said nothing for 1 s"):
        local_server(tmp_path)
    pid = (tmp_path / "pid").read_text().strip()
    assert subprocess.run(["kill", "-0", pid], capture_output=True, check=False).returncode != 0


def test_what_a_library_prints_does_not_disturb_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = """echo 'Hello from a library'; echo '{"ready": "http://127.0.0.1:9"}'"""
    monkeypatch.setattr(sys, "executable", executable(tmp_path, script))
    assert local_server(tmp_path) == "http://127.0.0.1:9"


# Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_one_line_shows_the_share_and_goes_away() -> None:
    terminal = Terminal()
    progress = local._Progress(terminal)
    progress.show("Fetching", 0.25)
    assert terminal.getvalue().endswith("Fetching ... 25%")
    progress.clear()
    assert terminal.getvalue().endswith("\r\033[K")
    assert "\n" not in terminal.getvalue()


def test_elsewhere_each_stage_is_a_line() -> None:
    stream = io.StringIO()
    progress = local._Progress(stream)
    for stage, share in (("Fetching", 0.0), ("Fetching", 0.5), ("Unpacking", 0.0)):
        progress.show(stage, share)
    progress.clear()
    assert stream.getvalue() == "Fetching ...\nUnpacking ...\n"
