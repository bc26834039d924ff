"""For several keys: who did what from where, with which outcome. For damaged disks: the snapshot before the last."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("audit", sa.Column("outcome", sa.Text(), server_default="done", nullable=False))
    op.add_column("audit", sa.Column("key_id", sa.BigInteger()))
    op.add_column("audit", sa.Column("address", sa.Text()))
    op.create_index("audit_by_age", "audit", ["time"])
    op.add_column("models", sa.Column("previous_snapshot_seq", sa.BigInteger()))
