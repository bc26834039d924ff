"""API keys. The store keeps a hash: keys are long and random, so a plain SHA-256 cannot be turned back."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import unicodedata
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from tinsmith.errors import InvalidInputError
from tinsmith.server.store.audit import note as note_event
from tinsmith.server.store.database import Database, Row
from tinsmith.server.store.records import ApiKey, NewEvent, NewKey
from tinsmith.server.store.schema import keys

LOCAL_OWNER = "local"
"""Owns everything on a server without keys."""

LONGEST_NAME = 100
_PREFIX = 8  # hexadecimal digits of the hash by which rows are looked up; the rest is compared in constant time
_COLUMNS = [keys.c[name] for name in ("key_id", "owner", "name", "note", "hint", "created", "revoked")]

_CHANGES = sa.select(sa.func.count() + sa.func.count(keys.c.revoked)).select_from(keys)


class Keys:
    def __init__(self, database: Database) -> None:
        self._database = database

    def create(
        self,
        owner: str,
        name: str,
        note: str = "",
        *,
        address: str | None = None,
        made_by: int | None = None,
        most: int | None = None,
    ) -> NewKey:
        """A new random key; this is the only time it is shown. An empty owner becomes one of its own.

        `address` is where it is made from, `made_by` the key that it is made with. `KeyRefusedError` if the owner has
        one of that name, or as many as `most`.
        """
        plain, name = f"tml-{secrets.token_urlsafe(32)}", _checked_name(name)
        values = self._values(plain, name, owner, note)

        def write(connection: sa.Connection) -> ApiKey:
            _check_room(connection, owner, name, most)
            key = _key(connection.execute(sa.insert(keys).returning(*_COLUMNS), values).one())
            by = {} if made_by is None else {"made_by": made_by}
            note_event(connection, _event("key_create", key, address, **by), key.created)
            return key

        return NewKey(key=self._database.write(write), plain=plain)

    def register(self, plain: str, name: str, *, address: str | None = None) -> ApiKey:
        """Accept a key that was chosen elsewhere; its owner is its own.

        A key that is known already stays as it is, even if it was revoked.
        """
        values = self._values(plain, name)

        def write(connection: sa.Connection) -> ApiKey:
            insert = self._database.insert(keys).on_conflict_do_nothing().returning(keys.c.key_id)
            is_new = connection.execute(insert, values).first() is not None
            key = _key(connection.execute(sa.select(*_COLUMNS).where(keys.c.hash == values["hash"])).one())
            if is_new:
                note_event(connection, _event("key_create", key, address), key.created)
            return key

        return self._database.write(write)

    def _values(self, plain: str, name: str, owner: str = "", note: str = "") -> dict[str, Any]:
        digest = _hash(plain)
        return {
            "prefix": digest[:_PREFIX],
            "hash": digest,
            "owner": owner or f"key-{digest[:12]}",
            "name": name,
            "note": note,
            "hint": plain[-4:],
            "created": self._database.now(),
        }

    def verify(self, plain: str) -> ApiKey | None:
        """The key as it is known, `None` if it is unknown or revoked."""
        digest = _hash(plain)
        query = sa.select(*_COLUMNS, keys.c.hash).where(keys.c.prefix == digest[:_PREFIX], keys.c.revoked.is_(None))
        rows = self._database.read(lambda connection: connection.execute(query).all())
        return next((_key(row) for row in rows if hmac.compare_digest(row.hash, digest)), None)

    def changes(self) -> int:
        """How often a key was made or revoked: as long as this stays the same, so does the answer of `verify`."""
        return self._database.read(lambda connection: connection.scalar(_CHANGES) or 0)

    def watch(self) -> Callable[[], int | None]:
        """A quick way to ask for `changes`, from one thread at a time; `None` where it is not quick."""
        return self._database.glance(_CHANGES)

    def get(self, key_id: int) -> ApiKey | None:
        """A key that was not revoked."""
        return self._database.first(sa.select(*_COLUMNS).where(keys.c.key_id == key_id, keys.c.revoked.is_(None)), _key)

    def all(self, owner: str | None = None) -> list[ApiKey]:
        """The keys of an owner, or all, oldest first, revoked ones included."""
        query = sa.select(*_COLUMNS).order_by(keys.c.key_id)
        if owner is not None:
            query = query.where(keys.c.owner == owner)
        return self._database.all(query, _key)

    def revoke(self, key_id: int, *, address: str | None = None) -> bool:
        """The key is refused from now on; False if there is no such key or it was revoked before."""
        now = self._database.now()
        update = sa.update(keys).where(keys.c.key_id == key_id, keys.c.revoked.is_(None))

        def write(connection: sa.Connection) -> bool:
            row = connection.execute(update.values(revoked=now).returning(*_COLUMNS)).one_or_none()
            if row is not None:
                note_event(connection, _event("key_revoke", _key(row), address), now)
            return row is not None

        return self._database.write(write, must_fit=True)


def _checked_name(name: str) -> str:
    """In one form, so that names that look the same are the same."""
    plain = unicodedata.normalize("NFC", name.strip())
    if not 0 < len(plain) <= LONGEST_NAME or not plain.isprintable():
        raise InvalidInputError(
            f"The name of a key cannot be {name[:40]!r}; take 1 to {LONGEST_NAME} printable characters.",
            field="name",
            value=name[:LONGEST_NAME],
        )
    return plain


class KeyRefusedError(InvalidInputError):
    """A key cannot be made, because of those that its owner has."""


def _check_room(connection: sa.Connection, owner: str, name: str, most: int | None) -> None:
    """Its owner's first key is locked, so that those who ask at the same time ask one after the other."""
    mine = keys.c.owner == owner
    connection.execute(sa.select(keys.c.key_id).where(mine).order_by(keys.c.key_id).limit(1).with_for_update())
    names = connection.scalars(sa.select(keys.c.name).where(mine, keys.c.revoked.is_(None))).all()
    if name in names:
        raise KeyRefusedError(
            f"There is a key {name!r} of this owner already; take another name, or revoke that one.", field="name"
        )
    if most is not None and len(names) >= most:
        raise KeyRefusedError(f"There are {most} keys of this owner already; revoke one that is not used.")


def _event(event: str, key: ApiKey, address: str | None, **more: int) -> NewEvent:
    details = {"name": key.name, **more}
    return NewEvent(owner=key.owner, event=event, key_id=key.key_id, address=address, details=details)


def _hash(plain: str) -> str:
    try:
        return hashlib.sha256(plain.encode()).hexdigest()
    except UnicodeEncodeError:
        raise InvalidInputError("An API key must be valid Unicode text.", field="api_key") from None


def _key(row: Row) -> ApiKey:
    return ApiKey(**{name: row._mapping[name] for name in ApiKey.__struct_fields__})
