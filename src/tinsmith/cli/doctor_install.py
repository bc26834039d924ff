"""The interpreter, our own package, the packages of its extras, and torch with its device."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tinsmith._version import __version__
from tinsmith.cli import shown
from tinsmith.cli.doctor_report import Check, fault, ok, warning

OLDEST_PYTHON = (3, 11)
TORCH_SECONDS = 12.0
"""Loading it for the first time may take a while."""
EXTRAS = {
    "cli": ("click", "rich"),
    "tokenizers": ("tokenizers", "huggingface_hub", "jinja2"),
    "server": (
        "alembic",
        "filelock",
        "httptools",
        "prometheus_client",
        "pyrage",
        "safetensors",
        "sqlalchemy",
        "starlette",
        "uvicorn",
        "zstandard",
    ),
    "postgres": ("psycopg",),
    "ray": ("ray",),
    "s3": ("s3fs",),
}
_OF_SOME_SERVERS = ("postgres", "ray", "s3")
_USES = {
    "cli": "tables and progress bars",
    "tokenizers": "text: `tinsmith train`, `chat` and `sample`",
    "server": "`tinsmith serve` and --base-url local",
    "postgres": "`tinsmith serve --database postgresql://...`",
    "ray": "`tinsmith serve --ray`",
    "s3": "`tinsmith serve --storage s3://...`",
}


def check_install(*, needs_server: bool) -> list[Check]:
    """Whoever uses a server elsewhere needs none of the server's packages here."""
    return [_python(), ok("Tinsmith", f"{__version__} in {Path(__file__).parents[1]}"), *_extras(needs_server)]


def _python() -> Check:
    told = f"{platform.python_version()}, {platform.system()} {platform.machine()}, {sys.executable}"
    if sys.version_info[:2] < OLDEST_PYTHON:
        return fault("Python", told, f"Tinsmith needs Python {'.'.join(map(str, OLDEST_PYTHON))} or later.")
    return ok("Python", told)


def _extras(needs_server: bool) -> list[Check]:
    return [_extra(extra, packages, needs_server) for extra, packages in EXTRAS.items()]


def _install(extra: str) -> str:
    return f"pip install 'tinsmith[{extra}]' (from a checkout: pip install '.[{extra}]')"


def _extra(extra: str, packages: tuple[str, ...], needs_server: bool) -> Check:
    name = f"Packages [{extra}]"
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if not missing:
        return ok(name, ", ".join(f"{package} {_version(package)}" for package in packages))
    told = f"{', '.join(missing)} missing; needed for {_USES[extra]}"
    if extra in _OF_SOME_SERVERS or (extra == "server" and not needs_server):
        return ok(name, told)
    remedy = _install("local" if needs_server else extra)
    return warning(name, told, remedy) if extra == "tokenizers" and not needs_server else fault(name, told, remedy)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(of unknown version)"


_PROBE = """
import json, torch
cuda, slow = torch.cuda.is_available(), None
if cuda:
    from tinsmith.server.engine.steps import why_no_kernels
    slow = why_no_kernels()
devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count() if cuda else 0)]
print(json.dumps({
    "version": torch.__version__,
    "threads": torch.get_num_threads(),
    "cuda": [[device.name, device.total_memory] for device in devices],
    "mps": torch.backends.mps.is_available(),
    "built_for_cuda": torch.version.cuda,
    "slow": slow,
}))
"""


class TorchProbe:
    """Loads torch in a process of its own: that takes seconds, may crash, and may hang with a broken driver."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._deadline = time.monotonic() + TORCH_SECONDS

    def __enter__(self) -> Self:
        if importlib.util.find_spec("torch") is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROBE],  # -P: a neighbour of the user's called torch.py is not torch
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def check(self, *, needed: bool) -> Check:
        remedy = _install("local")
        if self._process is None:
            told = "not installed; needed for custom losses and for `tinsmith serve` and --base-url local"
            return fault("torch", told, remedy) if needed else ok("torch", told)
        try:
            out, err = self._process.communicate(timeout=max(self._deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            return warning("torch", f"was not loaded within {TORCH_SECONDS:g} s", "Run the command again.")
        if self._process.returncode != 0:
            reason = (err.strip().splitlines() or [f"status {self._process.returncode}"])[-1]
            told, remedy = f"cannot be loaded: {reason}", "Install it again: pip install --force-reinstall torch"
            return fault("torch", told, remedy) if needed else warning("torch", told, remedy)
        return _torch(json.loads(out.splitlines()[-1]))


def _torch(found: dict[str, Any]) -> Check:
    told = f"{found['version']}, {found['threads']} CPU threads, {_memory()}"
    if found["cuda"]:
        names = ", ".join(f"{name} ({shown.size(memory)})" for name, memory in found["cuda"])
        told = f"{told}, CUDA: {names}"
        slow = found["slow"]
        return ok("torch", told) if slow is None else warning("torch", told, f"It is used without kernels: {slow}")
    if found["mps"]:
        return ok("torch", f"{told}, MPS")
    if found["built_for_cuda"] and Path("/proc/driver/nvidia").exists():
        return warning("torch", f"{told}, but CUDA cannot be used", "Check the driver with nvidia-smi.")
    return ok("torch", f"{told}, no GPU")


def _memory() -> str:
    if not hasattr(os, "sysconf"):
        return "memory unknown"
    return f"{shown.size(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'))} memory"
