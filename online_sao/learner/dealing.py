"""Which trajectories a rank runs, and in which micro-batches.

Every rank knows the whole batch and deals it the same way. Collectives must meet, so all ranks run
the same number of micro-batches: who has one fewer runs one of its own again and makes it count
for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from online_sao.learner.batch import TrajectoryBatch
from online_sao.learner.ranks import Ranks

SHARDED_PASS_COST = 256
"""What one more pass of all ranks costs each of them, in tokens: it gathers every layer again."""


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
    if ranks.size == 1:
        return [MicroBatch(rows, counts=True) for rows in batch.micro_batches(max_tokens)]
    groups = deal(batch.lengths.tolist(), max_tokens, ranks.size)
    device = batch.lengths.device
    own = [torch.tensor(group, device=device) for group in groups[ranks.rank :: ranks.size]]
    found = [MicroBatch(rows, counts=True) for rows in own]
    passes = -(-len(groups) // ranks.size)
    company = own[-1] if own else torch.tensor(groups[-1][:1], device=device)
    return found + [MicroBatch(company, counts=False)] * (passes - len(found))


def deal(lengths: Sequence[int], max_tokens: int, size: int) -> list[list[int]]:
    """Groups of rows of like length, the i-th for rank i modulo `size`, all of about one cost.

    The fewest passes that `max_tokens` allows, or more where less padding pays for them.
    """
    rows = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    ordered = [lengths[row] for row in rows]
    best: tuple[float, list[int]] | None = None
    for passes in range(1, len(lengths) + 1):
        largest, sizes = _even(ordered, passes * size)
        if largest > max(max_tokens, ordered[0]):
            continue
        cost = passes * (largest + SHARDED_PASS_COST)
        if best is not None and cost >= best[0]:
            break
        best = (cost, sizes)
    assert best is not None, "a group of one row is always allowed"
    dealt = iter(rows)
    return [list(islice(dealt, count)) for count in best[1]]


def _even(ordered: Sequence[int], groups: int) -> tuple[int, list[int]]:
    """At most `groups` consecutive groups whose largest padded cost is the least: it, and sizes."""
    low, high = ordered[0], ordered[0] * len(ordered)
    while low < high:
        limit = (low + high) // 2
        if len(_filled(ordered, limit)) <= groups:
            high = limit
        else:
            low = limit + 1
    return low, _filled(ordered, low)


def _filled(ordered: Sequence[int], limit: int) -> list[int]:
    """Sizes of groups that each take what `limit` padded tokens hold, longest rows first."""
    sizes: list[int] = []
    done = 0
    while done < len(ordered):
        sizes.append(min(limit // ordered[done], len(ordered) - done))
        done += sizes[-1]
    return sizes
