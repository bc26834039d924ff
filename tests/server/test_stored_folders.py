"""Folders in a storage of objects come and go whole, as local ones do."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from s3fs import S3FileSystem

from tests.server.bucket import BUCKET, Bucket, running_bucket
from tinsmith.errors import ConfigError, MissingExtraError
from tinsmith.server import folder_cache, objects, stored_folders
from tinsmith.server.engine.damage import DamagedError
from tinsmith.server.full_disk import DiskFullError
from tinsmith.server.objects import Objects, StorageAwayError, check_rights, check_url
from tinsmith.server.snapshots import SnapshotFolders
from tinsmith.server.spilled import StoredSpilled
from tinsmith.server.storage import check_storage, move_in, note_storage, open_storage
from tinsmith.server.store import reserve
from tinsmith.server.store.records import Snapshots
from tinsmith.server.stored_folders import StoredFolders

PATH = "tinker://session-1:train:0/weights/step-1"
COPY = "tinker://session-2:train:0/weights/copy"
MODEL = "session-1:train:0"
WAIT_SECONDS = 30.0

_numbers = itertools.count()


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    with running_bucket() as running:
        yield running


@pytest.fixture(autouse=True)
def _enough_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else is on this disk."""
    monkeypatch.setattr(folder_cache, "FREE_BYTES", 0)


