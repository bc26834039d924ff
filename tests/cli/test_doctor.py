"""`tinsmith doctor`: the real program where something is wrong, and where nothing is."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
import tomllib
from collections import namedtuple
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.cli.program import KEY, ROOT, Done, InProcess, Program, variables_of
from tests.server.api.running import RunningServer as ApiServer
from tests.support.server import FOREVER, FakeServer, Hang, Html, Reply
from tinsmith.cli.doctor_install import EXTRAS
from tinsmith.sharing import RunningServer, SharedFolder


def checks(done: Done) -> dict[str, dict[str, str]]:
    """The checks by name, of a command that printed JSON."""
    document = json.loads(done.out)
    found = {check.pop("name"): check for check in document["checks"]}
    for status, number in (("fault", document["faults"]), ("warning", document["warnings"])):
        assert sum(check["status"] == status for check in found.values()) == number
    assert all(check["remedy"] for check in found.values() if check["status"] != "ok")
    assert done.code == (1 if document["faults"] else 0)
    return found


@pytest.fixture
def examine(cli: InProcess, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command in this process, without loading torch for every test."""
    monkeypatch.setattr("tinsmith.cli.doctor_install._PROBE", _PROBE_WITHOUT_TORCH)

    def run(*arguments: str, options: Sequence[str] = ()) -> dict[str, dict[str, str]]:
        return checks(cli("-f", "json", *arguments, "doctor", *options))

    return run


_TORCH = {"version": "2.9", "threads": 4, "cuda": [], "mps": False, "built_for_cuda": None, "slow": None}
_PROBE_WITHOUT_TORCH = f"import json; print(json.dumps({_TORCH}))"


def test_where_all_is_well_every_check_has_a_line_and_the_code_is_0(program: Program) -> None:
    done = program("doctor")
    assert (done.code, done.err) == (0, ""), done
    *lines, last = done.out.splitlines()
    assert last.startswith("Faults: 0. ")
    found = {line[9:].split("  ")[0]: line.split()[0] for line in lines if not line.startswith(" ")}  # else a remedy
    assert found.keys() >= {"Python", "Tinsmith", "torch", "API key", "Server", "Key accepted", "State folder", "Disk"}
    assert set(found.values()) <= {"ok", "warning"}
    assert KEY not in done.out
    assert "tml-... from TINKER_API_KEY" in done.out
    assert list(program.home.iterdir()) == [], "it leaves nothing behind"


def test_a_missing_key_is_a_fault_but_the_server_is_asked_all_the_same(server: FakeServer, home: Path) -> None:
    found = checks(Program(home, TINKER_BASE_URL=server.url)("-f", "json", "doctor"))
    assert found["API key"]["status"] == "fault"
    assert "tinsmith auth login" in found["API key"]["remedy"]
    assert found["Server"]["status"] == "ok"
    assert "Key accepted" not in found


