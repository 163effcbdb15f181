"""Where the tokenizer of a base model is kept."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("models", sa.Column("tokenizer_blob", sa.String(length=120), nullable=True))


def downgrade() -> None:
    op.drop_column("models", "tokenizer_blob")
