"""For the dashboard: the curves of training runs, and what was sampled lately."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def _autoincrement() -> sa.types.TypeEngine[int]:
    return sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column("jobs", sa.Column("shown", sa.LargeBinary()))
    op.create_table(
        "curves",
        sa.Column("curve_id", _autoincrement(), primary_key=True),
        sa.Column("model_id", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.Column("thinned", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("last", sa.JSON(), nullable=False),
        sa.Column("gathered", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("stepped", sa.BigInteger()),
        sa.Column("loss", sa.Double(), server_default="0", nullable=False),
        sa.Column("weight", sa.Double(), server_default="0", nullable=False),
        sa.Column("tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.UniqueConstraint("model_id", "source"),
    )
    op.create_table(
        "points",
        sa.Column("curve_id", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("number", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("span", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("time", sa.BigInteger(), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "recent_samples",
        sa.Column("sample_id", _autoincrement(), primary_key=True),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("sampler_id", sa.Text(), nullable=False),
        sa.Column("time", sa.BigInteger(), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
    )
    op.create_index("recent_samples_newest", "recent_samples", ["owner", "sample_id"])
