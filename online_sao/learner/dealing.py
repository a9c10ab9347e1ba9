"""Which trajectories a rank runs, and in which micro-batches.

Every rank knows the whole batch and deals it the same way. Collectives must meet, so all ranks run
the same number of micro-batches: who has fewer runs one of its own again and makes it count for
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from online_sao.learner.batch import TrajectoryBatch
from online_sao.learner.ranks import Ranks


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Trajectories that one forward pass runs."""

    rows: Tensor
    """(M,) of the batch."""
    counts: bool
    """False for one that is run to keep the others company."""

    def denominators(self, share: Tensor) -> Tensor:
        """(M,) of the whole batch's (B,): infinite where it must not count."""
        own = share[self.rows]
        return own if self.counts else torch.full_like(own, torch.inf)


def micro_batches(batch: TrajectoryBatch, max_tokens: int, ranks: Ranks) -> list[MicroBatch]:
    """This rank's micro-batches, of at most `max_tokens` padded tokens each."""
    hands = deal(batch.lengths.tolist(), ranks.size)
    groups = [batch.micro_batches(max_tokens, hand) for hand in hands]
    own = [MicroBatch(rows, counts=True) for rows in groups[ranks.rank]]
    company = own[-1].rows if own else batch.micro_batches(max_tokens)[-1][:1]
    missing = max(map(len, groups)) - len(own)
    return own + [MicroBatch(company, counts=False)] * missing


def deal(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Rows of each rank: the longest first, each to whoever has the fewest tokens so far."""
    hands: list[list[int]] = [[] for _ in range(size)]
    load = [0] * size
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        rank = load.index(min(load))
        hands[rank].append(row)
        load[rank] += lengths[row]
    return hands
