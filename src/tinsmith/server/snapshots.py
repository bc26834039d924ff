"""Where snapshots of live models lie: `STATE/snapshots/`, laid out as checkpoints are. Nobody can name or load them.

    <model>/weights/357/           the model as it was after operation 357
    <model>/weights/357-loaded/    the checkpoint that operation 357 has loaded, which its owner may change or delete
    .unknown/<model>/              one that the database did not know at a start, kept for a week

With a storage elsewhere they lie there, laid out as checkpoints are there.

The last two snapshots of a model are kept: the one before is read if the last is damaged, and what was done since is
done once more. A checkpoint that was loaded in between is needed for that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path

from tinsmith.errors import InvalidInputError
from tinsmith.server.checkpoints import Folders, link_or_copy, run_folder
from tinsmith.server.engine.damage import DamagedError, reading
from tinsmith.server.store import ids
from tinsmith.server.store.records import Snapshots

_LOADED = "-loaded"


class LostError(InvalidInputError):
    """What cannot be had any more, through no fault of whoever asks. The message is for them."""


class SnapshotFolders:
    def __init__(self, folders: Folders) -> None:
        self._folders = folders

    def writing(self, model_id: str, seq_id: int) -> AbstractContextManager[Path]:
        """A folder for the files of a snapshot, which takes its place when the block ends well."""
        return self._folders.writing(_path(model_id, str(seq_id)))

    def folder(self, model_id: str, seq_id: int) -> Path:
        """Where the files of a snapshot are."""
        return _existing(self._folders.folder(_path(model_id, str(seq_id))), "its folder")

    def keep_loaded(self, model_id: str, seq_id: int, checkpoint: Callable[[], Path]) -> Path:
        """A copy of a checkpoint that this operation is about to load, without cost where files can be linked.

        There may be one, of a worker that died; else `checkpoint` is asked for its folder.
        """
        path = _path(model_id, f"{seq_id}{_LOADED}")
        if not self._folders.exists(path):
            found = checkpoint()
            with self._folders.writing(path) as folder:
                for file in found.iterdir():
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
        for name in self._names(run_folder(model_id)):
            seq_id = int(name.removesuffix(_LOADED))
            if seq_id <= (kept.last or 0) and not is_needed(name, kept):
                self._folders.delete(_path(model_id, name))

    def remove(self, model_id: str) -> None:
        """Everything of a model."""
        self._folders.remove_run(run_folder(model_id))

    def tidy(self) -> None:
        """Ends what a killed process left half done on this machine. Called at start, before anything is written."""
        self._folders.tidy()

    def remove_unneeded(self, known: Mapping[str, Snapshots]) -> None:
        """Removes what a killed worker left and the store does not know. Called before there is another.

        Whole models are only set aside, in case that it is the store that is wrong.
        """
        runs, models = self._folders.runs(), {run_folder(model_id): model_id for model_id in known}
        self._folders.set_aside(runs - models.keys())
        for run in runs & models.keys():
            for name in self._names(run):
                if not is_needed(name, known[models[run]]):
                    self._folders.delete(_path(models[run], name))

    def _names(self, run: str) -> set[str]:
        return {name for name in self._folders.names(run) if name[0].isdigit()}

    def remove_unknown(self, unknown_since: datetime) -> None:
        """What was set aside before that time."""
        self._folders.remove_set_aside(unknown_since)


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
