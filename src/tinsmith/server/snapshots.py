"""Where snapshots of live models lie: `STATE/snapshots/`, laid out as checkpoints are. Nobody can name or load them.

    <model>/weights/357/           the model as it was after operation 357
    <model>/weights/357-loaded/    the checkpoint that operation 357 has loaded, which its owner may change or delete
    .unknown/<model>/              one that the database did not know at a start, kept for a week

The last two snapshots of a model are kept: the one before is read if the last is damaged, and what was done since is
done once more. A checkpoint that was loaded in between is needed for that.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path

from tinsmith.errors import InvalidInputError
from tinsmith.server.checkpoints import CheckpointFolders, link_or_copy
from tinsmith.server.engine.damage import DamagedError, reading
from tinsmith.server.store import ids
from tinsmith.server.store.records import Snapshots

log = logging.getLogger(__name__)

_LOADED = "-loaded"
_UNKNOWN = ".unknown"


class LostError(InvalidInputError):
    """What cannot be had any more, through no fault of whoever asks. The message is for them."""


class SnapshotFolders:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._folders = CheckpointFolders(root)

    def writing(self, model_id: str, seq_id: int) -> AbstractContextManager[Path]:
        """A folder for the files of a snapshot, which takes its place when the block ends well."""
        return self._folders.writing(_path(model_id, str(seq_id)))

    def folder(self, model_id: str, seq_id: int) -> Path:
        """Where the files of a snapshot are."""
        return _existing(self._folders.folder(_path(model_id, str(seq_id))), "its folder")

    def keep_loaded(self, model_id: str, seq_id: int, checkpoint: Path) -> Path:
        """A copy of a checkpoint that this operation is about to load, without cost where files can be linked."""
        path = _path(model_id, f"{seq_id}{_LOADED}")
        if not self._folders.exists(path):
            with self._folders.writing(path) as folder:
                for file in checkpoint.iterdir():
                    link_or_copy(file, folder / file.name)
        return self._folders.folder(path)

    def loaded(self, model_id: str, seq_id: int) -> Path:
        """What this operation has loaded."""
        folder = self._folders.folder(_path(model_id, f"{seq_id}{_LOADED}"))
        return _existing(folder, f"the checkpoint that operation {seq_id} has loaded")

    def drop_loaded(self, model_id: str, seq_id: int) -> None:
        """This operation has loaded nothing after all."""
        self._folders.delete(_path(model_id, f"{seq_id}{_LOADED}"))

    def delete(self, model_id: str, seq_id: int) -> None:
        self._folders.delete(_path(model_id, str(seq_id)))

    def prune(self, model_id: str, kept: Snapshots) -> None:
        """Removes what is older than the snapshots that are kept and not needed beside them."""
        for folder in self._folders.folder(_path(model_id, "0")).parent.glob("[0-9]*"):
            seq_id = int(folder.name.removesuffix(_LOADED))
            if seq_id <= (kept.last or 0) and not is_needed(folder.name, kept):
                self._folders.delete(_path(model_id, folder.name))

    def remove(self, model_id: str) -> None:
        """Everything of a model."""
        shutil.rmtree(self._folders.folder(_path(model_id, "0")).parent.parent, ignore_errors=True)

    def tidy(self, known: Mapping[str, Snapshots]) -> None:
        """Removes what a killed process left and the store does not know. Called before anything is written.

        Whole models are only set aside, in case that it is the store that is wrong.
        """
        self._folders.tidy()
        models = {self._folders.folder(_path(model_id, "0")).parent.parent: kept for model_id, kept in known.items()}
        for model in self._root.glob("[!.]*"):
            if model not in models:
                self._set_aside(model)
        for model, kept in models.items():
            for folder in model.glob("weights/*"):
                if not is_needed(folder.name, kept):
                    shutil.rmtree(folder)

    def remove_unknown(self, unknown_since: datetime) -> None:
        """What was set aside before that time."""
        for model in (self._root / _UNKNOWN).glob("*"):
            if model.stat().st_mtime < unknown_since.timestamp():
                shutil.rmtree(model)

    def _set_aside(self, model: Path) -> None:
        aside = self._root / _UNKNOWN / model.name
        aside.parent.mkdir(exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        os.utime(model)  # since when it is there
        model.rename(aside)
        log.warning("The database does not know the model of %s; it is set aside, in %s.", model.name, aside)


def _existing(folder: Path, what: str) -> Path:
    with reading(what):
        if not folder.is_dir():
            raise DamagedError(f"{what} is missing")
    return folder


def _path(model_id: str, name: str) -> str:
    return ids.tinker_path(model_id, "weights", name)


def is_needed(name: str, kept: Snapshots) -> bool:
    """Whether a folder of this name is one of a model's snapshots, or may be loaded once more after the previous."""
    if not name.endswith(_LOADED):
        return name in (str(kept.last), str(kept.previous))
    return kept.previous is None or int(name.removesuffix(_LOADED)) > kept.previous
