"""What a campaign may leave behind: rows that were asked for, the things of others as they were, and no failure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tinsmith.server.store.schema import checkpoints, jobs, metadata, models, samplers, sessions

_SAVES = ("save_weights", "save_weights_for_sampler", "save_weights_external")
_FUTURES = (
    "create_model", "forward_backward", "forward", "optim_step", "load_weights", "create_custom_loss", "asample",
    "unload_model", *_SAVES,
)  # fmt: skip
_SAMPLES = ("completions", "chat/completions")
_PROMPTS = 8
"""For how many prompts such a request asks, at the most."""
_MAKERS: Mapping[str, tuple[str, ...]] = {
    "sessions": ("create_session", *_SAMPLES),
    "models": ("create_model", "load_weights", "copy_weights", "import_weights"),
    "samplers": ("create_sampling_session", "save_weights_for_sampler", *_SAMPLES),
    "losses": ("create_custom_loss",),
    "jobs": (*_FUTURES, *_SAMPLES),
    "payloads": (*_FUTURES, *_SAMPLES),
    "results": (*_FUTURES, *_SAMPLES),
    "streams": (*_FUTURES, *_SAMPLES),
    "checkpoints": (*_SAVES, "copy_weights", "import_weights"),
    "keys": ("dashboard/api/keys",),
}
"""By table: parts of the paths of endpoints that add a row, at most one for each request, or prompt, that is accepted.

Not the audit trail, which holds what was refused as well, and is bounded by a quota.
"""

_WITH_OWNERS = (sessions, models, samplers, checkpoints)


class Database:
    """A look at what the server has stored, from outside."""

    def __init__(self, state: Path, url: str = "") -> None:
        url = url or f"sqlite:///{state / 'tinsmith.db'}"
        self._engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))

    def close(self) -> None:
        self._engine.dispose()

    def rows(self) -> dict[str, int]:
        with self._engine.connect() as connection:
            return {
                name: connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0
                for name, table in metadata.tables.items()
            }

    def things_of(self, model_id: str) -> list[list[Any]]:
        """All that the owner of this model has."""
        with self._engine.connect() as connection:
            owner = connection.scalar(sa.select(models.c.owner).where(models.c.model_id == model_id))
            queries = [sa.select(table).where(table.c.owner == owner) for table in _WITH_OWNERS]
            return [sorted(map(tuple, connection.execute(query)), key=repr) for query in queries]

    def faults(self) -> list[str]:
        """Jobs that failed through no fault of the client."""
        query = sa.select(jobs.c.request_id, jobs.c.kind, jobs.c.error).where(jobs.c.category == "server")
        with self._engine.connect() as connection:
            return [f"{row.request_id} ({row.kind}) failed: {row.error}" for row in connection.execute(query)]

    def unfinished(self) -> int:
        """Jobs that could run and have not; those that wait for a missing number are not meant."""
        query = sa.select(sa.func.count()).where(jobs.c.finished.is_(None), jobs.c.turn.is_not(None))
        with self._engine.connect() as connection:
            return connection.scalar(query) or 0


def too_many(before: Mapping[str, int], after: Mapping[str, int], accepted: Mapping[str, int]) -> list[str]:
    """Tables with more new rows than requests were accepted that make one."""
    found = []
    for table, makers in _MAKERS.items():
        asked = sum(
            count * (_PROMPTS if _is_one_of(endpoint, _SAMPLES) else 1)
            for endpoint, count in accepted.items()
            if _is_one_of(endpoint, makers)
        )
        if after[table] - before[table] > asked:
            found.append(f"{after[table] - before[table]} rows were added to {table}, {asked} at most were asked for")
    return found


def _is_one_of(endpoint: str, makers: tuple[str, ...]) -> bool:
    return any(f"/{maker}" in endpoint for maker in makers)
