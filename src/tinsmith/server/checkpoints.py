"""Where checkpoints lie and how they come and go: whole, or not at all.

    STATE/checkpoints/<run>/<weights | sampler_weights | external_weights>/<name>/

A checkpoint is written into a folder of another name and renamed when all its files are on the disk, so that a reader,
or a restart after a power cut, finds either the old one, the new one or none. What the files mean is known to
`engine/adapter_files.py`.

The database knows whose a checkpoint is. Files and rows come and go in one step, one checkpoint at a time: of a save
and a deletion in the same moment, one comes first as a whole.

Files that lie elsewhere come and go in the same way (`stored_folders.py`); `Folders` is what both can do.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import IO, Protocol
from uuid import uuid4

from tinsmith.errors import InvalidInputError
from tinsmith.server.state_locks import one_at_a_time
from tinsmith.types import ParsedCheckpointTinkerPath

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_UNFINISHED = ".unfinished-"
_REPLACED = ".replaced-"
_UNKNOWN = ".unknown"
_STAMP_LENGTH = 12
_PIECE_BYTES = 2**20
_TAR_END = bytes(2 * tarfile.BLOCKSIZE)


def check_name(name: str) -> str:
    """The name of a checkpoint, or an error: it becomes part of paths and URLs."""
    if not _NAME.fullmatch(name):
        raise InvalidInputError(
            f"{name!r} cannot name a checkpoint; use up to 128 letters, digits, dots, dashes and underscores, "
            "beginning with a letter or digit.",
            field="path",
            value=name,
        )
    return name


def place_of(path: str) -> str:
    """Where the files of a `tinker://` path lie: `run/kind/name`. Nothing in a path leads out of the whole."""
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
    kind, _, name = parsed.checkpoint_id.partition("/")
    return f"{run_folder(parsed.training_run_id)}/{kind}/{check_name(name)}"


def run_folder(run_id: str) -> str:
    """An id holds colons, which not every file system takes."""
    return check_name(run_id.replace(":", "_"))


class Folders(Protocol):
    """Checkpoints by their `tinker://` paths, or what is laid out like them. Runs are named as by `run_folder`."""

    def folder(self, path: str) -> Path:
        """A local folder with the files; there is none of its name if there is no such checkpoint."""

    def exists(self, path: str) -> bool: ...

    def files(self, path: str) -> dict[str, Path]:
        """Every file by its name within the checkpoint."""

    def size_bytes(self, path: str) -> int: ...

    def archive(self, path: str) -> Archive:
        """The files as one tar file, as they are now, whatever becomes of the checkpoint while it is read."""

    def writing(self, path: str, enter: Callable[[int], object] = ...) -> AbstractContextManager[Path]:
        """A new folder to write into, which becomes the checkpoint when the block ends well.

        `enter` writes it into the database, by its size in bytes; if it raises an error, all is as before.
        """

    def make_scratch(self, path: str) -> Path:
        """A folder for what is on its way to a checkpoint. Whoever made it removes it, or the next start does."""

    def remove_scratch(self, scratch: Path) -> None: ...

    def copy(self, source: str, target: str, enter: Callable[[int], object] = ...) -> None:
        """A second checkpoint with the same content; `FileNotFoundError` if there is no first."""

    def delete(self, path: str, forget: Callable[[], bool] = ...) -> bool:
        """Removes a checkpoint, if `forget` finds it in the database and removes it there; gives back whether it did.

        If files are missing, or are left by a crash in between, nobody is harmed: without a row they are never read.
        """

    def runs(self) -> set[str]:
        """Those that have any checkpoint."""

    def names(self, run: str) -> set[str]:
        """Of its checkpoints that are `weights`."""

    def remove_run(self, run: str) -> None: ...

    def set_aside(self, runs: Collection[str]) -> None:
        """These seem to be nobody's. Called at start, before anything is written."""

    def remove_set_aside(self, before: datetime) -> None:
        """Those that were set aside before that time."""

    def tidy(self) -> None:
        """Ends what a killed process left half done on this machine. Called at start, before anything is written."""


