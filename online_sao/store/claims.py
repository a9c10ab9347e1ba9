"""The learner's claims: judged rollouts to a batch of trajectories, under a lease."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta

import sqlalchemy as sa

from online_sao.errors import RolloutRefused
from online_sao.store import leases, policies
from online_sao.store.batches import (
    Assembly,
    ClaimRules,
    Member,
    Refused,
    Unit,
    episode_unit,
    single_unit,
)
from online_sao.store.rows import Row, completion_from, request_from
from online_sao.store.states import is_settled, lag_of
from online_sao.store.tables import EpisodeRow, JudgementRow, LedgerRow, RolloutRow
from online_sao.types import DiscardReason, EpisodeRewards, LedgerState, Trajectory

logger = logging.getLogger(__name__)

# Run for each reply of a batch, so it is built once: building it costs as much as running it.
_RECORD = (
    sa.select(RolloutRow, LedgerRow.episode_id, JudgementRow.reward)
    .join(LedgerRow, LedgerRow.rollout_id == RolloutRow.id)
    .join(JudgementRow, JudgementRow.seq == LedgerRow.judgement_seq, isouter=True)
    .where(RolloutRow.id == sa.bindparam("rollout_id"))
)

Steps = Mapping[int, int]
"""Policy version -> published versions since."""


def claim_trajectories(
    conn: sa.Connection, now: datetime, owner: str, lease_s: float, rules: ClaimRules
) -> list[Trajectory]:
    """See `Store.claim_trajectories`; leases that ran out are taken over."""
    leases.recover(conn, now)
    leases.forget_loss(conn, owner)
    steps = policies.lineage_back(conn, rules.max_lag)
    assembly = Assembly(rules.size)
    for row in _judged_oldest_first(conn, rules.size):
        claim = _single if row.episode_id is None else _episode
        found = claim(conn, row, steps, rules)
        if isinstance(found, Refused):
            reason = found.reason.value
            leases.move(conn, found.rollout_ids, LedgerState.DISCARDED, reason=reason)
        elif found is not None:
            assembly.offer(found)
        if assembly.full:
            break
    units = assembly.batch()
    if units:
        ids = [rollout_id for unit in units for rollout_id in unit.rollout_ids]
        leases.take(conn, ids, LedgerState.LEASED, owner, now + timedelta(seconds=lease_s))
    return [trajectory for unit in units for trajectory in unit.trajectories]


def _judged_oldest_first(conn: sa.Connection, page_size: int) -> Iterator[Row]:
    """Judged rollouts that nobody else has locked, a page at a time, locked as they come.

    A page is no larger than a batch: what is locked here is hidden from other learners. Of an
    episode its head alone comes, so that no page's end parts it between two learners.
    """
    query = (
        sa.select(
            LedgerRow.rollout_id,
            LedgerRow.created_at,
            LedgerRow.episode_id,
            EpisodeRow.rewards,
        )
        .join(EpisodeRow, EpisodeRow.id == LedgerRow.episode_id, isouter=True)
        .where(
            LedgerRow.state == LedgerState.JUDGED,
            LedgerRow.reason == "",
            sa.or_(LedgerRow.episode_id.is_(None), EpisodeRow.head_id == LedgerRow.rollout_id),
        )
        .order_by(LedgerRow.created_at, LedgerRow.rollout_id)
        .limit(page_size)
        .with_for_update(of=LedgerRow, skip_locked=True)
    )
    page = query
    while rows := conn.execute(page).all():
        yield from rows
        last = rows[-1]
        page = query.where(
            sa.or_(
                LedgerRow.created_at > last.created_at,
                sa.and_(
                    LedgerRow.created_at == last.created_at,
                    LedgerRow.rollout_id > last.rollout_id,
                ),
            )
        )


def _single(conn: sa.Connection, row: Row, steps: Steps, rules: ClaimRules) -> Unit | Refused:
    """A reply without an episode."""
    return single_unit(row.rollout_id, _load(conn, row.rollout_id, steps), rules)


def _episode(
    conn: sa.Connection, head: Row, steps: Steps, rules: ClaimRules
) -> Unit | Refused | None:
    """The whole episode of a judged reply; None while some of it is unsettled or another's."""
    total = conn.scalar(sa.select(sa.func.count()).where(LedgerRow.episode_id == head.episode_id))
    rows = conn.execute(
        sa.select(LedgerRow.rollout_id, LedgerRow.created_at, LedgerRow.state)
        .where(LedgerRow.episode_id == head.episode_id)
        .order_by(LedgerRow.created_at, LedgerRow.rollout_id)
        .with_for_update(skip_locked=True)
    ).all()
    states = [row.state for row in rows]
    if len(rows) != total or not is_settled(states) or LedgerState.LEASED in states:
        return None
    members = [
        Member(
            row.rollout_id,
            row.state,
            _load(conn, row.rollout_id, steps) if row.state is LedgerState.JUDGED else None,
        )
        for row in rows
    ]
    return episode_unit(members, head.rewards or EpisodeRewards.ONE, rules)


def _load(conn: sa.Connection, rollout_id: str, steps: Steps) -> Trajectory | DiscardReason:
    """A judged reply's trajectory, or why there is none.

    One by one, so that a row whose bytes cannot be read spoils no other.
    """
    try:
        row = conn.execute(_RECORD, {"rollout_id": rollout_id}).one_or_none()
        if row is None:
            raise RolloutRefused(DiscardReason.MALFORMED, "there is no record of it")
        return _trajectory(row, steps)
    # What a row may hold that this code never wrote: each is data, and must not stop the learner.
    except (RolloutRefused, ValueError, TypeError) as error:
        logger.warning("action=rollout_malformed rollout=%s error=%s", rollout_id, error)
        return DiscardReason.MALFORMED


def _trajectory(row: Row, steps: Steps) -> Trajectory | DiscardReason:
    lag = lag_of([tuple(span) for span in row.version_spans], steps)
    if lag is None:
        return DiscardReason.STALE
    completion = completion_from(row)
    assert completion is not None, "only complete rollouts are judged"
    reward = math.nan if row.reward is None else row.reward  # SQLite keeps NaN as NULL
    return Trajectory.from_rollout(request_from(row), completion, reward, lag)
