"""What the store's double keeps of one tool episode, and what its end does to its replies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from online_sao.store.batches import ClaimRules, Member, Refused, Unit, episode_unit
from online_sao.store.memory_entry import Entry, trajectory_of
from online_sao.store.states import (
    FOLLOWERS,
    LEASE_STATES,
    WAITS_FOR_EPISODE,
    is_settled,
    passed_on,
    to_judge,
)
from online_sao.types import Episode, EpisodeRewards, Judgement, LedgerState

Record = Callable[[Judgement], None]


@dataclass(slots=True)
class EpisodeEntry:
    """An episode and its replies' entries."""

    id: str
    created_at: datetime
    last_active_at: datetime
    closed_at: datetime | None = None
    rewards: EpisodeRewards | None = None
    judged_id: str | None = None
    head_id: str | None = None
    entries: list[Entry] = field(default_factory=list)

    @property
    def record(self) -> Episode:
        """The record."""
        counts: dict[LedgerState, int] = {}
        for entry in self.entries:
            counts[entry.state] = counts.get(entry.state, 0) + 1
        return Episode(
            self.id, self.created_at, self.last_active_at, self.closed_at, self.rewards, counts
        )

    def members(self, *states: LedgerState) -> list[Entry]:
        """Its entries in these states (in any, if none is named), oldest first."""
        return sorted(
            (entry for entry in self.entries if not states or entry.state in states),
            key=lambda entry: (entry.request.created_at, entry.request.id),
        )

    def settle(self, active: EpisodeRewards) -> None:
        """What the end, or a verdict on a reply, sets going. `active`: what the rubric says."""
        if self.closed_at is None or self.members(LedgerState.IN_FLIGHT):
            return
        if self.rewards is None:
            self.rewards = active
            waiting = {e.request.id: e for e in self.members(LedgerState.AWAITING_JUDGEMENT)}
            chosen, self.judged_id = to_judge(list(waiting), active)
            for rollout_id in chosen:
                waiting[rollout_id].move(LedgerState.AWAITING_JUDGEMENT)
        elif is_settled([entry.state for entry in self.entries]):
            for entry in self.members(LedgerState.JUDGED):
                entry.move(LedgerState.JUDGED)
                self.head_id = entry.request.id

    def judged(self, judgement: Judgement, state: LedgerState, record: Record) -> None:
        """A verdict moved a reply to `state`; one on the whole episode is passed on."""
        if state is LedgerState.AWAITING_JUDGEMENT:
            return
        if self.judged_id == judgement.rollout_id:
            for entry in self.members(*FOLLOWERS):
                if entry.request.id != judgement.rollout_id:
                    own = passed_on(judgement, entry.request.id)
                    record(own)
                    entry.judgement = own if own.reward is not None else None
                    entry.move(state, WAITS_FOR_EPISODE)
        self.settle(EpisodeRewards.ONE)

    def hear(self, rollout_id: str) -> None:
        """Feedback came on a reply: have it, or the episode, judged (again)."""
        if self.rewards is None:
            return
        target_id = self.judged_id or rollout_id
        target = next(e for e in self.entries if e.request.id == target_id)
        if target.state in LEASE_STATES:
            target.feedback_came = True
        elif target.state in FOLLOWERS:
            target.move(LedgerState.AWAITING_JUDGEMENT)
            each = self.judged_id is None
            to = LedgerState.JUDGED if each else LedgerState.AWAITING_JUDGEMENT
            for entry in self.members(LedgerState.JUDGED):
                entry.move(to, WAITS_FOR_EPISODE)

    def unit(self, steps: Mapping[int, int], rules: ClaimRules) -> Unit | Refused | None:
        """Its judged replies as a claim takes them; None while some of it is unsettled."""
        states = [entry.state for entry in self.entries]
        if not is_settled(states) or LedgerState.LEASED in states:
            return None
        members = [
            Member(
                entry.request.id,
                entry.state,
                trajectory_of(entry, steps) if entry.state is LedgerState.JUDGED else None,
            )
            for entry in self.members()
        ]
        return episode_unit(members, self.rewards or EpisodeRewards.ONE, rules)
