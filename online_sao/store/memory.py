"""The store's double: one process, no database, nothing kept after it. For tests and trials.

It keeps the rules of `states.py` as the SQL store does, and the contract suite runs on both. No
method awaits anything, so each is one transaction by itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from online_sao.errors import EpisodeClosed, LeaseLost, UnknownRecord, VersionConflict
from online_sao.store.batches import Assembly, ClaimRules, Refused, Unit, single_unit
from online_sao.store.judging import same_rubric
from online_sao.store.learning import check_update
from online_sao.store.ledger import check_members
from online_sao.store.memory_entry import Entry, in_float32, prune, trajectory_of
from online_sao.store.memory_episodes import EpisodeEntry
from online_sao.store.rows import same_feedback
from online_sao.store.states import (
    BASE_VERSION,
    EPISODE_JUDGE,
    FINISHED,
    FOLLOWERS,
    LEARNABLE,
    LEASE_STATES,
    MEMBER_STATES,
    REWARDED,
    SERVABLE,
    WAITS_FOR_EPISODE,
    after_completion,
    after_judgement,
    after_lease,
    feedback_receipt,
    lineage,
)
from online_sao.types import (
    JSON,
    RUBRIC_PREFIX,
    Alarm,
    Episode,
    EpisodeRewards,
    Feedback,
    FeedbackReceipt,
    Judgement,
    JudgementState,
    Ledger,
    LedgerState,
    NewVersion,
    Outcome,
    PolicyVersion,
    RewardStats,
    Rollout,
    RolloutCompletion,
    RolloutRequest,
    RubricVersion,
    TokenTrace,
    Trajectory,
    Update,
    UpdateKind,
    VersionState,
    new_id,
    utc_now,
)


class MemoryStore:
    """`Store` in memory; `clock` as in `SqlStore`."""

    def __init__(self, *, clock: Callable[[], datetime] = utc_now) -> None:
        self._clock = clock
        self._requests = 0
        self._entries: dict[str, Entry] = {}
        self._episodes: dict[str, EpisodeEntry] = {}
        self._feedback: dict[str, list[Feedback]] = {}
        self._judgements: dict[str, list[Judgement]] = {}
        self._rubrics: list[RubricVersion] = []
        self._updates: list[Update] = []
        self._traces: dict[str, TokenTrace] = {}
        self._versions: dict[int, PolicyVersion] = {}
        self._losers: set[str] = set()
        self._notes: dict[str, str] = {}
        self._alarms: dict[str, Alarm] = {}

    async def open(self) -> None:
        """Nothing to connect to."""

    async def aclose(self) -> None:
        """Nothing to close."""

    # -- serving ---------------------------------------------------------------------------

    async def insert_rollout(self, request: RolloutRequest) -> None:
        """State `in_flight`; VersionConflict, or what forbids to join its episode."""
        if request.id in self._entries:
            raise VersionConflict(f"there is a rollout {request.id} already")
        entry = Entry(request)
        if request.episode_id is not None:
            episode = self._episode(request.episode_id)
            if episode.closed_at is not None:
                raise EpisodeClosed(f"the episode {request.episode_id[:64]} is closed")
            episode.entries.append(entry)
            episode.last_active_at = self._clock()
        self._entries[request.id] = entry
        self._requests += 1

    async def complete_rollout(self, completion: RolloutCompletion) -> None:
        """Record the end, once (VersionConflict the second time, UnknownRecord)."""
        entry = self._entry(completion.rollout_id)
        if entry.state is not LedgerState.IN_FLIGHT:
            raise VersionConflict(f"{completion.rollout_id} is complete already")
        entry.completion = completion
        state, reason = after_completion(completion)
        episode = self._episode_of(entry)
        if episode is not None and state is LedgerState.AWAITING_JUDGEMENT:
            reason = WAITS_FOR_EPISODE
        entry.move(state, reason)
        if episode is not None:
            episode.last_active_at = self._clock()
            episode.settle(self._active_rewards())

    async def fail_orphans(self, started_before: datetime, error: str) -> int:
        """What a dead process left in flight -> `failed`, its end recorded as now."""
        orphans = [
            e for e in self._in(LedgerState.IN_FLIGHT) if e.request.created_at < started_before
        ]
        for entry in orphans:
            await self.complete_rollout(
                RolloutCompletion(entry.request.id, self._clock(), Outcome.FAILED, error=error)
            )
        return len(orphans)

    async def get_rollout(self, rollout_id: str) -> Rollout:
        """One rollout; once pruned, without words and token ids."""
        return self._entry(rollout_id).rollout

    async def add_feedback(self, feedback: Feedback) -> FeedbackReceipt:
        """Append, and have the rollout judged (again) where that can still matter."""
        entry = self._entry(feedback.rollout_id)
        said = self._feedback.setdefault(feedback.rollout_id, [])
        for earlier in said:
            if feedback.client_id is not None and earlier.client_id == feedback.client_id:
                if same_feedback(earlier, feedback):
                    return FeedbackReceipt.DUPLICATE
                raise VersionConflict("this client id was used for other feedback")
        said.append(feedback)
        receipt = feedback_receipt(entry.state)
        episode = self._episode_of(entry)
        if episode is not None:
            episode.hear(feedback.rollout_id)
        elif entry.state in (LedgerState.AWAITING_JUDGEMENT, LedgerState.JUDGED):
            entry.move(LedgerState.AWAITING_JUDGEMENT)
        elif entry.state in LEASE_STATES:
            entry.feedback_came = True
        return receipt

    async def list_feedback(self, rollout_id: str) -> list[Feedback]:
        """Oldest first."""
        return sorted(self._feedback.get(rollout_id, []), key=lambda said: said.created_at)

    # -- episodes --------------------------------------------------------------------------

    async def open_episode(self, episode_id: str) -> Episode:
        """VersionConflict if the id is taken."""
        if episode_id in self._episodes:
            raise VersionConflict(f"there is an episode {episode_id} already")
        now = self._clock()
        self._episodes[episode_id] = EpisodeEntry(episode_id, now, now)
        return self._episodes[episode_id].record

    async def get_episode(self, episode_id: str) -> Episode:
        """Raises UnknownRecord."""
        return self._episode(episode_id).record

    async def close_episode(self, episode_id: str) -> Episode:
        """Again and again the same; raises UnknownRecord."""
        episode = self._episode(episode_id)
        if episode.closed_at is None:
            episode.closed_at = self._clock()
            episode.settle(self._active_rewards())
        return episode.record

    async def close_idle_episodes(self, idle_s: float) -> int:
        """None with a request in flight."""
        before = self._clock() - timedelta(seconds=idle_s)
        idle = [
            episode.id
            for episode in self._episodes.values()
            if episode.closed_at is None
            and episode.last_active_at <= before
            and not episode.members(LedgerState.IN_FLIGHT)
        ]
        for episode_id in idle:
            await self.close_episode(episode_id)
        return len(idle)

    # -- judging ---------------------------------------------------------------------------

    async def put_rubric(
        self,
        name: str,
        judge: str,
        criteria: JSON,
        *,
        message: str = "",
        author: str = "",
        episodes: EpisodeRewards = EpisodeRewards.ONE,
    ) -> RubricVersion:
        """Append and activate, unless the active version says the same."""
        criteria = json.loads(json.dumps(criteria))
        if self._rubrics:
            active = self._rubrics[-1]
            if same_rubric(active, name, judge, criteria, episodes):
                return active
        number = 1 + sum(rubric.name == name for rubric in self._rubrics)
        made = (new_id(RUBRIC_PREFIX), name, number, judge, criteria, self._clock())
        rubric = RubricVersion(*made, message, author, episodes)
        self._rubrics.append(rubric)
        return rubric

    async def active_rubric(self) -> RubricVersion:
        """Raises UnknownRecord while there is none."""
        if not self._rubrics:
            raise UnknownRecord("no rubric is active yet")
        return self._rubrics[-1]

    async def claim_unjudged(
        self, owner: str, *, limit: int, lease_s: float
    ) -> list[tuple[Rollout, tuple[Feedback, ...]]]:
        """Oldest first; takes over what others' leases ran out on."""
        now = self._clock()
        self._recover(now)
        self._losers.discard(owner)
        ready = [
            entry
            for entry in self._in(LedgerState.AWAITING_JUDGEMENT)
            if not entry.reason and (entry.not_before is None or entry.not_before <= now)
        ][:limit]
        for entry in ready:
            entry.lease(LedgerState.IN_JUDGEMENT, owner, now + timedelta(seconds=lease_s))
        return [(entry.rollout, self._heard(entry)) for entry in ready]

    async def record_judgement(self, judgement: Judgement, owner: str) -> None:
        """Raises LeaseLost, UnknownRecord (rubric version), VersionConflict (id taken)."""
        (entry,) = self._held([judgement.rollout_id], LedgerState.IN_JUDGEMENT, owner)
        if all(rubric.id != judgement.rubric_id for rubric in self._rubrics):
            raise UnknownRecord(f"there is no rubric version {judgement.rubric_id}")
        if any(judgement.id == j.id for told in self._judgements.values() for j in told):
            raise VersionConflict(f"there is a judgement {judgement.id} already")
        self._append_judgement(judgement)
        if judgement.state is JudgementState.SCORED:
            entry.judgement = judgement
        elif judgement.state is not JudgementState.ERROR:
            entry.judgement = None
        state, reason = after_judgement(judgement.state, judgement.reason, entry.feedback_came)
        episode = self._episode_of(entry)
        if episode is not None and state is LedgerState.JUDGED:
            reason = WAITS_FOR_EPISODE
        entry.move(state, reason)
        if episode is not None:
            episode.judged(judgement, state, self._append_judgement)

    async def postpone_judgement(self, rollout_id: str, owner: str, until: datetime) -> None:
        """Raises LeaseLost."""
        (entry,) = self._held([rollout_id], LedgerState.IN_JUDGEMENT, owner)
        not_before = None if entry.feedback_came else until
        entry.move(LedgerState.AWAITING_JUDGEMENT, not_before=not_before)

    async def list_judgements(self, rollout_id: str) -> list[Judgement]:
        """Oldest first."""
        return list(self._judgements.get(rollout_id, []))

    async def reward_stats(self, since: datetime | None = None) -> RewardStats:
        """Each reply that was looked at counts once, with its latest score."""
        rewards = [
            entry.judgement.reward
            for entry in self._entries.values()
            if entry.judgement is not None
            and entry.judgement.reward is not None
            and entry.judgement.judge != EPISODE_JUDGE
            and (since is None or entry.judgement.created_at > since)
        ]
        return RewardStats(len(rewards), sum(rewards) / len(rewards) if rewards else None)

    # -- learning --------------------------------------------------------------------------

    async def claim_trajectories(
        self,
        owner: str,
        *,
        size: int,
        lease_s: float,
        max_lag: int,
        max_train_tokens: int,
        skip_cut: bool,
    ) -> list[Trajectory]:
        """Exactly `size`, oldest first, or none; discards are kept either way."""
        now = self._clock()
        self._recover(now)
        self._losers.discard(owner)
        rules = ClaimRules(size, max_lag, max_train_tokens, skip_cut)
        assembly = Assembly(size)
        for entry in self._in(LedgerState.JUDGED):
            if assembly.full:
                break
            found = self._unit(entry, rules)
            if isinstance(found, Refused):
                for rollout_id in found.rollout_ids:
                    self._entries[rollout_id].move(LedgerState.DISCARDED, found.reason.value)
            elif found is not None:
                assembly.offer(found)
        units = assembly.batch()
        for rollout_id in (rollout_id for unit in units for rollout_id in unit.rollout_ids):
            deadline = now + timedelta(seconds=lease_s)
            self._entries[rollout_id].lease(LedgerState.LEASED, owner, deadline)
        return [trajectory for unit in units for trajectory in unit.trajectories]

    async def renew_lease(self, owner: str, lease_s: float) -> None:
        """Raises LeaseLost, until `owner` claims or releases, if anything was taken."""
        if owner in self._losers:
            raise LeaseLost(f"what {owner} held was given to others: its lease ran out")
        for entry in self._leased_by(owner):
            entry.deadline = self._clock() + timedelta(seconds=lease_s)

    async def release_leases(self, owner: str) -> int:
        """Back to where they were."""
        leased = self._leased_by(owner)
        for entry in leased:
            entry.move(after_lease(entry.state, entry.feedback_came))
        self._losers.discard(owner)
        return len(leased)

    async def commit_update(
        self,
        owner: str,
        update: Update,
        new_version: NewVersion | None,
        traces: Sequence[TokenTrace] = (),
    ) -> Update:
        """Raises LeaseLost (nothing changed), UnknownRecord (parent version), ValueError."""
        check_update(update, new_version, traces)
        entries = self._held(update.rollout_ids, LedgerState.LEASED, owner)
        if any(update.id == earlier.id for earlier in self._updates):
            raise VersionConflict(f"there is an update {update.id} already")
        number = None
        if new_version is not None:
            number = self._add_version(new_version).number
        committed = replace(
            update, version=number, metrics=json.loads(json.dumps(dict(update.metrics)))
        )
        self._updates.append(committed)
        for entry in entries:
            entry.move(*MEMBER_STATES[update.kind])
        for trace in traces:
            self._traces[trace.rollout_id] = in_float32(trace)
        return committed

    async def count_updates(self) -> int:
        """Of every kind."""
        return len(self._updates)

    async def list_updates(self, *, limit: int = 100) -> list[Update]:
        """Newest first."""
        return self._updates[::-1][:limit]

    async def list_traces(self, rollout_id: str) -> list[TokenTrace]:
        """In float32; empty once pruned."""
        trace = self._traces.get(rollout_id)
        return [] if trace is None else [trace]

    # -- policies --------------------------------------------------------------------------

    async def add_base_version(self, path: str, sha256: str) -> PolicyVersion:
        """Version 0; the one that is there already, if it is."""
        return self._versions.setdefault(
            BASE_VERSION,
            PolicyVersion(BASE_VERSION, None, path, sha256, VersionState.STABLE, self._clock()),
        )

    async def get_version(self, number: int) -> PolicyVersion:
        """Raises UnknownRecord."""
        if number not in self._versions:
            raise UnknownRecord(f"there is no policy version {number}")
        return self._versions[number]

    async def list_versions(self) -> list[PolicyVersion]:
        """Newest first."""
        return [self._versions[number] for number in sorted(self._versions, reverse=True)]

    async def newest_stable(self) -> PolicyVersion:
        """Highest number among stable, live and retired; UnknownRecord if there is none."""
        for version in await self.list_versions():
            if version.state in SERVABLE:
                return version
        raise UnknownRecord("there is no policy version that can be served")

    async def live_version(self) -> PolicyVersion | None:
        """None before the first publication."""
        live = [v for v in self._versions.values() if v.state is VersionState.LIVE]
        return live[0] if live else None

    async def mark_live(self, number: int, delivery: JSON) -> None:
        """Raises UnknownRecord, VersionConflict (withdrawn)."""
        version = await self.get_version(number)
        if version.state is VersionState.WITHDRAWN:
            raise VersionConflict(f"policy version {number} was withdrawn")
        for other in self._versions.values():
            if other.state is VersionState.LIVE:
                self._versions[other.number] = replace(other, state=VersionState.RETIRED)
            elif other.state is VersionState.STABLE and other.number < number:
                self._versions[other.number] = replace(other, state=VersionState.SUPERSEDED)
        self._versions[number] = replace(version, state=VersionState.LIVE)

    async def unpublished(self) -> int:
        """Stable versions newer than the live one."""
        live = await self.live_version()
        served = -1 if live is None else live.number
        return sum(
            v.state is VersionState.STABLE and v.number > served for v in self._versions.values()
        )

    # -- operation -------------------------------------------------------------------------

    async def ledger(self) -> Ledger:
        """Every state is counted, those with nothing in them as 0."""
        counts = dict.fromkeys(LedgerState, 0)
        reasons: dict[LedgerState, dict[str, int]] = {}
        for entry in self._entries.values():
            counts[entry.state] += 1
            if entry.reason:
                of_state = reasons.setdefault(entry.state, {})
                of_state[entry.reason] = of_state.get(entry.reason, 0) + 1
        problems = [
            *self._check_entries(counts),
            *self._check_episodes(),
            *check_members(self._members(), counts, reasons),
        ]
        return Ledger(self._requests, counts, reasons, tuple(problems))

    async def recover_leases(self) -> int:
        """Give back what dead workers held."""
        return self._recover(self._clock())

    async def prune_text(self, before: datetime) -> int:
        """Of finished rollouts alone."""
        old = [
            entry
            for entry in self._in(*FINISHED)
            if entry.request.created_at < before and not entry.pruned
        ]
        for entry in old:
            prune(entry)
            self._traces.pop(entry.request.id, None)
        return len(old)

    async def get_note(self, key: str) -> JSON | None:
        """None if there is none."""
        note = self._notes.get(key)
        return None if note is None else json.loads(note)

    async def put_note(self, key: str, value: Mapping[str, Any]) -> None:
        """Replaces the one before."""
        self._notes[key] = json.dumps(dict(value))

    async def raise_alarm(self, name: str, message: str) -> None:
        """The latest message stands; `since` is the first's."""
        alarm = self._alarms.get(name, Alarm(name, message, self._clock(), 0))
        self._alarms[name] = replace(alarm, message=message, count=alarm.count + 1)

    async def clear_alarm(self, name: str) -> None:
        """Nothing, if it is not open."""
        self._alarms.pop(name, None)

    async def alarms(self) -> list[Alarm]:
        """Oldest first."""
        return sorted(self._alarms.values(), key=lambda alarm: (alarm.since, alarm.name))

    # -- inside ----------------------------------------------------------------------------

    def _entry(self, rollout_id: str) -> Entry:
        if rollout_id not in self._entries:
            raise UnknownRecord(f"there is no rollout {rollout_id[:64]}")
        return self._entries[rollout_id]

    def _episode(self, episode_id: str) -> EpisodeEntry:
        if episode_id not in self._episodes:
            raise UnknownRecord(f"there is no episode {episode_id[:64]}")
        return self._episodes[episode_id]

    def _episode_of(self, entry: Entry) -> EpisodeEntry | None:
        episode_id = entry.request.episode_id
        return None if episode_id is None else self._episodes[episode_id]

    def _active_rewards(self) -> EpisodeRewards:
        return self._rubrics[-1].episodes if self._rubrics else EpisodeRewards.ONE

    def _append_judgement(self, judgement: Judgement) -> None:
        self._judgements.setdefault(judgement.rollout_id, []).append(judgement)

    def _heard(self, entry: Entry) -> tuple[Feedback, ...]:
        """What was said of the reply, or of all of the episode that it is judged for."""
        episode, ids = self._episode_of(entry), [entry.request.id]
        if episode is not None and episode.judged_id == entry.request.id:
            ids = [member.request.id for member in episode.entries]
        said = [feedback for rollout_id in ids for feedback in self._feedback.get(rollout_id, [])]
        return tuple(sorted(said, key=lambda feedback: feedback.created_at))

    def _unit(self, entry: Entry, rules: ClaimRules) -> Unit | Refused | None:
        """What a claim makes of a judged entry; None for an episode that is not ready, and for
        all of its entries but the one that stands for it."""
        steps, episode = self._lineage(), self._episode_of(entry)
        if episode is not None:
            return episode.unit(steps, rules) if episode.head_id == entry.request.id else None
        return single_unit(entry.request.id, trajectory_of(entry, steps), rules)

    def _in(self, *states: LedgerState) -> list[Entry]:
        """Entries in these states, oldest first."""
        return sorted(
            (entry for entry in self._entries.values() if entry.state in states),
            key=lambda entry: (entry.request.created_at, entry.request.id),
        )

    def _leased_by(self, owner: str) -> list[Entry]:
        return [entry for entry in self._in(*LEASE_STATES) if entry.owner == owner]

    def _held(self, ids: Iterable[str], state: LedgerState, owner: str) -> list[Entry]:
        now = self._clock()
        entries = [self._entries.get(rollout_id) for rollout_id in ids]
        held = [
            entry
            for entry in entries
            if entry is not None
            and entry.state is state
            and entry.owner == owner
            and entry.deadline is not None
            and entry.deadline > now
        ]
        if len(held) < len(entries):
            raise LeaseLost(f"{owner} no longer holds {len(entries) - len(held)} rollouts")
        return held

    def _recover(self, now: datetime) -> int:
        overdue = [
            entry
            for entry in self._in(*LEASE_STATES)
            if entry.deadline is not None and entry.deadline <= now
        ]
        for entry in overdue:
            if entry.owner is not None:
                self._losers.add(entry.owner)
            entry.move(after_lease(entry.state, entry.feedback_came))
        return len(overdue)

    def _lineage(self) -> dict[int, int]:
        servable = [v.number for v in self._versions.values() if v.state in SERVABLE]
        parents = {v.number: v.parent for v in self._versions.values()}
        return lineage(parents, max(servable, default=None))

    def _add_version(self, new: NewVersion) -> PolicyVersion:
        if new.parent not in self._versions:
            raise UnknownRecord(f"there is no policy version {new.parent} to descend from")
        number = max(self._versions) + 1
        self._versions[number] = PolicyVersion(
            number, new.parent, new.path, new.sha256, VersionState.STABLE, self._clock()
        )
        return self._versions[number]

    def _check_entries(self, counts: Mapping[LedgerState, int]) -> Iterable[str]:
        if sum(counts.values()) != self._requests:
            yield f"{self._requests} requests were counted, but {sum(counts.values())} stand"
        for entry in self._entries.values():
            if (entry.completion is None) != (entry.state is LedgerState.IN_FLIGHT):
                yield f"{entry.request.id} is {entry.state} and has the wrong end"
            if (entry.owner is not None) != (entry.state in LEASE_STATES):
                yield f"{entry.request.id} is {entry.state} and has the wrong lease"
            alone = entry.request.episode_id is None
            if alone and entry.state in FOLLOWERS and entry.reason == WAITS_FOR_EPISODE:
                yield f"{entry.request.id} waits for an episode and belongs to none"
            if entry.state in REWARDED and entry.judgement is None:
                yield f"{entry.request.id} is {entry.state} without a scored judgement"

    def _check_episodes(self) -> Iterable[str]:
        seen = {i: n for n, update in enumerate(self._updates) for i in update.rollout_ids}
        for episode in self._episodes.values():
            updates = {seen[e.request.id] for e in episode.entries if e.request.id in seen}
            if len(updates) > 1 or (updates and episode.members(*LEARNABLE)):
                yield f"{episode.id} was trained in part or by several updates"

    def _members(self) -> dict[tuple[UpdateKind, LedgerState, str], int]:
        members: dict[tuple[UpdateKind, LedgerState, str], int] = {}
        for update in self._updates:
            for rollout_id in update.rollout_ids:
                entry = self._entries[rollout_id]
                key = (update.kind, entry.state, entry.reason)
                members[key] = members.get(key, 0) + 1
        return members
