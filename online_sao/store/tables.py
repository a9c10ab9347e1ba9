"""The schema. One ledger entry per request, ever; everything else hangs off it.

    episodes -- ledger_entries            declared tool episodes; most entries belong to none
    ledger_entries -- rollouts            what was asked and answered; once each, then never edited
                   -- feedback            append-only
                   -- judgements          append-only; each names its rubric version
                   -- update_members      at most one update per rollout: exactly once is a key
                        -- token_traces   what that update saw at each token
    rubric_versions, rubric_labels        append-only versions; the label says which one is active
    updates -- policy_versions            one learner step; the weights it made, if it made some
    counters, notes, alarms, lost_leases

Deleting content deletes rows below the ledger and never the entry itself, so counts survive.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from online_sao.store.columns import AnyText, JsonText, PackedNumbers, UtcDateTime, Word
from online_sao.types import (
    EpisodeRewards,
    JudgementState,
    LedgerState,
    NotTrainable,
    Outcome,
    UpdateKind,
    VersionState,
)

REQUESTS = "requests"
"""The counter of requests ever accepted; counted apart from the entries, to check them."""
ACTIVE = "active"
"""The label of the rubric version that replies are judged under."""

_SEQUENCE = sa.BigInteger().with_variant(sa.Integer, "sqlite")


class Base(DeclarativeBase):
    """All tables; every constraint has a name that a migration can use."""

    metadata = sa.MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class EpisodeRow(Base):
    """A declared tool episode. Whoever changes where a member stands locks this row first."""

    __tablename__ = "episodes"
    __table_args__ = (
        sa.Index(
            "ix_episodes_open",
            "last_active_at",
            sqlite_where=sa.text("closed_at IS NULL"),
            postgresql_where=sa.text("closed_at IS NULL"),
        ),
    )

    id: Mapped[str] = mapped_column(AnyText, primary_key=True)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    last_active_at: Mapped[datetime] = mapped_column(UtcDateTime)
    closed_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    rewards: Mapped[EpisodeRewards | None] = mapped_column(Word(EpisodeRewards))
    """Who is judged; NULL until it has ended (closed, and no request in flight)."""
    judged_id: Mapped[str | None] = mapped_column(AnyText)
    """The member whose verdict is the episode's; NULL where each has its own."""
    head_id: Mapped[str | None] = mapped_column(AnyText)
    """The judged member by which claims find it; the others are taken along. Set when ready."""


class LedgerRow(Base):
    """Where one request stands."""

    __tablename__ = "ledger_entries"
    __table_args__ = (
        # Serves the claims (state, reason "", oldest first) and the counts by state and reason
        # without touching the table: one index, because each one costs at every transition.
        sa.Index(None, "state", "reason", "created_at", "rollout_id"),
        # Partial, so that replies without an episode pay nothing for it.
        sa.Index(
            "ix_ledger_entries_episode",
            "episode_id",
            sqlite_where=sa.text("episode_id IS NOT NULL"),
            postgresql_where=sa.text("episode_id IS NOT NULL"),
        ),
    )

    rollout_id: Mapped[str] = mapped_column(AnyText, primary_key=True)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    state: Mapped[LedgerState] = mapped_column(Word(LedgerState))
    reason: Mapped[str] = mapped_column(AnyText, default="")
    """Why, where the state has reasons; "" elsewhere (not NULL, so that the index is one range)."""
    not_before: Mapped[datetime | None] = mapped_column(UtcDateTime)
    """Awaiting judgement: not claimable before."""
    lease_owner: Mapped[str | None] = mapped_column(AnyText)
    lease_deadline: Mapped[datetime | None] = mapped_column(UtcDateTime)
    feedback_came: Mapped[bool] = mapped_column(sa.Boolean, default=False)
    """While a lease was out on it: the judge has not seen that feedback."""
    judgement_seq: Mapped[int | None] = mapped_column(_SEQUENCE)
    """The scored judgement whose reward counts. No foreign key, which would be circular."""
    episode_id: Mapped[str | None] = mapped_column(AnyText, sa.ForeignKey(EpisodeRow.id))
    """Never changes. In the ledger and not in the record: it decides where the entry may go."""


