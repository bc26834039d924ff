"""Folders that are made once: whole or not at all, and made anew when damaged."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tinsmith.server.sealed import is_whole, make_once


def fill(folder: Path) -> None:
    (folder / "weights").write_bytes(b"0123456789")
    (folder / "config").write_text("{}")


def refuse(folder: Path) -> None:
    pytest.fail("a whole folder was made again")


def nobody_waits() -> None:
    pytest.fail("there was nobody to wait for")


def make(folder: Path, fill: Callable[[Path], None] = fill, recipe: int = 1) -> None:
    make_once(folder, recipe, fill, nobody_waits)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    make(tmp_path / "cache" / "made")
    return tmp_path / "cache" / "made"


def test_a_folder_is_made_once_and_leaves_nothing_beside_it(made: Path) -> None:
    assert is_whole(made, 1)
    assert (made / "weights").read_bytes() == b"0123456789"
    make(made, refuse)
    assert {path.suffix for path in made.parent.iterdir()} <= {"", ".lock"}


def test_another_recipe_makes_it_anew(made: Path) -> None:
    assert not is_whole(made, 2)
    make(made, lambda folder: (folder / "other").touch(), recipe=2)
    assert is_whole(made, 2)
    assert not (made / "weights").exists()


def shorten(folder: Path) -> None:
    os.truncate(folder / "weights", 9)


def overwrite(folder: Path) -> None:
    (folder / "weights").write_bytes(b"012345678X")
    os.utime(folder / "weights", ns=(0, 0))


def remove(folder: Path) -> None:
    (folder / "config").unlink()


def unseal(folder: Path) -> None:
    (folder / "tinsmith.json").unlink()


def spoil_the_seal(folder: Path) -> None:
    (folder / "tinsmith.json").write_bytes(b'{"recipe": 1, "files": \xff')


@pytest.mark.parametrize("damage", [shorten, overwrite, remove, unseal, spoil_the_seal, shutil.rmtree])
def test_a_damaged_folder_is_made_anew(damage: Callable[[Path], None], made: Path) -> None:
    damage(made)
    assert not is_whole(made, 1)
    make(made)
    assert is_whole(made, 1)
    assert (made / "weights").read_bytes() == b"0123456789"


def test_a_copy_with_other_times_is_whole(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "copy", copy_function=shutil.copyfile)
    os.utime(tmp_path / "copy" / "weights", ns=(0, 0))
    assert is_whole(tmp_path / "copy", 1)


def test_a_failure_leaves_the_old_state_and_no_remains(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        fill(folder)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        make(tmp_path / "made", fail)
    assert not is_whole(tmp_path / "made", 1)
    assert not (tmp_path / "made").exists()
    assert not (tmp_path / "made.partial").exists()
    make(tmp_path / "made")


def _die_half_way(folder: Path) -> None:
    def die(folder: Path) -> None:
        (folder / "stale").write_text("half")
        os._exit(9)

    make(folder, die)


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_die_half_way, args=(tmp_path / "made",))
    process.start()
    process.join(60)
    assert process.exitcode == 9
    assert (tmp_path / "made.partial" / "stale").exists()

    make(tmp_path / "made")
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == ["config", "tinsmith.json", "weights"]
    assert not (tmp_path / "made.partial").exists()


def _make_when_told(folder: Path, started: Any, go_on: Any) -> None:
    def wait_and_fill(folder: Path) -> None:
        started.set()
        assert go_on.wait(60)
        fill(folder)

    make(folder, wait_and_fill)


def test_a_second_process_waits_for_the_first_and_uses_its_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    started, go_on = context.Event(), context.Event()
    first = context.Process(target=_make_when_told, args=(tmp_path / "made", started, go_on))
    first.start()
    assert started.wait(60)

    make_once(tmp_path / "made", 1, refuse, on_wait=go_on.set)

    assert is_whole(tmp_path / "made", 1)
    first.join(60)
    assert first.exitcode == 0
