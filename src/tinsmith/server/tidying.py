"""What happens every minute beside the requests: silent sessions end, and what was kept long enough is removed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from datetime import datetime, timedelta
from functools import partial

from tinsmith.server.config import ServerConfig
from tinsmith.server.full_disk import WaitError
from tinsmith.server.memory import collect
from tinsmith.server.outage import Outage
from tinsmith.server.recent import Recent
from tinsmith.server.storage import Storage
from tinsmith.server.store import Store, StoreUnavailableError
from tinsmith.server.store.database import utc_now
from tinsmith.server.store.records import Checkpoint, NewEvent, Sampler
from tinsmith.server.waiting import Waiting, Workers, note_abandoned

log = logging.getLogger(__name__)

ROUND_SECONDS = 60.0
UNKNOWN_KEPT = timedelta(days=7)
"""Snapshots of a model that the database does not know."""
MANY_WAIT = 200
"""With so many open polls, to look for rubbish among all objects stops the API for a tenth of a second or more."""
COLLECT_PAUSE = timedelta(minutes=10)
"""Between two of those looks while so many wait."""
USED_LATELY = timedelta(hours=1)
"""Copies of weights that samplers used since then stay, however many there are."""
SWEEP_PAUSE = timedelta(days=1)
"""Between two looks at all that lies in a storage elsewhere."""


class Tidying:
    def __init__(
        self,
        config: ServerConfig,
        store: Store,
        storage: Storage,
        waiting: Waiting,
        workers: Workers,
        samplers_in_use: Recent[tuple[str, str], Sampler],
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._config = config
        self._store = store
        self._storage = storage
        self._folders, self._snapshots, self._spilled = storage.checkpoints, storage.snapshots, storage.spilled
        self._waiting = waiting
        self._workers = workers
        self._samplers_in_use = samplers_in_use
        self._now = now
        self._last_round = self._listening_since = self._sweep_at = self._collected_at = now()
        self._heard: dict[str, tuple[datetime, datetime]] = {}
        """The last heartbeat of each session that is active, and when we saw it first."""
        self._outage = Outage(log, over="What was kept long enough is removed again")

    async def run(self, threads: Executor) -> None:
        """A round at once and one every minute or more often, until cancelled."""
        pause = min(ROUND_SECONDS, self._config.session_timeout_seconds / 4)
        while True:
            try:
                await self.round(threads)
                self._outage.is_over()
            except StoreUnavailableError as error:
                self._outage.met("The database is out of reach or full, so nothing is tidied up", error)
            except WaitError as error:
                self._outage.met("Not all is tidied up", error)
            except Exception:
                log.exception("could not tidy up")
            await asyncio.sleep(pause)

    async def round(self, threads: Executor) -> None:
        in_thread = asyncio.get_running_loop().run_in_executor
        self._note_sleep()
        if self._workers.leads:
            await in_thread(threads, self._end_silent_sessions)
            abandoned = await in_thread(threads, self._store.jobs.cancel_abandoned)
            note_abandoned(abandoned, self._waiting, self._workers)
            await in_thread(threads, self._remove_old)
        self._samplers_in_use.clear()  # some may not be used any more
        if len(self._waiting) < MANY_WAIT or self._now() - self._collected_at > COLLECT_PAUSE:
            await in_thread(threads, collect)
            self._collected_at = self._now()
        self._last_round = self._now()  # a round that takes long is no sleep: who lives is heard before the next one

    def _note_sleep(self) -> None:
        """A clock that was set forward looks as if we had slept."""
        now, patience = self._now(), timedelta(seconds=self._config.session_timeout_seconds)
        if now - self._last_round > min(timedelta(seconds=3 * ROUND_SECONDS), patience / 2):
            self._listening_since = now
        self._last_round = now

    def _end_silent_sessions(self) -> None:
        """Silence counts only where we would have heard: not before a restart, nor while the machine slept.

        What came before a heartbeat that could not be written down does not count either. It is counted from when we
        saw the last heartbeat: other servers write them, too, and their clocks may be others.
        """
        now, patience = self._now(), timedelta(seconds=self._config.session_timeout_seconds)
        self._listening_since = max(self._listening_since, self._store.sessions.last_unheard or self._listening_since)
        self._note_heartbeats(now)
        silent = {
            session_id: heartbeat
            for session_id, (heartbeat, seen) in self._heard.items()
            if now - max(seen, self._listening_since) >= patience
        }
        for session_id in self._store.sessions.end_silent(silent):
            log.info(
                "The session %s has ended: its client was not heard of for %s.",
                session_id,
                patience,
                extra={"session_id": session_id},
            )

    def _note_heartbeats(self, now: datetime) -> None:
        before, self._heard = self._heard, {}
        for session_id, heartbeat in self._store.sessions.heard().items():
            known, seen = before.get(session_id, (None, now))
            self._heard[session_id] = heartbeat, min(seen, now) if known == heartbeat else now

    def _remove_old(self) -> None:
        self._store.fill_reserve()
        now = self._now()
        kept_since = now - timedelta(seconds=self._config.result_ttl_seconds)
        self._store.curves.gather_all()  # from jobs that may be about to go
        self._store.curves.thin()
        self._store.results.expire(kept_since)
        self._store.recent_samples.forget(kept_since)
        for checkpoint in self._store.checkpoints.expired():
            forget = partial(self._store.checkpoints.delete_expired, checkpoint.key, _expiry(checkpoint))
            self._folders.delete(checkpoint.key.tinker_path, forget)
        self._remove_unused(now - timedelta(seconds=self._config.idle_seconds))
        self._store.audit.forget(now - timedelta(days=self._config.audit_days))
        if now >= self._sweep_at:
            self._storage.sweep()
            self._sweep_at = now + SWEEP_PAUSE

    def _remove_unused(self, idle_since: datetime) -> None:
        for model_id in self._store.models.remove_idle(idle_since):
            self._snapshots.remove(model_id)
        self._snapshots.remove_unknown(self._now() - UNKNOWN_KEPT)
        unused_since = max(idle_since, self._now() - USED_LATELY)
        self._store.samplers.remove_copies(idle_since, self._config.max_sampler_copies, unused_since)
        written = self._spilled.sampler_ids()
        for sampler_id in set(written) - self._store.samplers.kept(written):
            self._spilled.remove(sampler_id)
        self._store.forget_sessions(idle_since)


def _expiry(checkpoint: Checkpoint) -> NewEvent:
    key = checkpoint.key
    return NewEvent(owner=checkpoint.owner, event="checkpoint_expire", model_id=key.run_id, tinker_path=key.tinker_path)