@pytest.fixture(params=["s3", "file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place of our own in a storage of this kind."""
    if request.param == "s3":
        request.getfixturevalue("bucket")
    number = next(_numbers)
    return {"s3": f"s3://{BUCKET}/{number}", "file": f"file://{tmp_path}/far", "memory": f"memory://{number}"}[
        request.param
    ]


@pytest.fixture
def s3(bucket: Bucket) -> str:
    return f"s3://{BUCKET}/{next(_numbers)}"


class Machine:
    """One of those that use the same storage, with a state folder of its own."""

    def __init__(self, state: Path, url: str, cache_bytes: int = 2**30) -> None:
        state.mkdir(exist_ok=True)
        self.storage = open_storage(state, url, cache_bytes)
        assert self.storage.objects is not None
        self.objects: Objects = self.storage.objects
        self.objects.claim("a database")
        self.folders = self.storage.checkpoints

    def write(self, text: str, path: str = PATH, **options: Any) -> None:
        with self.folders.writing(path, **options) as folder:
            (folder / "a.txt").write_text(text)
            (folder / "sub").mkdir()
            (folder / "sub" / "b.txt").write_text(text)

    def read(self, path: str = PATH) -> dict[str, str]:
        return {name: file.read_text() for name, file in self.folders.files(path).items()}


@pytest.fixture
def one(tmp_path: Path, url: str) -> Machine:
    return Machine(tmp_path / "one", url)


@pytest.fixture
def other(tmp_path: Path, url: str) -> Machine:
    return Machine(tmp_path / "other", url)


def both(text: str) -> dict[str, str]:
    return {"a.txt": text, "sub/b.txt": text}


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def elsewhere(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """For whoever asks from now on."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setattr(S3FileSystem, "_cache", {})


def keys(machine: Machine) -> list[str]:
    return sorted(machine.objects.find("checkpoints"))


# Whole or not at all


def test_what_one_machine_has_written_another_reads_when_it_is_complete(one: Machine, other: Machine) -> None:
    sizes: list[int] = []
    with one.folders.writing(PATH, sizes.append) as folder:
        (folder / "a.txt").write_text("x")
        (folder / "sub").mkdir()
        (folder / "sub" / "b.txt").write_text("xyz")
        assert not other.folders.exists(PATH)
        assert not other.folders.folder(PATH).exists()
        assert other.folders.files(PATH) == {}
    assert sizes == [4]
    assert other.read() == {"a.txt": "x", "sub/b.txt": "xyz"}
    assert other.folders.size_bytes(PATH) == 4
    archive = other.folders.archive(PATH)
    assert len(b"".join(archive)) == archive.size_bytes


def test_a_copy_that_was_fetched_is_not_fetched_again(one: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    one.write("x")
    folder = one.folders.folder(PATH)
    monkeypatch.setattr(Objects, "get_file", None)
    assert one.folders.folder(PATH) == folder
    assert one.read() == both("x")


def test_an_overwrite_replaces_all_files_for_everybody_and_leaves_nothing_of_the_old(
    one: Machine, other: Machine
) -> None:
    one.write("old")
    assert other.read() == both("old")
    with one.folders.writing(PATH) as folder:
        (folder / "c.txt").write_text("new")
    assert other.read() == one.read() == {"c.txt": "new"}
    assert len(keys(one)) == 2


def test_a_write_that_fails_or_is_refused_leaves_the_old_one_and_nothing_else(one: Machine, other: Machine) -> None:
    one.write("old")
    before = keys(one)

    def refuse(size: int) -> None:
        raise RuntimeError("quota")

    with pytest.raises(RuntimeError, match="quota"):
        one.write("new", enter=refuse)
    with suppress(RuntimeError), one.folders.writing(PATH) as folder:
        (folder / "a.txt").write_text("new")
        raise RuntimeError
    assert keys(one) == before
    assert other.read() == both("old")
    assert not list((one.folders.folder(PATH).parents[5]).glob(".unfinished*"))


def test_a_copy_is_made_in_the_storage_and_survives_its_source(
    one: Machine, other: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one.write("x")
    with monkeypatch.context() as patch:
        patch.setattr(Objects, "get_file", None)
        other.folders.copy(PATH, COPY)
    assert one.folders.delete(PATH)
    assert one.folders.delete(PATH)
    assert not other.folders.exists(PATH)
    assert one.read(COPY) == both("x")
    with pytest.raises(FileNotFoundError):
        one.folders.copy(PATH, COPY)


def test_a_deletion_removes_the_objects_if_the_database_knew_them(one: Machine, other: Machine) -> None:
    one.write("x")
    assert other.read() == both("x")
    assert not one.folders.delete(PATH, lambda: False)
    assert other.read() == both("x")
    assert one.folders.delete(PATH, lambda: True)
    assert keys(one) == []
    assert other.read() == {}


def test_who_reads_while_others_write_finds_one_of_them_as_a_whole(one: Machine, other: Machine) -> None:
    one.write("0")
    over = threading.Event()

    def write() -> None:
        for number in range(1, 15):
            one.write(str(number))
        over.set()

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        seen = []
        while not over.is_set():
            found = other.read()
            assert len(found) == 2
            assert len(set(found.values())) == 1
            seen.append(int(found["a.txt"]))
        writing.result(WAIT_SECONDS)
    assert seen == sorted(seen)
    assert other.read() == both("14")


def test_who_reads_while_a_list_is_being_written_finds_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (Machine(tmp_path / name, f"file://{tmp_path}/far") for name in ("one", "other"))
    one.write("old")
    seen = []
    whole = LocalFileSystem.pipe_file

    def by_halves(files: LocalFileSystem, path: str, value: bytes) -> None:
        whole(files, path, value[: len(value) // 2])
        seen.append(other.read())
        whole(files, path, value)

    monkeypatch.setattr(LocalFileSystem, "pipe_file", by_halves)
    one.write("new")
    assert seen == [both("old")]
    assert other.read() == both("new")


def test_a_save_and_a_deletion_at_once_leave_files_and_row_in_agreement(tmp_path: Path) -> None:
    worker, api = (Machine(tmp_path / "state", f"file://{tmp_path}/far") for _ in range(2))
    row: list[str] = []

    def enter(text: str, size: int) -> None:
        row[:] = [text]

    def forget() -> bool:
        was_there = bool(row)
        row.clear()
        return was_there

    for number in range(20):
        text = str(number)
        with ThreadPoolExecutor(2) as pool:
            saving = pool.submit(worker.write, text, enter=partial(enter, text))
            deleting = pool.submit(api.folders.delete, PATH, forget)
            saving.result(WAIT_SECONDS)
            deleting.result(WAIT_SECONDS)
        assert api.read() == (both(text) if row else {})


def test_of_two_lists_the_later_counts_whatever_the_clocks_say(
    one: Machine, other: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one.write("old")
    monkeypatch.setattr(StoredFolders, "_remove", lambda *arguments: None)  # as if it had died before
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    other.write("new")
    monkeypatch.undo()
    assert one.read() == both("new")


# Snapshots and samplers


def test_snapshots_are_pruned_and_unknown_models_go_after_a_week(one: Machine, other: Machine) -> None:
    snapshots: SnapshotFolders = one.storage.snapshots
    for seq_id in (3, 5, 7):
        with snapshots.writing(MODEL, seq_id) as folder:
            (folder / "weights").write_text(str(seq_id))
    snapshots.prune(MODEL, Snapshots(last=7, previous=5))
    with pytest.raises(DamagedError, match="is missing"):
        other.storage.snapshots.folder(MODEL, 3)
    assert (other.storage.snapshots.folder(MODEL, 5) / "weights").read_text() == "5"

    now, found = datetime.now(UTC), partial(one.objects.find, "snapshots")
    snapshots.remove_unneeded({})
    snapshots.remove_unknown(now - timedelta(days=1))
    snapshots.remove_unneeded({MODEL: Snapshots(last=7, previous=None)})  # it is known after all
    snapshots.remove_unknown(now + timedelta(days=1))
    assert len(found()) == 2
    with pytest.raises(DamagedError):
        snapshots.folder(MODEL, 5)
    snapshots.remove_unneeded({})
    snapshots.remove_unknown(now + timedelta(days=1))
    assert found() == []


def test_weights_of_samplers_are_found_by_all_and_removed(one: Machine, other: Machine) -> None:
    sampler, spilled = "0b7c0d0e-1111:sample:3", other.storage.spilled
    assert isinstance(spilled, StoredSpilled)
    assert not spilled.exists(sampler)
    with one.storage.spilled.writing(sampler) as file:
        file.write_bytes(b"weights")
    assert spilled.sampler_ids() == [sampler]
    assert spilled.exists(sampler)
    assert spilled.path(sampler).read_bytes() == b"weights"
    spilled.remove(sampler)
    assert one.storage.spilled.sampler_ids() == []
    assert not one.storage.spilled.exists(sampler)


# What is left, damaged, or too much


def test_a_sweep_takes_what_nobody_names_when_it_is_old(one: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:  # somebody dies before the list is written, and then before the old one goes
        patch.setattr(StoredFolders, "_commit", lambda *arguments: None)
        one.write("never there")
        patch.undo()
        one.write("old")
        patch.setattr(StoredFolders, "_remove", lambda *arguments: None)
        one.write("new")
    assert len(keys(one)) == 8
    one.storage.sweep()
    assert len(keys(one)) == 8
    monkeypatch.setattr(stored_folders, "SWEPT_AFTER_SECONDS", -1.0)
    one.storage.sweep()
    assert len(keys(one)) == 3
    assert one.read() == both("new")


def test_what_took_so_long_that_it_may_be_swept_up_begins_anew(one: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_folders, "LONGEST_WRITE_SECONDS", -1.0)
    with pytest.raises(StorageAwayError):
        one.write("x")
    assert not one.folders.exists(PATH)


def test_files_that_are_damaged_or_missing_in_the_storage_are_noticed(tmp_path: Path, s3: str, bucket: Bucket) -> None:
    one = Machine(tmp_path / "one", s3)
    one.write("x")
    (key,) = [key for key in bucket.objects("") if key.startswith(s3.rpartition("/")[2]) and key.endswith("b.txt")]
    bucket.damage(key)
    with pytest.raises(DamagedError, match=r"b\.txt has 1 bytes and the checksum"):
        Machine(tmp_path / "other", s3).read()
    one.objects.remove([key.partition("/")[2]])
    with pytest.raises(DamagedError, match="lacks files"):
        Machine(tmp_path / "other", s3).read()


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "sub/../../evil"])
def test_a_list_that_leads_out_of_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    one = Machine(tmp_path / "one", f"file://{tmp_path}/far")
    one.write("x")
    (listed,) = (key for key in keys(one) if key.endswith(".json"))
    one.objects.put(listed, one.objects.get(listed).replace(b"a.txt", name.encode()))
    one.storage.stored[0]._cache.drop("checkpoints")
    with pytest.raises(DamagedError, match="outside of their folder"):
        one.read()


def test_local_copies_that_nobody_reads_go_when_they_are_too_many(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, paths = Machine(tmp_path / "one", url, cache_bytes=3), [f"{PATH}-{number}" for number in range(3)]
    for path in paths:
        one.write("x", path)
    assert kept(tmp_path / "one") == ["step-1-2"], "the last fits"
    assert all(one.read(path) == both("x") for path in paths), "and the others are fetched again"
    assert kept(tmp_path / "one") == ["step-1-0", "step-1-1", "step-1-2"], "somebody may be reading them"
    monkeypatch.setattr(folder_cache, "IN_USE_SECONDS", -1.0)
    one.write("y", paths[0])
    assert kept(tmp_path / "one") == ["step-1-0"]
    assert one.read(paths[0]) == both("y")


def test_a_disk_that_is_nearly_full_keeps_no_copies_that_nobody_reads(
    one: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one.write("x")
    monkeypatch.setattr(folder_cache, "FREE_BYTES", 2**62)
    one.write("y", COPY)
    assert kept(tmp_path / "one") == []


def kept(state: Path) -> list[str]:
    return sorted(folder.parent.name for folder in (state / "cache").glob("*/*/*/*/*"))


def test_a_local_disk_without_room_for_a_copy_says_so(
    one: Machine, other: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one.write("x")
    monkeypatch.setattr(reserve, "free_bytes", lambda folder: 0)
    with pytest.raises(DiskFullError, match="A copy of files from the storage"):
        other.read()


# Outages


def test_an_outage_costs_one_wait_and_ends_by_itself(
    tmp_path: Path, s3: str, bucket: Bucket, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "LOOK_SECONDS", 0.05)
    one = Machine(tmp_path / "one", s3)
    one.write("old")
    bucket.go_away()
    forgotten: list[bool] = []
    with pytest.raises(StorageAwayError) as away:
        one.write("new")
    assert not away.value.has_passed
    asked: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(Objects, "_look", lambda self: None)
        patch.setattr(Objects, "_ask", lambda self, name, *rest, **options: asked.append(name))
        with pytest.raises(StorageAwayError):
            one.folders.delete(PATH, lambda: not forgotten.append(True))
    assert (asked, forgotten) == ([], [])
    bucket.come_back()
    with one.objects._trouble:
        one.objects._look_at = 0.0
    until(lambda: away.value.has_passed)
    assert one.read() == both("old")
    one.write("new")
    assert one.read() == both("new")
    assert caplog.text.count("is out of reach, and what needs its files waits") == 1
    assert f"The storage {s3} is back" in caplog.text


def test_a_storage_that_never_answers_is_given_up(tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "PATIENCE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        elsewhere(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}")
        hung = open_storage(tmp_path / "hung", s3, 0)
        with pytest.raises(StorageAwayError):
            hung.checkpoints.exists(PATH)
    assert hung.is_away


def test_nothing_found_in_a_bucket_that_is_gone_is_no_answer(
    tmp_path: Path, s3: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "LOOK_SECONDS", 0.05)
    one = Machine(tmp_path / "one", s3)
    assert not one.folders.exists(PATH)
    bucket.remove()
    for ask in (one.folders.exists, one.folders.folder, one.folders.delete, one.write):
        with pytest.raises(StorageAwayError):
            ask(PATH)
    bucket.make()  # another one, without our mark
    for _ in range(5):
        time.sleep(0.05)
        assert one.objects.is_away


# At the start


def test_a_storage_that_cannot_be_used_is_refused_with_what_to_change(
    s3: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"bucket does not exist.*Check --storage, .*AWS_ENDPOINT_URL"):
        Objects("s3://not-there/x").claim("a")
    Objects(s3).claim("a")
    Objects(s3).claim("a")
    with pytest.raises(ConfigError, match=r"belongs to another database, that with the id a\."):
        Objects(s3).claim("b")
    elsewhere(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"cannot be used: EndpointConnectionError"):
        Objects(s3).claim("a")


def test_a_worker_without_the_credentials_of_the_server_says_so_and_an_outage_is_none_of_its_faults(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_rights("")
    check_rights(s3)
    elsewhere(monkeypatch, "http://127.0.0.1:9")
    check_rights(s3)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(S3FileSystem, "_cache", {})
    with pytest.raises(ConfigError, match=r"cannot be used there: .*credentials.*`ray start`.*AWS_ACCESS_KEY_ID"):
        check_rights(s3)


@pytest.mark.parametrize("url", ["ftp://127.0.0.1:9/x", "gs://bucket/x"])
def test_what_a_library_cannot_do_is_said_with_the_place(url: str) -> None:
    with pytest.raises(ConfigError, match=f"The storage {url} cannot be "):
        Objects(url)


def test_without_the_package_for_a_bucket_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: Any, **options: Any) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    with pytest.raises(MissingExtraError, match=r"pip install 'tinsmith\[s3\]'"):
        Objects("s3://bucket/x")
    with pytest.raises(ConfigError, match="Install s3fs"):
        Objects("gs://bucket/x")


@pytest.mark.parametrize(
    "url", ["s3://key:hidden@bucket/x", "s3://bucket/x?key=hidden", "s3://bucket#hidden", "s3://@bucket"]
)
def test_a_url_with_more_than_a_place_is_refused_and_not_quoted(url: str) -> None:
    with pytest.raises(ConfigError, match="AWS_SECRET_ACCESS_KEY") as refused:
        check_url(url)
    assert "hidden" not in str(refused.value)


@pytest.mark.parametrize("url", ["bucket", "s3://", "s3:///", "simplecache::s3://bucket", "/tmp/x", "nonsense://x"])
def test_what_is_no_place_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"s3://bucket/prefix"):
        Objects(url)


def test_a_state_folder_is_used_with_the_storage_of_its_files_alone(tmp_path: Path) -> None:
    check_storage(tmp_path, "s3://bucket/mistyped")  # which was refused then
    check_storage(tmp_path, "s3://bucket/a")
    note_storage(tmp_path, "s3://bucket/a")
    check_storage(tmp_path, "s3://bucket/a")
    for url in ("s3://bucket/b", ""):
        with pytest.raises(ConfigError, match=r"are in s3://bucket/a, and --storage is .*Start the server with"):
            check_storage(tmp_path, url)
    check_storage(tmp_path / "local", "")


def test_what_lies_in_a_state_folder_moves_into_its_storage_even_in_two_goes(
    one: Machine, other: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, sampler, export = tmp_path / "one", "s:sample:1", "tinker://session-1:train:0/external_weights/x"
    local = open_storage(state, "", 0)
    for path in (PATH, COPY, export):
        with local.checkpoints.writing(path) as folder:
            (folder / "a.txt").write_text(path)
            (folder / "sub").mkdir()
            (folder / "sub" / "b.txt").write_text(path)
    with local.snapshots.writing(MODEL, 7) as folder:
        (folder / "weights").write_text("7")
    with local.spilled.writing(sampler) as file:
        file.write_bytes(b"weights")
    with monkeypatch.context() as patch:
        patch.setattr(StoredFolders, "_commit", lambda *arguments: (_ for _ in ()).throw(StorageAwayError(one.objects)))
        with pytest.raises(StorageAwayError):
            move_in(state, one.storage)
    move_in(state, one.storage)
    move_in(state, one.storage)
    assert all(other.read(path) == both(path) for path in (PATH, COPY, export))
    assert (other.storage.snapshots.folder(MODEL, 7) / "weights").read_text() == "7"
    assert other.storage.spilled.path(sampler).read_bytes() == b"weights"
    assert [*state.glob("checkpoints/*/*/*"), *state.glob("snapshots/*/*/*"), *state.glob("samplers/*")] == []
