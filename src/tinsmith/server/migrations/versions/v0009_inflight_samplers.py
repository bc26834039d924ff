"""For samplers that share the weights of their model which were published last."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.add_column("samplers", sa.Column("inflight", sa.Boolean(), server_default=sa.false(), nullable=False))
    op.create_index(
        "samplers_published",
        "samplers",
        ["model_id", "model_seq_id"],
        sqlite_where=sa.text("inflight = 1 AND removed IS NULL"),
        postgresql_where=sa.text("inflight AND removed IS NULL"),
    )
