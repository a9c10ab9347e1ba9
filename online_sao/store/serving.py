"""What the gateway writes and reads: requests, completions, feedback."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from online_sao.errors import StoreError, UnknownRecord, VersionConflict
from online_sao.store import episodes, leases
from online_sao.store.rows import (
    completion_values,
    feedback_from,
    feedback_values,
    request_values,
    rollout_from,
    same_feedback,
)
from online_sao.store.states import WAITS_FOR_EPISODE, after_completion, feedback_receipt
from online_sao.store.tables import REQUESTS, CounterRow, FeedbackRow, LedgerRow, RolloutRow
from online_sao.types import (
    Feedback,
    FeedbackReceipt,
    LedgerState,
    Outcome,
    Rollout,
    RolloutCompletion,
    RolloutRequest,
)

# Every chat runs these, so they are built once: building one costs as much as running it.
_INSERT_ENTRY = sa.insert(LedgerRow)
_INSERT_ROLLOUT = sa.insert(RolloutRow)
_COUNT_REQUEST = (
    sa.update(CounterRow).where(CounterRow.name == REQUESTS).values(value=CounterRow.value + 1)
)
_COMPLETE = sa.update(RolloutRow).where(
    RolloutRow.id == sa.bindparam("rollout_id"), RolloutRow.completed_at.is_(None)
)
_END_FLIGHT = sa.update(LedgerRow).where(
    LedgerRow.rollout_id == sa.bindparam("entry_id"), LedgerRow.state == LedgerState.IN_FLIGHT
)
_END_SINGLE_FLIGHT = _END_FLIGHT.where(LedgerRow.episode_id.is_(None))


def insert_rollout(conn: sa.Connection, now: datetime, request: RolloutRequest) -> None:
    """See `Store.insert_rollout`."""
    if request.episode_id is not None:
        episodes.join(conn, now, request.episode_id)
    conn.execute(
        _INSERT_ENTRY,
        {
            "rollout_id": request.id,
            "created_at": request.created_at,
            "state": LedgerState.IN_FLIGHT,
            "episode_id": request.episode_id,
        },
    )
    conn.execute(_INSERT_ROLLOUT, request_values(request))
    # Last, because PostgreSQL makes other requests wait from here to the commit.
    if conn.execute(_COUNT_REQUEST).rowcount != 1:
        raise StoreError("the counter of requests is missing from the database")


def complete_rollout(conn: sa.Connection, now: datetime, completion: RolloutCompletion) -> None:
    """See `Store.complete_rollout`."""
    state, reason = after_completion(completion)
    end = {"entry_id": completion.rollout_id, "state": state, "reason": reason}
    if conn.execute(_END_SINGLE_FLIGHT, end).rowcount != 1:
        _complete_member(conn, now, completion, end)
        return
    _record_end(conn, completion)


def _complete_member(
    conn: sa.Connection, now: datetime, completion: RolloutCompletion, end: dict[str, Any]
) -> None:
    """The reply belongs to an episode, unless it cannot be completed at all."""
    episode = episodes.lock_of(conn, completion.rollout_id)
    if end["state"] is LedgerState.AWAITING_JUDGEMENT:
        end = {**end, "reason": WAITS_FOR_EPISODE}
    if episode is None or conn.execute(_END_FLIGHT, end).rowcount != 1:
        _entry_state(conn, completion.rollout_id)
        raise VersionConflict(f"{completion.rollout_id} is complete already")
    _record_end(conn, completion)
    episodes.completed(conn, now, episode)


def _record_end(conn: sa.Connection, completion: RolloutCompletion) -> None:
    values = completion_values(completion)
    conn.execute(_COMPLETE, {"rollout_id": completion.rollout_id, **values})


def fail_orphans(conn: sa.Connection, now: datetime, started_before: datetime, error: str) -> int:
    """See `Store.fail_orphans`."""
    # Not locked as they are found: a member's episode must be locked before its entry.
    ids = conn.scalars(
        sa.select(LedgerRow.rollout_id)
        .where(LedgerRow.state == LedgerState.IN_FLIGHT, LedgerRow.created_at < started_before)
        .order_by(LedgerRow.rollout_id)
    ).all()
    failed = 0
    for rollout_id in ids:
        end = RolloutCompletion(rollout_id, now, Outcome.FAILED, error=error)
        with suppress(VersionConflict):  # it was completed meanwhile
            complete_rollout(conn, now, end)
            failed += 1
    return failed


def get_rollout(conn: sa.Connection, rollout_id: str) -> Rollout:
    """See `Store.get_rollout`."""
    row = conn.execute(
        sa.select(RolloutRow, LedgerRow.state, LedgerRow.reason, LedgerRow.episode_id)
        .join(LedgerRow, LedgerRow.rollout_id == RolloutRow.id)
        .where(RolloutRow.id == rollout_id)
    ).one_or_none()
    if row is None:
        raise UnknownRecord(f"there is no rollout {rollout_id[:64]}")
    return rollout_from(row, row.state, row.reason)


def add_feedback(conn: sa.Connection, feedback: Feedback) -> FeedbackReceipt:
    """See `Store.add_feedback`."""
    episode = episodes.lock_of(conn, feedback.rollout_id)
    entry = conn.execute(
        sa.select(LedgerRow.state)
        .where(LedgerRow.rollout_id == feedback.rollout_id)
        .with_for_update()
    ).one_or_none()
    if entry is None:
        raise UnknownRecord(f"there is no rollout {feedback.rollout_id[:64]}")
    if feedback.client_id is not None and _is_repeated(conn, feedback):
        return FeedbackReceipt.DUPLICATE
    conn.execute(sa.insert(FeedbackRow), feedback_values(feedback))
    if episode is None:
        _wake(conn, feedback.rollout_id, entry.state)
    else:
        episodes.hear(conn, episode, feedback.rollout_id)
    return feedback_receipt(entry.state)


def _is_repeated(conn: sa.Connection, feedback: Feedback) -> bool:
    row = conn.execute(
        sa.select(FeedbackRow).where(
            FeedbackRow.rollout_id == feedback.rollout_id,
            FeedbackRow.client_id == feedback.client_id,
        )
    ).one_or_none()
    if row is None:
        return False
    if not same_feedback(feedback_from(row), feedback):
        raise VersionConflict("this client id was used for other feedback on the same reply")
    return True


def _wake(conn: sa.Connection, rollout_id: str, state: LedgerState) -> None:
    if state in (LedgerState.AWAITING_JUDGEMENT, LedgerState.JUDGED):
        leases.move(conn, [rollout_id], LedgerState.AWAITING_JUDGEMENT)
    elif state in (LedgerState.IN_JUDGEMENT, LedgerState.LEASED):
        conn.execute(
            sa.update(LedgerRow)
            .where(LedgerRow.rollout_id == rollout_id)
            .values(feedback_came=True)
        )


def list_feedback(conn: sa.Connection, rollout_id: str) -> list[Feedback]:
    """See `Store.list_feedback`."""
    rows = conn.execute(
        sa.select(FeedbackRow)
        .where(FeedbackRow.rollout_id == rollout_id)
        .order_by(FeedbackRow.created_at, FeedbackRow.seq)
    )
    return [feedback_from(row) for row in rows]


def _entry_state(conn: sa.Connection, rollout_id: str) -> LedgerState:
    state = conn.scalar(sa.select(LedgerRow.state).where(LedgerRow.rollout_id == rollout_id))
    if state is None:
        raise UnknownRecord(f"there is no rollout {rollout_id[:64]}")
    return state
