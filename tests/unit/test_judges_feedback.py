"""`judges.feedback`: the user's thumb decides; no thumb is no reward."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from judges.feedback import FeedbackJudge
from online_sao.types import (
    Evidence,
    Expired,
    Feedback,
    RubricVersion,
    Scored,
    Unscorable,
    Verdict,
    Wait,
)

DONE = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
UNTIL = DONE + timedelta(seconds=60)
RULES = {"quality": {"max_words": 2}}


async def verdict_at(
    now: datetime,
    *said: tuple[str | None, str, bool | float | str],
    criteria: dict[str, Any] | None = None,
    reply: str = "one two three",
) -> Verdict:
    feedback = tuple(
        Feedback(
            id=f"fb_{i}",
            rollout_id="chatcmpl-1",
            created_at=DONE + timedelta(seconds=i),
            metric=metric,
            value=value,
            user_hash=user,
        )
        for i, (user, metric, value) in enumerate(said)
    )
    evidence = Evidence(
        rollout_id="chatcmpl-1",
        messages=(),
        reply=reply,
        reply_tokens=3,
        finish_reason="stop",
        completed_at=DONE,
        feedback_until=UNTIL,
        feedback=feedback,
    )
    rubric = RubricVersion(
        id="rub_1",
        name="thumbs",
        number=1,
        judge="judges.feedback:FeedbackJudge",
        criteria=criteria or {},
        created_at=DONE,
    )
    return await FeedbackJudge(clock=lambda: now).judge(evidence, rubric)


async def test_a_thumb_up_is_reward_1_and_a_thumb_down_is_reward_0() -> None:
    up = await verdict_at(DONE, ("ann", "thumbs", True))
    assert up == Scored(quality=1, style=1, reason="thumbs: 1 up, 0 down")
    down = await verdict_at(DONE, ("ann", "thumbs", False))
    assert down == Scored(quality=0, style=1, reason="thumbs: 0 up, 1 down")


async def test_down_then_up_by_one_user_counts_once_as_up() -> None:
    verdict = await verdict_at(DONE, ("ann", "thumbs", False), ("ann", "thumbs", True))
    assert verdict == Scored(quality=1, style=1, reason="thumbs: 1 up, 0 down")


async def test_feedback_without_a_user_is_one_users() -> None:
    verdict = await verdict_at(DONE, *[(None, "thumbs", up) for up in (True, True, False)])
    assert verdict == Scored(quality=0, style=1, reason="thumbs: 0 up, 1 down")


async def test_of_three_users_the_majority_decides() -> None:
    said = [("ann", "thumbs", True), ("bob", "thumbs", True), ("cy", "thumbs", False)]
    verdict = await verdict_at(DONE, *said)
    assert verdict == Scored(quality=1, style=1, reason="thumbs: 2 up, 1 down")


async def test_of_a_tie_the_thumb_given_last_decides() -> None:
    tie = await verdict_at(DONE, ("ann", "thumbs", True), ("bob", "thumbs", False))
    assert tie == Scored(quality=0, style=1, reason="thumbs: 1 up, 1 down")
    repeated = await verdict_at(
        DONE, ("ann", "thumbs", True), ("bob", "thumbs", False), ("ann", "thumbs", True)
    )
    assert repeated == Scored(quality=1, style=1, reason="thumbs: 1 up, 1 down")


async def test_without_a_thumb_it_waits_until_the_wait_is_over_then_expires() -> None:
    assert await verdict_at(UNTIL - timedelta(milliseconds=1)) == Wait(UNTIL)
    assert await verdict_at(UNTIL) == Expired("no thumb within 60 s")


async def test_a_thumb_after_the_wait_still_counts() -> None:
    verdict = await verdict_at(UNTIL + timedelta(days=1), ("ann", "thumbs", True))
    assert isinstance(verdict, Scored)
    assert verdict.reward == 1.0


async def test_comments_and_unasked_ratings_are_no_thumbs() -> None:
    said = [("ann", "comment", "lovely"), ("ann", "rating", 5.0)]
    assert await verdict_at(DONE, *said) == Wait(UNTIL)


async def test_a_rating_counts_as_a_thumb_from_the_asked_number_on() -> None:
    criteria = {"rating_at_least": 4}
    assert FeedbackJudge().check(criteria) == []
    for rating, quality in ((4.0, 1), (3.9, 0), (5, 1)):
        verdict = await verdict_at(DONE, ("ann", "rating", rating), criteria=criteria)
        assert isinstance(verdict, Scored)
        assert verdict.quality == quality
    later = [("ann", "rating", 5.0), ("ann", "thumbs", False)]
    assert await verdict_at(DONE, *later, criteria=criteria) == Scored(
        quality=0, style=1, reason="thumbs: 0 up, 1 down"
    )


async def test_the_fallback_decides_only_when_the_wait_is_over() -> None:
    criteria = {"fallback": RULES}
    assert await verdict_at(DONE, criteria=criteria) == Wait(UNTIL)
    assert await verdict_at(UNTIL, criteria=criteria) == Scored(
        quality=0,
        style=1,
        reason="no thumb within 60 s; quality: 3 words, at most 2 allowed",
    )
    good = await verdict_at(UNTIL, criteria=criteria, reply="one two")
    assert good == Scored(1, 1, "no thumb within 60 s; every rule holds (2 words)")


async def test_a_thumb_overrules_the_fallback() -> None:
    verdict = await verdict_at(UNTIL, ("ann", "thumbs", True), criteria={"fallback": RULES})
    assert verdict == Scored(quality=1, style=1, reason="thumbs: 1 up, 0 down")


async def test_what_the_fallback_cannot_score_stays_unscorable() -> None:
    criteria = {"fallback": {"quality": {"matches": "x"}}}
    verdict = await verdict_at(UNTIL, criteria=criteria, reply="y" * 20_001)
    assert isinstance(verdict, Unscorable)
    assert verdict.reason.startswith("no thumb within 60 s; quality: 20001 characters")


@pytest.mark.parametrize(
    ("criteria", "problems"),
    [
        ({}, []),
        ({"fallback": RULES, "rating_at_least": 0.5}, []),
        ("thumbs", ["criteria must be a table"]),
        ({"fallbak": {}}, ["unknown key `fallbak`: there are rating_at_least, fallback"]),
        ({"rating_at_least": True}, ["rating_at_least must be a finite number"]),
        ({"rating_at_least": float("nan")}, ["rating_at_least must be a finite number"]),
        (
            {"fallback": {"quality": {"max_words": -2}}},
            ["fallback: quality.max_words must be a whole number, 0 or more, not -2"],
        ),
        (
            {"fallback": None},
            ["fallback: criteria must be a table with `quality` and `style`"],
        ),
    ],
)
def test_check_lists_what_is_wrong(criteria: Any, problems: list[str]) -> None:
    assert FeedbackJudge().check(criteria) == problems
