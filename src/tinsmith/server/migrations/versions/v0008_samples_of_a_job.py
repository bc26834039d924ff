"""For workers that take as many samples as they have room for: how many a job asks for."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("samples", sa.Integer(), server_default="1", nullable=False))