class CheckpointFolders(Folders):
    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = root.with_name(f"{root.name}.lock")

    def folder(self, path: str) -> Path:
        return self._root / place_of(path)

    def exists(self, path: str) -> bool:
        return self.folder(path).is_dir()

    @contextmanager
    def writing(self, path: str, enter: Callable[[int], object] = lambda size: None) -> Iterator[Path]:
        target = self.folder(path)
        unfinished = target.with_name(f"{_UNFINISHED}{_stamp()}")
        self._root.parent.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(self._lock):  # a deletion in this moment would take away the folders around it
            unfinished.mkdir(parents=True)
        try:
            yield unfinished
            _flush(unfinished)
            size = _size_bytes(unfinished)
            with one_at_a_time(self._lock):
                _replace(unfinished, target, lambda: enter(size))
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise

    def make_scratch(self, path: str) -> Path:
        scratch = self.folder(path).with_name(f"{_UNFINISHED}{_stamp()}")
        self._root.parent.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(self._lock):
            scratch.mkdir(parents=True)
        return scratch

    def remove_scratch(self, scratch: Path) -> None:
        shutil.rmtree(scratch, ignore_errors=True)
        self._remove_empty(scratch.parent)

    def delete(self, path: str, forget: Callable[[], bool] = lambda: True) -> bool:
        folder = self.folder(path)
        with one_at_a_time(self._lock):
            if not forget():
                return False
            # Renamed first, so that nobody reads a checkpoint that is half deleted.
            aside = _set_aside(folder, _UNFINISHED, "deleted") if folder.is_dir() else None
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
            self._remove_empty(folder.parent)
        return True

    def _remove_empty(self, kind: Path) -> None:
        """A run that has no checkpoint of this kind, or of any, leaves no folder behind."""
        with one_at_a_time(self._lock), suppress(OSError):
            kind.rmdir()
            kind.parent.rmdir()

    def copy(self, source: str, target: str, enter: Callable[[int], object] = lambda size: None) -> None:
        """Files are never changed in place, so both may share them."""
        files = self.files(source)
        if not files:
            raise FileNotFoundError(source)
        with self.writing(target, enter) as folder:
            link_files(files, folder)

    def files(self, path: str) -> dict[str, Path]:
        return files_in(self.folder(path))

    def size_bytes(self, path: str) -> int:
        return _size_bytes(self.folder(path))

    def archive(self, path: str) -> Archive:
        return archive_of(self.files(path))

    def runs(self) -> set[str]:
        return {folder.name for folder in self._root.glob("[!.]*")}

    def names(self, run: str) -> set[str]:
        return {folder.name for folder in (self._root / run / "weights").glob("[!.]*")}

    def remove_run(self, run: str) -> None:
        shutil.rmtree(self._root / run, ignore_errors=True)

    def set_aside(self, runs: Collection[str]) -> None:
        for run in runs:
            aside = self._root / _UNKNOWN / run
            aside.parent.mkdir(exist_ok=True)
            shutil.rmtree(aside, ignore_errors=True)
            os.utime(self._root / run)  # since when it is there
            (self._root / run).rename(aside)
            log.warning("The database does not know the model of %s; it is set aside, in %s.", run, aside)

    def remove_set_aside(self, before: datetime) -> None:
        for run in (self._root / _UNKNOWN).glob("*"):
            if run.stat().st_mtime < before.timestamp():
                shutil.rmtree(run)

    def tidy(self) -> None:
        for folder in self._root.glob(f"*/*/{_UNFINISHED}*"):
            shutil.rmtree(folder, ignore_errors=True)
        for folder in self._root.glob(f"*/*/{_REPLACED}*"):
            target = folder.with_name(folder.name.removeprefix(_REPLACED)[_STAMP_LENGTH + 1 :])
            if target.exists():
                shutil.rmtree(folder, ignore_errors=True)
            else:
                os.rename(folder, target)  # its successor never arrived


class Archive:
    """A tar file that is made while it is read, so that it takes up no room; its size is known before."""

    def __init__(self, files: Mapping[str, IO[bytes]], time: int | None) -> None:
        self._files = files
        self._heads = {name: _tar_head(name, file, time) for name, file in files.items()}
        parts = (len(self._heads[name]) + _padded(os.fstat(file.fileno()).st_size) for name, file in files.items())
        self.size_bytes = sum(parts) + len(_TAR_END)

    def __iter__(self) -> Iterator[bytes]:
        try:
            for name, file in self._files.items():
                yield self._heads[name]
                yield from iter(partial(file.read, _PIECE_BYTES), b"")
                yield bytes(_padded(file.tell()) - file.tell())
            yield _TAR_END
        finally:
            self.close()

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def archive_of(files: Mapping[str, Path], time: int | None = None) -> Archive:
    """`time` is when the files were written, if that of these copies is another."""
    return Archive({name: file.open("rb") for name, file in files.items()}, time)


def files_in(folder: Path) -> dict[str, Path]:
    return {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}


def _tar_head(name: str, file: IO[bytes], time: int | None) -> bytes:
    entry, status = tarfile.TarInfo(name), os.fstat(file.fileno())
    entry.size, entry.mtime = status.st_size, int(status.st_mtime) if time is None else time
    return entry.tobuf()


def _padded(size: int) -> int:
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _replace(new: Path, target: Path, enter: Callable[[], object]) -> None:
    # A folder cannot be renamed onto another one. Between the two renames there is none; tidy() knows what to do.
    replaced = _set_aside(target, _REPLACED, target.name) if target.exists() else None
    os.rename(new, target)
    flush_folder(target.parent)
    try:
        enter()
    except BaseException:
        os.rename(target, new)
        if replaced is not None:
            os.rename(replaced, target)
        raise
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def _set_aside(folder: Path, prefix: str, suffix: str) -> Path:
    aside = folder.with_name(f"{prefix}{_stamp()}-{suffix}")
    os.rename(folder, aside)
    return aside


def _size_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _stamp() -> str:
    return uuid4().hex[:_STAMP_LENGTH]


def _flush(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
    flush_folder(folder)


def flush_folder(folder: Path) -> None:
    """What was renamed in it is so after a power cut, too."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link_files(files: Mapping[str, Path], folder: Path) -> None:
    for name, file in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(file, folder / name)


def link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)
