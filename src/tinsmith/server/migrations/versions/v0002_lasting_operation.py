"""For servers that run for months: tries of jobs, snapshots, silent sessions, what is not kept any more, projects."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_ACTIVE = sa.text("state = 'active'")
_COPIED = sa.text("model_id IS NOT NULL AND removed IS NULL")


def upgrade() -> None:
    op.add_column("jobs", sa.Column("attempts", sa.Integer(), server_default="0", nullable=False))
    op.add_column("models", sa.Column("project_id", sa.Text()))
    op.add_column("models", sa.Column("snapshot_seq", sa.BigInteger()))
    op.add_column("models", sa.Column("removed", sa.BigInteger()))
    op.add_column("samplers", sa.Column("removed", sa.BigInteger()))
    op.add_column("samplers", sa.Column("saved_by", sa.Text()))
    op.create_index("sessions_by_heartbeat", "sessions", ["heartbeat"], sqlite_where=_ACTIVE, postgresql_where=_ACTIVE)
    op.create_index("samplers_by_age", "samplers", ["created"], sqlite_where=_COPIED, postgresql_where=_COPIED)
