"""The collection of blobs that nothing refers to: since when a snapshot is unused, and indexes to find references by.

Revision ID: 0009
Revises: 0008
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_NAMED = {
    "ix_operations_body_blob": ("body_blob", "body_blob IS NOT NULL"),
    "ix_operations_result_blob": ("result_blob", "result_blob IS NOT NULL"),
    "ix_operations_loads": ("model_id", "kind = 'load_weights'"),
}


def upgrade() -> None:
    op.add_column("snapshots", sa.Column("unused_since", sa.DateTime(timezone=True), nullable=True))
    for name, (column, where) in _NAMED.items():
        op.create_index(name, "operations", [column], sqlite_where=sa.text(where), postgresql_where=sa.text(where))


def downgrade() -> None:
    for name in _NAMED:
        op.drop_index(name, table_name="operations")
    op.drop_column("snapshots", "unused_since")
