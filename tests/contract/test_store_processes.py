"""Several processes on one database: writers, a learner, and its death at any moment."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from asyncio import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from store_world import World, thumb

from online_sao.store.sql import SqlStore
from online_sao.types import LedgerState, utc_now

S = LedgerState
WORKER = Path(__file__).with_name("store_worker.py")


@asynccontextmanager
async def learner(url: str, batch: int = 4) -> AsyncIterator[asyncio.subprocess.Process]:
    """A learner's process, killed at the end."""
    pipe = subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", str(WORKER), url, str(batch), stdout=pipe, stderr=pipe
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        assert await process.stdout.readline() == b"ready\n"
        yield process
        assert process.returncode is None, (await process.stderr.read()).decode()
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ledger_shows(store: SqlStore, want: Callable[[Mapping[LedgerState, int]], bool]) -> None:
    """Wait for other processes to get there."""
    async with asyncio.timeout(120):
        for _ in count():
            if want((await store.ledger()).counts):
                return
            await asyncio.sleep(0.05)


async def chat(world: World, store: SqlStore, until: float) -> int:
    """Requests, replies, now and then a thumb; how many."""
    n = 0
    while time.monotonic() < until:
        request = world.request(created_at=utc_now())
        await store.insert_rollout(request)
        await asyncio.sleep(random.uniform(0, 0.1))
        completion = world.completion(request.id, completed_at=utc_now())
        await store.complete_rollout(completion)
        if n % 5 == 0:
            await store.add_feedback(thumb(request.id, created_at=utc_now()))
        n += 1
    return n


async def judge(world: World, store: SqlStore, until: float) -> None:
    """Judge all that comes, and what is left in the end."""
    while True:
        over = time.monotonic() >= until + 0.5
        claimed = await store.claim_unjudged("judge", limit=32, lease_s=60)
        for rollout, _ in claimed:
            judgement = replace(await world.judgement(rollout.id), created_at=utc_now())
            await store.record_judgement(judgement, "judge")
        if over and not claimed:
            return
        await asyncio.sleep(0.005)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=pytest.mark.slow)])
async def test_twenty_writers_a_judge_and_a_learner_never_meet_a_locked_database(
    sql_world: World, seconds: int
) -> None:
    world = sql_world
    assert world.url is not None
    await world.store.add_base_version("base", "00")
    await world.rubric_id()
    store = SqlStore(world.url)  # with the true time
    async with learner(world.url, batch=16):
        until = time.monotonic() + seconds
        *chats, _ = await asyncio.gather(
            *(chat(world, store, until) for _ in range(20)), judge(world, store, until)
        )
        requests = sum(chat_count for chat_count in chats if chat_count is not None)
        await ledger_shows(store, lambda counts: counts[S.JUDGED] < 16)
        ledger = await store.ledger()
    await store.aclose()
    assert ledger.problems == ()
    assert ledger.requests == requests > 50 * seconds
    assert sum(ledger.counts[state] for state in (S.TRAINED, S.LEASED, S.JUDGED)) == requests


@pytest.mark.parametrize("kills", [4, pytest.param(40, marks=pytest.mark.slow)])
async def test_a_learner_killed_at_any_moment_trains_nothing_twice_and_loses_nothing(
    sql_world: World, kills: int
) -> None:
    world = sql_world
    assert world.url is not None
    await world.store.add_base_version("base", "00")
    ids: list[str] = []
    store = SqlStore(world.url)
    for _ in range(kills):
        ids += await world.judged(16)
        async with learner(world.url):
            await asyncio.sleep(random.uniform(0, 0.08))
        assert (await store.ledger()).problems == ()
    async with learner(world.url):
        await ledger_shows(store, lambda counts: counts[S.TRAINED] == len(ids))
    updates = await store.list_updates(limit=10**6)
    trained = Counter(rollout_id for update in updates for rollout_id in update.rollout_ids)
    versions = await store.list_versions()
    ledger = await store.ledger()
    await store.aclose()
    assert trained == Counter(ids)
    assert [version.number for version in versions] == list(range(len(ids) // 4, -1, -1))
    assert ledger.problems == ()
    assert {state: n for state, n in ledger.counts.items() if n} == {S.TRAINED: len(ids)}
