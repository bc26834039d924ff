"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("event_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("time", sa.BigInteger(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("event", sa.Text(), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.Column("model_id", sa.Text()),
        sa.Column("tinker_path", sa.Text()),
        sa.PrimaryKeyConstraint("event_id"),
    )
    op.create_index("audit_by_time", "audit", ["owner", "time"])
    op.create_table(
        "checkpoints",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("lora_rank", sa.Integer(), nullable=False),
        sa.Column("lora_seed", sa.BigInteger()),
        sa.Column("train_attn", sa.Boolean(), nullable=False),
        sa.Column("train_mlp", sa.Boolean(), nullable=False),
        sa.Column("train_unembed", sa.Boolean(), nullable=False),
        sa.Column("optimizer_config", sa.JSON(), nullable=False),
        sa.Column("user_metadata", sa.JSON()),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("public", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("created", sa.BigInteger(), nullable=False),
        sa.Column("expires", sa.BigInteger()),
        sa.PrimaryKeyConstraint("run_id", "kind", "name"),
    )
    op.create_index("checkpoints_newest", "checkpoints", ["owner", "created"])
    op.create_index("ix_checkpoints_expires", "checkpoints", ["expires"])
    op.create_table(
        "jobs",
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("lane", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("base_model", sa.Text()),
        sa.Column("model_id", sa.Text()),
        sa.Column("sampler_id", sa.Text()),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("turn", sa.BigInteger()),
        sa.Column("worker", sa.Text()),
        sa.Column("cancel_asked", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("error", sa.Text()),
        sa.Column("category", sa.Text()),
        sa.Column("created", sa.BigInteger(), nullable=False),
        sa.Column("started", sa.BigInteger()),
        sa.Column("finished", sa.BigInteger()),
        sa.Column("done_serial", sa.BigInteger()),
        sa.PrimaryKeyConstraint("request_id"),
        sa.UniqueConstraint("stream", "seq_id"),
    )
    op.create_index("jobs_by_age", "jobs", ["finished"])
    op.create_index("jobs_finished", "jobs", ["stream", "done_serial"])
    op.create_index(
        "jobs_ready",
        "jobs",
        ["base_model", "lane", "owner", "turn", "created"],
        sqlite_where=sa.text("state = 'queued' AND turn IS NOT NULL"),
        postgresql_where=sa.text("state = 'queued' AND turn IS NOT NULL"),
    )
    op.create_index(
        "jobs_running",
        "jobs",
        ["base_model", "worker"],
        sqlite_where=sa.text("state = 'running'"),
        postgresql_where=sa.text("state = 'running'"),
    )
    op.create_table(
        "keys",
        sa.Column("key_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("prefix", sa.Text(), nullable=False),
        sa.Column("hash", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("hint", sa.Text(), nullable=False),
        sa.Column("created", sa.BigInteger(), nullable=False),
        sa.Column("revoked", sa.BigInteger()),
        sa.PrimaryKeyConstraint("key_id"),
        sa.UniqueConstraint("hash"),
    )
    op.create_index("ix_keys_prefix", "keys", ["prefix"])
    op.create_table(
        "losses",
        sa.Column("loss_id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created", sa.BigInteger(), nullable=False),
        sa.Column("definition", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("loss_id"),
    )
    op.create_table(
        "models",
        sa.Column("model_id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text()),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("lora_rank", sa.Integer(), nullable=False),
        sa.Column("lora_seed", sa.BigInteger()),
        sa.Column("train_attn", sa.Boolean(), nullable=False),
        sa.Column("train_mlp", sa.Boolean(), nullable=False),
        sa.Column("train_unembed", sa.Boolean(), nullable=False),
        sa.Column("optimizer_config", sa.JSON(), nullable=False),
        sa.Column("user_metadata", sa.JSON()),
        sa.Column("trainable", sa.Boolean(), nullable=False),
        sa.Column("created", sa.BigInteger(), nullable=False),
        sa.Column("corrupted", sa.Text()),
        sa.PrimaryKeyConstraint("model_id"),
    )
    op.create_index("ix_models_session_id", "models", ["session_id"])
    op.create_index("models_newest", "models", ["owner", "created", "model_id"])
    op.create_table(
        "samplers",
        sa.Column("sampler_id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("model_path", sa.Text()),
        sa.Column("model_id", sa.Text()),
        sa.Column("model_seq_id", sa.BigInteger()),
        sa.Column("clones", sa.Integer(), server_default="0", nullable=False),
        sa.Column("created", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("sampler_id"),
    )
    op.create_index("ix_samplers_session_id", "samplers", ["session_id"])
    op.create_table(
        "sessions",
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
        sa.Column("sdk_version", sa.Text()),
        sa.Column("project_id", sa.Text()),
        sa.Column("display_name", sa.Text()),
        sa.Column("created", sa.BigInteger(), nullable=False),
        sa.Column("heartbeat", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("finish_reason", sa.Text()),
        sa.Column("finish_detail", sa.Text()),
        sa.PrimaryKeyConstraint("session_id"),
    )
    op.create_index("sessions_newest", "sessions", ["owner", "created", "session_id"])
    op.create_table(
        "streams",
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("frontier", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("highest", sa.BigInteger(), server_default="-1", nullable=False),
        sa.Column("next_turn", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("done_serial", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("last_request", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("stream"),
    )
    op.create_table(
        "turns",
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("lane", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("turn", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("base_model", "lane", "owner"),
    )
    op.create_table(
        "payloads",
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["request_id"], ["jobs.request_id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("request_id"),
    )
    op.create_table(
        "results",
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("content_type", sa.Text(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["request_id"], ["jobs.request_id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("request_id"),
    )
