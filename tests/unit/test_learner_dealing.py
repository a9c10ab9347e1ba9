"""Who runs what: balanced by tokens, everything once, collectives in step."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from online_sao.learner.batch import TrajectoryBatch
from online_sao.learner.dealing import deal, micro_batches
from online_sao.learner.ranks import ALONE, Ranks
from online_sao.types import Trajectory


def batch_of(lengths: list[int]) -> TrajectoryBatch:
    trajectories = [
        Trajectory(
            (f"r{n}",), (1,) * n, (False,) + (True,) * (n - 1), (math.nan,) + (-1.0,) * (n - 1),
            1.0, 1.0,
        )
        for n in lengths
    ]  # fmt: skip
    return TrajectoryBatch.from_trajectories(trajectories)


def test_the_longest_goes_first_to_whoever_has_least() -> None:
    # 9 -> A, 7 -> B, 5 -> B (12), 4 -> A (13), 2 -> B (14).
    assert deal([4, 9, 2, 7, 5], 2) == [[1, 0], [3, 4, 2]]


@given(
    st.lists(st.integers(2, 40), min_size=1, max_size=20), st.integers(1, 5), st.integers(20, 90)
)
def test_every_row_counts_once_and_all_ranks_run_as_many(
    lengths: list[int], size: int, max_tokens: int
) -> None:
    batch = batch_of(lengths)
    hands = [micro_batches(batch, max_tokens, Ranks(rank, size)) for rank in range(size)]
    assert len({len(hand) for hand in hands}) == 1
    counted = [row for hand in hands for m in hand if m.counts for row in m.rows.tolist()]
    assert sorted(counted) == list(range(len(lengths)))
    assert all(len(m.rows) >= 1 for hand in hands for m in hand)


def test_alone_they_are_the_batch_s_own() -> None:
    batch = batch_of([4, 9, 2, 7, 5])
    own = micro_batches(batch, 18, ALONE)
    assert [m.rows.tolist() for m in own] == [r.tolist() for r in batch.micro_batches(18)]
    assert all(m.counts for m in own)


def test_company_counts_for_nothing() -> None:
    batch = batch_of([6])
    first, second = (micro_batches(batch, 18, Ranks(rank, 2))[0] for rank in (0, 1))
    share = torch.tensor([5.0])
    assert (first.counts, second.counts) == (True, False)
    assert first.denominators(share).tolist() == [5.0]
    assert second.denominators(share).tolist() == [math.inf]


@pytest.mark.parametrize("size", [2, 3])
def test_loads_differ_by_one_trajectory_at_most(size: int) -> None:
    lengths = [3 + 7 * i % 31 for i in range(40)]
    loads = [sum(lengths[row] for row in hand) for hand in deal(lengths, size)]
    assert max(loads) - min(loads) <= max(lengths)
