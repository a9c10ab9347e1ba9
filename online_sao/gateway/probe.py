"""What the engine last said of itself, so that a chat need not ask each time."""

from __future__ import annotations

import asyncio
import logging
import time

from online_sao.errors import EngineError
from online_sao.interfaces import Engine
from online_sao.types import EngineStatus

logger = logging.getLogger(__name__)

REFRESH_AFTER_S = 1.0
"""Older answers are renewed: by a chat beside its own work, by others before they answer."""
CHECK_TIMEOUT_S = 2.0
"""Longest a check may take; what has not answered by then counts as missing."""


class EngineProbe:
    """The engine's last status, with its age."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._last: EngineStatus | None = None
        self._asked_at = self._answered_at = -float("inf")
        self._refresh: asyncio.Task[None] | None = None

    async def ask(self) -> EngineStatus:
        """The status now. Raises EngineError."""
        self._asked_at = time.monotonic()
        self._last = await self._engine.status()
        self._answered_at = time.monotonic()
        return self._last

    async def fresh(self) -> EngineStatus | None:
        """A status at most a second old; None when the engine does not answer in time."""
        if self._last is not None and time.monotonic() - self._answered_at < REFRESH_AFTER_S:
            return self._last
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                return await self.ask()
        except (EngineError, TimeoutError):
            return None

    async def recent(self) -> EngineStatus:
        """The last status; if it is old, a new one is fetched in the background meanwhile.

        Raises EngineError when the engine has never answered, and does not now.
        """
        if self._last is None:
            return await self.ask()
        old = time.monotonic() - self._asked_at > REFRESH_AFTER_S
        if old and (self._refresh is None or self._refresh.done()):
            self._asked_at = time.monotonic()
            self._refresh = asyncio.create_task(self._renew())
        return self._last

    @property
    def boot_id(self) -> str:
        """The engine's boot id as last heard; empty before its first answer."""
        return self._last.boot_id if self._last is not None else ""

    async def aclose(self) -> None:
        """Stop a refresh that is under way."""
        if self._refresh is not None and not self._refresh.done():
            self._refresh.cancel()
            await asyncio.wait({self._refresh})

    async def _renew(self) -> None:
        try:
            await self.ask()
        except EngineError as error:
            logger.warning("action=engine_probe_failed error=%s", error)
