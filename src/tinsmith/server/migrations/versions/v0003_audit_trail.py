"""For several keys: who did what from where, with which outcome. For damaged disks: the snapshot before the last.

For settings that are mixed up: which database this is, and which server uses it.
"""

from __future__ import annotations

from uuid import uuid4

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("audit", sa.Column("outcome", sa.Text(), server_default="done", nullable=False))
    op.add_column("audit", sa.Column("key_id", sa.BigInteger()))
    op.add_column("audit", sa.Column("address", sa.Text()))
    op.create_index("audit_by_age", "audit", ["time"])
    op.add_column("jobs", sa.Column("key_id", sa.BigInteger()))
    op.add_column("models", sa.Column("previous_snapshot_seq", sa.BigInteger()))
    identity = op.create_table(
        "identity", sa.Column("database_id", sa.Text(), primary_key=True), sa.Column("used_by", sa.Text())
    )
    op.bulk_insert(identity, [{"database_id": uuid4().hex}])
