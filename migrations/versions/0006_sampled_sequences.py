"""Samples that are on record: their prompts, sampled tokens and logprobs, for losses that look them up."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "recorded_samples",
        sa.Column("request_id", sa.String(length=160), nullable=False),
        sa.Column("owner_id", sa.String(length=64), nullable=False),
        sa.Column("session_id", sa.String(length=64), nullable=False),
        sa.Column("prompt", sa.LargeBinary(), nullable=False),
        sa.Column("response", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["owner_id"], ["owners.id"]),
        sa.PrimaryKeyConstraint("request_id"),
    )
    op.create_index("ix_recorded_samples_created_at", "recorded_samples", ["created_at"], unique=False)


def downgrade() -> None:
    op.drop_table("recorded_samples")
