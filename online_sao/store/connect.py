"""Connections and transactions: SQLite in threads of our own, PostgreSQL through asyncio.

A piece of work is a plain function of a `Connection`; `read` and `write` run it in one
transaction. Once started it runs to its end whatever becomes of the caller, so a client that
leaves never tears a transaction in two.

SQLite is not driven through aiosqlite: each of its statements is a hop to a thread and back, and
five hops made one insert 1.2 ms where one hop for the whole transaction makes it 0.5 ms (p50, 2
cores). It also leaves nothing to cancel half-way.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from online_sao.errors import (
    ConfigError,
    DatabaseRevisionError,
    DatabaseUnavailable,
    StoreError,
    VersionConflict,
)

T = TypeVar("T")
Work = Callable[[sa.Connection], T]

POOL_TIMEOUT_S = 5.0
"""How long a caller waits for a free connection."""
BUSY_TIMEOUT_MS = 10_000
"""How long SQLite waits for another process's write to end; ours take milliseconds."""
READERS = 4
"""SQLite connections that read beside the one that writes."""
ATTEMPTS = 10
"""Tries of a transaction that lost a race for a unique number."""
BACKOFF_S = 0.01
"""Longest pause before the second try; it grows with each, and is random, to part the racers."""

_RACES = ("40001", "40P01")
"""SQLSTATE of a serialization failure and of a deadlock: another try settles them."""


class Database(Protocol):
    """One database, reached in one way."""

    async def read(self, work: Work[T]) -> T:
        """Run `work` on one snapshot."""
        ...

    async def write(self, work: Work[T], *, durable: bool = False) -> T:
        """Run `work` and commit; with `durable`, on the disk before it returns."""
        ...

    async def aclose(self) -> None:
        """Close all connections."""
        ...


def parse_url(url: str) -> sa.URL:
    """The URL with its driver named; ConfigError says what is accepted."""
    try:
        parsed = sa.make_url(url)
    except exc.ArgumentError:
        raise ConfigError("setting `store.url` is no database URL") from None
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        if not parsed.database or parsed.database == ":memory:":
            raise ConfigError("setting `store.url`: SQLite needs a file (sqlite:///path/to.db)")
        return parsed.set(drivername="sqlite+pysqlite")
    if backend in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    raise ConfigError(f"setting `store.url`: {backend} is neither sqlite nor postgresql")


def connect(url: str) -> Database:
    """The database at `url`; nothing is opened before the first transaction."""
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        return SqliteDatabase(parsed)
    return PostgresDatabase(parsed)


def need_driver(error: ModuleNotFoundError) -> ConfigError:
    """What to say when the PostgreSQL driver is not installed."""
    return ConfigError(f"PostgreSQL needs `pip install online-sao[postgres]` ({error})")


class SqliteDatabase:
    """One thread with one connection writes, in turn; a few others read beside it.

    WAL (the file is made so) with synchronous=NORMAL: a killed process loses nothing; a power
    cut may lose the last moments, whole transactions at a time, and never corrupts. What must
    agree with files outside the database (an update and its weights' folder) is committed with
    synchronous=FULL.
    """

    def __init__(self, url: sa.URL) -> None:
        self._path = Path(str(url.database))
        self._writer = _Lane(sqlite_engine(url, write=True, size=1), 1, "store-writer")
        self._readers = _Lane(sqlite_engine(url, write=False, size=READERS), READERS, "store-read")

    async def read(self, work: Work[T]) -> T:
        """Run `work` on one snapshot (WAL: it neither waits for a writer nor blocks one)."""
        self._must_exist()
        return await self._readers.run(work, durable=False)

    async def write(self, work: Work[T], *, durable: bool = False) -> T:
        """Run `work` under BEGIN IMMEDIATE."""
        self._must_exist()
        return await self._writer.run(work, durable=durable)

    async def aclose(self) -> None:
        """Wait for what runs, then close."""
        await self._readers.aclose()
        await self._writer.aclose()

    def _must_exist(self) -> None:
        # SQLite would make an empty file of a mistyped path.
        if not self._path.exists():
            raise DatabaseRevisionError(
                f"there is no database {self._path}; `online-sao up` makes one in its data folder"
            )


