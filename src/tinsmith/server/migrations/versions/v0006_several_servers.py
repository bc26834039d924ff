"""For several servers on one database: what they sign with, where their files lie, and what the leader tells."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.add_column("identity", sa.Column("secret", sa.Text()))
    op.add_column("identity", sa.Column("storage", sa.Text(), server_default="", nullable=False))
    op.create_table(
        "bulletin",
        sa.Column("leader", sa.Text(), primary_key=True),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
    )
