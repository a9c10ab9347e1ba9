"""What the store's double keeps of one rollout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from online_sao.errors import TrajectoryRefused
from online_sao.store.columns import pack, unpack
from online_sao.store.rows import why_pruned
from online_sao.store.states import lag_of
from online_sao.types import (
    DiscardReason,
    Judgement,
    LedgerState,
    Rollout,
    RolloutCompletion,
    RolloutRequest,
    TokenTrace,
    Trajectory,
)


@dataclass(slots=True)
class Entry:
    """A ledger entry and its rollout."""

    request: RolloutRequest
    completion: RolloutCompletion | None = None
    state: LedgerState = LedgerState.IN_FLIGHT
    reason: str = ""
    not_before: datetime | None = None
    owner: str | None = None
    deadline: datetime | None = None
    feedback_came: bool = False
    judgement: Judgement | None = None
    pruned: bool = False

    @property
    def rollout(self) -> Rollout:
        """The record."""
        return Rollout(self.request, self.completion, self.state, self.reason or None)

    def move(
        self, state: LedgerState, reason: str = "", not_before: datetime | None = None
    ) -> None:
        """Into `state`, with no lease."""
        self.state, self.reason, self.not_before = state, reason, not_before
        self.owner = self.deadline = None
        self.feedback_came = False

    def lease(self, state: LedgerState, owner: str, deadline: datetime) -> None:
        """Into `state`, held by `owner`."""
        self.move(state)
        self.owner, self.deadline = owner, deadline


def trajectory_of(entry: Entry, steps: Mapping[int, int]) -> Trajectory | DiscardReason:
    """A judged entry's trajectory, or why there is none."""
    completion, judgement = entry.completion, entry.judgement
    assert completion is not None, "only complete rollouts are judged"
    assert judgement is not None, "a judged rollout has a judgement"
    assert judgement.reward is not None, "which is a scored one"
    spans = [(span.version, span.start, span.end) for span in completion.version_spans]
    lag = lag_of(spans, steps)
    if lag is None:
        return DiscardReason.STALE
    try:
        return Trajectory.from_rollout(entry.request, completion, judgement.reward, lag)
    except TrajectoryRefused:
        return DiscardReason.MALFORMED


def prune(entry: Entry) -> None:
    """Take the words and token ids away."""
    entry.pruned = True
    entry.request = replace(entry.request, messages=())
    if entry.completion is not None:
        entry.completion = replace(
            entry.completion,
            text="",
            prompt_ids=(),
            reply_ids=(),
            logprobs=(),
            not_trainable=why_pruned(entry.completion.outcome, entry.completion.not_trainable),
        )


def in_float32(trace: TokenTrace) -> TokenTrace:
    """As the database would give it back."""
    return replace(
        trace,
        values=unpack("f", pack("f", trace.values)),
        advantages=unpack("f", pack("f", trace.advantages)),
        ratios=unpack("f", pack("f", trace.ratios)),
    )
