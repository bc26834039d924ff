"""What the server that leads tells the others about its workers: written every second, and read as often."""

from __future__ import annotations

from typing import NamedTuple

import sqlalchemy as sa

from tinsmith.server.store.database import Database
from tinsmith.server.store.schema import bulletin, identity

_NEWEST = sa.select(bulletin).join(identity, identity.c.used_by == bulletin.c.leader)


class Posted(NamedTuple):
    leader: str
    number: int
    """Rises with each that the leader posts."""
    content: bytes


class Bulletin:
    def __init__(self, database: Database) -> None:
        self._database = database
        insert = database.insert(bulletin)
        self._post = insert.on_conflict_do_update(
            index_elements=["leader"], set_={"number": insert.excluded.number, "content": insert.excluded.content}
        )

    def begin(self, leader: str) -> None:
        """What others have posted, who led before, is out of date."""
        delete = sa.delete(bulletin).where(bulletin.c.leader != leader)
        self._database.write(lambda connection: connection.execute(delete), durable=False)

    def withdraw(self, leader: str) -> None:
        """It leads no more, and what it has posted is not so any more."""
        delete = sa.delete(bulletin).where(bulletin.c.leader == leader)
        self._database.write(lambda connection: connection.execute(delete), durable=False)

    def post(self, posted: Posted) -> None:
        self._database.write(lambda connection: connection.execute(self._post, posted._asdict()), durable=False)

    def newest(self) -> Posted | None:
        """`None` if who leads has posted nothing yet."""
        return self._database.first(_NEWEST, lambda row: Posted(row.leader, row.number, bytes(row.content)))
