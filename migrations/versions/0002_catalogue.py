"""What lists and published checkpoints need: `public`, `copied_from`, and indexes by owner and time."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_LISTED = ("checkpoints", "sessions")


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("public", sa.Boolean(), server_default=sa.false(), nullable=False))
    op.add_column("runs", sa.Column("copied_from", sa.String(length=500), nullable=True))
    for table in _LISTED:
        op.create_index(f"ix_{table}_owner_created", table, ["owner_id", "created_at"], unique=False)
        op.drop_index(f"ix_{table}_owner_id", table_name=table)


def downgrade() -> None:
    for table in _LISTED:
        op.create_index(f"ix_{table}_owner_id", table, ["owner_id"], unique=False)
        op.drop_index(f"ix_{table}_owner_created", table_name=table)
    op.drop_column("runs", "copied_from")
    op.drop_column("checkpoints", "public")
