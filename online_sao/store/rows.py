"""Records <-> rows: the one place where the house's dataclasses meet SQLAlchemy's rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any

import sqlalchemy as sa

from online_sao.types import (
    Alarm,
    Feedback,
    Judgement,
    LedgerState,
    Message,
    NotTrainable,
    Outcome,
    PolicyVersion,
    Rollout,
    RolloutCompletion,
    RolloutRequest,
    RubricVersion,
    Sampling,
    TokenTrace,
    Update,
    VersionSpan,
)

Row = sa.Row[*tuple[Any, ...]]


def messages_to_json(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as plain JSON, absent parts left out."""
    plain = []
    for message in messages:
        item: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.name is not None:
            item["name"] = message.name
        if message.tool_call_id is not None:
            item["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            item["tool_calls"] = [dict(call) for call in message.tool_calls]
        plain.append(item)
    return plain


def messages_from_json(plain: Sequence[dict[str, Any]]) -> tuple[Message, ...]:
    """What `messages_to_json` was given."""
    return tuple(
        Message(
            role=item["role"],
            content=item["content"],
            name=item.get("name"),
            tool_call_id=item.get("tool_call_id"),
            tool_calls=tuple(item.get("tool_calls", ())),
        )
        for item in plain
    )


_SAMPLING_DEFAULTS = {
    field.name: field.default for field in fields(Sampling) if field.default is not MISSING
}


def sampling_to_json(sampling: Sampling) -> dict[str, Any]:
    """What differs from the defaults."""
    return {
        name: value
        for name, default in _SAMPLING_DEFAULTS.items()
        if (value := getattr(sampling, name)) != default
    }


def sampling_from_json(plain: dict[str, Any]) -> Sampling:
    """What `sampling_to_json` was given; JSON's lists become tuples again."""
    return Sampling(**{name: _tuples(value) for name, value in plain.items()})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def request_values(request: RolloutRequest) -> dict[str, Any]:
    """Columns of `rollouts` that are known when the request comes."""
    return {
        "id": request.id,
        "created_at": request.created_at,
        "session_id": request.session_id,
        "user_hash": request.user_hash,
        "stream": request.stream,
        "train": request.train,
        "sampling": sampling_to_json(request.sampling),
        "messages": messages_to_json(request.messages),
    }


def completion_values(completion: RolloutCompletion) -> dict[str, Any]:
    """Columns of `rollouts` that are known at the end."""
    return {
        "completed_at": completion.completed_at,
        "outcome": completion.outcome,
        "finish_reason": completion.finish_reason,
        "not_trainable": completion.not_trainable,
        "error": completion.error,
        "engine": completion.engine,
        "version_spans": [[s.version, s.start, s.end] for s in completion.version_spans],
        "prompt_tokens": len(completion.prompt_ids),
        "reply_tokens": len(completion.reply_ids),
        "text": completion.text,
        "prompt_ids": completion.prompt_ids,
        "reply_ids": completion.reply_ids,
        "logprobs": completion.logprobs,
    }


PRUNED_VALUES: dict[str, Any] = {
    "messages": None,
    "text": None,
    "prompt_ids": None,
    "reply_ids": None,
    "logprobs": None,
}
"""What retention takes from a row: the words, and the token ids, which are the words too."""


def rollout_from(row: Row, state: LedgerState, reason: str) -> Rollout:
    """A row of `rollouts` and its place in the ledger as the record."""
    return Rollout(request_from(row), completion_from(row), state, reason or None)


def request_from(row: Row) -> RolloutRequest:
    """The request in a row of `rollouts` and its entry's episode; no messages once pruned."""
    return RolloutRequest(
        id=row.id,
        created_at=row.created_at,
        messages=messages_from_json(row.messages or ()),
        sampling=sampling_from_json(row.sampling),
        session_id=row.session_id,
        user_hash=row.user_hash,
        stream=row.stream,
        train=row.train,
        episode_id=row.episode_id,
    )


def completion_from(row: Row) -> RolloutCompletion | None:
    """The completion in a row of `rollouts`; `redacted` once its tokens were pruned."""
    if row.completed_at is None:
        return None
    return RolloutCompletion(
        rollout_id=row.id,
        completed_at=row.completed_at,
        outcome=row.outcome,
        text=row.text or "",
        prompt_ids=row.prompt_ids or (),
        reply_ids=row.reply_ids or (),
        logprobs=row.logprobs or (),
        version_spans=tuple(VersionSpan(*span) for span in row.version_spans),
        finish_reason=row.finish_reason,
        not_trainable=(
            row.not_trainable
            if row.pruned_at is None
            else why_pruned(row.outcome, row.not_trainable)
        ),
        error=row.error,
        engine=row.engine,
    )


def why_pruned(outcome: Outcome, not_trainable: NotTrainable | None) -> NotTrainable | None:
    """Why a pruned rollout is not trainable: as before, or because its content is gone."""
    if outcome is Outcome.COMPLETED and not_trainable is None:
        return NotTrainable.REDACTED
    return not_trainable


def feedback_values(feedback: Feedback) -> dict[str, Any]:
    """Columns of `feedback`."""
    return {field.name: getattr(feedback, field.name) for field in fields(Feedback)}


def feedback_from(row: Row) -> Feedback:
    """A row of `feedback` as the record."""
    return Feedback(**{field.name: getattr(row, field.name) for field in fields(Feedback)})


def same_feedback(one: Feedback, other: Feedback) -> bool:
    """Whether two feedbacks say the same (their own ids and times aside)."""
    return (
        one.rollout_id == other.rollout_id
        and one.metric == other.metric
        and isinstance(one.value, bool) is isinstance(other.value, bool)
        and one.value == other.value
        and one.comment == other.comment
        and one.user_hash == other.user_hash
        and one.source == other.source
    )


def rubric_values(rubric: RubricVersion) -> dict[str, Any]:
    """Columns of `rubric_versions`."""
    return {field.name: getattr(rubric, field.name) for field in fields(RubricVersion)}


def rubric_from(row: Row) -> RubricVersion:
    """A row of `rubric_versions` as the record."""
    return RubricVersion(
        **{field.name: getattr(row, field.name) for field in fields(RubricVersion)}
    )


def judgement_values(judgement: Judgement) -> dict[str, Any]:
    """Columns of `judgements`."""
    return {field.name: getattr(judgement, field.name) for field in fields(Judgement)}


def judgement_from(row: Row) -> Judgement:
    """A row of `judgements` as the record."""
    return Judgement(**{field.name: getattr(row, field.name) for field in fields(Judgement)})


def version_from(row: Row) -> PolicyVersion:
    """A row of `policy_versions` as the record."""
    return PolicyVersion(
        **{field.name: getattr(row, field.name) for field in fields(PolicyVersion)}
    )


def update_from(row: Row, rollout_ids: Sequence[str]) -> Update:
    """A row of `updates` and its members as the record."""
    return Update(
        id=row.id,
        created_at=row.created_at,
        kind=row.kind,
        rollout_ids=tuple(rollout_ids),
        metrics=row.metrics,
        version=row.version,
        note=row.note,
    )


def trace_values(trace: TokenTrace) -> dict[str, Any]:
    """Columns of `token_traces`."""
    return {
        "rollout_id": trace.rollout_id,
        "trace_values": trace.values,
        "advantages": trace.advantages,
        "ratios": trace.ratios,
        "kept": trace.kept,
    }


def trace_from(row: Row) -> TokenTrace:
    """A row of `token_traces` as the record."""
    return TokenTrace(row.rollout_id, row.trace_values, row.advantages, row.ratios, row.kept)


def alarm_from(row: Row) -> Alarm:
    """A row of `alarms` as the record."""
    return Alarm(row.name, row.message, row.since, row.times)


def new_key(inserted: sa.CursorResult[*tuple[Any, ...]]) -> int:
    """The sequence number that an inserted row got."""
    key = inserted.inserted_primary_key
    assert key is not None, "one row was inserted, and its key is a sequence"
    return int(key[0])
