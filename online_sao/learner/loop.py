"""The learner's loop: claim judged trajectories, one SAO update, write the version, commit.

    recover -> claim -> update -> write version -> commit -> (now and then) save state -> claim ...

A trajectory is trained by one update or by none: it is leased while the trainer works, and one
transaction checks the lease, marks it trained and makes the version's row. Whatever fails, the
leased trajectories go back and the trainer goes back to the last committed policy. No torch here.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

from online_sao.config import Settings
from online_sao.errors import (
    DatabaseUnavailable,
    LearnerError,
    LeaseLost,
    ModelError,
    StoreError,
    UpdateNotFinite,
)
from online_sao.interfaces import Store, Trainer
from online_sao.learner.checkpoints import StateFolders, VersionFolders
from online_sao.learner.facts import batch_facts
from online_sao.learner.heartbeat import Heartbeat, sleep
from online_sao.types import (
    UPDATE_PREFIX,
    LedgerState,
    NewVersion,
    TokenTrace,
    TrainingResult,
    Trajectory,
    Update,
    UpdateKind,
    new_id,
    new_uuid7,
    utc_now,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
Metrics = dict[str, float | None]

MAX_UNPUBLISHED = 2
"""The learner stops this many versions ahead of what is served."""
STATE_SHARE = 0.1
"""Writing full states may cost this share of the time."""
PAUSE_NOTE = "learner"
FAILED_ALARM = "update_failed"
NOT_FINITE_ALARM = "update_not_finite"
STATE_ALARM = "learner_state_not_written"
LONGEST_BACKOFF_S = 60.0
DATABASE_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class _Position:
    """Where the trainer stands in the database's history."""

    version: int
    """The policy version its weights are."""
    updates: int
    """Updates ever committed."""
    critic_only_left: int
    """Batches that train the critic alone before the policy first moves."""
    last_update_at: datetime | None
    note: str
    """What the next update's record should tell an operator."""

    def after(self, update: Update) -> _Position:
        """Where it stands once `update` is committed."""
        return _Position(
            version=self.version if update.version is None else update.version,
            updates=self.updates + 1,
            critic_only_left=self.critic_only_left - (update.kind is UpdateKind.CRITIC_ONLY),
            last_update_at=update.created_at,
            note="",
        )


