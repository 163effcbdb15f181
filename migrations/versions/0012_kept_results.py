"""Results that are old enough to be forgotten are found without passing over those that are forgotten.

Revision ID: 0012
Revises: 0011
"""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

_KEPT = sa.text("result_kind IS NOT NULL")


def upgrade() -> None:
    op.create_index("ix_operations_results", "operations", ["finished_at"], sqlite_where=_KEPT, postgresql_where=_KEPT)
    op.drop_index("ix_operations_finished", table_name="operations")


def downgrade() -> None:
    op.create_index("ix_operations_finished", "operations", ["finished_at"])
    op.drop_index("ix_operations_results", table_name="operations")
