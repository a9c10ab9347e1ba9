"""What flows: records check themselves where they are born."""

import math
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from online_sao.errors import RolloutRefused, TrajectoryRefused
from online_sao.types import (
    EpisodeRewards,
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


def trajectory(mask: str, **changes: Any) -> Trajectory:
    """`mask` as in "..aa.a": a dot is context, an a an action. Token ids count up from 10."""
    actions = tuple(c == "a" for c in mask)
    fields: dict[str, Any] = {
        "rollout_ids": (f"r{len(mask)}",),
        "token_ids": tuple(range(10, 10 + len(mask))),
        "action_mask": actions,
        "logprobs": tuple(-float(t) if a else math.nan for t, a in enumerate(actions)),
        "reward": 1.0,
        "temperature": 1.0,
    }
    return Trajectory(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"action_mask": (False,) * 4}, "no action token"),
        ({"action_mask": (True,) * 4, "logprobs": (-1.0,) * 4}, "prompt token"),
        ({"token_ids": (1, 2, 3)}, "3 token ids, 4 mask entries and 4 log-probabilities"),
        ({"action_mask": (False, True, True)}, "4 token ids, 3 mask entries"),
        ({"logprobs": (-1.0,) * 5}, "and 5 log-probabilities"),
        ({"reward": math.nan}, "its reward is nan"),
        ({"reward": -math.inf}, "its reward is -inf"),
        ({"reward": math.inf, "reward_at": ((3, math.inf),)}, "its reward is inf"),
        ({"logprobs": (math.nan, math.nan, -1.0, math.nan)}, "log-probability nan at token 3"),
        ({"logprobs": (math.nan, math.nan, -math.inf, -1.0)}, "log-probability -inf at token 2"),
        ({"reward_at": ((1, 1.0),)}, "a reward on token 1, which is no action"),
        ({"reward_at": ((4, 1.0),)}, "a reward on token 4, which is no action"),
        ({"reward_at": ((2, 0.5), (3, 0.25))}, "not the sum"),
    ],
)
def test_a_trajectory_that_no_update_could_take_is_refused_in_words(
    changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(TrajectoryRefused, match=says) as refused:
        trajectory("..aa", **changes)
    assert isinstance(refused.value, ValueError)
    assert "r4" in str(refused.value)


def test_what_stands_off_the_mask_is_not_looked_at() -> None:
    assert trajectory("..aa", logprobs=(math.inf, 1e30, -1.0, -1.0)).reward == 1.0


def test_rewards_stand_on_the_last_action_unless_they_are_placed() -> None:
    assert trajectory(".aa..a..", reward=0.5).placed_rewards == ((5, 0.5),)
    placed = ((2, 1.0), (5, 0.0))
    assert trajectory(".aa..a..", reward_at=placed).placed_rewards == placed


ONE, EACH = EpisodeRewards.ONE, EpisodeRewards.EACH


def test_replies_that_extend_each_other_become_one_trajectory() -> None:
    first, second = trajectory("..aa", lag=1, cut=True), trajectory(".....aaa", lag=2)
    (merged,) = Trajectory.from_episode([first, second], ONE)
    assert merged.rollout_ids == ("r4", "r8")
    assert merged.token_ids == tuple(range(10, 18))
    assert [i for i, a in enumerate(merged.action_mask) if a] == [2, 3, 5, 6, 7]
    assert [x for x in merged.logprobs if not math.isnan(x)] == [-2.0, -3.0, -5.0, -6.0, -7.0]
    assert (merged.reward, merged.reward_at, merged.lag, merged.cut) == (1.0, (), 2, True)


def test_own_rewards_stand_at_the_end_of_each_reply_and_sum_up() -> None:
    replies = [
        trajectory("..aa", reward=1.0),
        trajectory("....a", reward=0.0),
        trajectory("......a", reward=1.0),
    ]
    (merged,) = Trajectory.from_episode(replies, EACH)
    assert merged.reward_at == ((3, 1.0), (4, 0.0), (6, 1.0))
    assert merged.reward == 2.0


@pytest.mark.parametrize(
    "second",
    [
        trajectory(".....aaa", token_ids=(10, 11, 12, 99, 14, 15, 16, 17)),  # a reply's id differs
        trajectory(".....aaa", token_ids=(99, 11, 12, 13, 14, 15, 16, 17)),  # a prompt's id differs
        trajectory("...aaaaa"),  # its prompt ends before the reply before it
        trajectory(".....aaa", temperature=0.5),
        trajectory("..a"),  # a shorter chat
    ],
)
def test_replies_that_do_not_extend_each_other_exactly_stay_their_own(second: Trajectory) -> None:
    first = trajectory("..aa")
    for rewards in (ONE, EACH):
        assert Trajectory.from_episode([first, second], rewards) == [first, second]


def test_an_untrainable_reply_parts_an_episode_only_from_within() -> None:
    first, second = trajectory("..aa"), trajectory(".....aaa")
    assert Trajectory.from_episode([first, None, second], ONE) == [first, second]
    for members in ([None, first, second], [first, second, None]):
        (merged,) = Trajectory.from_episode(members, ONE)
        assert merged.rollout_ids == ("r4", "r8")


def test_an_episode_of_one_reply_is_that_reply_and_of_none_is_none() -> None:
    only = trajectory("..aa", reward=0.0)
    assert Trajectory.from_episode([None, only], EACH) == [only]
    assert Trajectory.from_episode([None], ONE) == []
