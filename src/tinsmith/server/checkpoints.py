"""Where checkpoints lie and how they come and go: whole, or not at all.

    STATE/checkpoints/<run>/<weights | sampler_weights | external_weights>/<name>/

A checkpoint is written into a folder of another name and renamed when all its files are on the disk, so that a reader,
or a restart after a power cut, finds either the old one, the new one or none. What the files mean is known to
`engine/adapter_files.py`.
"""

from __future__ import annotations

import os
import re
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from uuid import uuid4

from tinsmith.errors import InvalidInputError
from tinsmith.types import ParsedCheckpointTinkerPath

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_UNFINISHED = ".unfinished-"
_REPLACED = ".replaced-"
_STAMP_LENGTH = 12


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


class CheckpointFolders:
    def __init__(self, root: Path) -> None:
        self._root = root

    def folder(self, path: str) -> Path:
        """The folder of a `tinker://` path. Nothing in a path leads out of the root."""
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
        kind, _, name = parsed.checkpoint_id.partition("/")
        # A run id holds colons, which not every file system takes.
        run = check_name(parsed.training_run_id.replace(":", "_"))
        return self._root / run / kind / check_name(name)

    def exists(self, path: str) -> bool:
        return self.folder(path).is_dir()

    @contextmanager
    def writing(self, path: str) -> Iterator[Path]:
        """A new folder to write into, which becomes the checkpoint when the block ends well."""
        target = self.folder(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f"{_UNFINISHED}{_stamp()}")
        unfinished.mkdir()
        try:
            yield unfinished
            _flush(unfinished)
            _replace(unfinished, target)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise

    def delete(self, path: str) -> None:
        """Removes a checkpoint; one that is not there is gone already."""
        folder = self.folder(path)
        if folder.is_dir():
            _discard(folder)

    def copy(self, source: str, target: str) -> None:
        """A second checkpoint with the same content. Files are never changed in place, so they may be shared."""
        with self.writing(target) as folder:
            shutil.copytree(self.folder(source), folder, copy_function=_link_or_copy, dirs_exist_ok=True)

    def files(self, path: str) -> dict[str, Path]:
        """Every file by its name within the checkpoint."""
        folder = self.folder(path)
        return {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}

    def size_bytes(self, path: str) -> int:
        return sum(file.stat().st_size for file in self.files(path).values())

    def write_archive(self, path: str, out: IO[bytes]) -> None:
        """The files as one tar stream."""
        with tarfile.open(fileobj=out, mode="w|") as archive:
            for name, file in self.files(path).items():
                archive.add(file, arcname=name)

    def tidy(self) -> None:
        """Ends what a killed process left half done. Called at start, before anything is written."""
        for folder in self._root.glob(f"*/*/{_UNFINISHED}*"):
            shutil.rmtree(folder, ignore_errors=True)
        for folder in self._root.glob(f"*/*/{_REPLACED}*"):
            target = folder.with_name(folder.name.removeprefix(_REPLACED)[_STAMP_LENGTH + 1 :])
            if target.exists():
                shutil.rmtree(folder, ignore_errors=True)
            else:
                os.rename(folder, target)  # its successor never arrived


def _replace(new: Path, target: Path) -> None:
    if target.exists():
        # A folder cannot be renamed onto another one. Between the two renames there is none; tidy() knows what to do.
        replaced = _set_aside(target, _REPLACED, target.name)
        os.rename(new, target)
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        os.rename(new, target)
    _flush_folder(target.parent)


def _discard(folder: Path) -> None:
    """Renamed first, so that nobody reads a checkpoint that is half deleted."""
    shutil.rmtree(_set_aside(folder, _UNFINISHED, "deleted"), ignore_errors=True)


def _set_aside(folder: Path, prefix: str, suffix: str) -> Path:
    aside = folder.with_name(f"{prefix}{_stamp()}-{suffix}")
    os.rename(folder, aside)
    return aside


def _stamp() -> str:
    return uuid4().hex[:_STAMP_LENGTH]


def _flush(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
