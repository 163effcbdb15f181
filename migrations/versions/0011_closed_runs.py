"""Runs are closed after the end of their sessions, and those that are not yet are found by an index.

Revision ID: 0011
Revises: 0010
"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_OPEN = sa.text("closed_at IS NULL")


def upgrade() -> None:
    op.add_column("runs", sa.Column("closed_at", sa.DateTime(timezone=True), nullable=True))
    op.create_index("ix_runs_open", "runs", ["session_id"], sqlite_where=_OPEN, postgresql_where=_OPEN)


def downgrade() -> None:
    op.drop_index("ix_runs_open", table_name="runs")
    op.drop_column("runs", "closed_at")
