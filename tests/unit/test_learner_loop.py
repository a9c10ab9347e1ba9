"""The learner's loop on the store's and the trainer's doubles: exactly once, whatever fails."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from judged import judge_all, serve, serve_and_judge

from online_sao.config import Settings, load_settings
from online_sao.errors import DatabaseUnavailable, UpdateNotFinite
from online_sao.learner.loop import Learner
from online_sao.learner.scripted import ScriptedTrainer
from online_sao.manifest import Manifest
from online_sao.store.memory import MemoryStore
from online_sao.types import LedgerState, Update, UpdateKind, VersionState

BATCH = 4


def made(batch: int = BATCH, warmup: int = 0, **learner: Any) -> Settings:
    return load_settings(
        overrides={
            "learner": {"batch_size": batch, "lease_s": 5.0, **learner},
            "algorithm": {"value_warmup_updates": warmup},
        },
        environ={},
    )


class Room:
    """A store with version 0, and learners that come and go in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = MemoryStore()
        self.versions, self.states = root / "versions", root / "states"

    async def open(self) -> None:
        base = self.root / "base"
        ScriptedTrainer().export_policy(base)
        await self.store.add_base_version(str(base), Manifest.read(base).sha256)
        await self.store.mark_live(0, {})

    def learner(
        self, trainer: ScriptedTrainer | None = None, settings: Settings | None = None
    ) -> Learner:
        return Learner(
            self.store, trainer or ScriptedTrainer(), settings or made(),
            versions_dir=self.versions, state_dir=self.states, poll_s=0.01, backoff_s=0.01,
        )  # fmt: skip

    @contextlib.asynccontextmanager
    async def running(self, learner: Learner) -> AsyncIterator[None]:
        stop = asyncio.Event()
        task = asyncio.create_task(learner.run(stop))
        try:
            yield
        finally:
            stop.set()
            await asyncio.wait_for(task, 20)

    async def until(self, condition: Callable[[list[Update]], bool], what: str) -> list[Update]:
        for _ in range(1000):
            updates = await self.store.list_updates()
            if condition(updates):
                return updates
            await asyncio.sleep(0.01)
        raise AssertionError(f"never came: {what}")

    async def until_updates(self, count: int) -> list[Update]:
        return await self.until(lambda updates: len(updates) >= count, f"{count} updates")

    async def publish_all(self) -> None:
        newest = await self.store.newest_stable()
        await self.store.mark_live(newest.number, {})

    async def counts(self) -> dict[LedgerState, int]:
        book = await self.store.ledger()
        assert book.adds_up, book.problems
        return {state: n for state, n in book.counts.items() if n}

    def folders(self) -> list[str]:
        return sorted(f.name for f in self.versions.iterdir())


@pytest.fixture
async def room(tmp_path: Path) -> Room:
    made_room = Room(tmp_path)
    await made_room.open()
    return made_room


async def test_ten_judged_and_a_batch_of_eight_trains_eight_and_leaves_two(room: Room) -> None:
    ids = await serve_and_judge(room.store, 10)
    async with room.running(room.learner(settings=made(batch=8))):
        (update,) = await room.until_updates(1)
        await asyncio.sleep(0.05)
    assert await room.store.count_updates() == 1
    assert await room.counts() == {LedgerState.TRAINED: 8, LedgerState.JUDGED: 2}
    assert update.rollout_ids == tuple(ids[:8])
    assert update.version == 1
    assert len(await room.store.list_traces(ids[0])) == 1


async def test_a_merged_episode_is_one_of_a_batch_and_its_update_names_all_its_replies(
    room: Room,
) -> None:
    await room.store.open_episode("ep_1")
    first, second = [
        await serve(room.store, prompt=prompt, reply=(8, 9), episode_id="ep_1")
        for prompt in ((5, 6, 7), (5, 6, 7, 8, 9, 4))
    ]
    await room.store.close_episode("ep_1")
    await judge_all(room.store, 1, reward=1)
    (single,) = await serve_and_judge(room.store, 1, reward=0)
    async with room.running(room.learner(settings=made(batch=2))):
        (update,) = await room.until_updates(1)
    assert update.rollout_ids == (first, second, single)
    facts = [update.metrics[name] for name in ("trajectories", "rollouts", "tokens")]
    assert facts == [2.0, 3.0, 8.0]
    assert update.metrics["reward_mean"] == update.metrics["reward_mean_judged"] == 0.5
    assert await room.counts() == {LedgerState.TRAINED: 3}
    (trace,) = await room.store.list_traces(first)
    assert len(trace.values) == 4