class RolloutRow(Base):
    """One served reply. The first block is known at the request, the second at the end."""

    __tablename__ = "rollouts"
    __table_args__ = (
        sa.Index(
            "ix_rollouts_unpruned",
            "created_at",
            sqlite_where=sa.text("pruned_at IS NULL"),
            postgresql_where=sa.text("pruned_at IS NULL"),
        ),
        sa.Index(
            "ix_rollouts_open",
            "id",
            sqlite_where=sa.text("completed_at IS NULL"),
            postgresql_where=sa.text("completed_at IS NULL"),
        ),
    )

    id: Mapped[str] = mapped_column(AnyText, sa.ForeignKey(LedgerRow.rollout_id), primary_key=True)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    session_id: Mapped[str] = mapped_column(AnyText)
    user_hash: Mapped[str | None] = mapped_column(AnyText)
    stream: Mapped[bool] = mapped_column(sa.Boolean)
    train: Mapped[bool] = mapped_column(sa.Boolean)
    sampling: Mapped[dict[str, Any]] = mapped_column(JsonText)
    """What differs from `Sampling`'s defaults."""
    messages: Mapped[list[dict[str, Any]] | None] = mapped_column(JsonText)
    """NULL once pruned."""

    completed_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    outcome: Mapped[Outcome | None] = mapped_column(Word(Outcome))
    finish_reason: Mapped[str | None] = mapped_column(AnyText)
    not_trainable: Mapped[NotTrainable | None] = mapped_column(Word(NotTrainable))
    error: Mapped[str | None] = mapped_column(AnyText)
    engine: Mapped[str | None] = mapped_column(AnyText)
    version_spans: Mapped[list[list[int]] | None] = mapped_column(JsonText)
    """[version, start, end] each."""
    prompt_tokens: Mapped[int | None] = mapped_column(sa.Integer)
    reply_tokens: Mapped[int | None] = mapped_column(sa.Integer)
    pruned_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    text: Mapped[str | None] = mapped_column(AnyText)
    prompt_ids: Mapped[tuple[int, ...] | None] = mapped_column(PackedNumbers("i"))
    reply_ids: Mapped[tuple[int, ...] | None] = mapped_column(PackedNumbers("i"))
    logprobs: Mapped[tuple[float, ...] | None] = mapped_column(PackedNumbers("d"))


