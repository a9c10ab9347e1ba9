"""What a pool of connections and a server that may go away ask of the PostgreSQL store."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
import sqlalchemy as sa
from store_world import World, make_world

from online_sao.errors import DatabaseUnavailable
from online_sao.store import connect
from online_sao.store.connect import PostgresDatabase, parse_url
from online_sao.store.sql import SqlStore

pytestmark = pytest.mark.postgres


@pytest.fixture
async def postgres_world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """The store on PostgreSQL alone."""
    async for made in make_world(request, "postgres"):
        yield made


async def test_a_caller_that_leaves_tears_no_transaction_in_two(postgres_world: World) -> None:
    world = postgres_world
    for _ in range(100):
        task = asyncio.ensure_future(world.store.insert_rollout(world.request()))
        await asyncio.sleep(random.uniform(0, 0.004))
        task.cancel()
    await world.store.insert_rollout(world.request())
    await world.store.aclose()
    again = world.reopen()
    ledger = await again.ledger()
    assert ledger.problems == ()
    assert 1 <= ledger.requests <= 101


async def test_thirty_slow_streams_leave_the_pool_to_others(postgres_world: World) -> None:
    world = postgres_world
    streaming = asyncio.Event()

    async def stream() -> None:
        request = world.request()
        await world.store.insert_rollout(request)
        await streaming.wait()
        await world.store.complete_rollout(world.completion(request.id))

    streams = [asyncio.ensure_future(stream()) for _ in range(30)]
    async with asyncio.timeout(5):
        while (await world.store.ledger()).requests < 30:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.gather(*(world.store.count_updates() for _ in range(30)))
        streaming.set()
        await asyncio.gather(*streams)
    assert sum((await world.counts()).values()) == 30


async def test_a_pool_that_stays_empty_is_unavailable_and_recovers(
    postgres_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "POOL_TIMEOUT_S", 0.3)
    assert postgres_world.url is not None
    database = PostgresDatabase(parse_url(postgres_world.url))

    def slow(conn: sa.Connection) -> None:
        conn.exec_driver_sql("SELECT pg_sleep(1.5)")

    hogs = [asyncio.ensure_future(database.read(slow)) for _ in range(10)]
    await asyncio.sleep(0.5)
    with pytest.raises(DatabaseUnavailable, match="no free database connection"):
        await database.read(lambda conn: None)
    await asyncio.gather(*hogs)
    await database.read(lambda conn: None)
    await database.aclose()


async def test_connections_that_the_server_dropped_are_replaced(postgres_world: World) -> None:
    world = postgres_world
    await world.served()
    world.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE pid <> pg_backend_pid() AND datname = current_database()"
    )
    await world.served()
    assert sum((await world.counts()).values()) == 2


async def test_a_reader_sees_one_snapshot_while_others_write(postgres_world: World) -> None:
    world = postgres_world
    assert world.url is not None
    database = PostgresDatabase(parse_url(world.url))
    other = SqlStore(world.url)
    count = sa.text("SELECT count(*) FROM notes")

    def twice(conn: sa.Connection) -> tuple[int | None, int | None]:
        first = conn.scalar(count)
        conn.exec_driver_sql("SELECT pg_sleep(0.5)")
        return first, conn.scalar(count)

    reading = asyncio.ensure_future(database.read(twice))
    await asyncio.sleep(0.2)
    await other.put_note("k", {})
    assert await reading == (0, 0)
    assert await database.read(lambda conn: conn.scalar(count)) == 1
    await database.aclose()
    await other.aclose()
