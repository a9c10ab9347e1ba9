"""Advantages without a critic, against the reference's numbers and hand-worked cases."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from algorithm_support import CASES, PRECISIONS, assert_near

from online_sao.algorithm.baselines import (
    BetaTracker,
    batch_normalised,
    group_advantage,
    running_mean_advantage,
)

WINDOW = 128
"""The reference's, the paper's online study."""


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_running_mean_equals_the_reference(case: dict[str, Any], dtype: torch.dtype) -> None:
    given, want = case["inputs"], case["expected"]["running_mean"]
    rewards = torch.tensor(given["group_rewards"], dtype=dtype)
    got = running_mean_advantage(rewards, given["reward_history"], WINDOW)
    assert_near(got, torch.tensor(want, dtype=torch.float64), dtype)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_group_advantage_equals_the_reference(case: dict[str, Any], dtype: torch.dtype) -> None:
    rewards = torch.tensor(case["inputs"]["group_rewards"], dtype=dtype)
    want = torch.tensor(case["expected"]["group"], dtype=torch.float64)
    assert_near(group_advantage(rewards), want, dtype)


def test_running_mean_by_hand() -> None:
    rewards = torch.tensor([1.0, 0.0, 1.0])
    # Nothing seen: baseline 0; then 1; then (1 + 0)/2.
    assert running_mean_advantage(rewards, [], 8).tolist() == [1.0, -1.0, 0.5]
    # A window of 2 over 1, 0, 0 | 1, 0, 1: baselines 0, 1/2, 1/2; the first 1 is forgotten.
    assert running_mean_advantage(rewards, [1.0, 0.0, 0.0], 2).tolist() == [1.0, -0.5, 0.5]
    # A window of 1 is the reward before.
    assert running_mean_advantage(rewards, deque([1.0]), 1).tolist() == [0.0, -1.0, 1.0]
    assert running_mean_advantage(rewards[:0], [1.0], 1).tolist() == []


def test_a_window_of_none_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        running_mean_advantage(torch.ones(2), [], 0)


def test_group_advantage_by_hand_and_each_group_by_itself() -> None:
    groups = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.7, 0.7, 0.7, 0.7]], dtype=torch.float64)
    # Mean 1/2, population std 1/2: +-0.5/0.500001. Equal rewards say nothing.
    unit = 0.5 / (0.5 + 1e-6)
    got = group_advantage(groups)
    assert got[0].tolist() == pytest.approx([unit, -unit, -unit, unit], abs=1e-12)
    assert got[1].tolist() == [0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("advantages", [[0.3], [0.1, 0.1, 0.1], []])
def test_a_batch_of_one_or_of_equals_is_exactly_zero(advantages: list[float]) -> None:
    for dtype in PRECISIONS:
        got = batch_normalised(torch.tensor(advantages, dtype=dtype))
        assert got.tolist() == [0.0] * len(advantages)


def test_batch_normalised_by_hand() -> None:
    # Mean 1, population variance (4 + 0 + 4)/3.
    scale = math.sqrt(8 / 3) + 1e-6
    got = batch_normalised(torch.tensor([-1.0, 1.0, 3.0], dtype=torch.float64))
    assert got.tolist() == pytest.approx([-2 / scale, 0.0, 2 / scale], abs=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused(bad: float) -> None:
    rewards, good = torch.tensor([1.0, bad]), torch.ones(2)
    with pytest.raises(ValueError, match="1 rewards are not finite"):
        running_mean_advantage(rewards, [], 8)
    with pytest.raises(ValueError, match="1 rewards are not finite"):
        running_mean_advantage(good, [bad], 8)
    with pytest.raises(ValueError, match="not finite"):
        group_advantage(rewards)
    with pytest.raises(ValueError, match="not finite"):
        batch_normalised(rewards)
    with pytest.raises(ValueError, match="reward in"):
        BetaTracker(1.0, 1.0).visited(bad)


def test_integer_rewards_are_refused_before_an_advantage_is_rounded() -> None:
    with pytest.raises(ValueError, match="floating point"):
        group_advantage(torch.tensor([1, 0]))


def test_beta_tracker_by_hand() -> None:
    tracker = BetaTracker(3.0, 1.0)
    assert tracker.value == 0.75
    # One half-life: both counts halved, the rate stays.
    half = tracker.forgotten(kl=0.06, half_life=0.06)
    assert (half.successes, half.failures, half.value) == (1.5, 0.5, 0.75)
    # Two half-lives and a failure: (0.75 + 0, 0.25 + 1), rate 0.375.
    later = tracker.forgotten(kl=0.12, half_life=0.06).visited(0.0)
    assert (later.successes, later.failures) == (0.75, 1.25)
    assert later.value == 0.375
    partly = BetaTracker(1.0, 1.0).visited(0.25)
    assert (partly.successes, partly.failures) == (1.25, 1.75)


def test_a_tracker_is_a_record_and_an_empty_one_expects_a_half() -> None:
    assert BetaTracker(0.0, 0.0).value == 0.5
    assert BetaTracker(0.0, 0.0).visited(1.0).value == 1.0
    with pytest.raises(FrozenInstanceError):
        BetaTracker(1.0, 1.0).successes = 2.0  # type: ignore[misc]


def test_forgetting_never_adds_counts_and_refuses_what_is_no_distance() -> None:
    tracker = BetaTracker(2.0, 2.0)
    assert tracker.forgotten(kl=-1e-9, half_life=0.1) == tracker
    for kl, half_life in (
        (math.nan, 1.0),
        (math.inf, 1.0),
        (0.1, 0.0),
        (0.1, -1.0),
        (0.1, math.nan),
    ):
        with pytest.raises(ValueError, match="half_life"):
            tracker.forgotten(kl, half_life)


@pytest.mark.parametrize("counts", [(-1.0, 1.0), (1.0, math.nan), (math.inf, 1.0)])
def test_counts_that_are_no_counts_are_refused(counts: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="counts are finite"):
        BetaTracker(*counts)


@pytest.mark.parametrize("reward", [-0.1, 1.1])
def test_a_reward_outside_0_to_1_is_no_success_rate(reward: float) -> None:
    with pytest.raises(ValueError, match="reward in"):
        BetaTracker(1.0, 1.0).visited(reward)
