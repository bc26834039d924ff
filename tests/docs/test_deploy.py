"""The files in `deploy/` are what the page about them shows, and fit the server as it is."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, blocks
from tests.docs.shell import PROGRAMS, check_tinsmith
from tests.server.api.running import KEY, RunningServer
from tinsmith.server import serve
from tinsmith.server.config import ServerConfig
from tinsmith.server.keeper import STOP_SECONDS
from tinsmith.server.models import ModelSource

DEPLOY = ROOT / "deploy"
PAGE = DOCS / "how-to" / "self-host-on-a-gpu-box.md"
UNIT = (DEPLOY / "tinsmith.service").read_text(encoding="utf-8")
SERVER = ServerConfig(models=(ModelSource("m", "/nowhere"),))


@pytest.mark.parametrize(
    ("language", "file"), [("ini", "tinsmith.service"), ("nginx", "nginx.conf"), ("dockerfile", "Containerfile")]
)
def test_the_page_shows_the_file_as_it_is(language: str, file: str) -> None:
    assert blocks(PAGE, language) == [(DEPLOY / file).read_text(encoding="utf-8")]


# The systemd unit


def settings(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if re.match(r"\w+=", line))


def test_the_unit_starts_the_server_and_gives_it_time_to_stop() -> None:
    unit = settings(UNIT)
    program, *arguments = shlex.split(unit["ExecStart"])
    assert Path(program).name == "tinsmith"
    check_tinsmith(arguments)
    assert unit["KillMode"] == "mixed"
    assert int(unit["TimeoutStopSec"]) > serve._GRACE_SECONDS + STOP_SECONDS
    assert unit["OOMPolicy"] == "continue", "or systemd ends the server together with a worker that filled the memory"


def test_the_unit_does_not_hide_the_gpu() -> None:
    assert settings(UNIT).keys() & {"PrivateDevices", "ProtectClock", "DeviceAllow", "MemoryDenyWriteExecute"} == set()


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """Where there is no systemd, its names of sections are checked alone."""
    assert re.findall(r"^\[(\w+)\]$", UNIT, re.MULTILINE) == ["Unit", "Service", "Install"]
    if shutil.which("systemd-analyze"):
        unit = tmp_path / "tinsmith.service"
        unit.write_text(UNIT.replace("/opt/tinsmith/bin", str(PROGRAMS)))
        done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")


# The container


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Containerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines if line)]


def test_the_container_starts_the_server() -> None:
    found = dict(instructions())
    program, *arguments = [*json.loads(found["ENTRYPOINT"]), *json.loads(found["CMD"])]
    assert program == "tinsmith"
    check_tinsmith(arguments)
    assert {"FROM", "USER", "HEALTHCHECK", "EXPOSE"} <= found.keys()
    compile(json.loads(found["HEALTHCHECK"].partition("CMD ")[2])[2], "HEALTHCHECK", "exec")


def test_what_the_container_copies_is_enough_to_build_the_package(tmp_path: Path) -> None:
    for name, rest in instructions():
        if name == "COPY":
            *sources, target = rest.split()
            into = tmp_path / target.strip("/")
            into.mkdir(parents=True, exist_ok=True)
            for source in sources:
                copy(ROOT / source, into)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", tmp_path]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, tmp_path / "source"], check=True, timeout=120)
    assert [*tmp_path.glob("tinsmith-*.whl")]


def copy(source: Path, into: Path) -> None:
    """A folder is copied by its content, as in a container file."""
    if source.is_dir():
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(source, into, ignore=ignored, dirs_exist_ok=True)
    else:
        shutil.copy(source, into)


# The proxy


def test_the_proxy_waits_as_long_and_takes_as_much_as_the_server_does() -> None:
    text = (DEPLOY / "nginx.conf").read_text(encoding="utf-8")
    megabytes = int(re.findall(r"client_max_body_size (\d+)m;", text)[0])
    seconds = int(re.findall(r"proxy_read_timeout (\d+)s;", text)[0])
    assert megabytes * 2**20 >= SERVER.max_body_bytes
    assert seconds > 2 * SERVER.long_poll_seconds


def test_links_lead_to_the_proxy_if_it_is_on_the_same_machine(tmp_path: Path) -> None:
    with RunningServer(tmp_path, api_keys=(KEY,)) as server:
        place = f"sessions/{server.session()}/trace_export"
        forwarded = {"host": "tinsmith.example.com", "x-forwarded-proto": "https"}
        link = server.get(place, headers=forwarded).json()["url"]
        assert link.startswith("https://tinsmith.example.com/api/v1/traces/")
        answer = server.call("GET", link.removeprefix("https://tinsmith.example.com"), key=None)
        assert answer.status == 200
