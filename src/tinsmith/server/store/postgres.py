"""Connections to PostgreSQL on which nobody waits for ever when the other side is gone without a word.

A machine that is lost, or a network that is cut, ends no connection by itself. A server would wait for its answer, and
the database would keep the locks of a server that was lost, for the two hours that systems wait before they look.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

CONNECT_SECONDS = 10
_IDLE_SECONDS, _INTERVAL_SECONDS, _COUNT = 20, 10, 4
"""Who is silent for so long is asked every so many seconds, and gone after so many questions: within a minute."""
_UNREAD_MILLISECONDS = 60_000
"""What was sent is received within this time, or the connection is given up."""
TRANSACTION_SECONDS = 300
"""How long a transaction may pause: a server whose whole process is stopped must not hold locks for longer. One that
removes files meanwhile has a minute or two for each request to the storage."""


def connect_arguments(given: Collection[str]) -> dict[str, Any]:
    """For this side, which the system of the machine sees to; without those that the URL has."""
    arguments = {
        "connect_timeout": CONNECT_SECONDS,
        "keepalives_idle": _IDLE_SECONDS,
        "keepalives_interval": _INTERVAL_SECONDS,
        "keepalives_count": _COUNT,
        "tcp_user_timeout": _UNREAD_MILLISECONDS,
    }
    return {name: value for name, value in arguments.items() if name not in given}


def set_up(engine: sa.Engine) -> None:
    """For the other side. Not as options of the connection, which a pool in between would refuse."""

    def prepare(connection: Any, _record: object) -> None:
        settings = {
            "tcp_keepalives_idle": _IDLE_SECONDS,
            "tcp_keepalives_interval": _INTERVAL_SECONDS,
            "tcp_keepalives_count": _COUNT,
            "tcp_user_timeout": _UNREAD_MILLISECONDS,
            "idle_in_transaction_session_timeout": 1000 * TRANSACTION_SECONDS,
        }
        try:
            connection.execute("; ".join(f"SET {name} = {value}" for name, value in settings.items()))
            connection.commit()
        except BaseException:  # nobody else would: the pool does not know it yet
            connection.close()
            raise

    sa.event.listen(engine, "connect", prepare)
