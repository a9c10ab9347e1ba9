"""What the learner writes and reads: claims of trajectories, updates, traces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

import sqlalchemy as sa

from online_sao.errors import UnknownRecord
from online_sao.store import leases, policies
from online_sao.store.rows import (
    completion_from,
    new_key,
    request_from,
    trace_from,
    trace_values,
    update_from,
)
from online_sao.store.states import MEMBER_STATES, discard_reason, lag_of
from online_sao.store.tables import (
    JudgementRow,
    LedgerRow,
    PolicyVersionRow,
    RolloutRow,
    TokenTraceRow,
    UpdateMemberRow,
    UpdateRow,
)
from online_sao.types import (
    LedgerState,
    NewVersion,
    TokenTrace,
    Trajectory,
    Update,
    UpdateKind,
    VersionState,
)


@dataclass(frozen=True, slots=True)
class ClaimRules:
    """What a learner wants of a batch (the arguments of `Store.claim_trajectories`)."""

    size: int
    max_lag: int
    max_train_tokens: int
    skip_cut: bool


@dataclass(frozen=True, slots=True)
class _Candidate:
    rollout_id: str
    spans: list[tuple[int, int, int]]
    tokens: int
    cut: bool


def claim_trajectories(
    conn: sa.Connection, now: datetime, owner: str, lease_s: float, rules: ClaimRules
) -> list[Trajectory]:
    """See `Store.claim_trajectories`; leases that ran out are taken over."""
    leases.recover(conn, now)
    leases.forget_loss(conn, owner)
    steps = policies.lineage_back(conn, rules.max_lag)
    chosen: dict[str, int] = {}
    for candidate in _judged_oldest_first(conn, rules.size):
        lag = lag_of(candidate.spans, steps)
        reason = discard_reason(
            lag=lag,
            tokens=candidate.tokens,
            cut=candidate.cut,
            max_lag=rules.max_lag,
            max_train_tokens=rules.max_train_tokens,
            skip_cut=rules.skip_cut,
        )
        if reason is not None:
            leases.move(conn, [candidate.rollout_id], LedgerState.DISCARDED, reason=reason.value)
        elif lag is not None:
            chosen[candidate.rollout_id] = lag
        if len(chosen) == rules.size:
            leases.take(conn, chosen, LedgerState.LEASED, owner, now + timedelta(seconds=lease_s))
            return _trajectories(conn, chosen)
    return []


def _judged_oldest_first(conn: sa.Connection, page_size: int) -> Iterator[_Candidate]:
    """Judged rollouts that nobody else has locked, a page at a time, locked as they come.

    A page is no larger than a batch: what is locked here is hidden from other learners.
    """
    query = (
        sa.select(
            LedgerRow.rollout_id,
            LedgerRow.created_at,
            RolloutRow.version_spans,
            RolloutRow.prompt_tokens,
            RolloutRow.reply_tokens,
            RolloutRow.finish_reason,
        )
        .join(RolloutRow, RolloutRow.id == LedgerRow.rollout_id)
        .where(LedgerRow.state == LedgerState.JUDGED, LedgerRow.reason == "")
        .order_by(LedgerRow.created_at, LedgerRow.rollout_id)
        .limit(page_size)
        .with_for_update(of=LedgerRow, skip_locked=True)
    )
    page = query
    while rows := conn.execute(page).all():
        for row in rows:
            yield _Candidate(
                rollout_id=row.rollout_id,
                spans=[(version, start, end) for version, start, end in row.version_spans],
                tokens=row.prompt_tokens + row.reply_tokens,
                cut=row.finish_reason == "length",
            )
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


def _trajectories(conn: sa.Connection, lags: Mapping[str, int]) -> list[Trajectory]:
    rows = conn.execute(
        sa.select(RolloutRow, JudgementRow.reward)
        .join(LedgerRow, LedgerRow.rollout_id == RolloutRow.id)
        .join(JudgementRow, JudgementRow.seq == LedgerRow.judgement_seq)
        .where(RolloutRow.id.in_(lags))
    )
    found: dict[str, Trajectory] = {}
    for row in rows:
        completion = completion_from(row)
        assert completion is not None, "only complete rollouts are judged"
        found[row.id] = Trajectory.from_rollout(
            request_from(row), completion, row.reward, lags[row.id]
        )
    return [found[rollout_id] for rollout_id in lags]


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
