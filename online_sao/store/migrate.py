"""The schema's revision: bringing a database to it, and refusing one that is not at it.

There is no way down: a database that newer code has migrated is refused by older code, with what
to do instead. A copy of the data folder made before an update is the way back.
"""

from __future__ import annotations

import importlib.util
import logging
from functools import cache
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import event

from online_sao.errors import DatabaseRevisionError, DatabaseUnavailable
from online_sao.store.connect import need_driver, parse_url, translated_errors

logger = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 120
"""How long to wait for another process that migrates the same database."""
_LOCK_KEY = 0x53414F
"""PostgreSQL's advisory lock, per database; any number that is ours."""


def migrate(url: str) -> str:
    """Bring the database at `url` to this code's revision; returns the revision.

    One transaction under a lock: of several processes one migrates and the others wait, and
    nothing is ever half applied. Raises DatabaseRevisionError (newer than this code) and
    DatabaseUnavailable.
    """
    engine = _migration_engine(parse_url(url))
    try:
        with translated_errors(), engine.begin() as connection:
            _wait_for_lock(connection)
            found, head = revision_of(connection), head_revision()
            if found != head:
                _refuse_newer(connection, found)
                _upgrade(connection)
                logger.info("action=database_migrated from=%s to=%s", found, head)
    finally:
        engine.dispose()
    return head


def check_revision(connection: sa.Connection) -> None:
    """Raise DatabaseRevisionError unless the database is at this code's revision."""
    found, head = revision_of(connection), head_revision()
    if found == head:
        return
    _refuse_newer(connection, found)
    raise DatabaseRevisionError(
        f"the database {_name(connection)} is at revision {found or 'none'}, this online-sao "
        f"needs {head}: start `online-sao up` on it once, which migrates it"
    )


def revision_of(connection: sa.Connection) -> str | None:
    """The database's revision; None if it has no tables of ours."""
    return MigrationContext.configure(connection).get_current_revision()


@cache
def head_revision() -> str:
    """The revision this code is written for."""
    head = ScriptDirectory.from_config(alembic_config()).get_current_head()
    assert head is not None, "the migrations come with the code"
    return head


def alembic_config() -> Config:
    """Alembic's configuration, made from where the installed `migrations` package lies."""
    spec = importlib.util.find_spec("migrations")
    if spec is None or not spec.submodule_search_locations:
        raise DatabaseRevisionError("the package `migrations` is missing: reinstall online-sao")
    folder = Path(next(iter(spec.submodule_search_locations)))
    config = Config()
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    return config


def _upgrade(connection: sa.Connection) -> None:
    config = alembic_config()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
    if connection.dialect.name == "sqlite":
        broken = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
        if broken:
            raise DatabaseRevisionError(
                f"migrating {_name(connection)} would leave {len(broken)} rows without what they "
                "refer to; nothing was changed"
            )


def _refuse_newer(connection: sa.Connection, found: str | None) -> None:
    script = ScriptDirectory.from_config(alembic_config())
    if found is not None and found not in {r.revision for r in script.walk_revisions()}:
        raise DatabaseRevisionError(
            f"the database {_name(connection)} is at revision {found}, newer than this "
            "online-sao knows: update online-sao, or point it to another data folder"
        )


def _name(connection: sa.Connection) -> str:
    return connection.engine.url.render_as_string(hide_password=True)


def _wait_for_lock(connection: sa.Connection) -> None:
    # On SQLite the transaction itself is the lock: it began with BEGIN IMMEDIATE.
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_S}s'")
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK_KEY})")


def _migration_engine(url: sa.URL) -> sa.Engine:
    if url.get_backend_name() != "sqlite":
        try:
            return sa.create_engine(url, poolclass=sa.NullPool, connect_args={"connect_timeout": 5})
        except ModuleNotFoundError as error:
            raise need_driver(error) from None
    folder = Path(str(url.database)).absolute().parent
    if not folder.is_dir():
        raise DatabaseUnavailable(f"the database's folder {folder} does not exist")
    engine = sa.create_engine(url, poolclass=sa.NullPool)

    def configure(connection: sa.engine.interfaces.DBAPIConnection, _record: object) -> None:
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout={LOCK_TIMEOUT_S * 1000}")
        # The file remembers it; turning it on later would need a moment without any other user.
        cursor.execute("PRAGMA journal_mode=WAL")
        # Batch migrations rebuild tables: keys are checked as a whole before the commit instead.
        cursor.execute("PRAGMA foreign_keys=OFF")
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.close()

    event.listen(engine, "connect", configure)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    return engine
