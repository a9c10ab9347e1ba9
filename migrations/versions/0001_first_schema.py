"""The first schema.

Revision: 0001
After: nothing
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

SEQUENCE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    create_ledger()
    create_rollouts()
    create_feedback()
    create_rubrics()
    create_judgements()
    create_policies()
    create_updates()
    create_operation()
    counters = sa.table("counters", sa.column("name"), sa.column("value"))
    op.bulk_insert(counters, [{"name": "requests", "value": 0}])


def create_ledger() -> None:
    op.create_table(
        "ledger_entries",
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("state", sa.String(length=32), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("not_before", sa.DateTime(timezone=True), nullable=True),
        sa.Column("lease_owner", sa.Text(), nullable=True),
        sa.Column("lease_deadline", sa.DateTime(timezone=True), nullable=True),
        sa.Column("feedback_came", sa.Boolean(), nullable=False),
        sa.Column("judgement_seq", SEQUENCE, nullable=True),
        sa.PrimaryKeyConstraint("rollout_id", name=op.f("pk_ledger_entries")),
    )
    op.create_index(
        op.f("ix_ledger_entries_state_reason_created_at_rollout_id"),
        "ledger_entries",
        ["state", "reason", "created_at", "rollout_id"],
        unique=False,
    )
    op.create_table(
        "counters",
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("value", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_counters")),
    )
    op.create_table(
        "lost_leases",
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("lost_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("owner", name=op.f("pk_lost_leases")),
    )


def create_rollouts() -> None:
    op.create_table(
        "rollouts",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("user_hash", sa.Text(), nullable=True),
        sa.Column("stream", sa.Boolean(), nullable=False),
        sa.Column("train", sa.Boolean(), nullable=False),
        sa.Column("sampling", sa.Text(), nullable=False),
        sa.Column("messages", sa.Text(), nullable=True),
        sa.Column("completed_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("outcome", sa.String(length=32), nullable=True),
        sa.Column("finish_reason", sa.Text(), nullable=True),
        sa.Column("not_trainable", sa.String(length=32), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("engine", sa.Text(), nullable=True),
        sa.Column("version_spans", sa.Text(), nullable=True),
        sa.Column("prompt_tokens", sa.Integer(), nullable=True),
        sa.Column("reply_tokens", sa.Integer(), nullable=True),
        sa.Column("pruned_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("text", sa.Text(), nullable=True),
        sa.Column("prompt_ids", sa.LargeBinary(), nullable=True),
        sa.Column("reply_ids", sa.LargeBinary(), nullable=True),
        sa.Column("logprobs", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(
            ["id"], ["ledger_entries.rollout_id"], name=op.f("fk_rollouts_id_ledger_entries")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rollouts")),
    )
    op.create_index(
        op.f("ix_rollouts_open"),
        "rollouts",
        ["id"],
        unique=False,
        sqlite_where=sa.text("completed_at IS NULL"),
        postgresql_where=sa.text("completed_at IS NULL"),
    )
    op.create_index(
        op.f("ix_rollouts_unpruned"),
        "rollouts",
        ["created_at"],
        unique=False,
        sqlite_where=sa.text("pruned_at IS NULL"),
        postgresql_where=sa.text("pruned_at IS NULL"),
    )


def create_feedback() -> None:
    op.create_table(
        "feedback",
        sa.Column("seq", SEQUENCE, autoincrement=True, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("metric", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.Column("comment", sa.Text(), nullable=True),
        sa.Column("user_hash", sa.Text(), nullable=True),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("client_id", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["rollout_id"],
            ["ledger_entries.rollout_id"],
            name=op.f("fk_feedback_rollout_id_ledger_entries"),
        ),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_feedback")),
        sa.UniqueConstraint("id", name=op.f("uq_feedback_id")),
        sa.UniqueConstraint(
            "rollout_id", "client_id", name=op.f("uq_feedback_rollout_id_client_id")
        ),
    )


def create_rubrics() -> None:
    op.create_table(
        "rubric_versions",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("judge", sa.Text(), nullable=False),
        sa.Column("criteria", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("author", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rubric_versions")),
        sa.UniqueConstraint("name", "number", name=op.f("uq_rubric_versions_name_number")),
    )
    op.create_table(
        "rubric_labels",
        sa.Column("label", sa.String(length=32), nullable=False),
        sa.Column("rubric_id", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["rubric_id"],
            ["rubric_versions.id"],
            name=op.f("fk_rubric_labels_rubric_id_rubric_versions"),
        ),
        sa.PrimaryKeyConstraint("label", name=op.f("pk_rubric_labels")),
    )


def create_judgements() -> None:
    op.create_table(
        "judgements",
        sa.Column("seq", SEQUENCE, autoincrement=True, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("rubric_id", sa.Text(), nullable=False),
        sa.Column("judge", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=32), nullable=False),
        sa.Column("quality", sa.Integer(), nullable=True),
        sa.Column("style", sa.Integer(), nullable=True),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("latency_s", sa.Double(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["rollout_id"],
            ["ledger_entries.rollout_id"],
            name=op.f("fk_judgements_rollout_id_ledger_entries"),
        ),
        sa.ForeignKeyConstraint(
            ["rubric_id"],
            ["rubric_versions.id"],
            name=op.f("fk_judgements_rubric_id_rubric_versions"),
        ),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_judgements")),
        sa.UniqueConstraint("id", name=op.f("uq_judgements_id")),
    )
    op.create_index(op.f("ix_judgements_created_at"), "judgements", ["created_at"], unique=False)
    op.create_index(op.f("ix_judgements_rollout_id"), "judgements", ["rollout_id"], unique=False)


def create_policies() -> None:
    op.create_table(
        "policy_versions",
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("parent", sa.Integer(), nullable=True),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("state", sa.String(length=32), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("gate", sa.Text(), nullable=False),
        sa.Column("published_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("delivery", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["parent"],
            ["policy_versions.number"],
            name=op.f("fk_policy_versions_parent_policy_versions"),
        ),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_policy_versions")),
    )


def create_updates() -> None:
    op.create_table(
        "updates",
        sa.Column("seq", SEQUENCE, autoincrement=True, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("metrics", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=True),
        sa.Column("note", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["version"], ["policy_versions.number"], name=op.f("fk_updates_version_policy_versions")
        ),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_updates")),
        sa.UniqueConstraint("id", name=op.f("uq_updates_id")),
        sa.UniqueConstraint("version", name=op.f("uq_updates_version")),
    )
    op.create_table(
        "update_members",
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("update_seq", SEQUENCE, nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["rollout_id"],
            ["ledger_entries.rollout_id"],
            name=op.f("fk_update_members_rollout_id_ledger_entries"),
        ),
        sa.ForeignKeyConstraint(
            ["update_seq"], ["updates.seq"], name=op.f("fk_update_members_update_seq_updates")
        ),
        sa.PrimaryKeyConstraint("rollout_id", name=op.f("pk_update_members")),
    )
    op.create_index(
        op.f("ix_update_members_update_seq_position"),
        "update_members",
        ["update_seq", "position"],
        unique=False,
    )
    op.create_table(
        "token_traces",
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("trace_values", sa.LargeBinary(), nullable=False),
        sa.Column("advantages", sa.LargeBinary(), nullable=False),
        sa.Column("ratios", sa.LargeBinary(), nullable=False),
        sa.Column("kept", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["rollout_id"],
            ["update_members.rollout_id"],
            name=op.f("fk_token_traces_rollout_id_update_members"),
        ),
        sa.PrimaryKeyConstraint("rollout_id", name=op.f("pk_token_traces")),
    )


def create_operation() -> None:
    op.create_table(
        "notes",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_notes")),
    )
    op.create_table(
        "alarms",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False),
        sa.Column("times", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_alarms")),
    )


def downgrade() -> None:
    raise NotImplementedError("there is no way down: restore a copy made before the update")
