"""The first tables: owners and keys, sessions, models and workers, runs and their log, snapshots, checkpoints."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "models",
        sa.Column("pool", sa.String(length=120), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("architecture", sa.String(length=120), nullable=False),
        sa.Column("vocab_size", sa.Integer(), nullable=False),
        sa.Column("context_length", sa.Integer(), nullable=False),
        sa.Column("config_hash", sa.String(length=64), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("pool"),
    )
    op.create_table(
        "owners",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("name"),
    )
    op.create_table(
        "workers",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("pool", sa.String(length=120), nullable=False),
        sa.Column("roles", sa.JSON(), nullable=False),
        sa.Column("host", sa.String(length=255), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("slots", sa.Integer(), nullable=False),
        sa.Column("resident_runs", sa.Integer(), nullable=False),
        sa.Column("queued_tokens", sa.Integer(), nullable=False),
        sa.Column("phase", sa.String(length=32), nullable=False),
        sa.Column("draining", sa.Boolean(), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_seen", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_workers_pool", "workers", ["pool"], unique=False)

    op.create_table(
        "api_keys",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("owner_id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("prefix", sa.String(length=16), nullable=False),
        sa.Column("key_hash", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["owner_id"],
            ["owners.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("key_hash"),
    )
    op.create_index("ix_api_keys_owner_id", "api_keys", ["owner_id"], unique=False)

    op.create_table(
        "model_names",
        sa.Column("name", sa.String(length=500), nullable=False),
        sa.Column("pool", sa.String(length=120), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("client_name", sa.String(length=500), nullable=False),
        sa.Column("tokenizer_id", sa.String(length=500), nullable=True),
        sa.ForeignKeyConstraint(["pool"], ["models.pool"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_index("ix_model_names_pool", "model_names", ["pool"], unique=False)

    op.create_table(
        "sessions",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("owner_id", sa.String(length=64), nullable=False),
        sa.Column("idempotency_key", sa.String(length=200), nullable=True),
        sa.Column("sdk_version", sa.String(length=64), nullable=False),
        sa.Column("project_id", sa.String(length=200), nullable=True),
        sa.Column("display_name", sa.String(length=200), nullable=True),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("silent_since", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finish_reason", sa.String(length=32), nullable=True),
        sa.Column("finish_detail", sa.Text(), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["owner_id"],
            ["owners.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_sessions_owner_id", "sessions", ["owner_id"], unique=False)
    op.create_index("ux_sessions_idempotency", "sessions", ["owner_id", "idempotency_key"], unique=True)

    op.create_table(
        "runs",
        sa.Column("id", sa.String(length=120), nullable=False),
        sa.Column("owner_id", sa.String(length=64), nullable=False),
        sa.Column("session_id", sa.String(length=64), nullable=False),
        sa.Column("model_seq_id", sa.Integer(), nullable=False),
        sa.Column("base_model", sa.String(length=500), nullable=False),
        sa.Column("pool", sa.String(length=120), nullable=True),
        sa.Column("lora_rank", sa.Integer(), nullable=False),
        sa.Column("lora_alpha", sa.Float(), nullable=False),
        sa.Column("lora_seed", sa.BigInteger(), nullable=False),
        sa.Column("train_attn", sa.Boolean(), nullable=False),
        sa.Column("train_mlp", sa.Boolean(), nullable=False),
        sa.Column("train_unembed", sa.Boolean(), nullable=False),
        sa.Column("optimizer", sa.JSON(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_request_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("applied_seq", sa.Integer(), nullable=False),
        sa.Column("failed", sa.Boolean(), nullable=False),
        sa.Column("worker_id", sa.String(length=64), nullable=True),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("lease_expires_at", sa.Float(), nullable=True),
        sa.Column("crash_seq", sa.Integer(), nullable=True),
        sa.Column("crash_count", sa.Integer(), nullable=False),
        sa.Column("recovery_snapshot_id", sa.String(length=64), nullable=True),
        sa.Column("sampler_snapshot_id", sa.String(length=64), nullable=True),
        sa.ForeignKeyConstraint(
            ["owner_id"],
            ["owners.id"],
        ),
        sa.ForeignKeyConstraint(
            ["session_id"],
            ["sessions.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_runs_owner_created", "runs", ["owner_id", "created_at"], unique=False)
    op.create_index("ix_runs_worker", "runs", ["worker_id"], unique=False)
    op.create_index("ux_runs_session_seq", "runs", ["session_id", "model_seq_id"], unique=True)

    op.create_table(
        "sampling_sessions",
        sa.Column("id", sa.String(length=120), nullable=False),
        sa.Column("owner_id", sa.String(length=64), nullable=False),
        sa.Column("session_id", sa.String(length=64), nullable=False),
        sa.Column("seq_id", sa.Integer(), nullable=False),
        sa.Column("base_model", sa.String(length=500), nullable=False),
        sa.Column("pool", sa.String(length=120), nullable=False),
        sa.Column("model_path", sa.String(length=500), nullable=True),
        sa.Column("snapshot_id", sa.String(length=64), nullable=True),
        sa.Column("follows_model_id", sa.String(length=120), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["owner_id"],
            ["owners.id"],
        ),
        sa.ForeignKeyConstraint(
            ["session_id"],
            ["sessions.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_sampling_sessions_owner_id", "sampling_sessions", ["owner_id"], unique=False)
    op.create_index("ix_sampling_sessions_snapshot_id", "sampling_sessions", ["snapshot_id"], unique=False)
    op.create_index("ux_sampling_sessions_seq", "sampling_sessions", ["session_id", "seq_id"], unique=True)

    op.create_table(
        "operations",
        sa.Column("model_id", sa.String(length=120), nullable=False),
        sa.Column("seq_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("request_id", sa.String(length=140), nullable=False),
        sa.Column("kind", sa.String(length=40), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("format", sa.Integer(), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=True),
        sa.Column("body_blob", sa.String(length=120), nullable=True),
        sa.Column("body_bytes", sa.Integer(), nullable=False),
        sa.Column("result", sa.LargeBinary(), nullable=True),
        sa.Column("result_blob", sa.String(length=120), nullable=True),
        sa.Column("result_kind", sa.String(length=16), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("error_category", sa.String(length=16), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["model_id"], ["runs.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("model_id", "seq_id"),
        sa.UniqueConstraint("request_id"),
    )
    op.create_index(
        "ix_operations_accepted",
        "operations",
        ["model_id"],
        unique=False,
        sqlite_where=sa.text("state = 'accepted'"),
        postgresql_where=sa.text("state = 'accepted'"),
    )
    op.create_index("ix_operations_finished", "operations", ["finished_at"], unique=False)

    op.create_table(
        "snapshots",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("owner_id", sa.String(length=64), nullable=False),
        sa.Column("model_id", sa.String(length=120), nullable=False),
        sa.Column("seq_id", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("session_id", sa.String(length=64), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["model_id"],
            ["runs.id"],
        ),
        sa.ForeignKeyConstraint(
            ["owner_id"],
            ["owners.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_snapshots_model_id", "snapshots", ["model_id"], unique=False)
    op.create_index("ix_snapshots_owner_id", "snapshots", ["owner_id"], unique=False)
    op.create_index("ix_snapshots_session_id", "snapshots", ["session_id"], unique=False)

    op.create_table(
        "checkpoints",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("owner_id", sa.String(length=64), nullable=False),
        sa.Column("model_id", sa.String(length=120), nullable=False),
        sa.Column("kind", sa.String(length=20), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("snapshot_id", sa.String(length=64), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["model_id"],
            ["runs.id"],
        ),
        sa.ForeignKeyConstraint(
            ["owner_id"],
            ["owners.id"],
        ),
        sa.ForeignKeyConstraint(
            ["snapshot_id"],
            ["snapshots.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_checkpoints_expires_at", "checkpoints", ["expires_at"], unique=False)
    op.create_index("ix_checkpoints_owner_id", "checkpoints", ["owner_id"], unique=False)
    op.create_index("ix_checkpoints_snapshot_id", "checkpoints", ["snapshot_id"], unique=False)
    op.create_index("ux_checkpoints_path", "checkpoints", ["model_id", "kind", "name"], unique=True)


def downgrade() -> None:
    for table in (
        "checkpoints",
        "snapshots",
        "operations",
        "sampling_sessions",
        "runs",
        "sessions",
        "model_names",
        "api_keys",
        "workers",
        "owners",
        "models",
    ):
        op.drop_table(table)
