"""Which operations were computed in one pass: a recovery repeats passes as they were. Which runs are on trial: all runs
of a worker that died come back at once, and the next death counts against the one that was being tried.

Revision ID: 0014
Revises: 0013
"""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("operations", sa.Column("pass_id", sa.BigInteger(), nullable=True))
    op.add_column("runs", sa.Column("tried_seq", sa.Integer(), nullable=True))


def downgrade() -> None:
    op.drop_column("runs", "tried_seq")
    op.drop_column("operations", "pass_id")
