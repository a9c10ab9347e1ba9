"""The ledger's rules."""

from __future__ import annotations

import pytest

from online_sao.store.states import (
    FINISHED,
    LEASE_STATES,
    MEMBER_STATES,
    after_completion,
    after_judgement,
    after_lease,
    discard_reason,
    feedback_receipt,
    is_settled,
    lag_of,
    lineage,
    to_judge,
)
from online_sao.types import (
    DiscardReason,
    EpisodeRewards,
    FeedbackReceipt,
    JudgementState,
    LedgerState,
    Outcome,
    RolloutCompletion,
    UpdateKind,
    utc_now,
)

S = LedgerState


def test_a_straight_line_counts_back_one_by_one() -> None:
    assert lineage({0: None, 1: 0, 2: 1, 3: 2}, 3) == {3: 0, 2: 1, 1: 2, 0: 3}


def test_a_branch_that_was_left_is_not_on_the_line() -> None:
    assert lineage({0: None, 1: 0, 2: 1, 3: 1}, 3) == {3: 0, 1: 1, 0: 2}


def test_before_anything_is_published_the_base_is_the_newest() -> None:
    assert lineage({}, None) == {0: 0}


def test_parents_that_run_in_a_circle_end() -> None:
    assert lineage({1: 2, 2: 1}, 2) == {2: 0, 1: 1}


@pytest.mark.parametrize(
    ("spans", "lag"),
    [
        ([(3, 0, 5)], 0),
        ([(3, 0, 2), (1, 2, 5)], 1),
        ([(0, 0, 5)], 2),
        ([(2, 0, 5)], None),
        ([(3, 0, 2), (2, 2, 5)], None),
        ([], None),
    ],
)
def test_lag_is_that_of_the_oldest_weights(spans: list[tuple[int, int, int]], lag: int) -> None:
    assert lag_of(spans, {3: 0, 1: 1, 0: 2}) == lag


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({}, None),
        ({"lag": 8}, None),
        ({"lag": 9}, DiscardReason.STALE),
        ({"lag": None}, DiscardReason.STALE),
        ({"tokens": 100}, None),
        ({"tokens": 101}, DiscardReason.TOO_LONG),
        ({"cut": True}, DiscardReason.CUT),
        ({"cut": True, "skip_cut": False}, None),
        ({"lag": 9, "tokens": 101, "cut": True}, DiscardReason.STALE),
        ({"tokens": 101, "cut": True}, DiscardReason.TOO_LONG),
    ],
)
def test_bounds_are_inclusive_and_the_first_reason_counts(
    case: dict[str, int], reason: DiscardReason | None
) -> None:
    rules = {"lag": 0, "tokens": 10, "cut": False, "skip_cut": True}
    bounds = {"max_lag": 8, "max_train_tokens": 100}
    assert discard_reason(**{**rules, **bounds, **case}) is reason


def test_a_failure_without_a_word_is_counted_as_unknown() -> None:
    failed = RolloutCompletion("r", utc_now(), Outcome.FAILED)
    assert after_completion(failed) == (S.FAILED, "unknown")


@pytest.mark.parametrize("state", list(JudgementState))
def test_a_verdict_that_did_not_see_the_feedback_does_not_stand(state: JudgementState) -> None:
    assert after_judgement(state, "x", feedback_came=True) == (S.AWAITING_JUDGEMENT, "")


def test_a_reason_is_counted_if_it_is_a_word_of_at_most_32_letters() -> None:
    for reason, word in (("no_thumb", "no_thumb"), ("Not sure.", ""), ("a" * 33, ""), ("", "")):
        assert after_judgement(JudgementState.EXPIRED, reason, False) == (S.EXPIRED, word)
    assert after_judgement(JudgementState.SCORED, "good", False) == (S.JUDGED, "")


def test_a_lease_that_ends_without_a_result_leads_back() -> None:
    assert after_lease(S.IN_JUDGEMENT, False) is S.AWAITING_JUDGEMENT
    assert after_lease(S.IN_JUDGEMENT, True) is S.AWAITING_JUDGEMENT
    assert after_lease(S.LEASED, False) is S.JUDGED
    assert after_lease(S.LEASED, True) is S.AWAITING_JUDGEMENT


def test_every_update_kind_says_where_its_rollouts_go() -> None:
    assert set(MEMBER_STATES) == set(UpdateKind)
    assert {state for state, _ in MEMBER_STATES.values()} <= set(FINISHED)
    assert not set(FINISHED) & set(LEASE_STATES)


def test_whoever_rates_a_trained_reply_is_told() -> None:
    told = {state for state in S if feedback_receipt(state) is FeedbackReceipt.ALREADY_TRAINED}
    assert told == {S.TRAINED, S.CRITIC_ONLY}


@pytest.mark.parametrize(
    ("rewards", "chosen", "speaker"),
    [(EpisodeRewards.ONE, ["c"], "c"), (EpisodeRewards.EACH, ["a", "b", "c"], None)],
)
def test_who_of_an_episode_is_judged(
    rewards: EpisodeRewards, chosen: list[str], speaker: str | None
) -> None:
    assert to_judge(["a", "b", "c"], rewards) == (chosen, speaker)
    assert to_judge([], rewards) == ([], None)


def test_an_episode_is_settled_when_nothing_of_it_waits_for_a_reply_or_a_judge() -> None:
    waits = {S.IN_FLIGHT, S.AWAITING_JUDGEMENT, S.IN_JUDGEMENT}
    assert {state for state in S if not is_settled([S.JUDGED, state])} == waits
