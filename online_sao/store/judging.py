"""What the judging workers write and read: rubrics, claims, judgements."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta

import sqlalchemy as sa

from online_sao.errors import UnknownRecord
from online_sao.store import episodes, leases
from online_sao.store.rows import (
    feedback_from,
    judgement_from,
    judgement_values,
    new_key,
    rollout_from,
    rubric_from,
    rubric_values,
)
from online_sao.store.states import EPISODE_JUDGE, WAITS_FOR_EPISODE, after_judgement
from online_sao.store.tables import (
    ACTIVE,
    EpisodeRow,
    FeedbackRow,
    JudgementRow,
    LedgerRow,
    RolloutRow,
    RubricLabelRow,
    RubricRow,
)
from online_sao.types import (
    JSON,
    RUBRIC_PREFIX,
    EpisodeRewards,
    Feedback,
    Judgement,
    JudgementState,
    LedgerState,
    RewardStats,
    Rollout,
    RubricVersion,
    new_id,
)


def put_rubric(
    conn: sa.Connection,
    now: datetime,
    name: str,
    judge: str,
    criteria: JSON,
    message: str,
    author: str,
    rewards: EpisodeRewards,
) -> RubricVersion:
    """See `Store.put_rubric`. Two at once take the same number; the key refuses one, which
    comes again."""
    criteria = json.loads(json.dumps(criteria))  # as it will come back
    active = _active(conn)
    if active and same_rubric(active, name, judge, criteria, rewards):
        return active
    newest = conn.scalar(sa.select(sa.func.max(RubricRow.number)).where(RubricRow.name == name))
    rubric = RubricVersion(
        id=new_id(RUBRIC_PREFIX),
        name=name,
        number=(newest or 0) + 1,
        judge=judge,
        criteria=criteria,
        created_at=now,
        message=message,
        author=author,
        episodes=rewards,
    )
    conn.execute(sa.insert(RubricRow), rubric_values(rubric))
    if active is None:
        conn.execute(sa.insert(RubricLabelRow), {"label": ACTIVE, "rubric_id": rubric.id})
    else:
        conn.execute(
            sa.update(RubricLabelRow)
            .where(RubricLabelRow.label == ACTIVE)
            .values(rubric_id=rubric.id)
        )
    return rubric


def same_rubric(
    active: RubricVersion, name: str, judge: str, criteria: JSON, rewards: EpisodeRewards
) -> bool:
    """Whether a rubric that is put says what the active version says."""
    said = (active.name, active.judge, active.criteria, active.episodes)
    return said == (name, judge, criteria, rewards)


def active_rubric(conn: sa.Connection) -> RubricVersion:
    """See `Store.active_rubric`."""
    active = _active(conn)
    if active is None:
        raise UnknownRecord("no rubric is active yet")
    return active


def _active(conn: sa.Connection) -> RubricVersion | None:
    row = conn.execute(
        sa.select(RubricRow)
        .join(RubricLabelRow, RubricLabelRow.rubric_id == RubricRow.id)
        .where(RubricLabelRow.label == ACTIVE)
    ).one_or_none()
    return None if row is None else rubric_from(row)


def claim_unjudged(
    conn: sa.Connection, now: datetime, owner: str, limit: int, lease_s: float
) -> list[tuple[Rollout, tuple[Feedback, ...]]]:
    """See `Store.claim_unjudged`; leases that ran out are taken over."""
    leases.recover(conn, now)
    leases.forget_loss(conn, owner)
    rows = conn.execute(
        sa.select(LedgerRow.rollout_id, LedgerRow.episode_id)
        .where(
            LedgerRow.state == LedgerState.AWAITING_JUDGEMENT,
            LedgerRow.reason == "",
            sa.or_(LedgerRow.not_before.is_(None), LedgerRow.not_before <= now),
        )
        .order_by(LedgerRow.created_at, LedgerRow.rollout_id)
        .limit(limit)
        .with_for_update(skip_locked=True)
    ).all()
    if not rows:
        return []
    ids = [row.rollout_id for row in rows]
    deadline = now + timedelta(seconds=lease_s)
    leases.take(conn, ids, LedgerState.IN_JUDGEMENT, owner, deadline)
    return _evidence(conn, {row.rollout_id: row.episode_id for row in rows})


def _evidence(
    conn: sa.Connection, claimed: Mapping[str, str | None]
) -> list[tuple[Rollout, tuple[Feedback, ...]]]:
    """Each claimed rollout (id -> its episode) with what was said of it.

    Of one that is judged for its whole episode: what was said of any reply of the episode.
    """
    heard_by = {rollout_id: rollout_id for rollout_id in claimed}
    if any(claimed.values()):
        heard_by |= _whole_episodes(conn, claimed)
    said: dict[str, list[Feedback]] = defaultdict(list)
    for row in conn.execute(
        sa.select(FeedbackRow)
        .where(FeedbackRow.rollout_id.in_(heard_by))
        .order_by(FeedbackRow.created_at, FeedbackRow.seq)
    ):
        said[heard_by[row.rollout_id]].append(feedback_from(row))
    rollouts = {
        row.id: rollout_from(row, LedgerState.IN_JUDGEMENT, "")
        for row in conn.execute(
            sa.select(RolloutRow, LedgerRow.episode_id)
            .join(LedgerRow, LedgerRow.rollout_id == RolloutRow.id)
            .where(RolloutRow.id.in_(claimed))
        )
    }
    return [(rollouts[rollout_id], tuple(said[rollout_id])) for rollout_id in claimed]


def _whole_episodes(conn: sa.Connection, claimed: Collection[str]) -> dict[str, str]:
    """Each reply of the episodes that one of the claimed is judged for -> that one."""
    rows = conn.execute(
        sa.select(LedgerRow.rollout_id, EpisodeRow.judged_id)
        .join(EpisodeRow, EpisodeRow.id == LedgerRow.episode_id)
        .where(
            EpisodeRow.judged_id.in_(claimed),
            EpisodeRow.id.in_(
                sa.select(LedgerRow.episode_id).where(LedgerRow.rollout_id.in_(claimed))
            ),
        )
    )
    return {row.rollout_id: row.judged_id for row in rows}


def record_judgement(conn: sa.Connection, now: datetime, judgement: Judgement, owner: str) -> None:
    """See `Store.record_judgement`."""
    ids = [judgement.rollout_id]
    episode = episodes.lock_of(conn, judgement.rollout_id)
    (entry,) = leases.held(conn, ids, LedgerState.IN_JUDGEMENT, owner, now)
    rubric = conn.scalar(sa.select(RubricRow.id).where(RubricRow.id == judgement.rubric_id))
    if rubric is None:
        raise UnknownRecord(f"there is no rubric version {judgement.rubric_id[:64]}")
    inserted = conn.execute(sa.insert(JudgementRow), judgement_values(judgement))
    state, reason = after_judgement(judgement.state, judgement.reason, entry.feedback_came)
    if episode is not None and state is LedgerState.JUDGED:
        reason = WAITS_FOR_EPISODE
    counts: dict[str, int | None] = {}
    if judgement.state is JudgementState.SCORED:
        counts = {"judgement_seq": new_key(inserted)}
    elif judgement.state is not JudgementState.ERROR:
        counts = {"judgement_seq": None}  # an earlier reward no longer stands
    leases.move(conn, ids, state, reason=reason, **counts)
    if episode is not None:
        episodes.judged(conn, episode, judgement, state)


def postpone_judgement(
    conn: sa.Connection, now: datetime, rollout_id: str, owner: str, until: datetime
) -> None:
    """See `Store.postpone_judgement`; at once claimable if feedback came meanwhile."""
    (entry,) = leases.held(conn, [rollout_id], LedgerState.IN_JUDGEMENT, owner, now)
    not_before = None if entry.feedback_came else until
    leases.move(conn, [rollout_id], LedgerState.AWAITING_JUDGEMENT, not_before=not_before)


def list_judgements(conn: sa.Connection, rollout_id: str) -> list[Judgement]:
    """See `Store.list_judgements`."""
    rows = conn.execute(
        sa.select(JudgementRow)
        .where(JudgementRow.rollout_id == rollout_id)
        .order_by(JudgementRow.seq)
    )
    return [judgement_from(row) for row in rows]


def reward_stats(conn: sa.Connection, since: datetime | None) -> RewardStats:
    """See `Store.reward_stats`; each reply once, with the judgement that counts.

    A reward that its episode passed on to a reply is the verdict on another, and not counted again.
    """
    query = sa.select(sa.func.count(), sa.func.avg(JudgementRow.reward)).join_from(
        JudgementRow,
        LedgerRow,
        sa.and_(
            LedgerRow.rollout_id == JudgementRow.rollout_id,
            LedgerRow.judgement_seq == JudgementRow.seq,
        ),
    )
    query = query.where(JudgementRow.judge != EPISODE_JUDGE)
    if since is not None:
        query = query.where(JudgementRow.created_at > since)
    count, mean = conn.execute(query).one()
    return RewardStats(count, mean)
