"""How many clients have joined a sampling session."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("sampling_sessions", sa.Column("clients", sa.Integer(), server_default="0", nullable=False))


def downgrade() -> None:
    op.drop_column("sampling_sessions", "clients")
