"""Who works on a base model in a place: the last that began there.

A worker that was taken for dead may be alive: stopped, or on a node that only the cluster has lost. Its successor has
the same place and works for the same server, so neither tells them apart; the name of the holder does.
"""

from __future__ import annotations

from uuid import uuid4

import sqlalchemy as sa

from tinsmith.server.store.database import Database
from tinsmith.server.store.leading import Lead, ReplacedError
from tinsmith.server.store.schema import posts

# Shared, so that whoever takes the post waits for the end of what its last holder is writing.
_HOLDER = (
    sa.select(posts.c.holder)
    .where(posts.c.base_model == sa.bindparam("base_model"), posts.c.place == sa.bindparam("place"))
    .with_for_update(read=True)
)


class Post:
    """That of this process, if it has taken one; who has none is the server, or works alone."""

    def __init__(self, database: Database, lead: Lead) -> None:
        self._database = database
        self._lead = lead
        insert = database.insert(posts)
        self._take = insert.on_conflict_do_update(
            index_elements=["base_model", "place"], set_={"holder": insert.excluded.holder}
        )
        self._holder = uuid4().hex
        self._mine: dict[str, str] | None = None

    def take(self, base_model: str, place: str) -> None:
        if self._mine is not None:
            return
        mine = {"base_model": base_model, "place": place}

        def write(connection: sa.Connection) -> None:
            self._lead.check(connection)
            connection.execute(self._take, {**mine, "holder": self._holder})

        self._database.write(write, durable=False)
        self._mine = mine

    def check(self, connection: sa.Connection) -> None:
        """A `ReplacedError` if it is for others to work, which does not change before the end of this transaction."""
        self._lead.check(connection)
        if self._mine is not None and connection.scalar(_HOLDER, self._mine) != self._holder:
            raise ReplacedError("another worker was started in its place")
