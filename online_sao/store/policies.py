"""Policy versions: which exist, which serves, and how far back a version lies."""

from __future__ import annotations

from datetime import datetime

import sqlalchemy as sa

from online_sao.errors import UnknownRecord, VersionConflict
from online_sao.store.rows import Row, version_from
from online_sao.store.states import BASE_VERSION, SERVABLE, lineage
from online_sao.store.tables import PolicyVersionRow
from online_sao.types import JSON, PolicyVersion, VersionState


def add_base_version(conn: sa.Connection, now: datetime, path: str, sha256: str) -> PolicyVersion:
    """See `Store.add_base_version`."""
    row = _row(conn, BASE_VERSION)
    if row is not None:
        return version_from(row)
    base = PolicyVersion(BASE_VERSION, None, path, sha256, VersionState.STABLE, now)
    conn.execute(
        sa.insert(PolicyVersionRow),
        {
            "number": base.number,
            "parent": None,
            "path": path,
            "sha256": sha256,
            "state": base.state,
            "created_at": now,
            "gate": base.gate,
        },
    )
    return base


def exists(conn: sa.Connection, number: int) -> bool:
    """Whether there is such a version."""
    return _row(conn, number) is not None


def get_version(conn: sa.Connection, number: int) -> PolicyVersion:
    """See `Store.get_version`."""
    row = _row(conn, number)
    if row is None:
        raise UnknownRecord(f"there is no policy version {number}")
    return version_from(row)


def _row(conn: sa.Connection, number: int) -> Row | None:
    return conn.execute(
        sa.select(PolicyVersionRow).where(PolicyVersionRow.number == number)
    ).one_or_none()


def list_versions(conn: sa.Connection) -> list[PolicyVersion]:
    """See `Store.list_versions`."""
    rows = conn.execute(sa.select(PolicyVersionRow).order_by(PolicyVersionRow.number.desc()))
    return [version_from(row) for row in rows]


def newest_stable(conn: sa.Connection) -> PolicyVersion:
    """See `Store.newest_stable`. A superseded version is older than one that served."""
    row = conn.execute(
        sa.select(PolicyVersionRow)
        .where(PolicyVersionRow.state.in_(SERVABLE))
        .order_by(PolicyVersionRow.number.desc())
        .limit(1)
    ).one_or_none()
    if row is None:
        raise UnknownRecord("there is no policy version that can be served")
    return version_from(row)


def live_version(conn: sa.Connection) -> PolicyVersion | None:
    """See `Store.live_version`."""
    row = conn.execute(
        sa.select(PolicyVersionRow).where(PolicyVersionRow.state == VersionState.LIVE)
    ).one_or_none()
    return None if row is None else version_from(row)


def mark_live(conn: sa.Connection, now: datetime, number: int, delivery: JSON) -> None:
    """See `Store.mark_live`; an older number is a rollback and supersedes nothing newer."""
    rows = conn.execute(
        sa.select(PolicyVersionRow.number, PolicyVersionRow.state)
        .where(
            sa.or_(
                PolicyVersionRow.number == number,
                PolicyVersionRow.state.in_((VersionState.STABLE, VersionState.LIVE)),
            )
        )
        .order_by(PolicyVersionRow.number)
        .with_for_update()
    )
    states = {row.number: row.state for row in rows}
    if number not in states:
        raise UnknownRecord(f"there is no policy version {number}")
    if states[number] is VersionState.WITHDRAWN:
        raise VersionConflict(f"policy version {number} was withdrawn and is not served again")
    _set_state(conn, VersionState.RETIRED, PolicyVersionRow.state == VersionState.LIVE)
    _set_state(
        conn,
        VersionState.SUPERSEDED,
        PolicyVersionRow.state == VersionState.STABLE,
        PolicyVersionRow.number < number,
    )
    conn.execute(
        sa.update(PolicyVersionRow)
        .where(PolicyVersionRow.number == number)
        .values(state=VersionState.LIVE, published_at=now, delivery=dict(delivery))
    )


def _set_state(conn: sa.Connection, state: VersionState, *where: sa.ColumnElement[bool]) -> None:
    conn.execute(sa.update(PolicyVersionRow).where(*where).values(state=state))


def unpublished(conn: sa.Connection) -> int:
    """See `Store.unpublished`; all stable ones while nothing is live yet."""
    live = (
        sa.select(sa.func.max(PolicyVersionRow.number))
        .where(PolicyVersionRow.state == VersionState.LIVE)
        .scalar_subquery()
    )
    return (
        conn.scalar(
            sa.select(sa.func.count()).where(
                PolicyVersionRow.state == VersionState.STABLE,
                PolicyVersionRow.number > sa.func.coalesce(live, -1),
            )
        )
        or 0
    )


def lineage_back(conn: sa.Connection, depth: int) -> dict[int, int]:
    """The newest servable version (0) and its ancestors, `depth` of them at most, as steps back."""
    newest = conn.scalar(
        sa.select(sa.func.max(PolicyVersionRow.number)).where(PolicyVersionRow.state.in_(SERVABLE))
    )
    walk = (
        sa.select(PolicyVersionRow.number, PolicyVersionRow.parent, sa.literal(0).label("steps"))
        .where(PolicyVersionRow.number == newest)
        .cte("walk", recursive=True)
    )
    walk = walk.union_all(
        sa.select(PolicyVersionRow.number, PolicyVersionRow.parent, walk.c.steps + 1)
        .join(walk, walk.c.parent == PolicyVersionRow.number)
        .where(walk.c.steps < depth)
    )
    rows = conn.execute(sa.select(walk.c.number, walk.c.parent))
    parents = {row.number: row.parent for row in rows}
    steps = lineage(parents, newest)
    return {number: step for number, step in steps.items() if step <= depth}
