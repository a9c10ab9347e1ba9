"""Transactions run whole, and a database that cannot be had says so in one line."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from online_sao.errors import (
    ConfigError,
    DatabaseRevisionError,
    DatabaseUnavailable,
    StoreError,
    VersionConflict,
)
from online_sao.store import connect
from online_sao.store.connect import PostgresDatabase, SqliteDatabase, parse_url
from online_sao.store.migrate import migrate
from online_sao.store.sql import SqlStore
from online_sao.types import Message, RolloutRequest, Sampling, new_id, utc_now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A migrated SQLite file."""
    file = tmp_path / "store.db"
    migrate(f"sqlite:///{file}")
    return file


@pytest.fixture
async def database(path: Path) -> AsyncIterator[SqliteDatabase]:
    opened = SqliteDatabase(parse_url(f"sqlite:///{path}"))
    yield opened
    await opened.aclose()


def request() -> RolloutRequest:
    message = Message("user", "the user's own words")
    return RolloutRequest(new_id("chatcmpl-"), utc_now(), (message,), Sampling(), "s")


def put(key: str) -> connect.Work[None]:
    statement = "INSERT INTO notes (key, value, updated_at) VALUES (?, '{}', '2026-01-01')"
    return lambda conn: (conn.exec_driver_sql(statement, (key,)), None)[1]


def notes(conn: sa.Connection) -> list[str]:
    return list(conn.exec_driver_sql("SELECT key FROM notes ORDER BY key").scalars())


def pragma(name: str) -> connect.Work[object]:
    return lambda conn: conn.exec_driver_sql(f"PRAGMA {name}").scalar()


# -- addresses -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "driver"),
    [
        ("sqlite:////data/store.db", "sqlite+pysqlite"),
        ("sqlite+aiosqlite:////data/store.db", "sqlite+pysqlite"),
        ("postgresql://u:p@h/d", "postgresql+psycopg"),
        ("postgresql+psycopg://u:p@h/d", "postgresql+psycopg"),
    ],
)
def test_the_driver_is_ours_whatever_the_url_names(url: str, driver: str) -> None:
    assert parse_url(url).drivername == driver


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "mysql://h/d", "store.db", ""])
def test_an_address_that_cannot_be_used_names_the_setting(url: str) -> None:
    with pytest.raises(ConfigError, match=r"store\.url"):
        parse_url(url)


def test_a_missing_driver_says_what_to_install() -> None:
    error = connect.need_driver(ModuleNotFoundError("No module named 'psycopg'"))
    assert "online-sao[postgres]" in str(error)


# -- SQLite --------------------------------------------------------------------------------


async def test_connections_are_set_up_for_many_readers_and_one_writer(
    database: SqliteDatabase,
) -> None:
    for run in (database.read, database.write):
        assert await run(pragma("journal_mode")) == "wal"
        assert await run(pragma("foreign_keys")) == 1
        assert await run(pragma("busy_timeout")) == connect.BUSY_TIMEOUT_MS


async def test_only_what_must_agree_with_files_outside_waits_for_the_disk(
    database: SqliteDatabase,
) -> None:
    normal, full = 1, 2
    assert await database.write(pragma("synchronous")) == normal
    assert await database.write(pragma("synchronous"), durable=True) == full
    with pytest.raises(VersionConflict):
        await database.write(lambda conn: [put("k")(conn), put("k")(conn)], durable=True)
    assert await database.write(pragma("synchronous")) == normal
    assert await database.read(notes) == []


async def test_a_read_cannot_write(database: SqliteDatabase) -> None:
    with pytest.raises(StoreError, match="readonly"):
        await database.read(put("k"))
    assert await database.read(notes) == []


async def test_a_failed_write_leaves_nothing_and_the_next_one_works(
    database: SqliteDatabase,
) -> None:
    def half(conn: sa.Connection) -> None:
        put("half")(conn)
        raise RuntimeError("a fault")

    with pytest.raises(RuntimeError, match="a fault"):
        await database.write(half)
    await database.write(put("whole"))
    assert await database.read(notes) == ["whole"]


