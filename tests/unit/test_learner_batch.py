"""Trajectories as tensors, and their micro-batches."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from online_sao.learner.batch import TrajectoryBatch, partition
from online_sao.types import Trajectory


def trajectory(mask: str, reward: float = 1.0, temperature: float = 1.0) -> Trajectory:
    """`mask` as in "..aa.a": a dot is context, an a an action. Token ids count up from 10."""
    actions = tuple(c == "a" for c in mask)
    return Trajectory(
        rollout_ids=(mask,),
        token_ids=tuple(range(10, 10 + len(mask))),
        action_mask=actions,
        logprobs=tuple(-1.0 if a else math.nan for a in actions),
        reward=reward,
        temperature=temperature,
    )


def test_rows_are_padded_on_the_right_off_the_mask() -> None:
    batch = TrajectoryBatch.from_trajectories(
        [trajectory(".a"), trajectory("..aa", temperature=0.5)]
    )
    assert batch.token_ids.tolist() == [[10, 11, 0, 0], [10, 11, 12, 13]]
    assert batch.action_mask.tolist() == [[False, True, False, False], [False, False, True, True]]
    assert batch.rollout_logprobs.isnan().tolist() == [
        [True, False, True, True],
        [True, True, False, False],
    ]
    assert batch.temperatures.tolist() == [1.0, 0.5]
    assert batch.lengths.tolist() == [2, 4]


def test_reward_stands_on_the_last_action_also_before_masked_tokens() -> None:
    batch = TrajectoryBatch.from_trajectories([trajectory(".aa..a..", reward=0.5)])
    assert batch.rewards.tolist() == [[0, 0, 0, 0, 0, 0.5, 0, 0]]


def test_select_is_cut_to_its_longest() -> None:
    batch = TrajectoryBatch.from_trajectories([trajectory(".a"), trajectory("..aa")])
    part = batch.select(torch.tensor([0]))
    assert part.token_ids.tolist() == [[10, 11]]
    assert part.rollout_logprobs.shape == part.rewards.shape == (1, 2)


@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=20),
    max_tokens=st.integers(1, 100),
)
def test_each_row_is_in_one_micro_batch_within_the_limit(
    lengths: list[int], max_tokens: int
) -> None:
    batch = TrajectoryBatch.from_trajectories([trajectory("." * (n - 1) + "a") for n in lengths])
    parts = batch.micro_batches(max_tokens)
    assert sorted(row for part in parts for row in part.tolist()) == list(range(len(lengths)))
    for part in parts:
        padded = len(part) * int(batch.lengths[part].max())
        assert padded <= max_tokens or len(part) == 1


def test_rows_of_like_length_stand_together() -> None:
    batch = TrajectoryBatch.from_trajectories([trajectory("." * n + "a") for n in (1, 9, 2, 8)])
    assert [part.tolist() for part in batch.micro_batches(20)] == [[1, 3], [2, 0]]


def test_one_more_pass_is_worth_its_cost_or_not() -> None:
    # 2 x 100 padded for 100 + 40 is 60 too many, less than a pass costs (64); 70 too many is more.
    assert partition([100, 40], 1000) == [2]
    assert partition([100, 30], 1000) == [1, 1]
    assert partition([100, 100, 30, 30], 1000) == [2, 2]
    assert partition([], 1000) == []


def test_padding_of_a_mix_of_lengths_is_under_15_percent() -> None:
    lengths = sorted((round(100 * (0.6 + 0.8 * i / 15)) for i in range(16)), reverse=True)
    sizes = partition(lengths, 2048)
    begins = [sum(sizes[:i]) for i in range(len(sizes))]
    padded = sum(size * lengths[begin] for size, begin in zip(sizes, begins, strict=True))
    assert 1 - sum(lengths) / padded < 0.15


def test_a_batch_cannot_be_edited() -> None:
    batch = TrajectoryBatch.from_trajectories([trajectory(".a")])
    with pytest.raises(AttributeError):
        batch.rewards = batch.rewards  # type: ignore[misc]


def test_rewards_of_an_episode_s_replies_stand_on_each_one_s_last_action() -> None:
    whole = replace(trajectory(".aa.aa"), reward=1.25, reward_at=((2, 0.25), (5, 1.0)))
    batch = TrajectoryBatch.from_trajectories([whole, trajectory(".a")])
    assert batch.rewards.tolist() == [[0, 0, 0.25, 0, 0, 1.0], [0, 1.0, 0, 0, 0, 0]]
