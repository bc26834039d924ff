"""For several workers of one base model: which of them a job is for."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

_READY = sa.text("state = 'queued' AND turn IS NOT NULL")
_PLACES = ["base_model", "lane", "replica", "owner", "turn", "created"]


def upgrade() -> None:
    op.add_column("jobs", sa.Column("replica", sa.Text(), server_default="", nullable=False))
    op.drop_index("jobs_ready", "jobs")
    op.create_index("jobs_ready", "jobs", _PLACES, sqlite_where=_READY, postgresql_where=_READY)
