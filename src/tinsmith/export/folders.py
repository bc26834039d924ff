"""A folder under its own name is whole; until then its files lie beside it under another one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tinsmith.errors import InvalidInputError


@contextmanager
def new_folder(target: Path, *, force: bool = False) -> Iterator[Path]:
    """A folder to fill, which gets the name `target` when the block ends well and is gone otherwise.

    With `force` it takes the place of what is there, once it is complete.
    """
    check_target(target, force=force)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as name:
        scratch = Path(name)
        folder = scratch / "new"
        folder.mkdir()
        yield folder
        _put_in_place(folder, target, scratch / "replaced")


def check_target(target: Path, *, force: bool) -> None:
    is_free = not target.exists() or (target.is_dir() and (force or not any(target.iterdir())))
    if not is_free:
        problem = "exists and is not empty" if target.is_dir() else "is a file"
        remedy = "replace it with --force, or choose another folder" if target.is_dir() else "choose another name"
        raise InvalidInputError(f"{target} {problem}: {remedy}.", field="folder", value=str(target))


def _put_in_place(folder: Path, target: Path, aside: Path) -> None:
    if not target.exists():
        folder.rename(target)
        return
    target.rename(aside)
    try:
        folder.rename(target)
    except OSError:
        aside.rename(target)
        raise
