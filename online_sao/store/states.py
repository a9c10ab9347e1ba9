"""The ledger's rules, without a database: what moves a rollout from which state to which.

in_flight -> failed | not_trainable | awaiting_judgement
awaiting_judgement -> in_judgement (lease) -> judged | unscorable | expired | back
judged -> leased (lease) -> trained | critic_only | discarded | back
judged -> discarded (stale, too_long, cut, malformed)
judged -> awaiting_judgement (feedback came)

A reply of a tool episode that awaits judgement, or is judged, has the reason `episode` while it
waits for the others: it is claimed by no judge before the episode has ended, and by no learner
before each of its replies is settled. Ended: closed, and no request in flight.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

from online_sao.types import (
    JUDGEMENT_PREFIX,
    DiscardReason,
    EpisodeRewards,
    FeedbackReceipt,
    Judgement,
    JudgementState,
    LedgerState,
    NotTrainable,
    Outcome,
    RolloutCompletion,
    UpdateKind,
    VersionState,
    new_id,
)

BASE_VERSION = 0
"""The starting policy's number."""

LEASE_STATES = (LedgerState.IN_JUDGEMENT, LedgerState.LEASED)
"""In these, and in no other, an entry has a lease owner and a deadline."""

FINISHED = (
    LedgerState.FAILED,
    LedgerState.NOT_TRAINABLE,
    LedgerState.UNSCORABLE,
    LedgerState.EXPIRED,
    LedgerState.CRITIC_ONLY,
    LedgerState.TRAINED,
    LedgerState.DISCARDED,
)
"""Nothing will need the content again."""

REWARDED = (
    LedgerState.JUDGED,
    LedgerState.LEASED,
    LedgerState.CRITIC_ONLY,
    LedgerState.TRAINED,
    LedgerState.DISCARDED,
)
"""Only a scored judgement leads here."""

LEARNABLE = (
    LedgerState.IN_FLIGHT,
    LedgerState.AWAITING_JUDGEMENT,
    LedgerState.IN_JUDGEMENT,
    LedgerState.JUDGED,
    LedgerState.LEASED,
)
"""The learner may still get it: nothing of an episode stands here once an update had the rest."""

SERVABLE = (VersionState.STABLE, VersionState.LIVE, VersionState.RETIRED)
"""Whole and not withdrawn. A superseded version was overtaken before it could serve."""

MEMBER_STATES: Mapping[UpdateKind, tuple[LedgerState, str]] = {
    UpdateKind.POLICY: (LedgerState.TRAINED, ""),
    UpdateKind.CRITIC_ONLY: (LedgerState.CRITIC_ONLY, UpdateKind.CRITIC_ONLY.value),
    UpdateKind.SKIPPED: (LedgerState.CRITIC_ONLY, UpdateKind.SKIPPED.value),
    UpdateKind.NOT_FINITE: (LedgerState.DISCARDED, DiscardReason.NOT_FINITE.value),
}
"""Where an update of this kind leaves its rollouts, and with which reason."""

WAITS_FOR_EPISODE = "episode"
"""The reason of a reply that awaits judgement, or is judged, and waits for its episode's others;
also of one that ended unscorable or expired because its episode did."""

UNSETTLED = (LedgerState.IN_FLIGHT, LedgerState.AWAITING_JUDGEMENT, LedgerState.IN_JUDGEMENT)
"""An episode with a reply in one of these is not ready for the learner."""

FOLLOWERS = (LedgerState.AWAITING_JUDGEMENT, LedgerState.JUDGED)
"""Where an episode's other replies can be when its verdict comes."""

EPISODE_JUDGE = "episode"
"""The judge named in a judgement that only passes an episode's verdict on."""

LOST_LEASES_KEPT = timedelta(days=1)
"""How long an owner that never asks again is remembered as having lost something."""

_WORD = re.compile(r"[a-z0-9_]{1,32}")


