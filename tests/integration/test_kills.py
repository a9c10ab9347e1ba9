"""Kill -9 under traffic: chat goes on, nothing is lost, nothing is trained twice."""

import asyncio
import os
import signal
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from harness import SCRIPTED, Traffic, children, ledger, status, wait_for

from online_sao.running import RunningService


@asynccontextmanager
async def under_traffic(service: RunningService) -> AsyncIterator[Traffic]:
    traffic, stop = Traffic(service), asyncio.Event()
    running = asyncio.create_task(traffic.run(stop))
    yield traffic
    stop.set()
    await running


def updates_committed(data: Path) -> int:
    with sqlite3.connect(f"file:{data / 'online-sao.db'}?mode=ro", uri=True) as database:
        return int(database.execute("SELECT count(*) FROM updates").fetchone()[0])


def trained_more_than_once(data: Path) -> list[str]:
    with sqlite3.connect(f"file:{data / 'online-sao.db'}?mode=ro", uri=True) as database:
        rows = database.execute(
            "SELECT rollout_id FROM update_members GROUP BY rollout_id HAVING count(*) > 1"
        )
        return [row[0] for row in rows]


async def test_learner_killed_three_times_under_traffic(
    service: RunningService, data: Path
) -> None:
    async with under_traffic(service) as traffic:
        for kill in range(3):
            before = updates_committed(data)
            await asyncio.to_thread(
                wait_for, lambda b=before: updates_committed(data) > b, f"update before kill {kill}"
            )
            for learner in children(service.pid, "learn"):
                os.kill(learner.pid, signal.SIGKILL)
        before = updates_committed(data)
        await asyncio.to_thread(
            wait_for, lambda: updates_committed(data) > before + 1, "learning goes on"
        )
    assert traffic.failed == []
    assert len(traffic.statuses) > 50
    assert service.stop() == 0
    book = ledger(data)
    assert book["adds_up"], book["problems"]
    assert trained_more_than_once(data) == []
    counts = book["counts"]
    assert counts["leased"] == counts["in_flight"] == counts["in_judgement"] == 0
    assert book["requests"] == len(traffic.statuses)


async def test_parent_killed_in_mid_swap_loses_nothing(data: Path) -> None:
    service = RunningService(data, env=SCRIPTED, start_timeout_s=60)
    await asyncio.to_thread(service.start)
    try:
        async with under_traffic(service):
            await asyncio.to_thread(
                wait_for, lambda: (status(data)["live_version"] or 0) >= 1, "a first swap"
            )
            made = len(list((data / "versions").iterdir()))
            await asyncio.to_thread(
                wait_for, lambda: len(list((data / "versions").iterdir())) > made, "a next version"
            )
            service.kill()
    finally:
        service.kill()
    with RunningService(data, env=SCRIPTED, start_timeout_s=60) as again:
        before = updates_committed(data)
        async with under_traffic(again) as traffic:
            await asyncio.to_thread(
                wait_for, lambda: updates_committed(data) > before + 1, "learning goes on"
            )
        assert traffic.failed == []
        live = status(data)["live_version"]
        assert live >= 1
    book = ledger(data)
    assert book["adds_up"], book["problems"]
    assert trained_more_than_once(data) == []
    # What was in flight when the parent died got no reply: counted as failed, by its reason.
    assert set(book["reasons"].get("failed", {})) <= {"service_died"}


@pytest.mark.slow
async def test_twenty_swaps_under_traffic_fail_no_request(
    service: RunningService, data: Path
) -> None:
    async with under_traffic(service) as traffic:
        await asyncio.to_thread(
            wait_for, lambda: (status(data)["live_version"] or 0) >= 20, "20 versions", 300.0
        )
    assert traffic.failed == []
    assert ledger(data)["adds_up"]
