"""Lets `import tinker` mean this package, for code that cannot be changed.

>>> import tinsmith.compat
>>> tinsmith.compat.install()
>>> import tinker
>>> from tinker.lib.public_interfaces import APIFuture
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from tinsmith.errors import ConfigError

_NAMES: dict[str, str | dict[str, str]] = {
    "tinker": "tinsmith",
    "tinker.auth": "tinsmith.auth",
    "tinker.types": "tinsmith.types",
    "tinker.types.tensor_data": "tinsmith.types.tensors",
    "tinker.lib": {},
    "tinker.lib.public_interfaces": {
        "APIFuture": "tinsmith.client.futures",
        "AdminClient": "tinsmith.client.admin",
        "AwaitableConcurrentFuture": "tinsmith.client.futures",
        "BackcompatSamplingClientFuture": "tinsmith.client.sampling",
        "BackcompatTrainingClientFuture": "tinsmith.client.training",
        "LossHandle": "tinsmith.client.loss_graph",
        "PerDatumLossFn": "tinsmith.client.loss_graph",
        "RestClient": "tinsmith.client.rest",
        "SamplingClient": "tinsmith.client.sampling",
        "ServiceClient": "tinsmith.client.service",
        "TrainingClient": "tinsmith.client.training",
    },
    "tinker.lib.public_interfaces.admin_client": "tinsmith.client.admin",
    "tinker.lib.public_interfaces.api_future": "tinsmith.client.futures",
    "tinker.lib.public_interfaces.rest_client": "tinsmith.client.rest",
    "tinker.lib.public_interfaces.sampling_client": "tinsmith.client.sampling",
    "tinker.lib.public_interfaces.service_client": "tinsmith.client.service",
    "tinker.lib.public_interfaces.training_client": "tinsmith.client.training",
    "tinker.lib.retry_handler": "tinsmith.client.retry",
}
"""The module that stands behind each name, or the home of each attribute where none does."""


def install() -> None:
    """Makes `import tinker` and its submodules resolve to Tinsmith, for this process. Calling it twice is harmless."""
    if "tinker" in sys.modules and not isinstance(sys.modules["tinker"], _Alias):
        raise ConfigError(
            "The official tinker package was imported already; call tinsmith.compat.install() before anything "
            "imports tinker."
        )
    for name, target in _NAMES.items():
        alias = _Alias(name, target)
        sys.modules[name] = alias
        parent, _, child = name.rpartition(".")
        if parent:
            sys.modules[parent].__dict__[child] = alias


class _Alias(ModuleType):
    """A module whose attributes live elsewhere and are loaded on first use."""

    def __init__(self, name: str, target: str | dict[str, str]) -> None:
        super().__init__(name, f"Stands for {target}." if isinstance(target, str) else None)
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__path__: list[str] = []
        self.__dict__["_target"] = target
        if not isinstance(target, str):
            self.__dict__["__all__"] = sorted(target)

    def __getattr__(self, name: str) -> Any:
        target = self.__dict__["_target"]
        home = target if isinstance(target, str) else target.get(name)
        if home is None or name == "__file__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(import_module(home), name)
        self.__dict__[name] = value
        return value

    def __dir__(self) -> list[str]:
        target = self.__dict__["_target"]
        return dir(import_module(target)) if isinstance(target, str) else sorted(target)
