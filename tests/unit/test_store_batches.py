"""What a claim makes a batch of."""

from __future__ import annotations

import math

import pytest

from online_sao.store.batches import Assembly, ClaimRules, Member, Refused, Unit, episode_unit
from online_sao.types import DiscardReason, EpisodeRewards, LedgerState, Trajectory

RULES = ClaimRules(size=4, max_lag=8, max_train_tokens=100, skip_cut=False)
JUDGED = LedgerState.JUDGED


def reply(name: str, prompt: int, lag: int = 0) -> Trajectory:
    """Two tokens after a prompt of so many; ids count up from 0."""
    mask = (False,) * prompt + (True, True)
    logprobs = (math.nan,) * prompt + (-1.0, -1.0)
    return Trajectory((name,), tuple(range(prompt + 2)), mask, logprobs, 1.0, 1.0, lag)


def unit(name: str, trajectories: int = 1) -> Unit:
    return Unit((name,), tuple(reply(name, 1) for _ in range(trajectories)))


@pytest.mark.parametrize(
    ("sizes", "batch"),
    [
        ([1, 1, 1], []),
        ([1, 1, 1, 1, 1], [0, 1, 2, 3]),
        ([2, 1, 1], [0, 1, 2]),
        ([3, 2, 1], [0, 2]),  # the second waits: something later fills the batch
        ([3, 2], [0, 1]),  # nothing does: it goes over
        ([3, 2, 3], [0, 1]),  # by the older one
        ([6, 1], [0]),  # larger than a batch, and first
        ([1, 6, 1, 1, 1], [0, 2, 3, 4]),
        ([], []),
    ],
)
def test_a_batch_is_exact_unless_only_an_episode_can_fill_it(
    sizes: list[int], batch: list[int]
) -> None:
    assembly = Assembly(4)
    for number, size in enumerate(sizes):
        if not assembly.full:
            assembly.offer(unit(str(number), size))
    assert [int(each.rollout_ids[0]) for each in assembly.batch()] == batch


def test_what_refuses_one_reply_refuses_all() -> None:
    members = [
        Member("a", JUDGED, reply("a", 1)),
        Member("b", JUDGED, DiscardReason.STALE),
        Member("c", LedgerState.NOT_TRAINABLE, None),
    ]
    refused = episode_unit(members, EpisodeRewards.ONE, RULES)
    assert refused == Refused(("a", "b"), DiscardReason.STALE)


def test_the_merged_sequence_is_what_may_be_too_long() -> None:
    members = [Member("a", JUDGED, reply("a", 48)), Member("b", JUDGED, reply("b", 98))]
    whole = episode_unit(members, EpisodeRewards.ONE, RULES)
    assert isinstance(whole, Unit)
    assert [len(t.token_ids) for t in whole.trajectories] == [100]
    members.append(Member("c", JUDGED, reply("c", 100)))
    refused = episode_unit(members, EpisodeRewards.ONE, RULES)
    assert refused == Refused(("a", "b", "c"), DiscardReason.TOO_LONG)
