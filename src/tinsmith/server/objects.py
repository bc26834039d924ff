"""Objects under one URL, in whatever fsspec reaches: put and got as a whole, listed, copied and removed.

Every request has an end. The first that meets a storage out of reach tells so, and those after it are refused at once,
until a look from time to time, in a thread beside them, finds it back. So an outage costs whoever works here one wait.

A mark says whose the objects are, and that they are there: what is not found where no mark is found either is no
answer, but an outage (a bucket that is gone, a disk that is not mounted).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from tinsmith.errors import ConfigError, MissingExtraError
from tinsmith.server.full_disk import WaitError, is_full
from tinsmith.server.outage import Outage, first_line

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 30.0
"""For any request, besides the time that its bytes take."""
SLOWEST_BYTES_PER_SECOND = 2**20
LISTING_SECONDS = 600.0
"""For a list of all keys: a thousand come at a time."""
LOOK_SECONDS = 1.0

_MARK = "database-id"
_PROBE = "probe"
_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {"config_kwargs": {"connect_timeout": 5, "read_timeout": 20, "retries": {"max_attempts": 1}}},
    "file": {"auto_mkdir": True},
}
_EXTRAS = {"s3": "s3fs"}
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError")


class StorageAwayError(WaitError):
    """The message is for clients, who need not know where the storage is. The log says it."""

    promise = "it is done when that is back"

    def __init__(self, objects: Objects) -> None:
        super().__init__("the storage of the server's files is out of reach")
        self._objects = objects

    @property
    def has_passed(self) -> bool:
        return not self._objects.is_away


class Objects:
    """`url` is that of the folder which holds them all; keys are names within it, in parts with slashes between."""

    def __init__(self, url: str) -> None:
        self.url = check_url(url)
        self._files, self._root = _opened(url)
        self._trouble = threading.Lock()
        self._away = False
        self._look_at = 0.0
        self._outage = Outage(log, over=f"The storage {url} is back")

    def claim(self, database_id: str) -> None:
        """Makes these the files of a database, or refuses if they are another's or cannot be written."""
        mark = self._path(_MARK)
        try:
            try:
                found = self._ask("cat_file", mark).decode().strip()
            except FileNotFoundError:
                self._write(mark, f"{database_id}\n".encode(), self._ask)
                found = self._ask("cat_file", mark).decode().strip()
            self._probe()
        except Exception as error:
            raise ConfigError(
                f"The storage {self.url} cannot be used: {type(error).__name__}: {first_line(error)}. Check --storage, "
                f"and {_read_from_environment(self.url)}."
            ) from error
        if found != database_id:
            raise ConfigError(
                f"The storage {self.url} belongs to another database, that with the id {found}. Start the server with "
                "the --database and --state that it had before, or give this one a prefix of its own with --storage."
            )

    # Requests

    def put(self, key: str, data: bytes) -> None:
        """Who gets it finds the old data or the new, never a part."""
        self._write(self._path(key), data, self._tried)

    def put_file(self, key: str, file: Path) -> None:
        self._tried("put_file", str(file), self._path(key), seconds=_seconds(file.stat().st_size))

    def get(self, key: str) -> bytes:
        found: bytes = self._tried("cat_file", self._path(key))
        return found

    def get_file(self, key: str, file: Path, size: int) -> None:
        self._tried("get_file", self._path(key), str(file), seconds=_seconds(size))

    def copy(self, source: str, target: str, size: int) -> None:
        self._tried("cp_file", self._path(source), self._path(target), seconds=_seconds(size))

    def remove(self, keys: Iterable[str]) -> None:
        """What is not there need not be removed."""
        for key in keys:
            try:
                self._tried("rm_file", self._path(key))
            except FileNotFoundError:
                continue

    def names(self, prefix: str) -> list[str]:
        """What comes next in the keys that begin with this one."""
        try:
            found = self._tried("ls", self._path(prefix), detail=False)
        except FileNotFoundError:
            return []
        return [path.rstrip("/").rpartition("/")[2] for path in found]

    def find(self, prefix: str) -> list[str]:
        """All keys that begin with this one."""
        try:
            found = self._tried("find", self._path(prefix), seconds=LISTING_SECONDS)
        except FileNotFoundError:
            return []
        return [path[len(self._root) + 1 :] for path in found]

    def _write(self, path: str, data: bytes, ask: Callable[..., Any]) -> None:
        """In one request, or, where that is a file which others find while it is being written, under another name."""
        if self._files.async_impl:
            ask("pipe_file", path, data)
        else:
            part = f"{path}.{uuid4().hex[:8]}.part"
            ask("pipe_file", part, data)
            ask("mv", part, path)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _tried(self, name: str, *arguments: Any, seconds: float = 0.0, **options: Any) -> Any:
        """`seconds` is how much longer than others it may take."""
        if self.is_away:
            raise StorageAwayError(self)
        try:
            return self._ask(name, *arguments, seconds=seconds, **options)
        except FileNotFoundError as error:
            if name.startswith(("put", "pipe", "mv")) or not self._has_mark():
                raise self._lost(error) from error
            raise
        except Exception as error:  # every library has errors of its own for what is out of reach
            if is_full(error):  # the disk here, which a file was to be fetched to
                raise
            raise self._lost(error) from error

    def _ask(self, name: str, *arguments: Any, seconds: float = 0.0, **options: Any) -> Any:
        if not self._files.async_impl:
            return getattr(self._files, name)(*arguments, **options)
        from fsspec.asyn import sync

        work = getattr(self._files, f"_{name}")
        return sync(self._files.loop, work, *arguments, timeout=PATIENCE_SECONDS + seconds, **options)

    # Outages

    @property
    def is_away(self) -> bool:
        """As far as is known; whoever asks during an outage lets somebody look."""
        with self._trouble:
            if self._away and time.monotonic() >= self._look_at:
                self._look_at = float("inf")
                threading.Thread(target=self._look, name="storage", daemon=True).start()
            return self._away

    def _lost(self, error: Exception) -> StorageAwayError:
        with self._trouble:
            self._away, self._look_at = True, time.monotonic() + LOOK_SECONDS
            self._outage.met(f"The storage {self.url} is out of reach, and what needs its files waits", error)
        return StorageAwayError(self)

    def _look(self) -> None:
        try:
            self._probe()
        except Exception as error:  # noqa: BLE001 - as above
            self._lost(error)
            return
        with self._trouble:
            self._away = False
            self._outage.is_over()

    def _probe(self) -> None:
        """Reading alone would not tell that nothing can be written."""
        self._ask("cat_file", self._path(_MARK))
        self._ask("pipe_file", self._path(_PROBE), b"")

    def check_rights(self) -> None:
        try:
            self._probe()
        except Exception as error:
            if isinstance(error, PermissionError) or type(error).__name__ in _NO_CREDENTIALS:
                raise ConfigError(
                    f"The storage {self.url} cannot be used there: {first_line(error)}. Whatever starts this process, "
                    f"as `ray start` does on each node, must have {_read_from_environment(self.url)}."
                ) from error
            log.warning("The storage %s is out of reach: %s", self.url, first_line(error))

    def _has_mark(self) -> bool:
        try:
            self._ask("cat_file", self._path(_MARK))
        except Exception:  # noqa: BLE001 - as above
            return False
        return True


