"""What a learner's claim makes a batch of, without a database.

A unit is claimed whole: a single reply, or the replies of one tool episode. A batch has exactly
`size` trajectories. An episode that would overfill it waits for the next one; where no single
replies are left to fill it, the batch takes the episode and is larger, so that an episode never
waits for ever. Oldest first, hence an episode of more than `size` trajectories comes to be a batch
by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from online_sao.store.states import discard_reason
from online_sao.types import DiscardReason, EpisodeRewards, LedgerState, Trajectory


@dataclass(frozen=True, slots=True)
class ClaimRules:
    """What a learner wants of a batch (the arguments of `Store.claim_trajectories`)."""

    size: int
    max_lag: int
    max_train_tokens: int
    skip_cut: bool

    def refuses(self, trajectory: Trajectory) -> DiscardReason | None:
        """Why the learner may not have it, or None."""
        return discard_reason(
            lag=trajectory.lag,
            tokens=len(trajectory.token_ids),
            cut=trajectory.cut,
            max_lag=self.max_lag,
            max_train_tokens=self.max_train_tokens,
            skip_cut=self.skip_cut,
        )


@dataclass(frozen=True, slots=True)
class Unit:
    """Rollouts that are claimed together or not at all, and the trajectories they are."""

    rollout_ids: tuple[str, ...]
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """Rollouts that are discarded together."""

    rollout_ids: tuple[str, ...]
    reason: DiscardReason


@dataclass(frozen=True, slots=True)
class Member:
    """A reply of an episode as a claim finds it."""

    rollout_id: str
    state: LedgerState
    trajectory: Trajectory | DiscardReason | None
    """Of a judged reply: its trajectory, or why it has none. None for all others."""


def single_unit(
    rollout_id: str, found: Trajectory | DiscardReason, rules: ClaimRules
) -> Unit | Refused:
    """A reply without an episode, as its record makes a trajectory or has a reason to make none."""
    ids = (rollout_id,)
    if not isinstance(found, Trajectory):
        return Refused(ids, found)
    reason = rules.refuses(found)
    return Unit(ids, (found,)) if reason is None else Refused(ids, reason)


def episode_unit(
    members: Sequence[Member], rewards: EpisodeRewards, rules: ClaimRules
) -> Unit | Refused:
    """A settled episode's replies (in their order) as a unit; one that is refused refuses all.

    A request that failed gave no reply, so it breaks no chain; a reply that may not be trained on
    does, where it stands between two that may.
    """
    judged = [m for m in members if m.state is LedgerState.JUDGED]
    ids = tuple(m.rollout_id for m in judged)
    for member in judged:
        if isinstance(member.trajectory, DiscardReason):
            return Refused(ids, member.trajectory)
    replies = [
        m.trajectory if isinstance(m.trajectory, Trajectory) else None
        for m in members
        if m.state is not LedgerState.FAILED
    ]
    trajectories = tuple(Trajectory.from_episode(replies, rewards))
    for trajectory in trajectories:
        reason = rules.refuses(trajectory)
        if reason is not None:
            return Refused(ids, reason)
    return Unit(ids, trajectories)


class Assembly:
    """A batch while units are offered to it, oldest first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._units: list[Unit] = []
        self._count = 0
        self._over: Unit | None = None

    @property
    def full(self) -> bool:
        """Whether nothing more is wanted."""
        return self._count >= self._size

    def offer(self, unit: Unit) -> None:
        """Take the unit if it fits, or if it comes first."""
        if self._count == 0 or self._count + len(unit.trajectories) <= self._size:
            self._units.append(unit)
            self._count += len(unit.trajectories)
        elif self._over is None:
            self._over = unit

    def batch(self) -> list[Unit]:
        """The units of a batch; none when too few were offered."""
        if self.full:
            return self._units
        return [*self._units, self._over] if self._over is not None else []