def test_a_key_that_cannot_be_one_is_a_fault(examine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = examine("--api-key", "secret-of-mine")
    assert found["API key"]["status"] == "fault"
    assert "secret-of-mine" not in str(found)


def test_the_key_of_the_credentials_file_is_found(examine: Any, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(os.environ, "TINKER_API_KEY")
    (home / ".tinker").mkdir()
    document = {"version": 1, "default": "a", "keys": {"a": {"key": "tml-stored-secret"}}}
    (home / ".tinker" / "credentials.json").write_text(json.dumps(document))
    found = examine()
    assert found["API key"]["message"] == "tml-... from ~/.tinker/credentials.json"
    assert found["Key accepted"]["status"] == "ok"


@pytest.mark.parametrize(("command", "status"), [("echo tml-printed", "ok"), ("false", "fault")])
def test_a_credential_command_is_tried(
    examine: Any, monkeypatch: pytest.MonkeyPatch, command: str, status: str
) -> None:
    environment = os.environ
    monkeypatch.delitem(environment, "TINKER_API_KEY")
    monkeypatch.setitem(environment, "TINKER_CREDENTIAL_CMD", command)
    found = examine()
    assert found["API key"]["status"] == status
    assert "tml-printed" not in str(found)


def test_a_key_that_the_server_refuses_is_a_fault_of_the_key(examine: Any, server: FakeServer) -> None:
    server.script("client/config", Reply(401, json={"detail": "unknown key"}), times=FOREVER)
    found = examine()
    assert (found["API key"]["status"], found["Server"]["status"]) == ("ok", "ok")
    assert found["Key accepted"]["status"] == "fault"
    assert "TINKER_API_KEY" in found["Key accepted"]["remedy"]


def test_a_dead_server_is_told_soon(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    started = time.monotonic()
    done = Program(home, **variables_of(url))("doctor")
    assert time.monotonic() - started < 15
    assert done.code == 1
    assert f"{url}: Connection failed." in done.out
    assert "Check that the server runs and that --base-url" in done.out


def test_a_server_that_says_nothing_is_given_up(examine: Any, server: FakeServer) -> None:
    server.script("client/config", Hang(), times=FOREVER)
    started = time.monotonic()
    found = examine()
    assert time.monotonic() - started < 15
    assert found["Server"]["status"] == "fault"
    assert "Request timeout" in found["Server"]["message"]


def test_a_server_says_whether_it_is_ready_and_why_not(examine: Any, tmp_path: Path) -> None:
    with ApiServer(tmp_path / "state") as server:
        assert examine("--base-url", server.url)["Server ready"] == {"status": "ok", "message": "yes", "remedy": ""}
        server.workers.ready = False
        found = examine("--base-url", server.url)
    assert found["Server ready"]["status"] == "fault"
    assert found["Server ready"]["message"].startswith("no: The base model 'tiny/model-1' is still being loaded.")
    assert (found["Server"]["status"], found["Key accepted"]["status"]) == ("ok", "ok")


@pytest.mark.parametrize("answer", [Reply(404), Reply(200, json=[]), Reply(503), Html(503), Html(200), Hang()])
def test_of_a_server_that_does_not_say_so_it_is_not_told_whether_it_is_ready(
    examine: Any, server: FakeServer, answer: Reply | Html | Hang
) -> None:
    server.script("readyz", answer)
    found = examine()
    assert "Server ready" not in found
    assert found["Server"]["status"] == "ok"


def test_an_address_that_is_none_is_a_fault(examine: Any) -> None:
    assert "base_url is 'ftp://x'" in examine("--base-url", "ftp://x")["Server"]["message"]


# This machine as its own server


def test_local_mode_is_examined_without_a_start(home: Path) -> None:
    program = Program(home, TINKER_BASE_URL="local")
    found = checks(program("-f", "json", "doctor"))
    assert found["Server"]["message"].startswith("local, not running; started when it is needed")
    assert found["API key"]["status"] == "ok"
    assert "made when it is needed" in found["State folder"]["message"]
    assert list(home.iterdir()) == []


def test_what_a_killed_local_server_left_behind_misleads_nobody(examine: Any, home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    SharedFolder(home / ".tinsmith").announce(RunningServer(url=url, model="", host="here", pid=1, started="then"))
    assert examine("--base-url", "local")["Server"]["message"].startswith("local, not running")


def test_a_local_server_that_runs_is_asked(examine: Any, home: Path, server: FakeServer) -> None:
    announced = RunningServer(url=server.url, model="", host="here", pid=1, started="then")
    SharedFolder(home / ".tinsmith").announce(announced)
    server.script("readyz", Reply(503, json={"detail": "The server's disk is full; make room on it."}))
    found = examine("--base-url", "local")
    assert f"local, running at {server.url}" in found["Server"]["message"]
    assert found["Server ready"]["message"] == "no: The server's disk is full; make room on it."


@pytest.mark.parametrize(("base_url", "status"), [("local", "fault"), ("", "warning")])
def test_a_state_folder_that_cannot_be_written_hurts_where_it_is_needed(
    examine: Any, home: Path, monkeypatch: pytest.MonkeyPatch, base_url: str, status: str
) -> None:
    (home / "file").touch()
    monkeypatch.setitem(os.environ, "TINSMITH_STATE", str(home / "file" / "state"))
    found = examine(*(("--base-url", base_url) if base_url else ()))
    assert found["State folder"]["status"] == status
    assert "TINSMITH_STATE" in found["State folder"]["remedy"]


@pytest.mark.parametrize(("free", "status"), [(100 << 20, "fault"), (3 << 30, "warning"), (50 << 30, "ok")])
def test_little_room_is_told(examine: Any, monkeypatch: pytest.MonkeyPatch, free: int, status: str) -> None:
    usage = namedtuple("usage", ["free"])
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(free))
    assert examine("--base-url", "local")["Disk"]["status"] == status


def test_the_disk_of_a_server_is_looked_at_where_its_state_is(
    examine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usage = namedtuple("usage", ["free"])
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(1 if path == tmp_path else 50 << 30))
    assert examine()["Disk"]["status"] == "ok"
    found = examine(options=["--state", str(tmp_path)])
    assert found["Disk"]["status"] == "fault"
    assert found["State folder"]["message"] == str(tmp_path)


def test_the_model_cache_is_where_the_environment_says(
    examine: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "HF_HOME", str(home / "hf"))
    snapshot = home / "hf" / "hub" / "models--HuggingFaceTB--SmolLM2-135M-Instruct" / "snapshots" / "0"
    assert "is not here" in examine()["Embedded model"]["message"]
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").touch()
    found = examine()
    assert found["Model cache"]["message"] == f"{home / 'hf' / 'hub'} (HF_HOME), 1 model"
    assert found["Embedded model"]["message"] == str(snapshot.parents[1])


# What is installed


@pytest.mark.parametrize(
    ("missing", "arguments", "name", "status"),
    [
        ("torch", (), "torch", "ok"),
        ("torch", ("--base-url", "local"), "torch", "fault"),
        ("uvicorn", (), "Packages [server]", "ok"),
        ("uvicorn", ("--base-url", "local"), "Packages [server]", "fault"),
        ("jinja2", (), "Packages [tokenizers]", "warning"),
        ("rich", (), "Packages [cli]", "fault"),
        ("psycopg", ("--base-url", "local"), "Packages [postgres]", "ok"),
        ("ray", ("--base-url", "local"), "Packages [ray]", "ok"),
        ("s3fs", ("--base-url", "local"), "Packages [s3]", "ok"),
    ],
)
def test_a_missing_package_matters_where_it_is_needed(
    examine: Any, monkeypatch: pytest.MonkeyPatch, missing: str, arguments: tuple[str, ...], name: str, status: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None if package == missing else object())
    check = examine(*arguments)[name]
    assert check["status"] == status
    assert missing in check["message"] + name
    assert ("pip install 'tinsmith[" in check["remedy"]) == (status != "ok")


def test_ray_is_not_loaded_to_tell_its_version(examine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert examine()["Packages [ray]"]["message"] == f"ray {metadata.version('ray')}"
    assert "ray" not in sys.modules


def test_a_gpu_that_is_slower_than_it_could_be_is_told(examine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = {"cuda": [["Tesla T4", 15 * 2**30]], "slow": "they want a newer one."}
    for slow, status in ((cards["slow"], "warning"), (None, "ok")):
        probe = f"import json; print(json.dumps({_TORCH | cards | {'slow': slow}}))"
        monkeypatch.setattr("tinsmith.cli.doctor_install._PROBE", probe)
        found = examine()["torch"]
        assert found["status"] == status
        assert "Tesla T4" in found["message"]
        assert ("they want a newer one." in found.get("remedy", "")) == (status == "warning")


def test_a_torch_that_cannot_be_loaded_is_told(cli: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith.cli.doctor_install._PROBE", "raise OSError('libtorch.so is broken')")
    found = checks(cli("-f", "json", "doctor"))
    assert found["torch"]["status"] == "warning"
    assert "libtorch.so is broken" in found["torch"]["message"]


def test_a_torch_that_hangs_is_given_up(cli: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith.cli.doctor_install._PROBE", "import time; time.sleep(600)")
    monkeypatch.setattr("tinsmith.cli.doctor_install.TORCH_SECONDS", 0.2)
    assert checks(cli("-f", "json", "doctor"))["torch"]["status"] == "warning"


def test_the_packages_are_those_of_the_project() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, packages in EXTRAS.items():
        wanted = {re.split(r"[\[>]", line)[0] for line in extras[extra] if not line.startswith("tinsmith[")}
        assert wanted - {"zstandard"} == set(packages) - {"zstandard"}
