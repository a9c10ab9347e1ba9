"""A judge that asks the user: the thumb decides, and no thumb is no reward.

Criteria, all optional:
    rating_at_least   a `rating` of at least this counts as a thumb up, a lower one as a thumb
                      down; without it ratings are ignored
    fallback          a criteria table of `judges.rules`; decides where the wait is over without
                      a thumb. Without it such a reply expires: never a reward of 0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from judges.rules import apply_rules, check_rules
from online_sao.types import (
    JSON,
    Evidence,
    Expired,
    Feedback,
    RubricVersion,
    Scored,
    Unscorable,
    Verdict,
    Wait,
    utc_now,
)

CRITERIA = ("rating_at_least", "fallback")


class FeedbackJudge:
    """Scores a reply by its users' thumbs: up is quality 1, down is quality 0, style is 1.

    The latest thumb of each user counts; of several users the majority decides, and of a tie
    the latest. A thumb that comes after the wait counts too.
    """

    def __init__(self, clock: Callable[[], datetime] = utc_now) -> None:
        self._clock = clock

    async def judge(self, evidence: Evidence, rubric: RubricVersion) -> Verdict:
        """The thumb's verdict, or Wait until `feedback_until`, or the fallback's, or Expired.

        Raises JudgeError when the fallback's criteria are not usable.
        """
        thumbs = _thumbs(evidence.feedback, rubric.criteria.get("rating_at_least"))
        if thumbs:
            return _decide(thumbs)
        if self._clock() < evidence.feedback_until:
            return Wait(evidence.feedback_until)
        waited = (evidence.feedback_until - evidence.completed_at).total_seconds()
        missing = f"no thumb within {waited:g} s"
        fallback = rubric.criteria.get("fallback")
        if fallback is None:
            return Expired(missing)
        verdict = await apply_rules(evidence, fallback)
        if isinstance(verdict, Unscorable):
            return Unscorable(f"{missing}; {verdict.reason}")
        return Scored(verdict.quality, verdict.style, f"{missing}; {verdict.reason}")

    def check(self, criteria: JSON) -> list[str]:
        """Every problem of the criteria, in words."""
        if not isinstance(criteria, Mapping):
            return ["criteria must be a table"]
        problems = [
            f"unknown key `{name}`: there are {', '.join(CRITERIA)}"
            for name in criteria
            if name not in CRITERIA
        ]
        least = criteria.get("rating_at_least")
        if least is not None and not _is_number(least):
            problems.append("rating_at_least must be a finite number")
        if "fallback" in criteria:
            problems += [f"fallback: {p}" for p in check_rules(criteria["fallback"])]
        return problems


def _thumbs(feedback: Sequence[Feedback], rating_at_least: float | None) -> list[bool]:
    """The latest thumb of each user (True: up), in the order they were given.

    Feedback without a user counts as one user's: who gave it cannot be told.
    """
    latest: dict[str | None, bool] = {}
    for entry in feedback:
        up = _as_thumb(entry, rating_at_least)
        if up is not None:
            latest.pop(entry.user_hash, None)
            latest[entry.user_hash] = up
    return list(latest.values())


def _as_thumb(entry: Feedback, rating_at_least: float | None) -> bool | None:
    if entry.metric == "thumbs" and isinstance(entry.value, bool):
        return entry.value
    if entry.metric == "rating" and rating_at_least is not None and _is_number(entry.value):
        return float(entry.value) >= rating_at_least
    return None


def _decide(thumbs: list[bool]) -> Scored:
    up, down = thumbs.count(True), thumbs.count(False)
    good = thumbs[-1] if up == down else up > down
    return Scored(quality=int(good), style=1, reason=f"thumbs: {up} up, {down} down")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