async def test_a_reader_sees_one_snapshot_while_others_write(database: SqliteDatabase) -> None:
    begun, go = threading.Event(), threading.Event()

    def twice(conn: sa.Connection) -> tuple[list[str], list[str]]:
        first = notes(conn)
        begun.set()
        assert go.wait(10)
        return first, notes(conn)

    reading = asyncio.ensure_future(database.read(twice))
    await asyncio.to_thread(begun.wait, 10)
    await database.write(put("k"))
    go.set()
    assert await reading == ([], [])
    assert await database.read(notes) == ["k"]


async def test_a_missing_file_is_named_and_not_made(tmp_path: Path) -> None:
    missing = tmp_path / "typo.db"
    store = SqlStore(f"sqlite:///{missing}")
    with pytest.raises(DatabaseRevisionError, match=r"typo\.db"):
        await store.open()
    await store.aclose()
    assert not missing.exists()


async def test_a_file_that_is_no_database_is_said_to_be_none(tmp_path: Path) -> None:
    file = tmp_path / "photo.db"
    file.write_bytes(b"JFIF" * 1000)
    store = SqlStore(f"sqlite:///{file}")
    with pytest.raises(StoreError, match="not a database"):
        await store.open()
    await store.aclose()


async def test_a_caller_waits_a_set_time_for_its_turn(
    database: SqliteDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "POOL_TIMEOUT_S", 0.1)
    go = threading.Event()
    slow = asyncio.ensure_future(database.write(lambda conn: go.wait(10)))
    await asyncio.sleep(0)
    with pytest.raises(DatabaseUnavailable, match=r"within 0\.1 s"):
        await database.write(put("k"))
    assert await database.read(notes) == []  # readers have connections of their own
    go.set()
    assert await slow
    await database.write(put("k"))
    assert await database.read(notes) == ["k"]


async def test_another_process_that_holds_the_lock_is_waited_for_and_then_named(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "BUSY_TIMEOUT_MS", 200)
    database = SqliteDatabase(parse_url(f"sqlite:///{path}"))
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(DatabaseUnavailable, match="locked"):
        await database.write(put("k"))
    assert await database.read(notes) == []
    waiting = asyncio.ensure_future(database.write(put("k")))
    await asyncio.sleep(0.05)
    other.execute("COMMIT")
    other.close()
    await waiting
    assert await database.read(notes) == ["k"]
    await database.aclose()


async def test_a_full_disk_refuses_one_write_and_loses_nothing(database: SqliteDatabase) -> None:
    await database.write(put("kept"))
    pages = await database.read(pragma("page_count"))
    await database.write(pragma(f"max_page_count={pages}"))

    def large(conn: sa.Connection) -> None:
        put("x" * 1_000_000)(conn)

    with pytest.raises(DatabaseUnavailable, match="full") as refused:
        await database.write(large)
    assert "\n" not in str(refused.value)
    assert await database.read(notes) == ["kept"]
    await database.write(pragma("max_page_count=1000000"))
    await database.write(large)


async def test_an_error_does_not_repeat_the_users_words(path: Path) -> None:
    store = SqlStore(f"sqlite:///{path}")
    asked = request()
    await store.insert_rollout(asked)
    with pytest.raises(VersionConflict) as refused:
        await store.insert_rollout(asked)
    assert "own words" not in str(refused.value)
    await store.aclose()


async def test_a_caller_that_leaves_tears_no_transaction_in_two(path: Path) -> None:
    store = SqlStore(f"sqlite:///{path}")
    asked = [request() for _ in range(200)]
    for one in asked:
        task = asyncio.ensure_future(store.insert_rollout(one))
        await asyncio.sleep(random.uniform(0, 0.001))
        task.cancel()
    await store.insert_rollout(request())
    ledger = await store.ledger()
    await store.aclose()
    assert ledger.problems == ()
    assert 1 <= ledger.requests <= 201


async def test_a_closed_store_says_so(path: Path) -> None:
    store = SqlStore(f"sqlite:///{path}")
    await store.open()
    await store.aclose()
    with pytest.raises(DatabaseUnavailable, match="closed"):
        await store.count_updates()


# -- PostgreSQL ----------------------------------------------------------------------------


async def test_a_server_that_is_not_there_is_unavailable_at_once() -> None:
    database = PostgresDatabase(parse_url("postgresql://nobody@127.0.0.1:1/none"))
    begun = time.monotonic()
    with pytest.raises(DatabaseUnavailable):
        await database.read(lambda conn: None)
    assert time.monotonic() - begun < 6
    await database.aclose()
