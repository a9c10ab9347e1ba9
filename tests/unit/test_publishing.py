"""Publishing: the newest version is served, proved; whatever fails, the old one serves on."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from judged import serve_and_judge

from online_sao import publishing
from online_sao.config import PublishingSettings
from online_sao.engines.client import HttpEngine
from online_sao.engines.scripted import ScriptedBackend, ScriptedEngine
from online_sao.engines.server import build_app
from online_sao.errors import (
    DatabaseUnavailable,
    EngineUnavailable,
    SwapFailed,
    WeightsNotDelivered,
)
from online_sao.interfaces import Engine
from online_sao.learner.scripted import ScriptedTrainer
from online_sao.manifest import Manifest
from online_sao.publishing import Publisher, pass_all
from online_sao.store.memory import MemoryStore
from online_sao.types import (
    UPDATE_PREFIX,
    Delivery,
    EngineStatus,
    NewVersion,
    PolicyVersion,
    Update,
    UpdateKind,
    VersionState,
    new_id,
    utc_now,
)


class Room:
    """A store with version 0, a scripted engine that serves it, and versions made by updates."""

    def __init__(self, root: Path, *, wire: bool = False, served: int = 0, keep: int = 4) -> None:
        self.root, self.versions = root, root / "versions"
        self.versions.mkdir()
        self.store = MemoryStore()
        self.engine: Engine
        if wire:
            self.backend = ScriptedBackend(version=served)
            transport = httpx.ASGITransport(build_app(self.backend))
            self.engine = HttpEngine("http://engine", transport=transport)
        else:
            engine = ScriptedEngine(version=served)
            self.engine, self.backend = engine, engine.backend
        self.settings = PublishingSettings(keep_versions=keep)
        self.publisher = self.make(pass_all)
        self._trainer = ScriptedTrainer()

    def make(self, gate: publishing.Gate) -> Publisher:
        return Publisher(
            self.store, self.engine, self.settings, versions_dir=self.versions, gate=gate
        )

    async def open(self, base: Path | None = None) -> None:
        base = base or self.root / "model"
        self._trainer.export_policy(base)
        await self.store.add_base_version(str(base), Manifest.read(base).sha256)

    async def learn(self, folder: Path | None = None) -> int:
        """One update of the policy; the number of the version it made."""
        await serve_and_judge(self.store, 1)
        (trajectory,) = await self.store.claim_trajectories(
            "learner", size=1, lease_s=60, max_lag=99, max_train_tokens=99, skip_cut=False
        )
        parent = (await self.store.newest_stable()).number
        result = self._trainer.update([trajectory], critic_only=False)
        folder = folder or self.versions / f"of-{parent}"
        self._trainer.export_policy(folder)
        update = await self.store.commit_update(
            "learner",
            Update(
                new_id(UPDATE_PREFIX), utc_now(), UpdateKind.POLICY, trajectory.rollout_ids,
                result.metrics,
            ),
            NewVersion(str(folder), Manifest.read(folder).sha256, parent),
        )  # fmt: skip
        assert update.version is not None
        return update.version

    async def states(self) -> dict[int, VersionState]:
        return {v.number: v.state for v in await self.store.list_versions()}

    async def served(self) -> int | None:
        return (await self.engine.status()).version

    async def live(self) -> int | None:
        version = await self.store.live_version()
        return None if version is None else version.number

    async def alarm_names(self) -> list[str]:
        return [alarm.name for alarm in await self.store.alarms()]


@pytest.fixture(params=[False, True], ids=["in process", "over the wire"])
async def room(tmp_path: Path, request: pytest.FixtureRequest) -> Room:
    room = Room(tmp_path, wire=request.param)
    await room.open()
    assert await room.publisher.publish_once() is None
    return room


async def until(condition: Callable[[], bool], limit_s: float = 10) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.01)


def with_folder(versions: list[PolicyVersion]) -> set[int]:
    return {version.number for version in versions if Path(version.path).exists()}


# -- what is served ------------------------------------------------------------------------------


async def test_engine_started_on_the_newest_version_is_written_down_and_nothing_is_loaded(
    room: Room,
) -> None:
    assert await room.live() == 0
    assert await room.store.get_note(publishing.SWAP_NOTE) is None


async def test_newer_version_becomes_live_and_the_old_one_retires(room: Room) -> None:
    assert await room.learn() == 1
    published = await room.publisher.publish_once()
    assert published is not None
    assert published.number == 1
    assert await room.states() == {0: VersionState.RETIRED, 1: VersionState.LIVE}
    assert await room.served() == 1
    assert room.backend.status()["sha256"] == published.sha256
    note = await room.store.get_note(publishing.SWAP_NOTE)
    assert note is not None
    assert (note["version"], note["sha256"]) == (1, published.sha256)
    assert await room.publisher.publish_once() is None  # and it stays so


async def test_versions_in_between_are_superseded_and_never_served(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[int] = []
    load = room.engine.load_version

    async def watched(version: PolicyVersion, fallback: PolicyVersion) -> Delivery:
        loaded.append(version.number)
        return await load(version, fallback)

    monkeypatch.setattr(room.engine, "load_version", watched)
    for _ in range(3):
        await room.learn()
    await room.publisher.publish_once()
    await room.publisher.publish_once()
    assert loaded == [3]
    assert await room.states() == {
        0: VersionState.RETIRED,
        1: VersionState.SUPERSEDED,
        2: VersionState.SUPERSEDED,
        3: VersionState.LIVE,
    }


async def test_engine_restarted_on_an_older_version_is_brought_back_to_the_live_one(
    tmp_path: Path,
) -> None:
    room = Room(tmp_path)
    await room.open()
    await room.learn()
    await room.publisher.publish_once()
    room.engine = ScriptedEngine(version=0)  # a new process, started on what was live before
    published = await room.make(pass_all).publish_once()
    assert published is not None
    assert published.number == await room.served() == await room.live() == 1


async def test_engine_that_serves_a_number_unknown_here_gets_the_newest_version(
    tmp_path: Path,
) -> None:
    room = Room(tmp_path, served=57)
    await room.open()
    await room.publisher.publish_once()
    assert await room.served() == await room.live() == 0


# -- what fails ----------------------------------------------------------------------------------


async def test_swap_answered_500_changes_nothing_and_its_retry_clears_the_alarm(
    room: Room,
) -> None:
    await room.learn()
    room.backend.faults.swap_error = True
    for attempt in (1, 2):
        with pytest.raises(SwapFailed):
            await room.publisher.publish_once()
        assert await room.states() == {0: VersionState.LIVE, 1: VersionState.STABLE}
        assert await room.served() == 0
        assert not (await room.engine.status()).paused
        (alarm,) = await room.store.alarms()
        assert (alarm.name, alarm.count) == ("swap_failed", attempt)
        assert "version 1" in alarm.message
    room.backend.faults.swap_error = False
    published = await room.publisher.publish_once()
    assert published is not None
    assert published.number == await room.served() == await room.live() == 1
    assert await room.store.alarms() == []


async def test_weights_that_silently_never_arrive_fail_loudly_within_one_swap(room: Room) -> None:
    await room.learn()
    room.backend.faults.swap_ignored = True  # the engine says yes to everything
    with pytest.raises(WeightsNotDelivered):
        await room.publisher.publish_once()
    assert await room.live() == await room.served() == 0
    assert await room.alarm_names() == ["swap_failed"]
    room.backend.faults.swap_ignored = False
    await room.publisher.publish_once()
    assert await room.served() == 1
    assert await room.alarm_names() == []


async def test_probe_tokens_off_by_more_than_the_tolerance_are_no_delivery(room: Room) -> None:
    await room.learn()
    room.backend.faults.probe_offset = -room.settings.probe_tolerance - 0.01
    with pytest.raises(WeightsNotDelivered, match="probe"):
        await room.publisher.publish_once()
    assert await room.served() == 0
    room.backend.faults.probe_offset = -room.settings.probe_tolerance + 0.01
    await room.publisher.publish_once()
    note = await room.store.get_note(publishing.SWAP_NOTE)
    assert note is not None
    assert note["probe_error"] == pytest.approx(0.34)


async def test_folder_whose_bytes_changed_is_not_served(room: Room) -> None:
    number = await room.learn()
    version = await room.store.get_version(number)
    weights = Path(version.path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\1")
    with pytest.raises(SwapFailed):
        await room.publisher.publish_once()
    assert await room.served() == await room.live() == 0


async def test_alarm_of_a_swap_that_was_not_written_down_is_cleared_once_it_is(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    await room.learn()
    room.backend.faults.swap_error = True
    with pytest.raises(SwapFailed):
        await room.publisher.publish_once()
    room.backend.faults.swap_error = False
    mark_live, calls = room.store.mark_live, [DatabaseUnavailable("the disk is away")]

    async def away_once(number: int, delivery: object) -> None:
        if calls:
            raise calls.pop()
        await mark_live(number, {})

    monkeypatch.setattr(room.store, "mark_live", away_once)
    with pytest.raises(DatabaseUnavailable):
        await room.publisher.publish_once()
    assert (await room.served(), await room.live()) == (1, 0)  # delivered, not written down
    assert await room.publisher.publish_once() is None
    assert await room.live() == 1
    assert await room.alarm_names() == []


async def test_alarm_left_by_an_earlier_life_is_cleared_when_all_is_well(room: Room) -> None:
    await room.store.raise_alarm(publishing.SWAP_ALARM, "from before the restart")
    await room.make(pass_all).publish_once()
    assert await room.alarm_names() == []


# -- the gate ------------------------------------------------------------------------------------


async def test_gate_that_refuses_keeps_the_live_version(room: Room) -> None:
    await room.learn()
    await room.publisher.publish_once()
    await room.learn()
    looked_at: list[int] = []

    async def gate(version: PolicyVersion) -> str:
        looked_at.append(version.number)
        return "worse than its parent" if version.number == 2 else ""

    gated = room.make(gate)
    assert await gated.publish_once() is None
    assert looked_at == [2]
    assert await room.served() == await room.live() == 1
    assert (await room.states())[2] is VersionState.STABLE
    await room.learn()
    published = await gated.publish_once()
    assert published is not None
    assert published.number == 3
    assert (await room.states())[2] is VersionState.SUPERSEDED


async def test_gate_that_refuses_the_first_version_leaves_the_base_serving(tmp_path: Path) -> None:
    room = Room(tmp_path)
    await room.open()
    await room.learn()

    async def refuse(version: PolicyVersion) -> str:
        return "no"

    await room.make(refuse).publish_once()
    assert await room.served() == await room.live() == 0


# -- old folders ---------------------------------------------------------------------------------


async def test_prune_keeps_the_base_the_live_the_unpublished_and_the_newest_versions(
    tmp_path: Path,
) -> None:
    room = Room(tmp_path, keep=2)
    await room.open(room.versions / "base")
    for _ in range(3):
        await room.learn()
    await room.publisher.publish_once()  # 3 is live, 1 and 2 are superseded
    for _ in range(4):
        await room.learn()  # 4 to 7 are stable; 6 and 7 are the newest two
    strange = room.versions / "not-ours"
    strange.mkdir()
    assert await room.publisher.prune() == [1, 2]
    assert with_folder(await room.store.list_versions()) == {0, 3, 4, 5, 6, 7}
    assert strange.exists()
    assert await room.publisher.prune() == []
    await room.publisher.publish_once()  # 7 is live, 3 retired, 4 to 6 superseded
    assert await room.publisher.prune() == [3, 4, 5]
    assert with_folder(await room.store.list_versions()) == {
        0,
        6,
        7,
    }  # 6 never served, but is one of the newest two


async def test_prune_deletes_no_folder_outside_the_versions_folder(tmp_path: Path) -> None:
    room = Room(tmp_path, keep=2)
    await room.open()
    elsewhere = tmp_path / "elsewhere" / "of-0"
    await room.learn(elsewhere)
    await room.learn(room.versions / "nested" / "of-1")
    for _ in range(3):
        await room.learn()
    await room.publisher.publish_once()
    assert await room.publisher.prune() == [3]
    assert (elsewhere / "manifest.json").exists()
    assert (room.versions / "nested" / "of-1" / "manifest.json").exists()


# -- the loop ------------------------------------------------------------------------------------


async def test_loop_survives_an_engine_and_a_database_that_are_away_for_a_while(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    await room.learn()
    monkeypatch.setattr(publishing, "POLL_S", 0.01)
    status, newest = room.engine.status, room.store.newest_stable
    engine_errors: list[Exception] = [EngineUnavailable("starting")]
    store_errors: list[Exception] = [DatabaseUnavailable("locked")]

    async def engine_away_once() -> object:
        if engine_errors:
            raise engine_errors.pop()
        return await status()

    async def database_away_once() -> PolicyVersion:
        if store_errors:
            raise store_errors.pop()
        return await newest()

    monkeypatch.setattr(room.engine, "status", engine_away_once)
    monkeypatch.setattr(room.store, "newest_stable", database_away_once)
    stop = asyncio.Event()
    task = asyncio.create_task(room.publisher.run(stop))
    await until(lambda: room.backend.status()["version"] == 1)
    stop.set()
    await asyncio.wait_for(task, 5)
    assert engine_errors == store_errors == []
    assert await room.live() == 1


async def test_loop_resumes_an_engine_that_a_dead_controller_left_paused(room: Room) -> None:
    await room.backend.pause()
    stop = asyncio.Event()
    task = asyncio.create_task(room.publisher.run(stop))
    await until(lambda: not room.backend.status()["paused"])
    stop.set()
    await asyncio.wait_for(task, 5)


async def test_loop_recovers_again_after_the_engine_was_away(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "POLL_S", 0.01)
    status, calls = room.engine.status, 0

    async def away_at_the_third_call() -> EngineStatus:
        nonlocal calls
        calls += 1
        if calls == 3:
            await room.backend.pause()  # on the right version, so that nothing is loaded
            raise EngineUnavailable("away")
        return await status()

    monkeypatch.setattr(room.engine, "status", away_at_the_third_call)
    stop = asyncio.Event()
    task = asyncio.create_task(room.publisher.run(stop))
    await until(lambda: calls >= 4 and not room.backend.status()["paused"])
    stop.set()
    await asyncio.wait_for(task, 5)


async def test_failures_are_retried_at_growing_pauses_up_to_the_longest(
    room: Room, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(publishing, "POLL_S", 0.01)
    monkeypatch.setattr(publishing, "LONGEST_BACKOFF_S", 0.04)
    room.backend.faults.unavailable = True

    async def away() -> object:
        raise EngineUnavailable("gone")

    monkeypatch.setattr(room.engine, "recover", away)
    stop = asyncio.Event()
    task = asyncio.create_task(room.publisher.run(stop))
    await until(lambda: len(caplog.messages) >= 4)
    stop.set()
    await asyncio.wait_for(task, 5)
    pauses = [record.args[0] for record in caplog.records[:4] if isinstance(record.args, tuple)]
    assert pauses == [0.02, 0.04, 0.04, 0.04]


def test_publishing_loads_neither_a_learner_nor_torch() -> None:
    code = """
import sys
import online_sao.publishing
loaded = {name for name in sys.modules if name.startswith("online_sao.learner")}
loaded |= {"torch", "transformers", "safetensors", "numpy", "vllm"} & set(sys.modules)
print(sorted(loaded))
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout == "[]\n"
