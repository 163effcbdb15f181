"""Snapshots that are still to be uploaded."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from app.db import UtcDateTime

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "uploads",
        sa.Column("snapshot_id", sa.String(64), sa.ForeignKey("snapshots.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("created_at", UtcDateTime(), nullable=False),
    )
    op.create_index("ix_uploads_created_at", "uploads", ["created_at"])


def downgrade() -> None:
    op.drop_table("uploads")
