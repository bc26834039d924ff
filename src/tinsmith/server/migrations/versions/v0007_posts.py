"""Who works in which place, so that whoever was taken for dead works no more."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.create_table(
        "posts",
        sa.Column("base_model", sa.Text(), primary_key=True),
        sa.Column("place", sa.Text(), primary_key=True),
        sa.Column("holder", sa.Text(), nullable=False),
    )
