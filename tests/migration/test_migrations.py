"""From every revision to the next, by several processes at once, and never half-way."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from filled import FILLINGS
from store_world import PostgresServer

from online_sao.errors import DatabaseRevisionError, DatabaseUnavailable
from online_sao.store import migrate as migrating
from online_sao.store.connect import parse_url
from online_sao.store.migrate import alembic_config, head_revision, migrate
from online_sao.store.sql import SqlStore
from online_sao.store.tables import Base
from online_sao.types import EpisodeRewards, LedgerState

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPTS = ScriptDirectory.from_config(alembic_config())
REVISIONS = [script.revision for script in SCRIPTS.walk_revisions()][::-1]
"""Oldest first."""


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'store.db'}"
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    yield server.empty_database()


def begin(url: str) -> sa.Engine:
    return sa.create_engine(parse_url(url), poolclass=sa.NullPool)


def tables(url: str) -> set[str]:
    return set(sa.inspect(begin(url)).get_table_names())


def upgrade_to(url: str, revision: str) -> None:
    config = alembic_config()
    with begin(url).begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)


def test_there_is_one_line_of_revisions_and_each_has_a_filling() -> None:
    assert SCRIPTS.get_heads() == [head_revision()] == REVISIONS[-1:]
    assert list(FILLINGS) == REVISIONS


def test_an_empty_database_gets_exactly_the_tables_of_the_code(url: str) -> None:
    assert migrate(url) == head_revision()
    with begin(url).connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
    assert tables(url) == {*Base.metadata.tables, "alembic_version"}


def test_constraints_have_the_names_that_migrations_will_call_them_by(url: str) -> None:
    migrate(url)
    found = sa.inspect(begin(url))
    for name, table in Base.metadata.tables.items():
        assert found.get_pk_constraint(name)["name"] == table.primary_key.name
        assert {key["name"] for key in found.get_foreign_keys(name)} == {
            key.name for key in table.foreign_key_constraints
        }


@pytest.mark.parametrize("revision", REVISIONS)
async def test_a_filled_database_of_each_revision_is_brought_to_the_newest(
    url: str, revision: str
) -> None:
    upgrade_to(url, revision)
    with begin(url).begin() as connection:
        FILLINGS[revision](connection)
        filled = {
            name: connection.exec_driver_sql(f"SELECT count(*) FROM {name}").scalar()
            for name in sa.inspect(connection).get_table_names()
        }
    assert 0 not in filled.values(), "a filling has a row for every table"
    assert migrate(url) == head_revision()
    store = SqlStore(url)
    await store.open()
    ledger = await store.ledger()
    assert (ledger.problems, ledger.requests) == ((), 2)
    rollout = await store.get_rollout("r1")
    assert rollout.request.messages[0].content == "Hi"
    assert rollout.completion is not None
    assert (rollout.completion.logprobs, rollout.completion.reply_ids) == ((-0.5,), (2,))
    assert (await store.list_feedback("r1"))[0].value is True
    assert (await store.list_judgements("r1"))[0].reward == 1.0
    rubric = await store.active_rubric()
    assert (rubric.name, rubric.episodes) == ("tone", EpisodeRewards.ONE)
    await check_episodes(store, rollout.request.episode_id)
    assert (await store.list_updates())[0].rollout_ids == ("r1",)
    assert (await store.list_traces("r1"))[0].values == (0.5,)
    live = await store.live_version()
    assert live is not None
    assert live.number == 1
    assert (await store.alarms())[0].count == 2
    await store.aclose()


async def check_episodes(store: SqlStore, of_the_old_reply: str | None) -> None:
    """What was in no episode still is in none; the tables take a new one."""
    if of_the_old_reply is not None:
        episode = await store.get_episode(of_the_old_reply)
        assert episode.counts == {LedgerState.TRAINED: 1}
    opened = await store.open_episode("ep_new")
    assert (await store.close_episode("ep_new")).counts == opened.counts == {}


def test_of_several_processes_one_migrates_and_the_others_wait(url: str) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(HERE / "migrator.py"), url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    ends = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, ends
    assert [out for out, _ in ends] == [head_revision() + "\n"] * 4
    assert sum("action=database_migrated" in log for _, log in ends) == 1
    assert tables(url) == {*Base.metadata.tables, "alembic_version"}


def test_a_migration_that_fails_leaves_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    upgrade = migrating._upgrade

    def fail_late(connection: sa.Connection) -> None:
        upgrade(connection)
        assert sa.inspect(connection).has_table("rollouts")
        raise RuntimeError("the power went")

    monkeypatch.setattr(migrating, "_upgrade", fail_late)
    with pytest.raises(RuntimeError, match="power"):
        migrate(url)
    assert tables(url) == set()
    monkeypatch.undo()
    assert migrate(url) == head_revision()


def test_a_migration_waits_for_its_turn_only_so_long(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrating, "LOCK_TIMEOUT_S", 1)
    migrate(url)
    with begin(url).connect() as other:
        if other.dialect.name == "sqlite":
            other.exec_driver_sql("BEGIN IMMEDIATE")
        else:
            other.exec_driver_sql(f"SELECT pg_advisory_xact_lock({migrating._LOCK_KEY})")
        with pytest.raises(DatabaseUnavailable, match="lock"):
            migrate(url)


async def test_a_database_newer_than_the_code_is_refused_and_left_alone(url: str) -> None:
    migrate(url)
    with begin(url).begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    store = SqlStore(url)
    with pytest.raises(DatabaseRevisionError, match="9999") as refused_to_open:
        await store.open()
    await store.aclose()
    with pytest.raises(DatabaseRevisionError, match="9999") as refused:
        migrate(url)
    for error in (refused, refused_to_open):
        line = str(error.value)
        assert "update online-sao, or point it to another data folder" in line
        assert "\n" not in line
    assert tables(url) == {*Base.metadata.tables, "alembic_version"}


async def test_a_database_that_was_never_migrated_is_not_opened(url: str) -> None:
    with begin(url).begin() as connection:
        connection.exec_driver_sql("CREATE TABLE other (id INTEGER)")
    store = SqlStore(url)
    with pytest.raises(DatabaseRevisionError, match="online-sao up"):
        await store.open()
    await store.aclose()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatabaseUnavailable, match="nowhere"):
        migrate(f"sqlite:///{tmp_path}/nowhere/store.db")


def test_there_is_no_way_down(url: str) -> None:
    migrate(url)
    config = alembic_config()
    with begin(url).begin() as connection:
        config.attributes["connection"] = connection
        with pytest.raises(NotImplementedError, match="restore a copy"):
            command.downgrade(config, "base")
    assert tables(url) == {*Base.metadata.tables, "alembic_version"}


def test_the_wheel_carries_the_migrations_and_migrates_from_anywhere(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)]
    subprocess.run([*build, str(ROOT)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "site 100%"
    with zipfile.ZipFile(wheel) as archive:
        assert {"migrations/env.py", "migrations/script.py.mako"} <= set(archive.namelist())
        archive.extractall(installed)
    script = (
        "import migrations, sys; from online_sao.store.migrate import migrate; "
        "print(migrations.__path__[0], migrate(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, f"sqlite:///{tmp_path}/store.db"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{installed}/migrations {head_revision()}\n"