class Learner:
    """Everything of the learner's process but the trainer. Use `run`."""

    def __init__(
        self,
        store: Store,
        trainer: Trainer,
        settings: Settings,
        *,
        versions_dir: Path,
        state_dir: Path,
        poll_s: float = 0.5,
        backoff_s: float = 1.0,
    ) -> None:
        """`poll_s`: pause when there is nothing to do; `backoff_s`: after a first failure."""
        self._store = store
        self._trainer = trainer
        self._algorithm = settings.algorithm
        self._settings = settings.learner
        self._versions = VersionFolders(versions_dir)
        self._states = StateFolders(state_dir)
        self._owner = f"learner:{new_uuid7()}"
        self._poll_s = poll_s
        self._backoff_s = backoff_s
        self._heart = Heartbeat(store, self._owner)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")
        self._position: _Position | None = None
        self._clean = False
        self._saved_at = -1
        self._save_cost_s = 0.0
        self._since_save_s = math.inf

    async def run(self, stop: asyncio.Event) -> None:
        """Learn until `stop`; then finish the update in hand, save the state, end."""
        pause = self._backoff_s
        with self._thread:
            async with self._heart.beating():
                while not stop.is_set():
                    try:
                        rest = 0.0 if await self.turn() else self._poll_s
                        pause = self._backoff_s
                    # The learner's boundary: whatever an update raises, its replies go back.
                    except Exception as error:  # noqa: BLE001
                        await self._give_back(error)
                        rest, pause = pause, min(pause * 2, LONGEST_BACKOFF_S)
                    await sleep(stop, rest)
                if self._position is not None:
                    await self._save_state(self._position.updates)
            await self._heart.say("stopped")
        logger.info("action=learner_stopped")

    async def turn(self) -> bool:
        """One turn of the loop; False when there was nothing to do."""
        newest = await self._store.newest_stable()
        if self._position is None or self._position.version != newest.number:
            await self._recover()
            return True
        reason = await self._reason_to_wait()
        if reason:
            await self._heart.say("paused" if reason == "paused" else "waiting", reason)
            return False
        trajectories = await self._claim()
        if not trajectories:
            await self._heart.say("waiting", "too few judged replies for a batch")
            return False
        await self._learn(trajectories, self._position)
        return True

    # -- one update ------------------------------------------------------------------------

    async def _claim(self) -> list[Trajectory]:
        return await self._store.claim_trajectories(
            self._owner,
            size=self._settings.batch_size,
            lease_s=self._settings.lease_s,
            max_lag=self._settings.max_lag,
            max_train_tokens=self._settings.max_train_tokens,
            skip_cut=self._algorithm.cut_replies == "skip",
        )

    async def _learn(self, trajectories: Sequence[Trajectory], at: _Position) -> None:
        """Update, write the version, commit: all of it counts or none."""
        begin = time.monotonic()
        replies = sum(len(t.rollout_ids) for t in trajectories)
        await self._heart.say("learning", f"an update on {replies} replies")
        self._position = None  # unless all of it counts
        async with self._lease_kept():
            result = await self._update(trajectories, critic_only=at.critic_only_left > 0)
            updated = time.monotonic()
            version = await self._write_version(result, at)
            seconds: Metrics = {
                "seconds_update": updated - begin,
                "seconds_export": time.monotonic() - updated,
            }
            update = await self._describe(trajectories, result, at, seconds)
            committed = await self._commit(update, version, result.traces)
        self._position = at.after(committed)
        self._heart.version, self._heart.updates = self._position.version, self._position.updates
        logger.info(
            "action=update_committed kind=%s version=%s replies=%d reward_mean=%s seconds=%.1f",
            committed.kind, committed.version, replies,
            update.metrics["reward_mean"], updated - begin,
        )  # fmt: skip
        await self._clear(FAILED_ALARM)
        if committed.kind is not UpdateKind.NOT_FINITE:
            await self._clear(NOT_FINITE_ALARM)
        self._since_save_s += time.monotonic() - begin
        await self._save_state_if_due(self._position.updates)

    async def _update(
        self, trajectories: Sequence[Trajectory], *, critic_only: bool
    ) -> TrainingResult:
        """The trainer's update; one that met NaN or inf changed nothing, and is recorded."""
        try:
            return await self._work(
                partial(self._trainer.update, trajectories, critic_only=critic_only)
            )
        except UpdateNotFinite as error:
            await self._alarm(NOT_FINITE_ALARM, f"an update was dropped: {error}")
            facts = batch_facts(trajectories)
            return TrainingResult(UpdateKind.NOT_FINITE, facts, note=str(error))

    async def _write_version(self, result: TrainingResult, at: _Position) -> NewVersion | None:
        """The new policy, whole on disk; None where its bytes did not change."""
        if result.kind is not UpdateKind.POLICY:
            return None
        await self._heart.say("learning", "writing the new version")
        write = self._versions.write
        return await self._work(partial(write, self._trainer.export_policy, at.version))

    async def _describe(
        self,
        trajectories: Sequence[Trajectory],
        result: TrainingResult,
        at: _Position,
        seconds: Metrics,
    ) -> Update:
        """The update's record: the trainer's metrics, and what the store knows besides."""
        now = utc_now()
        judged = await self._patiently(partial(self._store.reward_stats, at.last_update_at))
        notes = [at.note, result.note]
        if result.kind is UpdateKind.CRITIC_ONLY:
            notes.append(f"critic alone, {at.critic_only_left - 1} such batches to go")
        return Update(
            id=new_id(UPDATE_PREFIX),
            created_at=now,
            kind=result.kind,
            rollout_ids=tuple(i for t in trajectories for i in t.rollout_ids),
            metrics={
                **result.metrics,
                **seconds,
                "reward_mean_judged": judged.mean,
                "judged": float(judged.count),
                **await self._patiently(self._discarded),
            },
            note="; ".join(note for note in notes if note),
        )

    async def _commit(
        self, update: Update, version: NewVersion | None, traces: Sequence[TokenTrace]
    ) -> Update:
        """One transaction. With the lease lost nothing is committed, and the version goes."""
        commit = partial(self._store.commit_update, self._owner, update, version, traces)
        try:
            return await self._patiently(commit)
        except LeaseLost:
            if version is not None:
                await self._remove_unless_known(version)
            raise

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Try again while the database is away. A commit that succeeded unseen finds its lease
        gone the next time: LeaseLost, and recovery finds the update's row.
        """
        for attempt in range(1, DATABASE_ATTEMPTS):
            try:
                return await call()
            except DatabaseUnavailable as error:
                logger.warning("action=database_retried attempt=%d error=%s", attempt, error)
                await asyncio.sleep(self._backoff_s * attempt)
        return await call()

    async def _remove_unless_known(self, version: NewVersion) -> None:
        known = {v.path for v in await self._store.list_versions()}
        if version.path not in known:
            await asyncio.to_thread(self._versions.remove, version)

    async def _discarded(self) -> Metrics:
        """Judged replies that were never trained on, so far, by reason."""
        reasons = (await self._store.ledger()).reasons.get(LedgerState.DISCARDED, {})
        return {f"discarded_{reason}": float(count) for reason, count in reasons.items()}

    # -- state -----------------------------------------------------------------------------

    async def _save_state_if_due(self, updates: int) -> None:
        """Every `state_every` updates, or as often as costs under a tenth of the time."""
        every = self._settings.state_every
        if every > 0:
            due = updates - self._saved_at >= every
        else:
            due = self._save_cost_s <= STATE_SHARE * self._since_save_s
        if due:
            await self._save_state(updates)

    async def _save_state(self, updates: int) -> None:
        """Write the trainer's full state; a failure is an alarm, and the older states remain."""
        if updates == self._saved_at:
            return
        await self._heart.say("learning", "saving its state")
        begin = time.monotonic()
        try:
            await self._work(partial(self._states.write, self._trainer.save_state, updates))
        except LearnerError as error:
            logger.error("action=state_not_written error=%s", error)
            await self._alarm(STATE_ALARM, str(error))
            return
        finally:
            self._save_cost_s, self._since_save_s = time.monotonic() - begin, 0.0
        self._saved_at = updates
        logger.info("action=state_saved updates=%d seconds=%.2f", updates, self._save_cost_s)
        await self._clear(STATE_ALARM)

    # -- recovery --------------------------------------------------------------------------

    async def _recover(self) -> None:
        """Newest stable policy, newest learner state, no leftovers of a life before this one."""
        await self._heart.say("starting", "loading the newest policy")
        at_start, self._clean = not self._clean, True
        failed = self._position is None
        if at_start:
            await self._clean_up()
        newest = await self._store.newest_stable()
        updates = await self._store.count_updates()
        latest = await self._store.list_updates(limit=1)
        note = await self._restore(Path(newest.path), updates)
        if updates > 0:
            why = "restarted on" if at_start else "reloaded" if failed else "moved to"
            note = "; ".join(n for n in (f"{why} version {newest.number}", note) if n)
        self._position = _Position(
            version=newest.number,
            updates=updates,
            critic_only_left=await self._critic_only_left(newest.number),
            last_update_at=latest[0].created_at if latest else None,
            note=note,
        )
        self._saved_at = -1
        self._heart.version, self._heart.updates = newest.number, updates
        logger.info(
            "action=learner_restored version=%d updates=%d note=%r", newest.number, updates, note
        )

    async def _clean_up(self) -> None:
        """What a learner before this one left: its leases, and folders without a row. Once, at
        the start, when no commit of ours can be under way.
        """
        await self._release_leases(await self._heart.previous_owner())
        known = {v.path for v in await self._store.list_versions()}
        removed = await asyncio.to_thread(self._versions.remove_orphans, known)
        removed += await asyncio.to_thread(self._states.remove_drafts)
        if removed:
            logger.info("action=orphans_removed folders=%s", removed)

    async def _restore(self, policy: Path, updates: int) -> str:
        """The trainer on `policy` with the newest state that can be read."""
        for state in await asyncio.to_thread(self._states.newest_first, updates):
            try:
                return await self._work(partial(self._trainer.restore, policy, state))
            except ModelError as error:
                logger.warning("action=state_unreadable state=%s error=%s", state.name, error)
        return await self._work(partial(self._trainer.restore, policy, None))

    async def _critic_only_left(self, version: int) -> int:
        """Batches of value pretraining and warm-up still to come, counted over all restarts.

        A version above 0 exists only when they are over.
        """
        pretraining = math.ceil(self._algorithm.value_pretrain_rollouts / self._settings.batch_size)
        planned = pretraining + self._algorithm.value_warmup_updates
        if version > 0 or planned == 0 or not self._algorithm.has_critic:
            return 0
        count = await self._store.count_updates()
        done = sum(
            update.kind is UpdateKind.CRITIC_ONLY
            for update in await self._store.list_updates(limit=max(1, count))
        )
        return max(0, planned - done)

    async def _give_back(self, error: Exception) -> None:
        """After a failure: the trajectories go back. Where an update had begun, the trainer is
        restored before the next.
        """
        if isinstance(error, LeaseLost):
            logger.warning("action=lease_lost error=%s", error)
        elif isinstance(error, DatabaseUnavailable):
            logger.warning("action=database_away error=%s", error)
        else:
            known = isinstance(error, LearnerError | ModelError | StoreError)
            logger.error("action=update_failed error=%s", error, exc_info=not known)
            name = str(error) or type(error).__name__
            await self._alarm(FAILED_ALARM, f"{name}; its replies went back, it is tried again")
        await self._release_leases(self._owner)
        await self._heart.say("backing_off", str(error))

    async def _release_leases(self, owner: str | None) -> None:
        try:
            if owner is not None and await self._store.release_leases(owner):
                logger.info("action=leases_released owner=%s", owner)
        except StoreError as error:  # they run out by themselves
            logger.warning("action=leases_not_released error=%s", error)

    async def _alarm(self, name: str, message: str) -> None:
        try:
            await self._store.raise_alarm(name, message)
        except StoreError as error:
            logger.error("action=alarm_not_stored alarm=%s error=%s", name, error)

    async def _clear(self, name: str) -> None:
        try:
            await self._store.clear_alarm(name)
        except StoreError as error:
            logger.warning("action=alarm_not_cleared alarm=%s error=%s", name, error)

    # -- helpers ---------------------------------------------------------------------------

    async def _reason_to_wait(self) -> str:
        if ((await self._store.get_note(PAUSE_NOTE)) or {}).get("paused"):
            return "paused"
        if await self._store.unpublished() >= MAX_UNPUBLISHED:
            return f"{MAX_UNPUBLISHED} versions are not served yet"
        return ""

    async def _work(self, work: Callable[[], T]) -> T:
        """Run the trainer's blocking work in its one thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    @asynccontextmanager
    async def _lease_kept(self) -> AsyncIterator[None]:
        """Renew the lease while the block runs; a lease that is lost shows at the commit."""
        done = asyncio.Event()
        renewing = asyncio.create_task(self._renew(done))
        try:
            yield
        finally:
            done.set()
            await renewing

    async def _renew(self, done: asyncio.Event) -> None:
        while not await sleep(done, self._settings.lease_s / 3):
            try:
                await self._store.renew_lease(self._owner, self._settings.lease_s)
            except LeaseLost:
                return
            except DatabaseUnavailable as error:
                logger.warning("action=lease_not_renewed error=%s", error)
