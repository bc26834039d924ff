"""Folders that lie in a storage of objects, and come and go there as a whole.

    <run>/<kind>/<name>/<stamp>/<file>             files, each under a stamp of its own, never changed
    <run>/<kind>/<name>/<number>.<stamp>.json      the list of them; the one with the highest number counts
    .unknown/<run>                                 since when a run is set aside

A list is written when all its files are there, in one request, which is the moment from which the folder is there: who
looks finds the old list, the new one or none. What no list names was left by somebody who died, and is swept up when
nobody can be writing it any more.

Others work with local copies (`folder_cache.py`). Saves and deletions of one folder come one after the other, for which
they take a lock: of this machine, or, where several servers share a database, of that.
"""

from __future__ import annotations

import logging
import re
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, TypeAlias
from uuid import uuid4

import msgspec

from tinsmith.server.checkpoints import Archive, Folders, archive_of, files_in, place_of
from tinsmith.server.engine.damage import DamagedError, checksum
from tinsmith.server.folder_cache import FolderCache
from tinsmith.server.full_disk import Disk
from tinsmith.server.objects import Objects, StorageAwayError

log = logging.getLogger(__name__)

SWEPT_AFTER_SECONDS = 24 * 3600.0
LONGEST_WRITE_SECONDS = SWEPT_AFTER_SECONDS / 2
"""Who takes longer, because the machine slept, say, begins anew: it may have been swept up."""
MAX_TRIES = 3
MAX_SUCCESSORS = 100
"""Of a folder that is overwritten whenever it is about to be read."""

_LIST = re.compile(r"(\d{13})\.((\d{13})-[0-9a-f]{8})\.json")
_STAMP = re.compile(r"(\d{13})-[0-9a-f]{8}")
_UNKNOWN = ".unknown"


Alone: TypeAlias = Callable[[str], AbstractContextManager[None]]


class _File(msgspec.Struct, frozen=True, array_like=True):
    size: int
    checksum: int


class _List(msgspec.Struct, frozen=True):
    files: dict[str, _File]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())


class _Version(NamedTuple):
    """One of the lists of a folder."""

    number: int
    stamp: str
    key: str


