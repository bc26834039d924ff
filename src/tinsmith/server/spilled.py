"""Files of sampler weights that no checkpoint holds: `STATE/samplers/<sampler>.safetensors`, whole or not at all.

With a storage elsewhere they lie there, each as if it were a checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from tinsmith.server.checkpoints import Folders, flush_folder, run_folder
from tinsmith.server.store import ids

_SUFFIX = ".safetensors"
_UNFINISHED = ".unfinished-"


class Spilled(Protocol):
    """The worker of a base model writes and reads them, the API process removes those nobody can ask for."""

    def exists(self, sampler_id: str) -> bool: ...

    def path(self, sampler_id: str) -> Path:
        """A local file with the weights, if there are any."""

    def writing(self, sampler_id: str) -> AbstractContextManager[Path]:
        """A file to write, which takes its place when the block ends well."""

    def sampler_ids(self) -> list[str]:
        """Whose weights are here."""

    def remove(self, sampler_id: str) -> None: ...

    def tidy(self) -> None:
        """Removes what a killed process left half written. Called at start, before anything is written."""


class SpilledWeights(Spilled):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def exists(self, sampler_id: str) -> bool:
        return self.path(sampler_id).exists()

    def path(self, sampler_id: str) -> Path:
        return self._folder / f"{sampler_id.replace(':', '_')}{_SUFFIX}"

    @contextmanager
    def writing(self, sampler_id: str) -> Iterator[Path]:
        self._folder.mkdir(parents=True, exist_ok=True)
        target = self.path(sampler_id)
        unfinished = target.with_name(f"{_UNFINISHED}{target.name}")
        try:
            yield unfinished
            with unfinished.open("rb") as written:
                os.fsync(written.fileno())
            unfinished.replace(target)
            flush_folder(self._folder)
        finally:
            unfinished.unlink(missing_ok=True)

    def sampler_ids(self) -> list[str]:
        files = self._folder.glob(f"[!.]*{_SUFFIX}")
        return [file.name.removesuffix(_SUFFIX).replace("_", ":") for file in files]

    def remove(self, sampler_id: str) -> None:
        self.path(sampler_id).unlink(missing_ok=True)

    def tidy(self) -> None:
        for file in self._folder.glob(f"{_UNFINISHED}*"):
            file.unlink()


class StoredSpilled(Spilled):
    def __init__(self, folders: Folders) -> None:
        self._folders = folders

    def exists(self, sampler_id: str) -> bool:
        return self._folders.exists(_stored(sampler_id))

    def path(self, sampler_id: str) -> Path:
        return self._folders.folder(_stored(sampler_id)) / f"flat{_SUFFIX}"

    @contextmanager
    def writing(self, sampler_id: str) -> Iterator[Path]:
        with self._folders.writing(_stored(sampler_id)) as folder:
            yield folder / f"flat{_SUFFIX}"

    def sampler_ids(self) -> list[str]:
        return [run.replace("_", ":") for run in self._folders.runs()]

    def remove(self, sampler_id: str) -> None:
        self._folders.remove_run(run_folder(sampler_id))

    def tidy(self) -> None:
        self._folders.tidy()


def _stored(sampler_id: str) -> str:
    return ids.tinker_path(sampler_id, "sampler_weights", "spilled")
