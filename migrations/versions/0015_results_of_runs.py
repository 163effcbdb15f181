"""Results are forgotten run by run: the oldest that a run has, and the next run that has any, are found by an index.

Revision ID: 0015
Revises: 0014
"""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

_KEPT = sa.text("result_kind IS NOT NULL")


def upgrade() -> None:
    op.create_index(
        "ix_operations_kept", "operations", ["model_id", "seq_id"], sqlite_where=_KEPT, postgresql_where=_KEPT
    )
    op.drop_index("ix_operations_results", table_name="operations")


def downgrade() -> None:
    op.create_index("ix_operations_results", "operations", ["finished_at"], sqlite_where=_KEPT, postgresql_where=_KEPT)
    op.drop_index("ix_operations_kept", table_name="operations")
