"""Tool episodes: declared, joined, closed; and what the end of one does to its replies.

Whoever changes where a member stands locks the episode's row first and the ledger's rows after
it, so that the last of several to settle sees that it is the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

import sqlalchemy as sa

from online_sao.errors import EpisodeClosed, UnknownRecord
from online_sao.store import leases
from online_sao.store.rows import Row, judgement_values, new_key
from online_sao.store.states import (
    FOLLOWERS,
    LEASE_STATES,
    WAITS_FOR_EPISODE,
    is_settled,
    passed_on,
    to_judge,
)
from online_sao.store.tables import (
    ACTIVE,
    EpisodeRow,
    JudgementRow,
    LedgerRow,
    RubricLabelRow,
    RubricRow,
)
from online_sao.types import (
    Episode,
    EpisodeRewards,
    Judgement,
    JudgementState,
    LedgerState,
)

IDLE_CHUNK = 50
"""Episodes closed in one transaction: a few ms, so that no chat waits long for its turn."""


def open_episode(conn: sa.Connection, now: datetime, episode_id: str) -> Episode:
    """See `Store.open_episode`."""
    conn.execute(
        sa.insert(EpisodeRow), {"id": episode_id, "created_at": now, "last_active_at": now}
    )
    return Episode(episode_id, created_at=now, last_active_at=now)


def get_episode(conn: sa.Connection, episode_id: str) -> Episode:
    """See `Store.get_episode`."""
    row = conn.execute(sa.select(EpisodeRow).where(EpisodeRow.id == episode_id)).one_or_none()
    if row is None:
        raise UnknownRecord(f"there is no episode {episode_id[:64]}")
    counts = conn.execute(
        sa.select(LedgerRow.state, sa.func.count().label("n"))
        .where(LedgerRow.episode_id == episode_id)
        .group_by(LedgerRow.state)
    )
    return Episode(
        id=row.id,
        created_at=row.created_at,
        last_active_at=row.last_active_at,
        closed_at=row.closed_at,
        rewards=row.rewards,
        counts={row.state: row.n for row in counts},
    )


def join(conn: sa.Connection, now: datetime, episode_id: str) -> None:
    """A request comes to the episode. Raises UnknownRecord, EpisodeClosed."""
    joined = conn.execute(
        sa.update(EpisodeRow)
        .where(EpisodeRow.id == episode_id, EpisodeRow.closed_at.is_(None))
        .values(last_active_at=now)
    )
    if joined.rowcount != 1:
        lock(conn, episode_id)
        raise EpisodeClosed(f"the episode {episode_id[:64]} is closed")


def lock(conn: sa.Connection, episode_id: str) -> Row:
    """The episode's row, locked until the transaction ends. Raises UnknownRecord."""
    row = conn.execute(
        sa.select(EpisodeRow).where(EpisodeRow.id == episode_id).with_for_update()
    ).one_or_none()
    if row is None:
        raise UnknownRecord(f"there is no episode {episode_id[:64]}")
    return row


def lock_of(conn: sa.Connection, rollout_id: str) -> Row | None:
    """The locked row of the rollout's episode; None for a single reply (or no such rollout)."""
    episode_id = conn.scalar(
        sa.select(LedgerRow.episode_id).where(LedgerRow.rollout_id == rollout_id)
    )
    return None if episode_id is None else lock(conn, episode_id)


def completed(conn: sa.Connection, now: datetime, episode: Row) -> None:
    """A reply of the locked episode is complete."""
    conn.execute(
        sa.update(EpisodeRow).where(EpisodeRow.id == episode.id).values(last_active_at=now)
    )
    settle(conn, episode)


def close_episode(conn: sa.Connection, now: datetime, episode_id: str) -> Episode:
    """See `Store.close_episode`."""
    if lock(conn, episode_id).closed_at is None:
        conn.execute(sa.update(EpisodeRow).where(EpisodeRow.id == episode_id).values(closed_at=now))
        settle(conn, lock(conn, episode_id))
    return get_episode(conn, episode_id)


def close_idle(conn: sa.Connection, now: datetime, idle_s: float) -> int:
    """Close up to IDLE_CHUNK episodes; how many. One with a request in flight is not idle."""
    in_flight = sa.exists().where(
        LedgerRow.episode_id == EpisodeRow.id, LedgerRow.state == LedgerState.IN_FLIGHT
    )
    rows = conn.execute(
        sa.select(EpisodeRow.id)
        .where(
            EpisodeRow.closed_at.is_(None),
            EpisodeRow.last_active_at <= now - timedelta(seconds=idle_s),
            sa.not_(in_flight),
        )
        .order_by(EpisodeRow.last_active_at)
        .limit(IDLE_CHUNK)
        .with_for_update(skip_locked=True)
    ).all()
    for row in rows:
        close_episode(conn, now, row.id)
    return len(rows)


def members(conn: sa.Connection, episode_id: str) -> Sequence[Row]:
    """The entries of an episode's replies, oldest first, locked until the transaction ends."""
    rows = conn.execute(
        sa.select(LedgerRow.rollout_id, LedgerRow.created_at, LedgerRow.state)
        .where(LedgerRow.episode_id == episode_id)
        .order_by(LedgerRow.rollout_id)  # as all who lock several entries
        .with_for_update()
    ).all()
    return sorted(rows, key=lambda row: (row.created_at, row.rollout_id))


def settle(conn: sa.Connection, episode: Row) -> None:
    """What the locked episode's end, or a verdict on a reply of it, sets going.

    Ended: those that are to be judged become claimable by a judge. All settled: the judged ones
    become claimable by the learner.
    """
    if episode.closed_at is None:
        return
    entries = members(conn, episode.id)
    if any(entry.state is LedgerState.IN_FLIGHT for entry in entries):
        return
    if episode.rewards is None:
        _begin_judging(conn, episode.id, _ids(entries, LedgerState.AWAITING_JUDGEMENT))
    elif is_settled([entry.state for entry in entries]):
        judged = _ids(entries, LedgerState.JUDGED)
        if judged:
            leases.move(conn, judged, LedgerState.JUDGED)
            _write(conn, episode.id, head_id=judged[-1])


def _begin_judging(conn: sa.Connection, episode_id: str, awaiting: Sequence[str]) -> None:
    active = conn.scalar(
        sa.select(RubricRow.episodes)
        .join(RubricLabelRow, RubricLabelRow.rubric_id == RubricRow.id)
        .where(RubricLabelRow.label == ACTIVE)
    )
    rewards = active or EpisodeRewards.ONE
    chosen, judged_id = to_judge(awaiting, rewards)
    if chosen:
        leases.move(conn, chosen, LedgerState.AWAITING_JUDGEMENT)
    _write(conn, episode_id, rewards=rewards, judged_id=judged_id)


def _write(conn: sa.Connection, episode_id: str, **columns: object) -> None:
    conn.execute(sa.update(EpisodeRow).where(EpisodeRow.id == episode_id).values(**columns))


def _ids(entries: Sequence[Row], *states: LedgerState) -> list[str]:
    return [entry.rollout_id for entry in entries if entry.state in states]


def judged(conn: sa.Connection, episode: Row, judgement: Judgement, state: LedgerState) -> None:
    """A reply of the locked episode was judged, which moved it to `state`.

    A verdict on the whole episode is passed on to the others.
    """
    if state is LedgerState.AWAITING_JUDGEMENT:
        return
    if episode.judged_id == judgement.rollout_id:
        for entry in members(conn, episode.id):
            if entry.rollout_id != judgement.rollout_id and entry.state in FOLLOWERS:
                _pass_on(conn, passed_on(judgement, entry.rollout_id), state)
    settle(conn, episode)


def _pass_on(conn: sa.Connection, judgement: Judgement, state: LedgerState) -> None:
    inserted = conn.execute(sa.insert(JudgementRow), judgement_values(judgement))
    scored = judgement.state is JudgementState.SCORED
    leases.move(
        conn,
        [judgement.rollout_id],
        state,
        reason=WAITS_FOR_EPISODE,
        judgement_seq=new_key(inserted) if scored else None,
    )


def hear(conn: sa.Connection, episode: Row, rollout_id: str) -> None:
    """Feedback came on a reply of the locked episode: have it, or the episode, judged (again).

    Before the end it is kept, and the judge will see it then.
    """
    if episode.rewards is None:
        return
    entries = members(conn, episode.id)
    target = episode.judged_id or rollout_id
    state = next((e.state for e in entries if e.rollout_id == target), None)
    if state in LEASE_STATES:
        conn.execute(
            sa.update(LedgerRow).where(LedgerRow.rollout_id == target).values(feedback_came=True)
        )
    elif state in FOLLOWERS:
        leases.move(conn, [target], LedgerState.AWAITING_JUDGEMENT)
        others = [i for i in _ids(entries, LedgerState.JUDGED) if i != target]
        if others:
            # Where each has its own reward they keep it, but none is ready without the others.
            each = episode.judged_id is None
            to = LedgerState.JUDGED if each else LedgerState.AWAITING_JUDGEMENT
            leases.move(conn, others, to, reason=WAITS_FOR_EPISODE)
