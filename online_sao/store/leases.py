"""Leases: who holds which ledger entries, until when, and what becomes of those left behind."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from online_sao.errors import LeaseLost
from online_sao.store.rows import Row
from online_sao.store.states import LEASE_STATES, LOST_LEASES_KEPT, after_lease
from online_sao.store.tables import LedgerRow, LostLeaseRow
from online_sao.types import LedgerState

Rows = Sequence[Row]


def lock(conn: sa.Connection, *where: sa.ColumnElement[bool], skip_locked: bool = False) -> Rows:
    """The entries that match, locked until the transaction ends.

    Always in the order of their ids, so that no two transactions wait for each other.
    """
    return conn.execute(
        sa.select(
            LedgerRow.rollout_id,
            LedgerRow.state,
            LedgerRow.lease_owner,
            LedgerRow.lease_deadline,
            LedgerRow.feedback_came,
        )
        .where(*where)
        .order_by(LedgerRow.rollout_id)
        .with_for_update(skip_locked=skip_locked)
    ).all()


def take(
    conn: sa.Connection, ids: Collection[str], state: LedgerState, owner: str, deadline: datetime
) -> None:
    """Lease locked entries to `owner`."""
    conn.execute(
        sa.update(LedgerRow)
        .where(LedgerRow.rollout_id.in_(ids))
        .values(
            state=state,
            not_before=None,
            lease_owner=owner,
            lease_deadline=deadline,
            feedback_came=False,
        )
    )


def move(conn: sa.Connection, ids: Collection[str], state: LedgerState, **columns: Any) -> None:
    """Locked entries -> `state`, with no lease on them."""
    values = {"reason": "", "not_before": None, "feedback_came": False, **columns}
    conn.execute(
        sa.update(LedgerRow)
        .where(LedgerRow.rollout_id.in_(ids))
        .values(state=state, lease_owner=None, lease_deadline=None, **values)
    )


def give_back(conn: sa.Connection, rows: Rows) -> None:
    """Locked, leased entries -> where they were (to be judged again if feedback came)."""
    for target in (LedgerState.AWAITING_JUDGEMENT, LedgerState.JUDGED):
        ids = [r.rollout_id for r in rows if after_lease(r.state, r.feedback_came) is target]
        if ids:
            move(conn, ids, target)


def recover(conn: sa.Connection, now: datetime) -> int:
    """Give back all whose deadline has passed, and remember who lost them; how many."""
    rows = lock(
        conn,
        LedgerRow.state.in_(LEASE_STATES),
        LedgerRow.lease_deadline <= now,
        skip_locked=True,
    )
    if not rows:
        return 0
    give_back(conn, rows)
    losers = {row.lease_owner for row in rows}
    known = set(conn.scalars(sa.select(LostLeaseRow.owner).where(LostLeaseRow.owner.in_(losers))))
    if losers - known:
        conn.execute(
            sa.insert(LostLeaseRow), [{"owner": o, "lost_at": now} for o in sorted(losers - known)]
        )
    conn.execute(sa.delete(LostLeaseRow).where(LostLeaseRow.lost_at < now - LOST_LEASES_KEPT))
    return len(rows)


def forget_loss(conn: sa.Connection, owner: str) -> None:
    """`owner` starts anew: what it lost before is no news any more."""
    conn.execute(sa.delete(LostLeaseRow).where(LostLeaseRow.owner == owner))


def renew(conn: sa.Connection, now: datetime, owner: str, lease_s: float) -> None:
    """See `Store.renew_lease`. A lease that ran out but was not taken is still the owner's."""
    lost = conn.scalar(sa.select(LostLeaseRow.owner).where(LostLeaseRow.owner == owner))
    if lost is not None:
        raise LeaseLost(f"what {owner} held was given to others: its lease ran out")
    rows = lock(conn, LedgerRow.state.in_(LEASE_STATES), LedgerRow.lease_owner == owner)
    conn.execute(
        sa.update(LedgerRow)
        .where(LedgerRow.rollout_id.in_([row.rollout_id for row in rows]))
        .values(lease_deadline=now + timedelta(seconds=lease_s))
    )


def release(conn: sa.Connection, owner: str) -> int:
    """See `Store.release_leases`."""
    rows = lock(conn, LedgerRow.state.in_(LEASE_STATES), LedgerRow.lease_owner == owner)
    give_back(conn, rows)
    forget_loss(conn, owner)
    return len(rows)


def held(
    conn: sa.Connection,
    ids: Collection[str],
    state: LedgerState,
    owner: str,
    now: datetime,
) -> Rows:
    """The entries of `ids`, locked; LeaseLost unless `owner` holds every one of them now."""
    rows = lock(conn, LedgerRow.rollout_id.in_(ids))
    lost = len(ids) - sum(
        row.state is state and row.lease_owner == owner and row.lease_deadline > now for row in rows
    )
    if lost:
        raise LeaseLost(f"{owner} no longer holds {lost} of {len(ids)} rollouts")
    return rows
