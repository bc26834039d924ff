"""What receives metrics besides the file may fail without harm."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from tinsmith.errors import ConfigError
from tinsmith.recipes.sinks import TRACKIO, WANDB, Sink


class Service(ModuleType):
    """Stands for wandb or trackio: notes its calls, and fails at those it is told to."""

    def __init__(self, name: str, fails_at: str = "") -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._fails_at = fails_at

    def init(self, **options: Any) -> None:
        self._call("init", **options)

    def log(self, *arguments: Any, **options: Any) -> None:
        self._call("log", *arguments, **options)

    def finish(self) -> None:
        self._call("finish")

    def _call(self, called: str, /, *arguments: Any, **options: Any) -> None:
        if called == self._fails_at:
            raise OSError("no network")
        self.calls.append((called, arguments, options))


@pytest.mark.parametrize("package", [WANDB, TRACKIO])
def test_metrics_go_to_the_project(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(package)
    monkeypatch.setitem(sys.modules, package, service)
    complaints: list[str] = []
    sink = Sink(package, "ships", complaints.append)
    sink.start("pirate", "0123456789", {"rank": 8})
    sink.log({"step": 3, "loss": 1.5, "time": "now"})
    sink.finish()
    (_, _, options), logged, finished = service.calls
    assert (options["project"], options["config"], options["resume"]) == ("ships", {"rank": 8}, "allow")
    assert options["name"].startswith("pirate")
    assert logged == ("log", ({"loss": 1.5},), {"step": 3})
    assert finished[0] == "finish"
    assert complaints == []


@pytest.mark.parametrize("fails_at", ["init", "log"])
def test_a_failure_is_told_once(fails_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, WANDB, Service(WANDB, fails_at))
    complaints: list[str] = []
    sink = Sink(WANDB, "ships", complaints.append)
    sink.start("pirate", "0123456789", {})
    for step in range(3):
        sink.log({"step": step})
    sink.finish()
    assert complaints == ["wandb failed and gets no more metrics: OSError: no network"]


@pytest.mark.parametrize("package", [WANDB, TRACKIO])
def test_a_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"--{package} needs .* pip install {package}"):
        Sink(package, "ships", print)
