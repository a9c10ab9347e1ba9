"""Tool episodes: the table, who belongs to which, and what a rubric says of them.

Revision: 0002
After: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    create_episodes()
    join_ledger()
    with op.batch_alter_table("rubric_versions") as table:
        # Rubrics written before there were episodes judge them as the default does.
        table.add_column(
            sa.Column("episodes", sa.String(length=32), nullable=False, server_default="one")
        )


def create_episodes() -> None:
    op.create_table(
        "episodes",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_active_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("closed_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("rewards", sa.String(length=32), nullable=True),
        sa.Column("judged_id", sa.Text(), nullable=True),
        sa.Column("head_id", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_episodes")),
    )
    op.create_index(
        op.f("ix_episodes_open"),
        "episodes",
        ["last_active_at"],
        unique=False,
        sqlite_where=sa.text("closed_at IS NULL"),
        postgresql_where=sa.text("closed_at IS NULL"),
    )


def join_ledger() -> None:
    with op.batch_alter_table("ledger_entries") as table:
        table.add_column(sa.Column("episode_id", sa.Text(), nullable=True))
        table.create_foreign_key(
            op.f("fk_ledger_entries_episode_id_episodes"), "episodes", ["episode_id"], ["id"]
        )
    op.create_index(
        op.f("ix_ledger_entries_episode"),
        "ledger_entries",
        ["episode_id"],
        unique=False,
        sqlite_where=sa.text("episode_id IS NOT NULL"),
        postgresql_where=sa.text("episode_id IS NOT NULL"),
    )


def downgrade() -> None:
    raise NotImplementedError("there is no way down: restore a copy made before the update")
