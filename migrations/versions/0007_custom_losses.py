"""Uploaded loss functions."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from app.db import UtcDateTime

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "custom_losses",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("owner_id", sa.String(64), sa.ForeignKey("owners.id"), nullable=False),
        sa.Column("session_id", sa.String(64), sa.ForeignKey("sessions.id"), nullable=False),
        sa.Column("seq_id", sa.Integer(), nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("graph", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("created_at", UtcDateTime(), nullable=False),
    )
    op.create_index("ux_custom_losses_session_seq", "custom_losses", ["session_id", "seq_id"], unique=True)
    op.create_index("ix_custom_losses_owner_id", "custom_losses", ["owner_id"])


def downgrade() -> None:
    op.drop_table("custom_losses")
