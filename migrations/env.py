"""What Alembic runs: on the connection the service hands over, or on `-x url=...` by hand.

alembic -x url=sqlite:////tmp/new.db upgrade head
alembic -x url=sqlite:////tmp/new.db revision --autogenerate -m "what changes"
"""

from __future__ import annotations

from typing import Any, Literal

import sqlalchemy as sa
from alembic import context
from alembic.autogenerate.api import AutogenContext
from sqlalchemy.types import TypeDecorator

from online_sao.store.tables import Base


def render_item(kind: str, item: Any, _context: AutogenContext) -> str | Literal[False]:
    """Write a column type of ours as the plain type under it: a migration outlives our code."""
    if kind != "type" or not isinstance(item, TypeDecorator):
        return False
    return f"sa.{item.impl!r}"


def run(connection: sa.Connection) -> None:
    """Migrate; where the caller began a transaction, inside it."""
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        render_as_batch=True,
        render_item=render_item,
        compare_type=True,
    )
    with context.begin_transaction():
        context.run_migrations()


handed_over = context.config.attributes.get("connection")
if handed_over is not None:
    run(handed_over)
else:
    url = context.get_x_argument(as_dictionary=True).get("url")
    if url is None:
        raise SystemExit("name the database: alembic -x url=sqlite:////tmp/new.db ...")
    with sa.create_engine(url).connect() as own:
        run(own)
        own.commit()
