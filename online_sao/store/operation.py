"""Retention, notes and alarms."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from online_sao.store.rows import PRUNED_VALUES, alarm_from
from online_sao.store.states import FINISHED
from online_sao.store.tables import AlarmRow, LedgerRow, NoteRow, RolloutRow, TokenTraceRow
from online_sao.types import JSON, Alarm

PRUNE_CHUNK = 50
"""Rollouts pruned in one transaction: a few ms, so that no chat waits long for its turn."""


def prune_some(conn: sa.Connection, now: datetime, before: datetime) -> int:
    """Prune up to PRUNE_CHUNK rollouts, oldest first; how many."""
    # A subquery, not a join: SQLite would begin a join at the ledger and sort all of it.
    state = (
        sa.select(LedgerRow.state).where(LedgerRow.rollout_id == RolloutRow.id).scalar_subquery()
    )
    ids = conn.scalars(
        sa.select(RolloutRow.id)
        .where(RolloutRow.pruned_at.is_(None), RolloutRow.created_at < before, state.in_(FINISHED))
        .order_by(RolloutRow.created_at)
        .limit(PRUNE_CHUNK)
    ).all()
    if not ids:
        return 0
    conn.execute(sa.delete(TokenTraceRow).where(TokenTraceRow.rollout_id.in_(ids)))
    conn.execute(
        sa.update(RolloutRow).where(RolloutRow.id.in_(ids)).values(pruned_at=now, **PRUNED_VALUES)
    )
    return len(ids)


def get_note(conn: sa.Connection, key: str) -> JSON | None:
    """See `Store.get_note`."""
    return conn.scalar(sa.select(NoteRow.value).where(NoteRow.key == key))


def put_note(conn: sa.Connection, now: datetime, key: str, value: Mapping[str, Any]) -> None:
    """See `Store.put_note`."""
    changed = conn.execute(
        sa.update(NoteRow).where(NoteRow.key == key).values(value=dict(value), updated_at=now)
    )
    if changed.rowcount == 0:
        conn.execute(sa.insert(NoteRow), {"key": key, "value": dict(value), "updated_at": now})


def raise_alarm(conn: sa.Connection, now: datetime, name: str, message: str) -> None:
    """See `Store.raise_alarm`."""
    changed = conn.execute(
        sa.update(AlarmRow)
        .where(AlarmRow.name == name)
        .values(message=message, times=AlarmRow.times + 1)
    )
    if changed.rowcount == 0:
        conn.execute(
            sa.insert(AlarmRow), {"name": name, "message": message, "since": now, "times": 1}
        )


def clear_alarm(conn: sa.Connection, name: str) -> None:
    """See `Store.clear_alarm`."""
    conn.execute(sa.delete(AlarmRow).where(AlarmRow.name == name))


def alarms(conn: sa.Connection) -> list[Alarm]:
    """See `Store.alarms`."""
    rows = conn.execute(sa.select(AlarmRow).order_by(AlarmRow.since, AlarmRow.name))
    return [alarm_from(row) for row in rows]