async def test_nothing_judged_is_a_wait_that_a_clean_stop_ends(room: Room) -> None:
    async with room.running(room.learner()):
        await asyncio.sleep(0.1)
        note = await room.store.get_note("learner_heartbeat")
    assert note is not None
    assert note["state"] == "waiting"
    assert await room.store.count_updates() == 0
    after = await room.store.get_note("learner_heartbeat")
    assert after is not None
    assert after["state"] == "stopped"
    assert {"pid", "version", "updates", "time", "owner", "doing"} <= set(after)


async def test_every_reply_discarded_is_no_update(room: Room) -> None:
    await serve_and_judge(room.store, 6, reply=range(40))
    async with room.running(room.learner(settings=made(max_train_tokens=20))):
        await asyncio.sleep(0.1)
    assert await room.counts() == {LedgerState.DISCARDED: 6}
    assert await room.store.count_updates() == 0


async def test_warm_up_is_counted_over_restarts(room: Room) -> None:
    settings = made(warmup=3)
    await serve_and_judge(room.store, 5 * BATCH)
    async with room.running(room.learner(ScriptedTrainer(delays={"update": 0.02}), settings)):
        await room.until_updates(1)
    before = await room.store.count_updates()
    assert 1 <= before <= 3
    async with room.running(room.learner(settings=settings)):
        updates = await room.until_updates(5)
    kinds = [u.kind for u in reversed(updates)]
    assert kinds == [UpdateKind.CRITIC_ONLY] * 3 + [UpdateKind.POLICY] * 2
    assert "critic alone, 2 such batches to go" in updates[-1].note
    assert [u.version for u in reversed(updates)] == [None, None, None, 1, 2]
    assert (await room.counts())[LedgerState.CRITIC_ONLY] == 3 * BATCH


async def test_value_pretraining_comes_before_warm_up(room: Room) -> None:
    settings = load_settings(
        overrides={
            "learner": {"batch_size": BATCH},
            "algorithm": {"value_warmup_updates": 1, "value_pretrain_rollouts": BATCH + 1},
        },
        environ={},
    )
    await serve_and_judge(room.store, 4 * BATCH)
    async with room.running(room.learner(settings=settings)):
        updates = await room.until_updates(4)
    kinds = [u.kind.value for u in reversed(updates)]
    assert kinds == ["critic_only", "critic_only", "critic_only", "policy"]


async def test_without_a_critic_the_policy_moves_at_once(room: Room) -> None:
    overrides = {"learner": {"batch_size": BATCH}, "algorithm": {"variant": "running_mean"}}
    settings = load_settings(overrides=overrides, environ={})
    assert settings.algorithm.value_warmup_updates > 0  # it has nothing to warm up
    await serve_and_judge(room.store, BATCH)
    async with room.running(room.learner(settings=settings)):
        updates = await room.until_updates(1)
    assert [u.kind for u in updates] == [UpdateKind.POLICY]


async def test_paused_records_and_judges_and_learns_nothing(room: Room) -> None:
    await room.store.put_note("learner", {"paused": True})
    await serve_and_judge(room.store, BATCH)
    async with room.running(room.learner()):
        await asyncio.sleep(0.1)
        assert await room.counts() == {LedgerState.JUDGED: BATCH}
        note = await room.store.get_note("learner_heartbeat")
        assert note is not None
        assert note["state"] == "paused"
        await room.store.put_note("learner", {"paused": False})
        await room.until_updates(1)


async def test_learner_stops_two_versions_ahead_of_what_is_served(room: Room) -> None:
    await serve_and_judge(room.store, 4 * BATCH)
    async with room.running(room.learner()):
        await room.until_updates(2)
        await asyncio.sleep(0.1)
        assert await room.store.count_updates() == 2
        await room.publish_all()
        await room.until_updates(4)


