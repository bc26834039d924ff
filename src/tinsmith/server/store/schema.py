"""The tables. `migrations/` builds them; a test compares the two."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import sqlalchemy as sa

REVISION = "0009"
"""The newest migration. A database that has it is ready as it is."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class UtcTime(sa.types.TypeDecorator[datetime]):
    """Microseconds since 1970 as an integer: exact, sortable and the same in both databases."""

    impl = sa.BigInteger
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> int | None:
        return None if value is None else (value - _EPOCH) // _MICROSECOND

    def process_result_value(self, value: int | None, dialect: sa.Dialect) -> datetime | None:
        return None if value is None else _EPOCH + value * _MICROSECOND


def _autoincrement() -> sa.types.TypeEngine[int]:
    # Only a column declared as INTEGER numbers itself in SQLite.
    return sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _lora() -> list[sa.Column[object]]:
    return [
        sa.Column("lora_rank", sa.Integer, nullable=False),
        sa.Column("lora_seed", sa.BigInteger),
        sa.Column("train_attn", sa.Boolean, nullable=False),
        sa.Column("train_mlp", sa.Boolean, nullable=False),
        sa.Column("train_unembed", sa.Boolean, nullable=False),
    ]


metadata = sa.MetaData()

identity = sa.Table(
    "identity",  # one row
    metadata,
    sa.Column("database_id", sa.Text, primary_key=True),  # also in the state folder that belongs to it
    sa.Column("used_by", sa.Text),  # with PostgreSQL: the server that leads, or was the last to do so
    sa.Column("secret", sa.Text),  # what tokens and URLs are signed with
    sa.Column("storage", sa.Text, nullable=False, server_default=""),  # where the files of that server lie
)

bulletin = sa.Table(
    "bulletin",  # with PostgreSQL: what the server that leads tells the others about its workers
    metadata,
    sa.Column("leader", sa.Text, primary_key=True),
    sa.Column("number", sa.BigInteger, nullable=False),
    sa.Column("content", sa.LargeBinary, nullable=False),
)

posts = sa.Table(
    "posts",  # which process works on a base model in a place: the last that began there
    metadata,
    sa.Column("base_model", sa.Text, primary_key=True),
    sa.Column("place", sa.Text, primary_key=True),
    sa.Column("holder", sa.Text, nullable=False),
)

_ACTIVE = sa.text("state = 'active'")

