"""The processes that share one learner: who I am among them, and what they say to each other.

Started by torchrun, which tells each process its place in the environment. Rank 0 owns the store;
the others do what it does. Alone, everything here does nothing.

There are two process groups. Work has a time-out, so that a rank which meets no partner ends
instead of waiting for ever. Orders have none: an idle learner says nothing for hours.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

WORK_TIMEOUT = timedelta(minutes=15)
"""Longest wait for the other ranks within an update; also for their loading a model."""
_PATIENCE = timedelta(days=365)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process' place among `size`."""

    rank: int = 0
    size: int = 1
    orders: Any = None
    """The process group of orders."""

    @classmethod
    def join(cls, environ: Mapping[str, str] = os.environ) -> Ranks:
        """Meet the other processes, if torchrun started some; on CUDA, take this one's device."""
        size = int(environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if cuda else "gloo", timeout=WORK_TIMEOUT)
        orders = dist.new_group(backend="gloo", timeout=_PATIENCE)
        return cls(dist.get_rank(), size, orders)

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes."""
        return self.rank == 0

    def leave(self) -> None:
        """Say goodbye."""
        if self.size > 1:
            dist.destroy_process_group()

    def sum(self, *tensors: Tensor) -> None:
        """Each tensor becomes its sum over all ranks, in place."""
        if self.size > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def order(self, order: Any = None) -> Any:
        """What rank 0 says, on every rank (its own is given, the others wait)."""
        said = [order]
        if self.size > 1:
            dist.broadcast_object_list(said, group=self.orders)
        return said[0]

    def all_say(self, word: Any) -> list[Any]:
        """What each rank says, on every rank."""
        said = [word] * self.size
        if self.size > 1:
            dist.all_gather_object(said, word, group=self.orders)
        return said


ALONE = Ranks()
"""One process."""
