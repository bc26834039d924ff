"""Where snapshots of live models lie: `STATE/snapshots/`, laid out as checkpoints are. Nobody can name or load them.

    <model>/weights/357/           the model as it was after operation 357, with a checksum of each file
    <model>/weights/357-loaded/    the checkpoint that operation 357 has loaded, which its owner may change or delete

The last two snapshots of a model are kept: the one before is read if the last is damaged, and what was done since is
done once more. A checkpoint that was loaded in between is needed for that.
"""

from __future__ import annotations

import errno
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tinsmith.errors import InvalidInputError
from tinsmith.server.checkpoints import CheckpointFolders, link_or_copy
from tinsmith.server.store import ids
from tinsmith.server.store.records import Snapshots

CHECKSUMS = "checksums.json"
_LOADED = "-loaded"
_CHUNK_BYTES = 2**24


class DamagedError(Exception):
    """What is on the disk is not what was written. The message says which file, and what is wrong with it."""


class LostError(InvalidInputError):
    """What cannot be had any more, through no fault of whoever asks. The message is for them."""


class SnapshotFolders:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._folders = CheckpointFolders(root)

    @contextmanager
    def writing(self, model_id: str, seq_id: int) -> Iterator[Path]:
        """A folder for the files of a snapshot, which takes its place when the block ends well."""
        with self._folders.writing(_path(model_id, str(seq_id))) as folder:
            yield folder
            checksums = {file.name: _checksum(file) for file in folder.iterdir()}
            (folder / CHECKSUMS).write_bytes(msgspec.json.encode(checksums))

    def checked(self, model_id: str, seq_id: int) -> Path:
        """The folder of a snapshot, after a look at every byte of it."""
        folder = self._folders.folder(_path(model_id, str(seq_id)))
        if not folder.is_dir():
            raise DamagedError("its folder is missing")
        for name, expected in _expected(folder).items():
            _compare(folder / name, expected)
        return folder

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
        if not folder.is_dir():
            raise DamagedError(f"the checkpoint that operation {seq_id} has loaded is missing")
        return folder

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
        """Removes what a killed process left and the store does not know. Called before anything is written."""
        self._folders.tidy()
        models = {self._folders.folder(_path(model_id, "0")).parent.parent: kept for model_id, kept in known.items()}
        for model in self._root.glob("*"):
            if model not in models:
                shutil.rmtree(model)
        for model, kept in models.items():
            for folder in model.glob("weights/*"):
                if not is_needed(folder.name, kept):
                    shutil.rmtree(folder)


def _path(model_id: str, name: str) -> str:
    return ids.tinker_path(model_id, "weights", name)


def is_needed(name: str, kept: Snapshots) -> bool:
    """Whether a folder of this name is one of a model's snapshots, or may be loaded once more after the previous."""
    if not name.endswith(_LOADED):
        return name in (str(kept.last), str(kept.previous))
    return kept.previous is None or int(name.removesuffix(_LOADED)) > kept.previous


def _expected(folder: Path) -> dict[str, int]:
    """The checksums that were written down; none in a snapshot of a release that wrote none."""
    try:
        return msgspec.json.decode((folder / CHECKSUMS).read_bytes(), type=dict[str, int])
    except FileNotFoundError:
        return {}
    except msgspec.DecodeError as error:
        raise DamagedError(f"{CHECKSUMS} cannot be read: {error}") from error


def _compare(file: Path, expected: int) -> None:
    try:
        found = _checksum(file)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EIO):  # too many open files, say: not this one's fault
            raise
        raise DamagedError(f"{file.name} cannot be read: {error.strerror}") from error
    if found != expected:
        raise DamagedError(f"{file.name} has the checksum {found:08x} instead of {expected:08x}")


def _checksum(file: Path) -> int:
    """CRC-32: it finds what goes wrong by chance, ten times as fast as the file is written."""
    checksum = 0
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum
