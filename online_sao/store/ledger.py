"""Does the ledger add up? Every count is checked against another that was kept apart from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import sqlalchemy as sa

from online_sao.store.states import (
    FOLLOWERS,
    LEARNABLE,
    LEASE_STATES,
    MEMBER_STATES,
    REWARDED,
    WAITS_FOR_EPISODE,
)
from online_sao.store.tables import (
    REQUESTS,
    CounterRow,
    JudgementRow,
    LedgerRow,
    PolicyVersionRow,
    RolloutRow,
    UpdateMemberRow,
    UpdateRow,
)
from online_sao.types import (
    DiscardReason,
    JudgementState,
    Ledger,
    LedgerState,
    UpdateKind,
    VersionState,
)

Counts = Mapping[LedgerState, int]


def read_ledger(conn: sa.Connection) -> Ledger:
    """See `Store.ledger`; the caller's transaction is the snapshot."""
    reasons: dict[LedgerState, dict[str, int]] = defaultdict(dict)
    counts = dict.fromkeys(LedgerState, 0)
    for state, reason, count in conn.execute(
        sa.select(LedgerRow.state, LedgerRow.reason, sa.func.count()).group_by(
            LedgerRow.state, LedgerRow.reason
        )
    ):
        counts[state] += count
        if reason:
            reasons[state][reason] = count
    requests = conn.scalar(sa.select(CounterRow.value).where(CounterRow.name == REQUESTS))
    problems = [
        *_check_totals(conn, counts, requests),
        *_check_leases(conn),
        *_check_rewards(conn),
        *check_members(_members(conn), counts, reasons),
        *_check_versions(conn),
        *_check_episodes(conn),
    ]
    return Ledger(requests or 0, counts, dict(reasons), tuple(problems))


def _count(conn: sa.Connection, *where: sa.ColumnElement[bool]) -> int:
    return conn.scalar(sa.select(sa.func.count()).where(*where)) or 0


def _check_totals(conn: sa.Connection, counts: Counts, requests: int | None) -> Iterator[str]:
    entries = sum(counts.values())
    if requests is None:
        yield "the counter of requests is missing"
    elif requests != entries:
        yield f"{requests} requests were counted, but {entries} stand in the ledger"
    rollouts = conn.scalar(sa.select(sa.func.count()).select_from(RolloutRow)) or 0
    kept = entries - counts[LedgerState.DELETED]
    if rollouts != kept:
        yield f"{kept} rollouts stand in the ledger, but {rollouts} records are kept"
    unfinished = _count(conn, RolloutRow.completed_at.is_(None))
    if unfinished != counts[LedgerState.IN_FLIGHT]:
        yield (
            f"{counts[LedgerState.IN_FLIGHT]} rollouts are in flight, "
            f"but {unfinished} records have no end"
        )


def _check_leases(conn: sa.Connection) -> Iterator[str]:
    whole = sa.and_(LedgerRow.lease_owner.is_not(None), LedgerRow.lease_deadline.is_not(None))
    none = sa.and_(LedgerRow.lease_owner.is_(None), LedgerRow.lease_deadline.is_(None))
    for state in LEASE_STATES:
        orphans = _count(conn, LedgerRow.state == state, sa.not_(whole))
        if orphans:
            yield f"{orphans} rollouts are {state} without an owner and a deadline"
    strays = _count(conn, LedgerRow.state.not_in(LEASE_STATES), sa.not_(none))
    if strays:
        yield f"{strays} rollouts have a lease in a state that has none"


def _check_rewards(conn: sa.Connection) -> Iterator[str]:
    scored = sa.and_(
        JudgementRow.seq == LedgerRow.judgement_seq,
        JudgementRow.rollout_id == LedgerRow.rollout_id,
        JudgementRow.state == JudgementState.SCORED,
    )
    without = conn.execute(
        sa.select(LedgerRow.state, sa.func.count())
        .join(JudgementRow, scored, isouter=True)
        .where(LedgerRow.state.in_(REWARDED), JudgementRow.seq.is_(None))
        .group_by(LedgerRow.state)
        .order_by(LedgerRow.state)
    )
    for state, count in without:
        yield f"{count} rollouts are {state} without a scored judgement"


def _members(conn: sa.Connection) -> Mapping[tuple[UpdateKind, LedgerState, str], int]:
    rows = conn.execute(
        sa.select(UpdateRow.kind, LedgerRow.state, LedgerRow.reason, sa.func.count())
        .join_from(UpdateMemberRow, UpdateRow, UpdateRow.seq == UpdateMemberRow.update_seq)
        .join(LedgerRow, LedgerRow.rollout_id == UpdateMemberRow.rollout_id)
        .group_by(UpdateRow.kind, LedgerRow.state, LedgerRow.reason)
        .order_by(UpdateRow.kind, LedgerRow.state)
    )
    return {(kind, state, reason): count for kind, state, reason, count in rows}


def check_members(
    members: Mapping[tuple[UpdateKind, LedgerState, str], int],
    counts: Counts,
    reasons: Mapping[LedgerState, Mapping[str, int]],
) -> Iterator[str]:
    """What updates say of their rollouts against what the ledger says of them.

    `members` counts the updates' rollouts by the update's kind and their place in the ledger.
    """
    found = dict.fromkeys(UpdateKind, 0)
    for (kind, state, reason), count in members.items():
        if state is LedgerState.DELETED:
            continue
        if (state, reason) == MEMBER_STATES[kind]:
            found[kind] += count
        else:
            yield f"{count} rollouts were in an update of kind {kind}, but are {state}"
    claimed = {
        "trained": (counts[LedgerState.TRAINED], found[UpdateKind.POLICY]),
        "critic_only": (
            counts[LedgerState.CRITIC_ONLY],
            found[UpdateKind.CRITIC_ONLY] + found[UpdateKind.SKIPPED],
        ),
        "discarded as not_finite": (
            reasons.get(LedgerState.DISCARDED, {}).get(DiscardReason.NOT_FINITE.value, 0),
            found[UpdateKind.NOT_FINITE],
        ),
    }
    for place, (stand, updates) in claimed.items():
        if stand != updates:
            yield f"{stand} rollouts are {place}, but updates name {updates}"


def _check_episodes(conn: sa.Connection) -> Iterator[str]:
    strays = _count(
        conn,
        LedgerRow.state.in_(FOLLOWERS),
        LedgerRow.reason == WAITS_FOR_EPISODE,
        LedgerRow.episode_id.is_(None),
    )
    if strays:
        yield f"{strays} rollouts wait for an episode and belong to none"
    updates = sa.func.count(sa.distinct(UpdateMemberRow.update_seq))
    learnable = sa.func.sum(sa.case((LedgerRow.state.in_(LEARNABLE), 1), else_=0))
    parted = (
        sa.select(LedgerRow.episode_id)
        .join(UpdateMemberRow, UpdateMemberRow.rollout_id == LedgerRow.rollout_id, isouter=True)
        .where(LedgerRow.episode_id.is_not(None))
        .group_by(LedgerRow.episode_id)
        .having(sa.or_(updates > 1, sa.and_(updates > 0, learnable > 0)))
        .subquery()
    )
    count = conn.scalar(sa.select(sa.func.count()).select_from(parted)) or 0
    if count:
        yield f"{count} episodes were trained in part or by several updates"


def _check_versions(conn: sa.Connection) -> Iterator[str]:
    live = _count(conn, PolicyVersionRow.state == VersionState.LIVE)
    if live > 1:
        yield f"{live} policy versions are live at once"
    made = _count(conn, PolicyVersionRow.number > 0)
    newest = conn.scalar(sa.select(sa.func.max(PolicyVersionRow.number))) or 0
    updates = _count(conn, UpdateRow.version.is_not(None))
    if not made == newest == updates:
        yield f"{made} versions up to number {newest} exist, but {updates} updates made one"
