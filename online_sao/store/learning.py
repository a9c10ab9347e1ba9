"""What the learner writes and reads of its updates: their records, versions, traces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

import sqlalchemy as sa

from online_sao.errors import UnknownRecord
from online_sao.store import leases, policies
from online_sao.store.rows import new_key, trace_from, trace_values, update_from
from online_sao.store.states import MEMBER_STATES
from online_sao.store.tables import (
    PolicyVersionRow,
    TokenTraceRow,
    UpdateMemberRow,
    UpdateRow,
)
from online_sao.types import (
    LedgerState,
    NewVersion,
    TokenTrace,
    Update,
    UpdateKind,
    VersionState,
)


def commit_update(
    conn: sa.Connection,
    now: datetime,
    owner: str,
    update: Update,
    new_version: NewVersion | None,
    traces: Sequence[TokenTrace],
) -> Update:
    """See `Store.commit_update`."""
    check_update(update, new_version, traces)
    leases.held(conn, update.rollout_ids, LedgerState.LEASED, owner, now)
    number = None if new_version is None else _add_version(conn, now, new_version)
    committed = replace(update, version=number)
    inserted = conn.execute(
        sa.insert(UpdateRow),
        {
            "id": update.id,
            "created_at": update.created_at,
            "kind": update.kind,
            "metrics": dict(update.metrics),
            "version": number,
            "note": update.note,
        },
    )
    if update.rollout_ids:
        seq = new_key(inserted)
        conn.execute(
            sa.insert(UpdateMemberRow),
            [
                {"rollout_id": rollout_id, "update_seq": seq, "position": position}
                for position, rollout_id in enumerate(update.rollout_ids)
            ],
        )
        state, reason = MEMBER_STATES[update.kind]
        leases.move(conn, update.rollout_ids, state, reason=reason)
    if traces:
        conn.execute(sa.insert(TokenTraceRow), [trace_values(trace) for trace in traces])
    return committed


def check_update(
    update: Update, new_version: NewVersion | None, traces: Sequence[TokenTrace]
) -> None:
    """Raise ValueError where the learner contradicts itself: a fault of code, not of data."""
    ids = set(update.rollout_ids)
    if len(ids) != len(update.rollout_ids):
        raise ValueError("an update names a rollout twice")
    if update.kind is UpdateKind.POLICY and not ids:
        raise ValueError("an update of the policy needs rollouts")
    if new_version is not None and update.kind is not UpdateKind.POLICY:
        raise ValueError(f"an update of kind {update.kind} makes no version")
    traced = [trace.rollout_id for trace in traces]
    if len(set(traced)) != len(traced) or not ids.issuperset(traced):
        raise ValueError("each trace belongs to one rollout of its update")


def _add_version(conn: sa.Connection, now: datetime, new_version: NewVersion) -> int:
    newest: int | None = conn.scalar(sa.select(sa.func.max(PolicyVersionRow.number)))
    if newest is None or not policies.exists(conn, new_version.parent):
        raise UnknownRecord(f"there is no policy version {new_version.parent} to descend from")
    conn.execute(
        sa.insert(PolicyVersionRow),
        {
            "number": newest + 1,
            "parent": new_version.parent,
            "path": new_version.path,
            "sha256": new_version.sha256,
            "state": VersionState.STABLE,
            "created_at": now,
            "gate": "passed",
        },
    )
    return newest + 1


def count_updates(conn: sa.Connection) -> int:
    """See `Store.count_updates`."""
    return conn.scalar(sa.select(sa.func.count()).select_from(UpdateRow)) or 0


def list_updates(conn: sa.Connection, limit: int) -> list[Update]:
    """See `Store.list_updates`."""
    rows = conn.execute(sa.select(UpdateRow).order_by(UpdateRow.seq.desc()).limit(limit)).all()
    members: dict[int, list[str]] = defaultdict(list)
    for member in conn.execute(
        sa.select(UpdateMemberRow.update_seq, UpdateMemberRow.rollout_id)
        .where(UpdateMemberRow.update_seq.in_([row.seq for row in rows]))
        .order_by(UpdateMemberRow.update_seq, UpdateMemberRow.position)
    ):
        members[member.update_seq].append(member.rollout_id)
    return [update_from(row, members[row.seq]) for row in rows]


def list_traces(conn: sa.Connection, rollout_id: str) -> list[TokenTrace]:
    """See `Store.list_traces`."""
    rows = conn.execute(sa.select(TokenTraceRow).where(TokenTraceRow.rollout_id == rollout_id))
    return [trace_from(row) for row in rows]
