"""What flows: records check themselves where they are born."""

import math
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from online_sao.errors import RolloutRefused
from online_sao.types import (
    Judgement,
    JudgementState,
    Message,
    NotTrainable,
    Outcome,
    RolloutCompletion,
    RolloutRequest,
    Sampling,
    Scored,
    Trajectory,
    VersionSpan,
    new_id,
    new_uuid7,
    parse_id,
    token_problem,
    utc_now,
    uuid7_time,
)

NOW = datetime(2026, 1, 2, tzinfo=UTC)
WHOLE = (VersionSpan(3, 0, 2),)


def completion(**changes: Any) -> RolloutCompletion:
    fields: dict[str, Any] = {
        "rollout_id": "chatcmpl-x",
        "completed_at": NOW,
        "outcome": Outcome.COMPLETED,
        "prompt_ids": (1, 2, 3),
        "reply_ids": (7, 8),
        "logprobs": (-0.5, -1.25),
        "version_spans": WHOLE,
        "finish_reason": "stop",
    }
    return RolloutCompletion(**{**fields, **changes})


def test_uuid7_carries_the_time_it_was_made_to_the_millisecond() -> None:
    before = utc_now() - timedelta(milliseconds=1)
    value = new_uuid7()
    assert value.version == 7
    assert value.variant == "specified in RFC 4122"
    assert before <= uuid7_time(value) <= utc_now()


def test_uuid7_sorts_by_time_of_making() -> None:
    ids = [new_uuid7() for _ in range(50)]
    assert [uuid7_time(i) for i in sorted(ids)] == sorted(uuid7_time(i) for i in ids)


def test_public_id_goes_there_and_back() -> None:
    public = new_id("fb_")
    assert str(parse_id(public, "fb_")) == public.removeprefix("fb_")


@pytest.mark.parametrize(
    "bad", ["fb_nonsense", "chatcmpl-x", "fb_6ba7b810-9dad-41d1-80b4-00c04fd430c8"]
)
def test_id_of_another_kind_or_uuid_version_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match=r"starts with|UUID|badly"):
        parse_id(bad, "fb_")


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        (Sampling(), None),
        (Sampling(temperature=0.5, stop=("x",), seed=1, max_tokens=3), None),
        (Sampling(temperature=0.0), NotTrainable.GREEDY),
        (Sampling(top_p=0.5), NotTrainable.TRUNCATED_SAMPLING),
        (Sampling(top_k=5), NotTrainable.TRUNCATED_SAMPLING),
        (Sampling(min_p=0.1), NotTrainable.TRUNCATED_SAMPLING),
        (Sampling(presence_penalty=0.1), NotTrainable.PENALTIES),
        (Sampling(repetition_penalty=1.1), NotTrainable.PENALTIES),
        (Sampling(logit_bias=((5, 1.0),)), NotTrainable.LOGIT_BIAS),
        (Sampling(min_tokens=1), NotTrainable.GRAMMAR),
        (Sampling(bad_words=("x",)), NotTrainable.GRAMMAR),
    ],
)
def test_sampling_that_changes_the_distribution_is_not_trainable(
    sampling: Sampling, reason: NotTrainable | None
) -> None:
    assert sampling.not_trainable() is reason


@pytest.mark.parametrize(
    ("ids", "logprobs", "spans", "counted", "reason"),
    [
        ((), (), (), None, NotTrainable.NO_TOKEN_IDS),
        ((7, 8), (-0.5,), WHOLE, None, NotTrainable.LOGPROB_MISSING),
        ((7, 8), (-0.5, math.nan), WHOLE, None, NotTrainable.LOGPROB_NONFINITE),
        ((7, 8), (-0.5, -math.inf), WHOLE, None, NotTrainable.LOGPROB_NONFINITE),
        ((7, 8), (-0.5, -9999.0), WHOLE, None, NotTrainable.LOGPROB_NONFINITE),
        ((7, 8), (-0.5, 1e-9), WHOLE, None, NotTrainable.LOGPROB_NONFINITE),
        ((7, 8), (-0.5, -1.0), WHOLE, 3, NotTrainable.NO_TOKEN_IDS),
        ((7, 8), (-0.5, -1.0), (), None, NotTrainable.NO_TOKEN_IDS),
        ((7, 8), (-0.5, -1.0), (VersionSpan(3, 0, 1),), None, NotTrainable.NO_TOKEN_IDS),
        ((7, 8), (-0.5, -1.0), (VersionSpan(3, 1, 2),), None, NotTrainable.NO_TOKEN_IDS),
    ],
)
def test_first_problem_of_a_token_record_is_named(
    ids: tuple[int, ...],
    logprobs: tuple[float, ...],
    spans: tuple[VersionSpan, ...],
    counted: int | None,
    reason: NotTrainable,
) -> None:
    problem = token_problem(ids, logprobs, spans, counted)
    assert problem is not None
    assert problem[0] is reason


def test_whole_token_record_over_two_versions_has_no_problem() -> None:
    spans = (VersionSpan(3, 0, 1), VersionSpan(4, 1, 2))
    assert token_problem((7, 8), (-0.0, -1.0), spans, 2) is None


def test_trainable_completion_with_a_missing_logprob_cannot_be_made() -> None:
    with pytest.raises(RolloutRefused) as refused:
        completion(logprobs=(-0.5,))
    assert refused.value.reason == NotTrainable.LOGPROB_MISSING


def test_untrainable_completion_keeps_what_the_engine_reported() -> None:
    kept = completion(logprobs=(-math.inf,), not_trainable=NotTrainable.LOGPROB_MISSING)
    assert kept.logprobs == (-math.inf,)


def test_reward_is_quality_times_style() -> None:
    assert [Scored(q, s, "").reward for q, s in ((0, 0), (0, 1), (1, 0), (1, 1))] == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("state", "reward"), [(JudgementState.ERROR, 0.0), (JudgementState.SCORED, None)]
)
def test_failed_judgement_never_carries_a_reward(
    state: JudgementState, reward: float | None
) -> None:
    with pytest.raises(ValueError, match="reward"):
        Judgement("jdg_1", "chatcmpl-x", NOW, "rub_1", "j", state, reward=reward)


def test_trajectory_masks_the_prompt_and_keeps_the_engines_numbers() -> None:
    request = RolloutRequest(
        "chatcmpl-x", NOW, (Message("user", "hi"),), Sampling(temperature=0.7), "sess_1"
    )
    trajectory = Trajectory.from_rollout(request, completion(finish_reason="length"), 1.0, lag=2)
    assert trajectory.token_ids == (1, 2, 3, 7, 8)
    assert trajectory.action_mask == (False, False, False, True, True)
    assert all(math.isnan(x) for x in trajectory.logprobs[:3])
    assert trajectory.logprobs[3:] == (-0.5, -1.25)
    assert (trajectory.temperature, trajectory.lag, trajectory.cut) == (0.7, 2, True)


def test_trajectory_without_a_prompt_token_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt token"):
        Trajectory(("chatcmpl-x",), (1, 2), (True, True), (-1.0, -1.0), 0.0, 1.0)
