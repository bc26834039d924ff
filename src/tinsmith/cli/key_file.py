"""Writes the credentials file that `tinsmith.client.credentials` reads; other programs may keep keys there too."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from tinsmith.client.credentials import CREDENTIALS_FILE, stored_key

VERSION = 1


def store_default_key(key: str, name: str) -> Path:
    """Adds a key and makes it the one that is used."""
    document = _read()
    identifier = _free_identifier(document["keys"], name)
    document["keys"][identifier] = {"type": "manual", "key": key, "name": name}
    document["default"] = identifier
    return _write(document)


def remove_default_key() -> dict[str, Any] | None:
    """Removes the key that is used; gives its record, or None if there was none."""
    document = _read()
    identifier = document.pop("default", None)
    if identifier is None:
        return None
    record: dict[str, Any] = document["keys"].pop(identifier)
    _write(document)
    return record


def _read() -> dict[str, Any]:
    stored_key()  # refuses a file that it cannot make sense of
    path = CREDENTIALS_FILE.expanduser()
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    document.setdefault("version", VERSION)
    document.setdefault("keys", {})
    return document


def _free_identifier(keys: dict[str, Any], name: str) -> str:
    numbered = (f"{name}-{number}" for number in range(2, len(keys) + 3))
    return next(each for each in (name, *numbered) if each not in keys)


def _write(document: dict[str, Any]) -> Path:
    """A whole file or none, and readable by its owner alone from its first byte on."""
    path = CREDENTIALS_FILE.expanduser()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(dir=path.parent)  # made with mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=2)
        os.replace(draft, path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
    return path