sessions = sa.Table(
    "sessions",
    metadata,
    sa.Column("session_id", sa.Text, primary_key=True),
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("tags", sa.JSON, nullable=False),
    sa.Column("user_metadata", sa.JSON, nullable=False),
    sa.Column("sdk_version", sa.Text),
    sa.Column("project_id", sa.Text),
    sa.Column("display_name", sa.Text),
    sa.Column("created", UtcTime, nullable=False),
    sa.Column("heartbeat", UtcTime, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("finish_reason", sa.Text),
    sa.Column("finish_detail", sa.Text),
    sa.Index("sessions_newest", "owner", "created", "session_id"),
    sa.Index("sessions_by_heartbeat", "heartbeat", sqlite_where=_ACTIVE, postgresql_where=_ACTIVE),
)

models = sa.Table(
    "models",
    metadata,
    sa.Column("model_id", sa.Text, primary_key=True),
    sa.Column("session_id", sa.Text, index=True),
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("base_model", sa.Text, nullable=False),
    *_lora(),
    sa.Column("optimizer_config", sa.JSON, nullable=False),
    sa.Column("user_metadata", sa.JSON),
    sa.Column("trainable", sa.Boolean, nullable=False),
    sa.Column("created", UtcTime, nullable=False),
    sa.Column("corrupted", sa.Text),
    sa.Column("project_id", sa.Text),  # null for a model of a session, which is in the session's project
    sa.Column("snapshot_seq", sa.BigInteger),  # the last operation that is in the snapshot, if there is one
    sa.Column("removed", UtcTime),  # since then only its checkpoints are kept
    sa.Column("previous_snapshot_seq", sa.BigInteger),  # that of the snapshot before, for when the last is damaged
    sa.Index("models_newest", "owner", "created", "model_id"),
)

_COPIED = sa.text("model_id IS NOT NULL AND removed IS NULL")

samplers = sa.Table(
    "samplers",
    metadata,
    sa.Column("sampler_id", sa.Text, primary_key=True),
    sa.Column("session_id", sa.Text, nullable=False, index=True),
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("base_model", sa.Text, nullable=False),
    sa.Column("model_path", sa.Text),
    sa.Column("model_id", sa.Text),
    sa.Column("model_seq_id", sa.BigInteger),
    sa.Column("clones", sa.Integer, nullable=False, server_default="0"),
    sa.Column("created", UtcTime, nullable=False),
    sa.Column("removed", UtcTime),  # since then its weights, copied from a model, are not kept any more
    sa.Column("saved_by", sa.Text),  # the job that wrote the checkpoint it samples from
    # Draws with the newest of its model. It is that only when the job that makes it is done.
    sa.Column("inflight", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Index("samplers_by_age", "created", sqlite_where=_COPIED, postgresql_where=_COPIED),
    sa.Index(
        "samplers_published",
        *("model_id", "model_seq_id"),
        sqlite_where=sa.text("inflight = 1 AND removed IS NULL"),
        postgresql_where=sa.text("inflight AND removed IS NULL"),
    ),
)

losses = sa.Table(
    "losses",
    metadata,
    sa.Column("loss_id", sa.Text, primary_key=True),
    sa.Column("session_id", sa.Text, nullable=False),
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("created", UtcTime, nullable=False),
    sa.Column("definition", sa.LargeBinary, nullable=False),
)

streams = sa.Table(
    "streams",  # whatever numbers its jobs: a model, a sampling session, the losses of a session
    metadata,
    sa.Column("stream", sa.Text, primary_key=True),
    sa.Column("frontier", sa.BigInteger, nullable=False, server_default="0"),  # every lower number has arrived
    sa.Column("highest", sa.BigInteger, nullable=False, server_default="-1"),  # the highest number that has arrived
    sa.Column("next_turn", sa.BigInteger, nullable=False, server_default="0"),  # earliest turn of its next job
    sa.Column("done_serial", sa.BigInteger, nullable=False, server_default="0"),  # that of its latest finished job
    sa.Column("last_request", UtcTime, nullable=False),
)

turns = sa.Table(
    "turns",  # how far the jobs of an owner have been claimed: a stream that was idle joins here, not earlier
    metadata,
    sa.Column("base_model", sa.Text, primary_key=True),
    sa.Column("lane", sa.Text, primary_key=True),
    sa.Column("owner", sa.Text, primary_key=True),
    sa.Column("turn", sa.BigInteger, nullable=False),
)

_READY = sa.text("state = 'queued' AND turn IS NOT NULL")
_RUNNING = sa.text("state = 'running'")

jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("request_id", sa.Text, primary_key=True),
    sa.Column("stream", sa.Text, nullable=False),
    sa.Column("seq_id", sa.BigInteger, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("lane", sa.Text, nullable=False),
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("key_id", sa.BigInteger),  # the key that it was submitted with
    sa.Column("session_id", sa.Text, nullable=False),
    sa.Column("base_model", sa.Text),
    sa.Column("model_id", sa.Text),
    sa.Column("sampler_id", sa.Text),
    sa.Column("size", sa.BigInteger, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("turn", sa.BigInteger),  # null until it may run
    sa.Column("worker", sa.Text),
    sa.Column("cancel_asked", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("error", sa.Text),
    sa.Column("category", sa.Text),
    sa.Column("created", UtcTime, nullable=False),
    sa.Column("started", UtcTime),
    sa.Column("finished", UtcTime),
    sa.Column("done_serial", sa.BigInteger),  # rises within a stream, in the order of finishing
    sa.Column("attempts", sa.Integer, nullable=False, server_default="0"),  # how often it was begun
    sa.Column("shown", sa.LargeBinary),  # what it adds to the curves of its model
    sa.Column("replica", sa.Text, nullable=False, server_default=""),  # the sampler replica that it is for, if any is
    sa.Column("samples", sa.Integer, nullable=False, server_default="1"),  # how many it asks for; 1 for training
    sa.UniqueConstraint("stream", "seq_id"),
    sa.Index(
        "jobs_ready",
        *("base_model", "lane", "replica", "owner", "turn", "created"),
        sqlite_where=_READY,
        postgresql_where=_READY,
    ),
    sa.Index("jobs_running", "base_model", "worker", sqlite_where=_RUNNING, postgresql_where=_RUNNING),
    sa.Index("jobs_finished", "stream", "done_serial"),
    sa.Index("jobs_by_age", "finished"),
)

# Bytes live apart from the jobs: a change of state rewrites a row as a whole, and payloads have megabytes.
payloads = sa.Table(
    "payloads",
    metadata,
    sa.Column("request_id", sa.ForeignKey("jobs.request_id", ondelete="CASCADE"), primary_key=True),
    sa.Column("data", sa.LargeBinary, nullable=False),
)

results = sa.Table(
    "results",
    metadata,
    sa.Column("request_id", sa.ForeignKey("jobs.request_id", ondelete="CASCADE"), primary_key=True),
    sa.Column("content_type", sa.Text, nullable=False),
    sa.Column("size", sa.BigInteger, nullable=False),
    sa.Column("data", sa.LargeBinary, nullable=False),
)

checkpoints = sa.Table(
    "checkpoints",
    metadata,
    sa.Column("run_id", sa.Text, primary_key=True),
    sa.Column("kind", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("base_model", sa.Text, nullable=False),
    *_lora(),
    sa.Column("optimizer_config", sa.JSON, nullable=False),
    sa.Column("user_metadata", sa.JSON),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("request_id", sa.Text, nullable=False),
    sa.Column("public", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("created", UtcTime, nullable=False),
    sa.Column("expires", UtcTime, index=True),
    sa.Index("checkpoints_newest", "owner", "created"),
)

keys = sa.Table(
    "keys",
    metadata,
    sa.Column("key_id", _autoincrement(), primary_key=True),
    sa.Column("prefix", sa.Text, nullable=False, index=True),  # of the hash: finds the row, proves nothing
    sa.Column("hash", sa.Text, nullable=False, unique=True),
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("note", sa.Text, nullable=False),
    sa.Column("hint", sa.Text, nullable=False),
    sa.Column("created", UtcTime, nullable=False),
    sa.Column("revoked", UtcTime),
)

audit = sa.Table(
    "audit",
    metadata,
    sa.Column("event_id", _autoincrement(), primary_key=True),
    sa.Column("time", UtcTime, nullable=False),
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("event", sa.Text, nullable=False),
    sa.Column("details", sa.JSON, nullable=False),
    sa.Column("model_id", sa.Text),
    sa.Column("tinker_path", sa.Text),
    sa.Column("outcome", sa.Text, nullable=False, server_default="done"),
    sa.Column("key_id", sa.BigInteger),  # the key that was used, or, in what was done to a key, that one
    sa.Column("address", sa.Text),  # where it was done from; null for what a worker or the server did by itself
    sa.Index("audit_by_time", "owner", "time"),
    sa.Index("audit_by_age", "time"),
)

curves = sa.Table(
    "curves",  # what is drawn of a model: what the server knows of its steps, and what its client logs
    metadata,
    sa.Column("curve_id", _autoincrement(), primary_key=True),
    sa.Column("model_id", sa.Text, nullable=False),
    sa.Column("source", sa.Text, nullable=False),
    sa.Column("count", sa.BigInteger, nullable=False),  # points it ever had, which is the number of the last
    sa.Column("thinned", sa.BigInteger, nullable=False, server_default="0"),  # points that are not kept as they were
    sa.Column("last", sa.JSON, nullable=False),  # the last value of each name there ever was
    sa.Column(
        "gathered", sa.BigInteger, nullable=False, server_default="0"
    ),  # the last job, or call, that is in the points
    sa.Column("stepped", UtcTime),  # when the last step was done; what came of the data since then:
    sa.Column("loss", sa.Double, nullable=False, server_default="0"),  # a sum
    sa.Column("weight", sa.Double, nullable=False, server_default="0"),  # what to divide it by
    sa.Column("tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.UniqueConstraint("model_id", "source"),
)

points = sa.Table(
    "points",
    metadata,
    sa.Column("curve_id", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("span", sa.BigInteger, nullable=False),  # how many points it stands for: itself and those after it
    sa.Column("step", sa.BigInteger, nullable=False),
    sa.Column("time", UtcTime, nullable=False),
    sa.Column("metrics", sa.JSON, nullable=False),  # by name; null for what is no finite number
    sqlite_with_rowid=False,
)

recent_samples = sa.Table(
    "recent_samples",  # to be looked at; clients have their own
    metadata,
    sa.Column("sample_id", _autoincrement(), primary_key=True),
    sa.Column("request_id", sa.Text, nullable=False),
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("base_model", sa.Text, nullable=False),
    sa.Column("sampler_id", sa.Text, nullable=False),
    sa.Column("time", UtcTime, nullable=False),
    sa.Column("content", sa.LargeBinary, nullable=False),
    sa.Index("recent_samples_newest", "owner", "sample_id"),
)
