"""Who runs what: balanced by padded tokens, everything once, collectives in step."""

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


def test_few_long_rows_for_one_and_many_short_ones_for_the_other() -> None:
    # 9 + 7 padded is 18, three of 5 is 15; any other cut has a costlier half.
    assert deal([4, 9, 2, 7, 5], 100, 2) == [[1, 3], [4, 0, 2]]


def test_more_passes_where_one_does_not_hold_it() -> None:
    # One pass of two ranks would need 18 padded tokens of one of them.
    assert deal([4, 9, 2, 7, 5], 17, 2) == [[1], [3], [4], [0, 2]]


def test_more_passes_where_padding_costs_more() -> None:
    # In one pass a rank must take all three long rows: 3000 + 256. In two: 2 x (1000 + 256).
    assert deal([1000, 1000, 1000, 10, 10], 100_000, 2) == [[0], [1], [2], [3, 4]]


@given(
    st.lists(st.integers(2, 40), min_size=1, max_size=20), st.integers(2, 5), st.integers(20, 90)
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
    for m in (m for hand in hands for m in hand):
        longest = int(batch.lengths[m.rows].max())
        assert len(m.rows) * longest <= max(max_tokens, max(lengths))


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


def test_a_mix_of_lengths_on_two_ranks_in_one_pass_is_padded_by_a_sixth() -> None:
    """7 rows of up to 140 and 9 of up to 103; a second pass would cost more than it saves."""
    lengths = [round(100 * (0.6 + 0.8 * i / 15)) for i in range(16)]
    groups = deal(lengths, 2048, 2)
    padded = sum(len(group) * max(lengths[row] for row in group) for group in groups)
    assert len(groups) == 2
    assert padded == 7 * 140 + 9 * 103
    assert 1 - sum(lengths) / padded == pytest.approx(0.161, abs=1e-3)
