"""Short messages between the servers on one PostgreSQL: whoever listens hears them, and nobody keeps them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa

from tinsmith.server.store.database import Database

MAX_BYTES = 7999
"""Of one message."""
_CHANNEL = "tinsmith"
_LOOK_SECONDS = 0.5
_TELL = sa.select(sa.func.pg_notify(_CHANNEL, sa.bindparam("text")))


class Relay:
    def __init__(self, database: Database) -> None:
        self._database = database

    def tell(self, texts: Sequence[str]) -> None:
        def write(connection: sa.Connection) -> None:
            for text in texts:
                connection.execute(_TELL, {"text": text})

        self._database.write(write, durable=False)

    def listen(self, begin: Callable[[], None], hear: Callable[[str], None], over: threading.Event) -> None:
        """Calls `hear` with what is told after `begin` was called, until it is over or the connection is lost."""
        connection = self._database.engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        driver: Any = connection.connection.driver_connection
        connection.detach()
        try:
            connection.exec_driver_sql(f"LISTEN {_CHANNEL}")
            begin()
            while not over.is_set():
                for each in driver.notifies(timeout=_LOOK_SECONDS):
                    hear(each.payload)
        finally:
            connection.close()