def after_completion(completion: RolloutCompletion) -> tuple[LedgerState, str]:
    """State and reason of a rollout whose end is recorded."""
    if completion.outcome is Outcome.FAILED:
        return LedgerState.FAILED, completion.error or "unknown"
    if completion.not_trainable is not None:
        return LedgerState.NOT_TRAINABLE, completion.not_trainable.value
    if completion.outcome is Outcome.ABORTED:
        return LedgerState.NOT_TRAINABLE, NotTrainable.ENGINE_ABORT.value
    return LedgerState.AWAITING_JUDGEMENT, ""


def after_judgement(
    judged: JudgementState, reason: str, feedback_came: bool
) -> tuple[LedgerState, str]:
    """State and reason of a rollout that was judged.

    Feedback that came while the judge looked sends it back: the verdict did not see it. Of a
    judge's reason only a single machine word is counted in the ledger, never its prose.
    """
    if feedback_came or judged is JudgementState.ERROR:
        return LedgerState.AWAITING_JUDGEMENT, ""
    if judged is JudgementState.SCORED:
        return LedgerState.JUDGED, ""
    word = reason if _WORD.fullmatch(reason) else ""
    if judged is JudgementState.EXPIRED:
        return LedgerState.EXPIRED, word
    return LedgerState.UNSCORABLE, word


def passed_on(judgement: Judgement, rollout_id: str) -> Judgement:
    """The verdict on an episode as the judgement of another reply of it."""
    said = "the reward of its episode" if judgement.reward is not None else "as its episode"
    return replace(
        judgement,
        id=new_id(JUDGEMENT_PREFIX),
        rollout_id=rollout_id,
        judge=EPISODE_JUDGE,
        reason=f"{said}: {judgement.id} on {judgement.rollout_id}",
        latency_s=0.0,
        attempts=1,
    )


def to_judge(awaiting: Sequence[str], rewards: EpisodeRewards) -> tuple[Sequence[str], str | None]:
    """Who of an ended episode's waiting replies (oldest first) is judged, and for whom.

    Returns their ids, and the id of the one whose verdict is the whole episode's.
    """
    if rewards is EpisodeRewards.EACH or not awaiting:
        return awaiting, None
    return awaiting[-1:], awaiting[-1]


def is_settled(states: Collection[LedgerState]) -> bool:
    """Whether an ended episode's replies wait for nothing but the learner."""
    return not any(state in UNSETTLED for state in states)


def after_lease(state: LedgerState, feedback_came: bool) -> LedgerState:
    """Where an entry goes whose lease ended without a result."""
    if state is LedgerState.LEASED and not feedback_came:
        return LedgerState.JUDGED
    return LedgerState.AWAITING_JUDGEMENT


def feedback_receipt(state: LedgerState) -> FeedbackReceipt:
    """What to say to whoever gives feedback on a rollout in this state."""
    if state in (LedgerState.TRAINED, LedgerState.CRITIC_ONLY):
        return FeedbackReceipt.ALREADY_TRAINED
    return FeedbackReceipt.ACCEPTED


def lineage(parents: Mapping[int, int | None], newest: int | None) -> dict[int, int]:
    """Version -> published versions since, from `newest` (0) back along the parents.

    Where nothing was published yet, the base policy is the newest.
    """
    steps: dict[int, int] = {}
    number = BASE_VERSION if newest is None else newest
    while number not in steps:
        steps[number] = len(steps)
        parent = parents.get(number)
        if parent is None:
            break
        number = parent
    return steps


def lag_of(spans: Sequence[tuple[int, int, int]], steps: Mapping[int, int]) -> int | None:
    """Published versions since the oldest weights in `spans`; None off the lineage.

    A version off the lineage (a branch that was taken back) is stale whatever the bound.
    """
    lags = [steps.get(version) for version, _, _ in spans]
    known = [lag for lag in lags if lag is not None]
    return max(known, default=None) if len(known) == len(lags) else None


def discard_reason(
    *, lag: int | None, tokens: int, cut: bool, max_lag: int, max_train_tokens: int, skip_cut: bool
) -> DiscardReason | None:
    """Why the learner may not have a judged rollout, or None."""
    if lag is None or lag > max_lag:
        return DiscardReason.STALE
    if tokens > max_train_tokens:
        return DiscardReason.TOO_LONG
    if cut and skip_cut:
        return DiscardReason.CUT
    return None
