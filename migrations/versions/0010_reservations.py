"""Reservations of quota, so that saves of one tenant that are under way at the same time see each other.

Revision ID: 0010
Revises: 0009
"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "reservations",
        sa.Column("model_id", sa.String(120), sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("seq_id", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("owner_id", sa.String(64), sa.ForeignKey("owners.id"), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
    )
    op.create_index("ix_reservations_owner_id", "reservations", ["owner_id"])


def downgrade() -> None:
    op.drop_table("reservations")