async def test_reward_of_all_replies_judged_since_the_last_update(room: Room) -> None:
    await serve_and_judge(room.store, BATCH, reward=1)
    async with room.running(room.learner()):
        await room.until_updates(1)
        # 4 more with reward 0, 2 with reward 1: the mean over the 6 judged since.
        await serve_and_judge(room.store, 2, reward=1, version=0)
        await serve_and_judge(room.store, BATCH, reward=0, version=0)
        second = (await room.until_updates(2))[0]
    assert second.metrics["judged"] == pytest.approx(6)
    assert second.metrics["reward_mean_judged"] == pytest.approx(2 / 6)
    assert second.metrics["reward_mean"] == pytest.approx(0.5)  # 1, 1, 0, 0
    assert {"seconds_update", "seconds_export", "tokens", "lag_max"} <= set(second.metrics)


class Died(BaseException):
    """Not an Exception: the loop must not catch it, as it could not catch a kill."""


FAULTS: list[tuple[str, Exception]] = [
    ("update", RuntimeError("out of memory")),
    ("export", OSError(errno.ENOSPC, "No space left on device")),
    ("restore", RuntimeError("flaky disk")),
]


@pytest.mark.parametrize(("point", "fault"), FAULTS, ids=[p for p, _ in FAULTS])
async def test_a_fault_gives_the_replies_back_and_is_tried_again(
    room: Room, point: str, fault: Exception
) -> None:
    ids = await serve_and_judge(room.store, BATCH)
    trainer = ScriptedTrainer(faults={point: [fault, fault]})
    async with room.running(room.learner(trainer)):
        await room.until(lambda _: bool(room.store._alarms), "an alarm")
        (alarm,) = await room.store.alarms()
        assert alarm.name == "update_failed"
        assert "tried again" in alarm.message
        (update,) = await room.until_updates(1)
        await room.until(lambda _: not room.store._alarms, "the alarm is over")
    assert update.rollout_ids == tuple(ids)
    assert await room.counts() == {LedgerState.TRAINED: BATCH}
    assert len(room.folders()) == 1
    served = await room.store.newest_stable()
    Manifest.read(Path(served.path)).verify(Path(served.path))


async def test_a_full_disk_says_what_to_do_and_leaves_nothing_half_written(room: Room) -> None:
    await serve_and_judge(room.store, BATCH)
    full = OSError(errno.ENOSPC, "No space left on device")
    async with room.running(room.learner(ScriptedTrainer(faults={"export": [full] * 1000}))):
        await room.until(lambda _: bool(room.store._alarms), "an alarm")
        (alarm,) = await room.store.alarms()
    assert "No space left on device" in alarm.message
    assert "free disk space" in alarm.message
    assert room.folders() == []
    assert await room.counts() == {LedgerState.JUDGED: BATCH}
    assert await room.store.count_updates() == 0


async def test_a_state_that_cannot_be_written_is_an_alarm_and_learning_goes_on(room: Room) -> None:
    await serve_and_judge(room.store, 2 * BATCH)
    full = OSError(errno.ENOSPC, "No space left on device")
    async with room.running(room.learner(ScriptedTrainer(faults={"save": [full]}))):
        await room.until_updates(2)
    assert len(list(room.states.iterdir())) == 1
    assert await room.counts() == {LedgerState.TRAINED: 2 * BATCH}


async def test_nan_is_recorded_with_an_alarm_and_the_next_batch_learns(room: Room) -> None:
    ids = await serve_and_judge(room.store, 2 * BATCH)
    trainer = ScriptedTrainer(faults={"update": [UpdateNotFinite("gradient norm is nan")]})
    async with room.running(room.learner(trainer)):
        good, bad = (await room.until_updates(2))[:2]
    assert (bad.kind, bad.version) == (UpdateKind.NOT_FINITE, None)
    assert "gradient norm is nan" in bad.note
    assert bad.rollout_ids == tuple(ids[:BATCH])
    assert (good.kind, good.version) == (UpdateKind.POLICY, 1)
    assert await room.counts() == {LedgerState.TRAINED: BATCH, LedgerState.DISCARDED: BATCH}
    book = await room.store.ledger()
    assert book.reasons[LedgerState.DISCARDED] == {"not_finite": BATCH}


async def test_nan_alarm_stays_until_an_update_succeeds(room: Room) -> None:
    await serve_and_judge(room.store, BATCH)
    trainer = ScriptedTrainer(faults={"update": [UpdateNotFinite("loss is nan")]})
    async with room.running(room.learner(trainer)):
        await room.until_updates(1)
        assert [a.name for a in await room.store.alarms()] == ["update_not_finite"]
        await serve_and_judge(room.store, BATCH)
        await room.until_updates(2)
        await room.until(lambda _: not room.store._alarms, "the alarm is over")