def check_rights(url: str) -> None:
    """Refuses a storage whose credentials or library this process lacks; one that is out of reach may come back."""
    if url:
        Objects(url).check_rights()


def _read_from_environment(url: str) -> str:
    if urlsplit(url).scheme == "s3":
        return (
            "what its library reads from the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, "
            "AWS_DEFAULT_REGION, and AWS_ENDPOINT_URL if it is not Amazon's"
        )
    return "the credentials that fsspec's library for this kind of URL reads from the environment"


def _seconds(size: int) -> float:
    return size / SLOWEST_BYTES_PER_SECOND


def check_url(url: str) -> str:
    """Refuses what may hold a secret, without quoting it: a URL is seen by whoever lists processes or reads logs."""
    scheme, _, rest = url.partition("://")
    if "@" in url or "?" in url or "#" in url:
        raise ConfigError(
            "The URL of --storage holds more than a place (an @, ? or #). Give credentials in the environment, for "
            "s3:// as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and only the place as a URL: s3://bucket/prefix."
        )
    if not scheme or not rest.strip("/") or ":" in scheme:
        raise ConfigError(f"--storage is {url!r}, which is no URL of a place. One looks like s3://bucket/prefix.")
    return url


def _opened(url: str) -> tuple[Any, str]:
    scheme = urlsplit(url).scheme
    try:
        from fsspec.core import url_to_fs

        files, root = url_to_fs(url, use_listings_cache=False, **_OPTIONS.get(scheme, {}))
    except ImportError as error:
        if scheme in _EXTRAS:
            raise MissingExtraError(_EXTRAS[scheme], scheme, f"A storage such as {url}") from error
        raise ConfigError(
            f"The storage {url} cannot be used: {error}. Install that with pip, wherever a server or a worker runs."
        ) from error
    except OSError as error:
        raise ConfigError(f"The storage {url} cannot be reached: {error}. Check --storage.") from error
    except ValueError as error:
        raise ConfigError(f"--storage is {url!r}, which cannot be used: {error}. Take s3://bucket/prefix.") from error
    return files, root.rstrip("/")
