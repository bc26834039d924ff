"""A save, a copy and a deletion of one checkpoint in the same moment end as if they had come one after the other."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from tests.server.store.making import MODEL, Clock, new_checkpoint
from tinsmith.errors import InvalidInputError
from tinsmith.server.checkpoints import CheckpointFolders
from tinsmith.server.store import Store
from tinsmith.server.store.records import NewCheckpoint

ROUNDS = 60
KEY = new_checkpoint("one").key
PATH = KEY.tinker_path


class Shelf:
    """Checkpoints with their rows, as a worker and the API see them: each with a store of its own."""

    def __init__(self, folder: Path, url: str, clock: Callable[[], object] | None = None) -> None:
        self.folders = CheckpointFolders(folder / "checkpoints")
        self.store = Store(url) if clock is None else Store(url, now=clock)  # type: ignore[arg-type]

    def save(
        self, text: str, *, name: str = "one", overwrite: bool = False, most_bytes: int | None = None
    ) -> NewCheckpoint:
        entered: list[NewCheckpoint] = []

        def enter(size: int) -> None:
            entered.append(new_checkpoint(name, size_bytes=size, request_id=text))
            self.store.checkpoints.save(entered[0], overwrite=overwrite, most_bytes=most_bytes)

        path = new_checkpoint(name).key.tinker_path
        with self.folders.writing(path, enter) as folder:
            (folder / "a.txt").write_text(text)
        return entered[0]

    def delete(self) -> bool:
        return self.folders.delete(PATH, lambda: self.store.checkpoints.delete(KEY, "ann"))

    def close(self) -> None:
        self.store.close()


def the_files_are_those_of_the_row(shelf: Shelf) -> None:
    row = shelf.store.checkpoints.get(KEY, "ann")
    files = shelf.folders.files(PATH)
    if row is None:
        assert not files
    else:
        assert files["a.txt"].read_text() == row.request_id


def together(*works: Callable[[], object], within: float = 0.001) -> None:
    """Started within so many seconds of each other, in any order."""
    barrier = threading.Barrier(len(works))

    def start(work: Callable[[], object]) -> object:
        barrier.wait(30)
        time.sleep(random.uniform(0, within))
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        for done in [pool.submit(start, work) for work in works]:
            done.result(30)


def test_a_save_and_a_deletion_leave_files_and_row_in_agreement(tmp_path: Path, url: str) -> None:
    worker, api = Shelf(tmp_path, url), Shelf(tmp_path, url)
    started = time.monotonic()
    worker.save("0")
    span = 2 * (time.monotonic() - started)
    for number in range(1, ROUNDS):
        together(partial(worker.save, str(number), overwrite=True), api.delete, within=span)
        the_files_are_those_of_the_row(api)
    worker.close()
    api.close()


def test_a_deletion_between_the_files_and_the_row_waits_for_the_row(tmp_path: Path, url: str) -> None:
    worker, api = Shelf(tmp_path, url), Shelf(tmp_path, url)
    worker.save("old")
    with ThreadPoolExecutor(1) as pool:
        deletions: list[Future[bool]] = []

        def enter(size: int) -> None:
            deletions.append(pool.submit(api.delete))
            assert not wait(deletions, timeout=0.2).done
            worker.store.checkpoints.save(new_checkpoint(request_id="new"), overwrite=True)

        with worker.folders.writing(PATH, enter) as folder:
            (folder / "a.txt").write_text("new")
        assert deletions[0].result(30)
    the_files_are_those_of_the_row(api)
    assert not api.folders.exists(PATH)
    worker.close()
    api.close()


def test_a_save_between_the_row_and_the_files_of_a_deletion_waits_for_its_end(tmp_path: Path, url: str) -> None:
    worker, api = Shelf(tmp_path, url), Shelf(tmp_path, url)
    worker.save("old")
    with ThreadPoolExecutor(1) as pool:
        saves: list[Future[NewCheckpoint]] = []

        def forget() -> bool:
            forgotten = api.store.checkpoints.delete(KEY, "ann")
            saves.append(pool.submit(worker.save, "new"))
            assert not wait(saves, timeout=0.2).done
            return forgotten

        assert api.folders.delete(PATH, forget)
        assert saves[0].result(30).request_id == "new"
    the_files_are_those_of_the_row(api)
    assert api.folders.exists(PATH)
    worker.close()
    api.close()


def test_an_expiry_never_takes_the_successor(tmp_path: Path) -> None:
    clock, url = Clock(), f"sqlite:///{tmp_path}/tinsmith.db"
    worker, api = Shelf(tmp_path, url, clock), Shelf(tmp_path, url, clock)

    def tidy() -> None:
        for checkpoint in api.store.checkpoints.expired():
            api.folders.delete(PATH, partial(api.store.checkpoints.delete_expired, checkpoint.key))

    for number in range(ROUNDS):
        worker.save(f"old {number}", overwrite=True)
        api.store.checkpoints.set_expiry(KEY, "ann", clock() + timedelta(hours=1))
        clock.pass_(timedelta(hours=2))
        together(tidy, partial(worker.save, f"new {number}"))
        the_files_are_those_of_the_row(api)
        assert api.folders.files(PATH)["a.txt"].read_text() == f"new {number}"
    worker.close()
    api.close()


def test_a_save_that_is_refused_leaves_the_old_one_as_it_was(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, f"sqlite:///{tmp_path}/tinsmith.db")
    shelf.save("old")
    with pytest.raises(InvalidInputError, match="exists already"):
        shelf.save("new")
    with pytest.raises(InvalidInputError, match=r"This checkpoint alone.*6 bytes.*over the limit.*5 bytes"):
        shelf.save("newest", overwrite=True, most_bytes=5)
    the_files_are_those_of_the_row(shelf)
    assert [path.name for path in shelf.folders.folder(PATH).parent.iterdir()] == ["one"]
    shelf.close()


def test_saves_at_once_do_not_pass_the_quota_together(tmp_path: Path, url: str) -> None:
    shelves = [Shelf(tmp_path, url) for _ in range(4)]
    names = itertools.count()
    refused = []

    def save(shelf: Shelf) -> None:
        for _ in range(5):
            try:
                shelf.save("x" * 10, name=f"n{next(names)}", most_bytes=75)
            except InvalidInputError as error:
                refused.append(error)

    together(*(partial(save, shelf) for shelf in shelves))
    kept = shelves[0].store.checkpoints.page("ann", limit=100).items
    assert (len(kept), len(refused)) == (7, 13)
    assert shelves[0].store.checkpoints.kept_bytes("ann") == 70
    on_disk = [file for one in kept for file in shelves[0].folders.files(one.key.tinker_path)]
    run = shelves[0].folders.folder(PATH).parent
    assert len(on_disk) == len(list(run.iterdir())) == 7
    for shelf in shelves:
        shelf.close()


def test_saves_at_once_on_several_machines_do_not_pass_the_quota_together(tmp_path: Path, url: str) -> None:
    """They share no folder, in which one would come after the other."""
    shelves = [Shelf(tmp_path / str(number), url) for number in range(4)]
    refused = []

    def save(shelf: Shelf, name: str, most_bytes: int) -> None:
        try:
            shelf.save("x" * 10, name=name, most_bytes=most_bytes)
        except InvalidInputError as error:
            refused.append(error)

    for kept in range(0, 200, 10):
        together(*(partial(save, shelf, f"n{kept}-{place}", kept + 15) for place, shelf in enumerate(shelves)))
        assert shelves[0].store.checkpoints.kept_bytes("ann") == kept + 10
    assert len(refused) == 20 * 3
    for shelf in shelves:
        shelf.close()


def test_a_copy_of_what_goes_away_is_whole_or_none(tmp_path: Path) -> None:
    """The files of a copy may not be of two checkpoints."""
    shelf = Shelf(tmp_path, f"sqlite:///{tmp_path}/tinsmith.db")
    copy = f"tinker://{MODEL}/weights/copy"
    with pytest.raises(FileNotFoundError):
        shelf.folders.copy(PATH, copy)
    assert not shelf.folders.exists(copy)
    shelf.close()
