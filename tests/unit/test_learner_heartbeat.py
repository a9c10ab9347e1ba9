"""What the learner tells of itself."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from online_sao.errors import DatabaseUnavailable
from online_sao.learner.heartbeat import NOTE, Heartbeat
from online_sao.store.memory import MemoryStore


async def told(store: MemoryStore) -> dict[str, Any]:
    note = await store.get_note(NOTE)
    assert note is not None
    return dict(note)


async def test_it_tells_at_once_and_whenever_something_changes() -> None:
    store = MemoryStore()
    heart = Heartbeat(store, "learner:1")
    async with heart.beating():
        assert (await told(store))["state"] == "starting"
        heart.version, heart.updates = 4, 9
        await heart.say("learning", "an update on 16 replies")
        note = await told(store)
    assert (note["state"], note["doing"]) == ("learning", "an update on 16 replies")
    assert (note["version"], note["updates"], note["owner"]) == (4, 9, "learner:1")
    assert note["pid"] == os.getpid()


async def test_it_is_fresh_while_a_long_work_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("online_sao.learner.heartbeat.EVERY_S", 0.01)
    store = MemoryStore()
    heart = Heartbeat(store, "learner:1")
    async with heart.beating():
        first = (await told(store))["time"]
        for _ in range(200):
            if (await told(store))["time"] > first:
                break
            await asyncio.sleep(0.01)
    assert (await told(store))["time"] > first


async def test_the_owner_before_is_told_once() -> None:
    store = MemoryStore()
    await store.put_note(NOTE, {"owner": "learner:dead"})
    heart = Heartbeat(store, "learner:2")
    async with heart.beating():
        assert await heart.previous_owner() == "learner:dead"
        assert await heart.previous_owner() is None
    assert (await told(store))["owner"] == "learner:2"


async def test_a_database_that_is_away_does_not_stop_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()

    async def away(*_: Any) -> None:
        raise DatabaseUnavailable("down")

    monkeypatch.setattr(store, "put_note", away)
    monkeypatch.setattr(store, "get_note", away)
    heart = Heartbeat(store, "learner:1")
    async with heart.beating():
        await heart.say("waiting")
        assert await heart.previous_owner() is None
