"""Where metrics go besides the file: services that draw curves. What happens there never stops the training."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from tinsmith.errors import ConfigError

WANDB, TRACKIO = "wandb", "trackio"


class Sink:
    """One run at W&B or trackio, whose packages are called alike. The first failure is told, and ends it."""

    def __init__(self, package: str, project: str, warn: Callable[[str], None]) -> None:
        try:
            self._module = importlib.import_module(package)
        except ImportError as error:
            raise ConfigError(
                f"--{package} needs the package {package!r}. Install it with: pip install {package}"
            ) from error
        self._package = package
        self._project = project
        self._warn = warn
        self._works = True

    def start(self, name: str, run_id: str, settings: Mapping[str, Any]) -> None:
        """The same id continues the curves of a run that was interrupted."""
        options: dict[str, Any] = {"project": self._project, "config": dict(settings), "resume": "allow"}
        if self._package == WANDB:
            options |= {"name": name, "id": run_id}
        else:
            options |= {"name": f"{name}-{run_id[:8]}"}
        self._try(lambda: self._module.init(**options))

    def log(self, record: Mapping[str, Any]) -> None:
        values = {name: value for name, value in record.items() if name not in ("step", "time")}
        self._try(lambda: self._module.log(values, step=record["step"]))

    def finish(self) -> None:
        self._try(lambda: self._module.finish())

    def _try(self, action: Callable[[], object]) -> None:
        if not self._works:
            return
        try:
            action()
        except Exception as error:  # noqa: BLE001 - whatever goes wrong there
            self._works = False
            self._warn(f"{self._package} failed and gets no more metrics: {type(error).__name__}: {error}")