class FeedbackRow(Base):
    """One thing a user said of one reply."""

    __tablename__ = "feedback"
    __table_args__ = (
        # A client's own id of a feedback: one row per reply, whoever repeats it.
        sa.UniqueConstraint("rollout_id", "client_id"),
    )

    seq: Mapped[int] = mapped_column(_SEQUENCE, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(AnyText, unique=True)
    rollout_id: Mapped[str] = mapped_column(AnyText, sa.ForeignKey(LedgerRow.rollout_id))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    metric: Mapped[str] = mapped_column(AnyText)
    value: Mapped[bool | float | str] = mapped_column(JsonText)
    comment: Mapped[str | None] = mapped_column(AnyText)
    user_hash: Mapped[str | None] = mapped_column(AnyText)
    source: Mapped[str] = mapped_column(AnyText)
    client_id: Mapped[str | None] = mapped_column(AnyText)


class RubricRow(Base):
    """One version of a rubric."""

    __tablename__ = "rubric_versions"
    __table_args__ = (sa.UniqueConstraint("name", "number"),)

    id: Mapped[str] = mapped_column(AnyText, primary_key=True)
    name: Mapped[str] = mapped_column(AnyText)
    number: Mapped[int] = mapped_column(sa.Integer)
    judge: Mapped[str] = mapped_column(AnyText)
    criteria: Mapped[dict[str, Any]] = mapped_column(JsonText)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    message: Mapped[str] = mapped_column(AnyText)
    author: Mapped[str] = mapped_column(AnyText)
    episodes: Mapped[EpisodeRewards] = mapped_column(Word(EpisodeRewards))


class RubricLabelRow(Base):
    """A name that points at one rubric version (`active`)."""

    __tablename__ = "rubric_labels"

    label: Mapped[str] = mapped_column(sa.String(32), primary_key=True)
    rubric_id: Mapped[str] = mapped_column(AnyText, sa.ForeignKey(RubricRow.id))


class JudgementRow(Base):
    """One judge's look at one rollout."""

    __tablename__ = "judgements"
    __table_args__ = (sa.Index(None, "rollout_id"), sa.Index(None, "created_at"))

    seq: Mapped[int] = mapped_column(_SEQUENCE, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(AnyText, unique=True)
    rollout_id: Mapped[str] = mapped_column(AnyText, sa.ForeignKey(LedgerRow.rollout_id))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    rubric_id: Mapped[str] = mapped_column(AnyText, sa.ForeignKey(RubricRow.id))
    judge: Mapped[str] = mapped_column(AnyText)
    state: Mapped[JudgementState] = mapped_column(Word(JudgementState))
    quality: Mapped[int | None] = mapped_column(sa.Integer)
    style: Mapped[int | None] = mapped_column(sa.Integer)
    reward: Mapped[float | None] = mapped_column(sa.Double)
    reason: Mapped[str] = mapped_column(AnyText)
    latency_s: Mapped[float] = mapped_column(sa.Double)
    attempts: Mapped[int] = mapped_column(sa.Integer)


class PolicyVersionRow(Base):
    """Weights that can be served."""

    __tablename__ = "policy_versions"

    number: Mapped[int] = mapped_column(sa.Integer, primary_key=True, autoincrement=False)
    parent: Mapped[int | None] = mapped_column(sa.Integer, sa.ForeignKey("policy_versions.number"))
    path: Mapped[str] = mapped_column(AnyText)
    sha256: Mapped[str] = mapped_column(sa.String(64))
    state: Mapped[VersionState] = mapped_column(Word(VersionState))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    gate: Mapped[str] = mapped_column(AnyText)
    published_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    delivery: Mapped[dict[str, Any] | None] = mapped_column(JsonText)
    """Proof of the latest publication."""


class UpdateRow(Base):
    """One learner step."""

    __tablename__ = "updates"

    seq: Mapped[int] = mapped_column(_SEQUENCE, primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(AnyText, unique=True)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    kind: Mapped[UpdateKind] = mapped_column(Word(UpdateKind))
    metrics: Mapped[dict[str, float | None]] = mapped_column(JsonText)
    version: Mapped[int | None] = mapped_column(
        sa.Integer, sa.ForeignKey(PolicyVersionRow.number), unique=True
    )
    note: Mapped[str] = mapped_column(AnyText)


class UpdateMemberRow(Base):
    """A rollout in an update. The key lets no rollout be in two: exactly once, by constraint."""

    __tablename__ = "update_members"
    __table_args__ = (sa.Index(None, "update_seq", "position"),)

    rollout_id: Mapped[str] = mapped_column(
        AnyText, sa.ForeignKey(LedgerRow.rollout_id), primary_key=True
    )
    update_seq: Mapped[int] = mapped_column(_SEQUENCE, sa.ForeignKey(UpdateRow.seq))
    position: Mapped[int] = mapped_column(sa.Integer)


class TokenTraceRow(Base):
    """Per-token training values; float32, as the learner computed them."""

    __tablename__ = "token_traces"

    rollout_id: Mapped[str] = mapped_column(
        AnyText, sa.ForeignKey(UpdateMemberRow.rollout_id), primary_key=True
    )
    trace_values: Mapped[tuple[float, ...]] = mapped_column(PackedNumbers("f"))
    advantages: Mapped[tuple[float, ...]] = mapped_column(PackedNumbers("f"))
    ratios: Mapped[tuple[float, ...]] = mapped_column(PackedNumbers("f"))
    kept: Mapped[tuple[bool, ...]] = mapped_column(PackedNumbers("B"))


class CounterRow(Base):
    """A number that only grows."""

    __tablename__ = "counters"

    name: Mapped[str] = mapped_column(sa.String(32), primary_key=True)
    value: Mapped[int] = mapped_column(sa.BigInteger)


class LostLeaseRow(Base):
    """An owner from whom something was taken and who has not been told yet."""

    __tablename__ = "lost_leases"

    owner: Mapped[str] = mapped_column(AnyText, primary_key=True)
    lost_at: Mapped[datetime] = mapped_column(UtcDateTime)


class NoteRow(Base):
    """A small named record."""

    __tablename__ = "notes"

    key: Mapped[str] = mapped_column(AnyText, primary_key=True)
    value: Mapped[dict[str, Any]] = mapped_column(JsonText)
    updated_at: Mapped[datetime] = mapped_column(UtcDateTime)


class AlarmRow(Base):
    """An open alarm."""

    __tablename__ = "alarms"

    name: Mapped[str] = mapped_column(AnyText, primary_key=True)
    message: Mapped[str] = mapped_column(AnyText)
    since: Mapped[datetime] = mapped_column(UtcDateTime)
    times: Mapped[int] = mapped_column(sa.Integer)