def sqlite_engine(url: sa.URL, *, write: bool, size: int) -> sa.Engine:
    """An engine whose transactions are all BEGIN IMMEDIATE, or all read-only."""
    engine = sa.create_engine(url, pool_size=size, max_overflow=0)

    def configure(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver's own BEGIN comes too late
        connection.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA foreign_keys=ON")
        if not write:
            connection.execute("PRAGMA query_only=ON")

    def begin(connection: sa.Connection) -> None:
        # In WAL a read that turns into a write fails at once, whatever the time-out.
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    event.listen(engine, "connect", configure)
    event.listen(engine, "begin", begin)
    return engine


class _Lane:
    """Threads with one connection each; callers wait their turn, at most POOL_TIMEOUT_S."""

    def __init__(self, engine: sa.Engine, size: int, name: str) -> None:
        self._engine = engine
        self._free = asyncio.Semaphore(size)
        self._threads = ThreadPoolExecutor(size, thread_name_prefix=name)

    async def run(self, work: Work[T], *, durable: bool) -> T:
        try:
            async with asyncio.timeout(POOL_TIMEOUT_S):
                await self._free.acquire()
        except TimeoutError:
            raise no_free_connection() from None
        try:
            future = asyncio.get_running_loop().run_in_executor(
                self._threads, self._transaction, work, durable
            )
        except RuntimeError:
            self._free.release()
            raise DatabaseUnavailable("the store is closed") from None
        future.add_done_callback(self._done)
        return await asyncio.shield(future)

    def _transaction(self, work: Work[T], durable: bool) -> T:
        with translated_errors(), self._engine.connect() as connection:
            driver = connection.connection.dbapi_connection
            assert driver is not None
            try:
                if durable:
                    driver.execute("PRAGMA synchronous=FULL")
                with connection.begin():
                    return work(connection)
            finally:
                if durable:
                    driver.execute("PRAGMA synchronous=NORMAL")

    def _done(self, future: asyncio.Future[T]) -> None:
        self._free.release()
        if not future.cancelled():
            future.exception()  # seen, also where the caller has left

    async def aclose(self) -> None:
        await asyncio.to_thread(self._threads.shutdown)
        self._engine.dispose()


class PostgresDatabase:
    """A pool of connections; reads see one snapshot, writes lock the rows they move."""

    def __init__(self, url: sa.URL) -> None:
        try:
            self._engine: AsyncEngine = create_async_engine(
                url,
                pool_size=5,
                max_overflow=5,
                pool_timeout=POOL_TIMEOUT_S,
                pool_pre_ping=True,
                connect_args={"connect_timeout": int(POOL_TIMEOUT_S)},
            )
        except ModuleNotFoundError as error:
            raise need_driver(error) from None
        self._snapshots = self._engine.execution_options(
            isolation_level="REPEATABLE READ", postgresql_readonly=True
        )
        self._running: set[asyncio.Task[Any]] = set()

    async def read(self, work: Work[T]) -> T:
        """Run `work` on one snapshot."""
        return await self._whole(self._snapshots, work)

    async def write(self, work: Work[T], *, durable: bool = False) -> T:
        """Run `work`; again, if it lost a race (PostgreSQL's commits are all durable)."""
        for attempt in range(1, ATTEMPTS):
            try:
                return await self._whole(self._engine, work)
            except (_Taken, _Contended):
                await asyncio.sleep(random.uniform(0, attempt * BACKOFF_S))
        return await self._whole(self._engine, work)

    async def aclose(self) -> None:
        """Wait for what runs, then close."""
        if self._running:
            await asyncio.wait(self._running)
        await self._engine.dispose()

    async def _whole(self, engine: AsyncEngine, work: Work[T]) -> T:
        task = asyncio.ensure_future(self._transaction(engine, work))
        self._running.add(task)
        task.add_done_callback(self._done)
        return await asyncio.shield(task)

    async def _transaction(self, engine: AsyncEngine, work: Work[T]) -> T:
        with translated_errors():
            async with engine.begin() as connection:
                return await connection.run_sync(work)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()


class _Taken(VersionConflict):
    """A unique value is taken; where another transaction has just taken it, a retry helps."""


class _Contended(DatabaseUnavailable):
    """Given up for another transaction's sake; a retry helps."""


def no_free_connection() -> DatabaseUnavailable:
    """What to say when the pool stayed empty."""
    return DatabaseUnavailable(f"no free database connection within {POOL_TIMEOUT_S:g} s")


@contextmanager
def translated_errors() -> Iterator[None]:
    """The driver's errors as the house's."""
    try:
        yield
    except exc.TimeoutError:
        raise no_free_connection() from None
    except exc.IntegrityError as error:
        raise _Taken(f"the database refused a change: {first_line(error)}") from error
    except (exc.OperationalError, exc.InterfaceError) as error:
        if getattr(error.orig, "sqlstate", None) in _RACES:
            raise _Contended(f"the database is contended: {first_line(error)}") from error
        raise DatabaseUnavailable(f"the database failed: {first_line(error)}") from error
    except exc.DBAPIError as error:
        raise StoreError(f"the database refused: {first_line(error)}") from error


def first_line(error: exc.DBAPIError) -> str:
    """The driver's message without statement and parameters, which hold users' words."""
    lines = str(error.orig).strip().splitlines()
    return lines[0] if lines else type(error.orig).__name__