class StoredFolders(Folders):
    """`prefix` is what the keys of all objects begin with. `alone` lets one at a time change what is in a place."""

    def __init__(self, objects: Objects, prefix: str, cache: FolderCache, alone: Alone) -> None:
        self._objects = objects
        self._prefix = prefix
        self._cache = cache
        self._alone = alone

    # Reading

    def folder(self, path: str) -> Path:
        place, tried = self._place(path), Counter[str]()
        while (found := self._newest(place)) is not None:
            try:
                return self._cache.find(place, found.stamp) or self._fetched(place, found)
            except (FileNotFoundError, msgspec.DecodeError) as error:  # replaced or deleted in this moment
                tried[found.stamp] += 1
                if tried[found.stamp] == MAX_TRIES or tried.total() == MAX_SUCCESSORS:
                    raise DamagedError(f"{path} lacks files in the storage") from error
        return self._cache.place(place, "none")

    def exists(self, path: str) -> bool:
        return self._newest(self._place(path)) is not None

    def files(self, path: str) -> dict[str, Path]:
        return files_in(self.folder(path))

    def size_bytes(self, path: str) -> int:
        """Nothing is fetched for it."""
        found = self._newest(self._place(path))
        return 0 if found is None else self._list(found).size

    def archive(self, path: str) -> Archive:
        """The same bytes from whichever copy, wherever that is."""
        folder = self.folder(path)
        return archive_of(files_in(folder), _written(folder.name))

    def _place(self, path: str) -> str:
        return f"{self._prefix}/{place_of(path)}"

    def _newest(self, place: str) -> _Version | None:
        return max(self._versions(place), default=None)

    def _versions(self, place: str) -> list[_Version]:
        found = ((_LIST.fullmatch(name), f"{place}/{name}") for name in self._objects.names(place))
        return [_Version(int(match[1]), match[2], key) for match, key in found if match is not None]

    def _list(self, version: _Version) -> _List:
        listed = msgspec.json.decode(self._objects.get(version.key), type=_List)
        if any(part in ("", "..") for name in listed.files for part in name.split("/")):
            raise DamagedError(f"{version.key} in the storage names files outside of their folder")
        return listed

    def _fetched(self, place: str, version: _Version) -> Path:
        listed = self._list(version)
        scratch = self._cache.make_scratch()
        try:
            with Disk(scratch).room("A copy of files from the storage", listed.size):
                for name, facts in listed.files.items():
                    self._fetch(f"{place}/{version.stamp}/{name}", scratch / name, facts)
            return self._cache.keep(scratch, place, version.stamp, is_read=True)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _fetch(self, key: str, file: Path, facts: _File) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._objects.get_file(key, file, facts.size)
        if (found := _described(file)) != facts:
            raise DamagedError(
                f"{file.name} has {found.size} bytes and the checksum {found.checksum:08x} in the storage, instead of "
                f"{facts.size} and {facts.checksum:08x}"
            )

    # Writing

    @contextmanager
    def writing(self, path: str, enter: Callable[[int], object] = lambda size: None) -> Iterator[Path]:
        place, scratch = self._place(path), self._cache.make_scratch()
        try:
            yield scratch
            files = files_in(scratch)
            listed, stamp = _List({name: _described(file) for name, file in files.items()}), _stamp()
            for name, file in files.items():
                self._objects.put_file(f"{place}/{stamp}/{name}", file)
            self._commit(place, stamp, listed, enter)
            self._cache.keep(scratch, place, stamp, is_read=False)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def copy(self, source: str, target: str, enter: Callable[[int], object] = lambda size: None) -> None:
        """Within the storage: nothing is fetched."""
        found = self._newest(self._place(source))
        if found is None:
            raise FileNotFoundError(source)
        listed, stamp = self._list(found), _stamp()
        for name, facts in listed.files.items():
            old, new = f"{self._place(source)}/{found.stamp}/{name}", f"{self._place(target)}/{stamp}/{name}"
            self._objects.copy(old, new, facts.size)
        self._commit(self._place(target), stamp, listed, enter)

    def _commit(self, place: str, stamp: str, listed: _List, enter: Callable[[int], object]) -> None:
        """If this fails, what was uploaded is left to be swept up: it may have succeeded without our knowing."""
        with self._alone(place):
            if _age(stamp) > LONGEST_WRITE_SECONDS:
                raise StorageAwayError(self._objects)
            old = self._versions(place)
            number = max([_now(), *(version.number + 1 for version in old)])
            new = _Version(number, stamp, f"{place}/{number:013d}.{stamp}.json")
            self._objects.put(new.key, msgspec.json.encode(listed))
            try:
                enter(listed.size)
            except BaseException:
                self._remove(place, [new])
                raise
        self._remove(place, old)

    def make_scratch(self, path: str) -> Path:
        return self._cache.make_scratch()

    def remove_scratch(self, scratch: Path) -> None:
        shutil.rmtree(scratch, ignore_errors=True)

    # Removing

    def delete(self, path: str, forget: Callable[[], bool] = lambda: True) -> bool:
        place = self._place(path)
        with self._alone(place):
            versions = self._versions(place)  # before anything is forgotten: the storage may be out of reach
            if not forget():
                return False
            self._remove(place, versions)
        self._cache.drop(place)
        return True

    def _remove(self, place: str, versions: Collection[_Version]) -> None:
        """First the lists, so that nobody finds a folder that is half there. Nobody needs any of it any more."""
        try:
            self._objects.remove(version.key for version in versions)
            for version in versions:
                self._objects.remove(self._objects.find(f"{place}/{version.stamp}"))
        except StorageAwayError:
            log.warning("Files of %s are left in the storage, which is out of reach.", place)

    def remove_run(self, run: str) -> None:
        keys = self._objects.find(f"{self._prefix}/{run}")
        self._objects.remove(sorted(keys, key=lambda key: not key.endswith(".json")))
        self._cache.drop(f"{self._prefix}/{run}")

    # Looking around

    def runs(self) -> set[str]:
        keys = (key.removeprefix(f"{self._prefix}/").split("/") for key in self._objects.find(self._prefix))
        return {parts[0] for parts in keys if _LIST.fullmatch(parts[-1])}

    def names(self, run: str) -> set[str]:
        keys = (key.split("/") for key in self._objects.find(f"{self._prefix}/{run}/weights"))
        return {parts[-2] for parts in keys if _LIST.fullmatch(parts[-1])}

    def set_aside(self, runs: Collection[str]) -> None:
        """They stay where they are, with a note that says since when."""
        noted = set(self._objects.names(f"{self._prefix}/{_UNKNOWN}"))
        self._objects.remove(f"{self._prefix}/{_UNKNOWN}/{run}" for run in noted - set(runs))
        for run in set(runs) - noted:
            self._objects.put(f"{self._prefix}/{_UNKNOWN}/{run}", datetime.now(UTC).isoformat().encode())
            log.warning("The database does not know the model of %s; it is set aside, in %s.", run, self._objects.url)

    def remove_set_aside(self, before: datetime) -> None:
        for run in self._objects.names(f"{self._prefix}/{_UNKNOWN}"):
            note = f"{self._prefix}/{_UNKNOWN}/{run}"
            if datetime.fromisoformat(self._objects.get(note).decode()) < before:
                self.remove_run(run)
                self._objects.remove([note])

    def tidy(self) -> None:
        self._cache.tidy()

    def sweep(self) -> None:
        """Removes what no list names, and lists that have a successor, if they are old: others may be writing now."""
        places: dict[str, list[str]] = defaultdict(list)
        for key in self._objects.find(self._prefix):
            *place, inside = key.removeprefix(f"{self._prefix}/").split("/", 3)
            if len(place) == 3:
                places["/".join([self._prefix, *place])].append(inside)
        for where, found in places.items():
            self._objects.remove(f"{where}/{name}" for name in _unneeded(found))


def _unneeded(names: Collection[str]) -> list[str]:
    """Lists first."""
    lists = [match for match in map(_LIST.fullmatch, names) if match is not None]
    newest = max(lists, key=lambda match: (match[1], match[2]), default=None)
    kept = {} if newest is None else {newest[0], newest[2]}
    old = [name for name in names if name.partition("/")[0] not in kept and _is_old(name)]
    return sorted(old, key=lambda name: "/" in name)


def _is_old(name: str) -> bool:
    head = name.partition("/")[0]
    found = _LIST.match(head) or _STAMP.fullmatch(head)  # or the part of a list, whose writer died
    return found is not None and time.time() - int(found[1]) / 1000 > SWEPT_AFTER_SECONDS


def _described(file: Path) -> _File:
    return _File(file.stat().st_size, checksum(file))


def _now() -> int:
    return int(time.time() * 1000)


def _stamp() -> str:
    return f"{_now():013d}-{uuid4().hex[:8]}"


def _age(stamp: str) -> float:
    return time.time() - int(stamp.partition("-")[0]) / 1000


def _written(stamp: str) -> int | None:
    return int(stamp.partition("-")[0]) // 1000 if _STAMP.fullmatch(stamp) else None
