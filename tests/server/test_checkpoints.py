"""Checkpoints come and go whole."""

import io
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tinsmith.errors import InvalidInputError
from tinsmith.server.checkpoints import CheckpointFolders, check_name

PATH = "tinker://session-1:train:0/weights/step-1"


def write(folders: CheckpointFolders, text: str, path: str = PATH) -> None:
    with folders.writing(path) as folder:
        (folder / "a.txt").write_text(text)
        (folder / "sub").mkdir()
        (folder / "sub" / "b.txt").write_text(text)


def test_a_checkpoint_appears_when_it_is_complete(tmp_path: Path) -> None:
    folders = CheckpointFolders(tmp_path)
    with folders.writing(PATH) as folder:
        (folder / "a.txt").write_text("x")
        assert not folders.exists(PATH)
    assert {name: file.read_text() for name, file in folders.files(PATH).items()} == {"a.txt": "x"}
    assert folders.size_bytes(PATH) == 1


def test_a_failed_write_leaves_the_old_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    folders = CheckpointFolders(tmp_path)
    write(folders, "old")

    def write_and_fail() -> None:
        with folders.writing(PATH) as folder:
            (folder / "a.txt").write_text("new")
            raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        write_and_fail()
    assert folders.files(PATH)["a.txt"].read_text() == "old"
    assert len(list(folders.folder(PATH).parent.iterdir())) == 1


def test_overwriting_replaces_all_files(tmp_path: Path) -> None:
    folders = CheckpointFolders(tmp_path)
    write(folders, "old")
    with folders.writing(PATH) as folder:
        (folder / "c.txt").write_text("new")
    assert list(folders.files(PATH)) == ["c.txt"]


def test_a_copy_survives_the_deletion_of_its_source(tmp_path: Path) -> None:
    folders = CheckpointFolders(tmp_path)
    copy = "tinker://session-2:train:0/weights/copy"
    write(folders, "x")
    folders.copy(PATH, copy)
    folders.delete(PATH)
    folders.delete(PATH)
    assert not folders.exists(PATH)
    assert {name: file.read_text() for name, file in folders.files(copy).items()} == {"a.txt": "x", "sub/b.txt": "x"}


def test_a_run_without_checkpoints_leaves_no_folder_behind(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    folders = CheckpointFolders(root)
    others = [f"tinker://session-1:train:0/{kind}/other" for kind in ("weights", "sampler_weights")]
    for path in (PATH, *others):
        write(folders, "x", path)
    folders.delete(PATH)
    assert all(map(folders.exists, others))
    for path in others:
        folders.delete(path)
    assert list(root.iterdir()) == []


def test_an_archive_holds_every_file(tmp_path: Path) -> None:
    folders = CheckpointFolders(tmp_path)
    write(folders, "x")
    long = f"{'n' * 90}/{'m' * 120}.txt"
    (folders.folder(PATH) / long).parent.mkdir()
    (folders.folder(PATH) / long).write_bytes(bytes(5_000_000))
    archive = folders.archive(PATH)
    folders.delete(PATH)
    content = b"".join(archive)
    assert len(content) == archive.size_bytes
    with tarfile.open(fileobj=io.BytesIO(content)) as read:
        assert read.getnames() == ["a.txt", long, "sub/b.txt"]
        assert read.extractfile("sub/b.txt").read() == b"x"  # type: ignore[union-attr]
        assert read.extractfile(long).read() == bytes(5_000_000)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", ".hidden", "a\0b", "ä", "a b", "x" * 129, "-x"])
def test_names_that_could_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match="cannot name a checkpoint"):
        check_name(name)


@pytest.mark.parametrize(
    "path",
    ["tinker://../weights/x", "tinker://run/weights/..", "tinker://run/other/x", "file:///etc/passwd", "tinker://run"],
)
def test_paths_that_are_no_checkpoint_paths_are_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError):
        CheckpointFolders(tmp_path).folder(path)


KILLED_WRITER = """
import os, sys
from pathlib import Path
from tinsmith.server import checkpoints

def die(*_):
    os.kill(os.getpid(), 9)

folders = checkpoints.CheckpointFolders(Path(sys.argv[1]))
moment = sys.argv[2]
if moment == "between the renames":
    real, calls = os.rename, []
    def rename(a, b):
        calls.append(a)
        if len(calls) == 2:
            die()
        real(a, b)
    checkpoints.os.rename = rename
with folders.writing(sys.argv[3]) as folder:
    (folder / "a.txt").write_text("new")
    if moment == "while writing":
        die()
"""


@pytest.mark.parametrize("moment", ["while writing", "between the renames"])
def test_a_killed_overwrite_leaves_the_old_checkpoint(moment: str, tmp_path: Path) -> None:
    folders = CheckpointFolders(tmp_path)
    write(folders, "old")
    done = subprocess.run([sys.executable, "-c", KILLED_WRITER, str(tmp_path), moment, PATH], timeout=60)
    assert done.returncode == -signal.SIGKILL
    folders.tidy()
    assert folders.files(PATH)["a.txt"].read_text() == "old"
    assert os.listdir(folders.folder(PATH).parent) == ["step-1"]
