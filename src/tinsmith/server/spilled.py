"""Files of sampler weights that no checkpoint holds: `STATE/samplers/<sampler>.safetensors`, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tinsmith.server.checkpoints import flush_folder

_SUFFIX = ".safetensors"
_UNFINISHED = ".unfinished-"


class SpilledWeights:
    """The worker of a base model writes and reads them, the API process removes those nobody can ask for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, sampler_id: str) -> Path:
        return self._folder / f"{sampler_id.replace(':', '_')}{_SUFFIX}"

    @contextmanager
    def writing(self, sampler_id: str) -> Iterator[Path]:
        """A file to write, which takes its place when the block ends well."""
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
        """Whose weights are here."""
        files = self._folder.glob(f"[!.]*{_SUFFIX}")
        return [file.name.removesuffix(_SUFFIX).replace("_", ":") for file in files]

    def remove(self, sampler_id: str) -> None:
        self.path(sampler_id).unlink(missing_ok=True)

    def tidy(self) -> None:
        """Removes what a killed process left half written. Called at start, before anything is written."""
        for file in self._folder.glob(f"{_UNFINISHED}*"):
            file.unlink()
