"""What the learner tells of itself: one note in the store, kept fresh while it works."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from online_sao.errors import StoreError
from online_sao.interfaces import Store
from online_sao.types import utc_now

logger = logging.getLogger(__name__)

NOTE = "learner_heartbeat"
EVERY_S = 5.0


class Heartbeat:
    """Writes `learner_heartbeat`: state, doing, version, updates, pid, parent, owner,
    time.

    States: starting, waiting, paused, learning, backing_off, stopped. A database that is away
    is logged here and raised by whatever the loop does next.
    """

    def __init__(self, store: Store, owner: str) -> None:
        self._store = store
        self._owner = owner
        self._said = ("starting", "")
        self._previous: str | None = None
        self.version: int | None = None
        self.updates = 0

    async def previous_owner(self) -> str | None:
        """Owner of the leases of the learner before this one, which must be dead; once."""
        previous, self._previous = self._previous, None
        return previous

    async def say(self, state: str, doing: str = "") -> None:
        """Change what is told, and tell it now if it is new."""
        if (state, doing) != self._said:
            self._said = (state, doing)
            await self._write()

    @asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Keep the note fresh while the block runs."""
        await self._look_back()
        await self._write()
        done = asyncio.Event()
        beat = asyncio.create_task(self._beat(done))
        try:
            yield
        finally:
            done.set()
            await beat

    async def _look_back(self) -> None:
        try:
            note = await self._store.get_note(NOTE)
        except StoreError as error:
            logger.warning("action=heartbeat_not_read error=%s", error)
            return
        owner = (note or {}).get("owner")
        self._previous = owner if isinstance(owner, str) else None

    async def _beat(self, done: asyncio.Event) -> None:
        while not await sleep(done, EVERY_S):
            await self._write()

    async def _write(self) -> None:
        state, doing = self._said
        note = {
            "state": state,
            "doing": doing,
            "version": self.version,
            "updates": self.updates,
            "pid": os.getpid(),
            "parent": os.getppid(),
            "owner": self._owner,
            "time": utc_now().isoformat(),
        }
        try:
            await self._store.put_note(NOTE, note)
        except StoreError as error:
            logger.warning("action=heartbeat_not_written error=%s", error)


async def sleep(until: asyncio.Event, seconds: float) -> bool:
    """Wait for the event, but no longer than that; whether it came."""
    try:
        await asyncio.wait_for(until.wait(), seconds)
    except TimeoutError:
        return False
    return True