KILLS = ("after the lease", "after the step", "while the version is written", "before the commit")


@pytest.mark.parametrize("moment", KILLS)
async def test_killed_at_any_moment_each_reply_is_trained_once_and_none_is_lost(
    room: Room, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    ids = await serve_and_judge(room.store, 2 * BATCH)
    trainer = ScriptedTrainer()
    learner = room.learner(trainer, made(lease_s=0.2))

    def die(*_: Any, **__: Any) -> Any:
        raise Died(moment)

    async def die_async(*_: Any, **__: Any) -> Any:
        raise Died(moment)

    if moment == "after the lease":
        monkeypatch.setattr(trainer, "update", die)
    elif moment == "after the step":
        monkeypatch.setattr(trainer, "export_policy", die)
    elif moment == "while the version is written":
        # Dead before the rename, with no chance to clean up.
        monkeypatch.setattr("online_sao.learner.checkpoints.publish_folder", die)
        monkeypatch.setattr("online_sao.learner.checkpoints.shutil.rmtree", lambda *_, **__: None)
    else:
        monkeypatch.setattr(room.store, "commit_update", die_async)
    with pytest.raises(Died):
        await learner.run(asyncio.Event())
    monkeypatch.undo()
    assert await room.counts() == {LedgerState.LEASED: BATCH, LedgerState.JUDGED: BATCH}
    left_behind = 1 if moment in KILLS[2:] else 0
    assert len(list(room.versions.glob("*")) if room.versions.exists() else []) == left_behind

    async with room.running(room.learner()):
        updates = await room.until_updates(2)
    trained = Counter(i for u in updates for i in u.rollout_ids)
    assert trained == Counter(ids)
    assert await room.counts() == {LedgerState.TRAINED: 2 * BATCH}
    known = {Path(v.path).name for v in await room.store.list_versions()} - {"base"}
    assert set(room.folders()) == known


async def test_killed_after_the_commit_the_next_learner_goes_on_from_the_new_version(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    await serve_and_judge(room.store, 3 * BATCH)
    learner = room.learner(settings=made(state_every=1))

    async def die_later(*_: Any) -> None:
        if await room.store.count_updates() == 2:
            raise Died

    save = learner._save_state

    async def save_or_die(updates: int) -> None:
        await die_later()
        await save(updates)

    monkeypatch.setattr(learner, "_save_state", save_or_die)
    with pytest.raises(Died):
        await learner.run(asyncio.Event())
    await room.publish_all()
    async with room.running(room.learner()):
        third = (await room.until_updates(3))[0]
    assert third.version == 3
    assert "restarted on version 2" in third.note
    assert "state that belongs to 1" in third.note
    newest = await room.store.newest_stable()
    assert newest.parent == 2


async def test_a_clean_stop_saves_the_state_and_the_restart_has_nothing_to_say(room: Room) -> None:
    await serve_and_judge(room.store, BATCH)
    async with room.running(room.learner(settings=made(state_every=50))):
        await room.until_updates(1)
    await serve_and_judge(room.store, BATCH, version=1)
    async with room.running(room.learner()):
        second = (await room.until_updates(2))[0]
    assert second.note == "restarted on version 1"


async def test_at_most_two_states_are_kept(room: Room) -> None:
    await serve_and_judge(room.store, 5 * BATCH)
    async with room.running(room.learner(settings=made(state_every=1))):
        for count in range(1, 6):
            await room.until_updates(count)
            await room.publish_all()
    assert sorted(f.name for f in room.states.iterdir()) == [
        "state-000000000004",
        "state-000000000005",
    ]


async def test_an_unreadable_state_falls_back_to_the_one_before(room: Room) -> None:
    await serve_and_judge(room.store, 2 * BATCH)
    async with room.running(room.learner(settings=made(state_every=1))):
        await room.until_updates(2)
    newest = max(room.states.iterdir())
    (newest / "state.json").write_text("{")
    await room.publish_all()
    await serve_and_judge(room.store, BATCH, version=2)
    async with room.running(room.learner()):
        third = (await room.until_updates(3))[0]
    assert "state that belongs to 1" in third.note


async def test_a_lost_lease_trains_nobody_twice_and_reloads(room: Room) -> None:
    ids = await serve_and_judge(room.store, BATCH)
    trainer = ScriptedTrainer(delays={"update": 0.2})
    async with room.running(room.learner(trainer)):
        await room.until(lambda _: bool(trainer.trained), "the update began")
        note = await room.store.get_note("learner_heartbeat")
        assert note is not None
        await room.store.release_leases(note["owner"])  # as if somebody had taken them over
        (update,) = await room.until_updates(1)
    assert update.rollout_ids == tuple(ids)
    assert update.version == 1
    assert len(room.folders()) == 1
    assert await room.store.alarms() == []


async def test_a_database_away_at_the_commit_is_tried_again(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    await serve_and_judge(room.store, BATCH)
    commit, failures = room.store.commit_update, [DatabaseUnavailable("down")] * 2

    async def flaky(*args: Any, **kwargs: Any) -> Update:
        if failures:
            raise failures.pop()
        return await commit(*args, **kwargs)

    monkeypatch.setattr(room.store, "commit_update", flaky)
    trainer = ScriptedTrainer()
    async with room.running(room.learner(trainer)):
        await room.until_updates(1)
    assert len(trainer.trained) == 1
    assert await room.counts() == {LedgerState.TRAINED: BATCH}


async def test_a_commit_that_succeeded_unseen_is_found_again(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    await serve_and_judge(room.store, BATCH)
    commit, lies = room.store.commit_update, [DatabaseUnavailable("connection lost")]

    async def unseen(*args: Any, **kwargs: Any) -> Update:
        done = await commit(*args, **kwargs)
        if lies:
            raise lies.pop()
        return done

    monkeypatch.setattr(room.store, "commit_update", unseen)
    async with room.running(room.learner()):
        await room.until_updates(1)
        await asyncio.sleep(0.1)
        await serve_and_judge(room.store, BATCH, version=1)
        updates = await room.until_updates(2)
    assert [u.version for u in updates] == [2, 1]
    assert len(room.folders()) == 2
    assert await room.counts() == {LedgerState.TRAINED: 2 * BATCH}


async def test_a_database_away_between_updates_is_no_alarm_and_no_reload(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = ScriptedTrainer()
    restores: list[Path] = []
    restore = trainer.restore

    def counted(policy: Path, state: Path | None) -> str:
        restores.append(policy)
        return restore(policy, state)

    monkeypatch.setattr(trainer, "restore", counted)
    claim, failures = room.store.claim_trajectories, [DatabaseUnavailable("locked")] * 3

    async def flaky(*args: Any, **kwargs: Any) -> Any:
        if failures:
            raise failures.pop()
        return await claim(*args, **kwargs)

    monkeypatch.setattr(room.store, "claim_trajectories", flaky)
    await serve_and_judge(room.store, BATCH)
    async with room.running(room.learner(trainer)):
        await room.until_updates(1)
    assert not failures
    assert len(restores) == 1
    assert await room.store.alarms() == []


async def test_the_lease_is_renewed_while_a_long_update_runs(room: Room) -> None:
    await serve_and_judge(room.store, BATCH)
    trainer = ScriptedTrainer(delays={"update": 0.5})
    async with room.running(room.learner(trainer, made(lease_s=0.15))):
        while not trainer.trained:
            await room.store.recover_leases()
            await asyncio.sleep(0.02)
        await room.until_updates(1)
    assert len(trainer.trained) == 1


async def test_the_store_is_answered_while_an_update_runs(room: Room) -> None:
    await serve_and_judge(room.store, BATCH)
    loop = asyncio.get_running_loop()
    async with room.running(room.learner(ScriptedTrainer(delays={"update": 0.5}))):
        slowest = 0.0
        while await room.store.count_updates() == 0:
            begin = loop.time()
            await asyncio.sleep(0)
            slowest = max(slowest, loop.time() - begin)
            await asyncio.sleep(0.01)
    assert slowest < 0.2


async def test_a_withdrawn_version_sends_the_learner_back_to_the_one_before(room: Room) -> None:
    await serve_and_judge(room.store, BATCH)
    async with room.running(room.learner()):
        await room.until_updates(1)
        one = room.store._versions[1]
        room.store._versions[1] = replace(one, state=VersionState.WITHDRAWN)
        await serve_and_judge(room.store, BATCH)
        second = (await room.until_updates(2))[0]
    newest = await room.store.newest_stable()
    assert (newest.number, newest.parent) == (2, 0)
    assert "moved to version 0" in second.note
