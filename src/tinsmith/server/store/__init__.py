"""Where the server's processes meet: jobs, models, samplers, checkpoints, sessions and keys, in SQLite or PostgreSQL.

Every SQL statement of the server is in this package. Calls are synchronous, may come from any thread, and are one short
transaction each; what comes out are frozen records. What belongs to somebody is found only by its owner.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime

from sqlalchemy.exc import OperationalError as StoreUnavailableError

from tinsmith.server.store.audit import Audit
from tinsmith.server.store.bulletin import Bulletin
from tinsmith.server.store.checkpoints import Checkpoints
from tinsmith.server.store.curves import Curves
from tinsmith.server.store.database import Database, utc_now
from tinsmith.server.store.forgetting import forget_sessions
from tinsmith.server.store.identity import Identity
from tinsmith.server.store.jobs import Jobs
from tinsmith.server.store.keys import LOCAL_OWNER, Keys
from tinsmith.server.store.leading import Lead
from tinsmith.server.store.models import Models
from tinsmith.server.store.recent_samples import RecentSamples
from tinsmith.server.store.relay import Relay
from tinsmith.server.store.results import Results
from tinsmith.server.store.samplers import Losses, Samplers
from tinsmith.server.store.sessions import Sessions

__all__ = ["LOCAL_OWNER", "Store", "StoreUnavailableError"]


class Store:
    """Opens the database at `url`, made or brought up to date where necessary.

    `url` is `sqlite:////absolute/path/tinsmith.db` or `postgresql://user:password@host/database`.
    """

    def __init__(self, url: str, *, now: Callable[[], datetime] = utc_now) -> None:
        self._database = Database(url, now)
        self.lead = Lead(self._database)
        self.identity = Identity(self._database, self.lead)
        self.bulletin = Bulletin(self._database)
        self.relay = Relay(self._database)
        self.sessions = Sessions(self._database)
        self.models = Models(self._database)
        self.samplers = Samplers(self._database)
        self.losses = Losses(self._database)
        self.jobs = Jobs(self._database, self.lead)
        self.results = Results(self._database)
        self.checkpoints = Checkpoints(self._database)
        self.curves = Curves(self._database)
        self.recent_samples = RecentSamples(self._database)
        self.keys = Keys(self._database)
        self.audit = Audit(self._database)

    def forget_sessions(self, idle_since: datetime) -> int:
        """Remove sessions that ended before that time and of which nothing is left; gives back how many."""
        return forget_sessions(self._database, idle_since)

    def alone(self, name: str) -> AbstractContextManager[None]:
        """With PostgreSQL: of all who come here with this name, on whatever machine, one at a time."""
        return self._database.alone(name)

    def begin_reserve(self) -> None:
        """Keep some room on the disk from now on, so that deletions and revocations fit when it is full."""
        if self._database.reserve is not None:
            self._database.reserve.begin()

    def fill_reserve(self) -> None:
        """Keep it up: some of it may have been used, and there may be room again."""
        if self._database.reserve is not None:
            self._database.reserve.fill()

    def close(self) -> None:
        self.lead.close()
        self._database.close()
