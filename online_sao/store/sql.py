"""The store on SQLite or PostgreSQL: each method is one transaction around one piece of work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Concatenate, ParamSpec

from sqlalchemy import Connection

from online_sao.store import (
    claims,
    episodes,
    judging,
    learning,
    leases,
    operation,
    policies,
    serving,
)
from online_sao.store.batches import ClaimRules
from online_sao.store.connect import T, connect
from online_sao.store.ledger import read_ledger
from online_sao.store.migrate import check_revision
from online_sao.types import (
    JSON,
    Alarm,
    Episode,
    EpisodeRewards,
    Feedback,
    FeedbackReceipt,
    Judgement,
    Ledger,
    NewVersion,
    PolicyVersion,
    RewardStats,
    Rollout,
    RolloutCompletion,
    RolloutRequest,
    RubricVersion,
    TokenTrace,
    Trajectory,
    Update,
    utc_now,
)

P = ParamSpec("P")


class SqlStore:
    """`Store` on a migrated database.

    `url`: `sqlite:///path` or `postgresql://...`. `clock` says what time it is for leases and
    waits, and stamps what the store itself writes. One instance belongs to one event loop.
    """

    def __init__(self, url: str, *, clock: Callable[[], datetime] = utc_now) -> None:
        self._database = connect(url)
        self._clock = clock

    async def open(self) -> None:
        """Connect; raises DatabaseRevisionError when the schema is not this code's."""
        await self._database.read(check_revision)

    async def aclose(self) -> None:
        """Finish what runs and close all connections."""
        await self._database.aclose()

    async def _read(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        return await self._database.read(lambda conn: work(conn, *args, **kwargs))

    async def _write(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        return await self._database.write(lambda conn: work(conn, *args, **kwargs))

    # -- serving ---------------------------------------------------------------------------

    async def insert_rollout(self, request: RolloutRequest) -> None:
        """State `in_flight`; VersionConflict if the id is taken.

        Raises UnknownRecord and EpisodeClosed for the episode it is to join.
        """
        await self._write(serving.insert_rollout, self._clock(), request)

    async def complete_rollout(self, completion: RolloutCompletion) -> None:
        """Record the end, once (VersionConflict the second time, UnknownRecord)."""
        await self._write(serving.complete_rollout, self._clock(), completion)

    async def fail_orphans(self, started_before: datetime, error: str) -> int:
        """What a dead process left in flight -> `failed`, its end recorded as now."""
        return await self._write(serving.fail_orphans, self._clock(), started_before, error)

    async def get_rollout(self, rollout_id: str) -> Rollout:
        """One rollout; once pruned, without words and token ids."""
        return await self._read(serving.get_rollout, rollout_id)

    async def add_feedback(self, feedback: Feedback) -> FeedbackReceipt:
        """Append, and have the rollout judged (again) where that can still matter.

        A client id belongs to the one reply: the same one on another reply is another feedback.
        """
        return await self._write(serving.add_feedback, feedback)

    async def list_feedback(self, rollout_id: str) -> list[Feedback]:
        """Oldest first."""
        return await self._read(serving.list_feedback, rollout_id)

    # -- episodes --------------------------------------------------------------------------

    async def open_episode(self, episode_id: str) -> Episode:
        """VersionConflict if the id is taken."""
        return await self._write(episodes.open_episode, self._clock(), episode_id)

    async def get_episode(self, episode_id: str) -> Episode:
        """Raises UnknownRecord."""
        return await self._read(episodes.get_episode, episode_id)

    async def close_episode(self, episode_id: str) -> Episode:
        """Again and again the same; raises UnknownRecord."""
        return await self._write(episodes.close_episode, self._clock(), episode_id)

    async def close_idle_episodes(self, idle_s: float) -> int:
        """In several transactions, so that serving never waits for one long one."""
        closed = 0
        while some := await self._write(episodes.close_idle, self._clock(), idle_s):
            closed += some
        return closed

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
        return await self._write(
            judging.put_rubric, self._clock(), name, judge, criteria, message, author, episodes
        )

    async def active_rubric(self) -> RubricVersion:
        """Raises UnknownRecord while there is none."""
        return await self._read(judging.active_rubric)

    async def claim_unjudged(
        self, owner: str, *, limit: int, lease_s: float
    ) -> list[tuple[Rollout, tuple[Feedback, ...]]]:
        """Oldest first; takes over what others' leases ran out on."""
        return await self._write(judging.claim_unjudged, self._clock(), owner, limit, lease_s)

    async def record_judgement(self, judgement: Judgement, owner: str) -> None:
        """Raises LeaseLost, UnknownRecord (rubric version), VersionConflict (id taken)."""
        await self._write(judging.record_judgement, self._clock(), judgement, owner)

    async def postpone_judgement(self, rollout_id: str, owner: str, until: datetime) -> None:
        """Raises LeaseLost."""
        await self._write(judging.postpone_judgement, self._clock(), rollout_id, owner, until)

    async def list_judgements(self, rollout_id: str) -> list[Judgement]:
        """Oldest first."""
        return await self._read(judging.list_judgements, rollout_id)

    async def reward_stats(self, since: datetime | None = None) -> RewardStats:
        """Each reply that was looked at counts once, with its latest score."""
        return await self._read(judging.reward_stats, since)

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
        """`size` trajectories, oldest first, or none; discards are kept either way."""
        rules = ClaimRules(size, max_lag, max_train_tokens, skip_cut)
        return await self._write(claims.claim_trajectories, self._clock(), owner, lease_s, rules)

    async def renew_lease(self, owner: str, lease_s: float) -> None:
        """Raises LeaseLost, until `owner` claims or releases, if anything was taken."""
        await self._write(leases.renew, self._clock(), owner, lease_s)

    async def release_leases(self, owner: str) -> int:
        """Back to where they were."""
        return await self._write(leases.release, owner)

    async def commit_update(
        self,
        owner: str,
        update: Update,
        new_version: NewVersion | None,
        traces: Sequence[TokenTrace] = (),
    ) -> Update:
        """On the disk when it returns.

        Raises LeaseLost (nothing changed), UnknownRecord (parent version), ValueError (an update
        that contradicts itself).
        """
        now = self._clock()
        return await self._database.write(
            lambda conn: learning.commit_update(conn, now, owner, update, new_version, traces),
            durable=True,
        )

    async def count_updates(self) -> int:
        """Of every kind."""
        return await self._read(learning.count_updates)

    async def list_updates(self, *, limit: int = 100) -> list[Update]:
        """Newest first."""
        return await self._read(learning.list_updates, limit)

    async def list_traces(self, rollout_id: str) -> list[TokenTrace]:
        """In float32; empty once pruned."""
        return await self._read(learning.list_traces, rollout_id)

    # -- policies --------------------------------------------------------------------------

    async def add_base_version(self, path: str, sha256: str) -> PolicyVersion:
        """Version 0; the one that is there already, if it is."""
        now = self._clock()
        return await self._database.write(
            lambda conn: policies.add_base_version(conn, now, path, sha256), durable=True
        )

    async def get_version(self, number: int) -> PolicyVersion:
        """Raises UnknownRecord."""
        return await self._read(policies.get_version, number)

    async def list_versions(self) -> list[PolicyVersion]:
        """Newest first."""
        return await self._read(policies.list_versions)

    async def newest_stable(self) -> PolicyVersion:
        """Highest number among stable, live and retired; UnknownRecord if there is none."""
        return await self._read(policies.newest_stable)

    async def live_version(self) -> PolicyVersion | None:
        """None before the first publication."""
        return await self._read(policies.live_version)

    async def mark_live(self, number: int, delivery: JSON) -> None:
        """Raises UnknownRecord, VersionConflict (withdrawn)."""
        await self._write(policies.mark_live, self._clock(), number, delivery)

    async def unpublished(self) -> int:
        """Stable versions newer than the live one."""
        return await self._read(policies.unpublished)

    # -- operation -------------------------------------------------------------------------

    async def ledger(self) -> Ledger:
        """Every state is counted, those with nothing in them as 0."""
        return await self._read(read_ledger)

    async def recover_leases(self) -> int:
        """Give back what dead workers held."""
        return await self._write(leases.recover, self._clock())

    async def prune_text(self, before: datetime) -> int:
        """In several transactions, so that serving never waits for one long one."""
        pruned = 0
        while some := await self._write(operation.prune_some, self._clock(), before):
            pruned += some
        return pruned

    async def get_note(self, key: str) -> JSON | None:
        """None if there is none."""
        return await self._read(operation.get_note, key)

    async def put_note(self, key: str, value: Mapping[str, Any]) -> None:
        """Replaces the one before."""
        await self._write(operation.put_note, self._clock(), key, value)

    async def raise_alarm(self, name: str, message: str) -> None:
        """The latest message stands; `since` is the first's."""
        await self._write(operation.raise_alarm, self._clock(), name, message)

    async def clear_alarm(self, name: str) -> None:
        """Nothing, if it is not open."""
        await self._write(operation.clear_alarm, name)

    async def alarms(self) -> list[Alarm]:
        """Oldest first."""
        return await self._read(operation.alarms)
