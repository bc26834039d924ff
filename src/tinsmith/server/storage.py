"""Where the files of a server lie: in its state folder, or in a storage of objects under a URL."""

from __future__ import annotations

import logging
import shutil
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from tinsmith.errors import ConfigError
from tinsmith.server.checkpoints import CheckpointFolders, Folders, files_in, link_files, link_or_copy
from tinsmith.server.folder_cache import FolderCache
from tinsmith.server.objects import Objects
from tinsmith.server.snapshots import SnapshotFolders
from tinsmith.server.spilled import Spilled, SpilledWeights, StoredSpilled
from tinsmith.server.state_locks import one_at_a_time, write_note
from tinsmith.server.store import Store, ids
from tinsmith.server.stored_folders import StoredFolders

log = logging.getLogger(__name__)

_NOTE = "storage"
"""Says in the state folder under which URL its files lie."""
_FOLDERS = ("checkpoints", "snapshots")
_SAMPLERS = "samplers"


@dataclass(frozen=True)
class Storage:
    checkpoints: Folders
    snapshots: SnapshotFolders
    spilled: Spilled
    objects: Objects | None = None
    """`None` if all is in the state folder."""
    stored: tuple[StoredFolders, ...] = ()
    """All that is not in the state folder."""

    @property
    def is_away(self) -> bool:
        return self.objects is not None and self.objects.is_away

    def sweep(self) -> None:
        """Removes what others have left half done, if it is old. May take long."""
        for folders in self.stored:
            folders.sweep()


def open_storage(state: Path, url: str, cache_bytes: int, store: Store | None = None) -> Storage:
    """Asks nothing of the storage, which may be out of reach. Others who use it have the same `store`, if it is given,
    and else the same state folder.
    """
    if not url:
        snapshots = SnapshotFolders(CheckpointFolders(state / "snapshots"))
        return Storage(CheckpointFolders(state / "checkpoints"), snapshots, SpilledWeights(state / _SAMPLERS))
    objects, cache = Objects(url), FolderCache(state / "cache", cache_bytes)

    def alone(place: str) -> AbstractContextManager[None]:
        if store is not None and store.lead.can_be_shared:
            return store.alone(place)
        return one_at_a_time(state / f"{place.partition('/')[0]}.lock")

    stored = tuple(StoredFolders(objects, name, cache, alone) for name in (*_FOLDERS, _SAMPLERS))
    return Storage(stored[0], SnapshotFolders(stored[1]), StoredSpilled(stored[2]), objects, stored)


def storage_of(state: Path) -> str:
    """The URL under which the files of a state folder lie; empty if they lie in the folder."""
    note = state / _NOTE
    return note.read_text().strip() if note.exists() else ""


def check_storage(state: Path, url: str) -> None:
    """Refuses a storage other than the one that the files of this state folder are in: they would seem to be lost."""
    note, known = state / _NOTE, storage_of(state)
    if known and known != url:
        raise ConfigError(
            f"The files of the state folder {state} are in {known}, and --storage is {url or 'not given'}. Start the "
            f"server with --storage {known}. If they were copied elsewhere, delete {note}."
        )


def note_storage(state: Path, url: str) -> None:
    """From now on the files of this state folder are there: to be called when it is known that they can be."""
    if url and not storage_of(state):
        write_note(state / _NOTE, url)


def move_in(state: Path, storage: Storage) -> None:
    """Puts what lies in the state folder into the storage, one after the other, and removes it here.

    Called at start, before anything is written; what a start that was ended has left, the next one moves.
    """
    for name, target in zip(_FOLDERS, storage.stored, strict=False):
        for folder in sorted((state / name).glob("[!.]*/*/[!.]*")):
            run, kind, checkpoint = folder.relative_to(state / name).parts
            log.info("Moving %s to the storage ...", folder)
            with target.writing(ids.tinker_path(run, kind, checkpoint)) as scratch:
                link_files(files_in(folder), scratch)
            shutil.rmtree(folder)
    local = SpilledWeights(state / _SAMPLERS)
    for sampler_id in local.sampler_ids():
        with storage.spilled.writing(sampler_id) as file:
            link_or_copy(local.path(sampler_id), file)
        local.remove(sampler_id)
