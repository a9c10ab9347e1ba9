"""How many chats may be in flight, and how serving ends: no new ones, then none at all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from online_sao.gateway.problems import RETRY_AFTER_S, ApiError, unavailable


class Admission:
    """The count of chats in flight against its limit.

    Set `draining` and every new chat gets 503 `draining`; `idle()` resolves when none is left.
    """

    def __init__(self, limit: int) -> None:
        self.draining = False
        self._limit = limit
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        """Chats between their admission and the end of both their answer and their record."""
        return self._in_flight

    @contextmanager
    def place(self) -> Iterator[None]:
        """One chat's place. Raises ApiError: 503 `draining`, 429 `queue_full`."""
        if self.draining:
            raise unavailable("draining", "The service is shutting down; try again elsewhere.")
        if self._in_flight >= self._limit:
            raise ApiError(
                429,
                "queue_full",
                f"{self._limit} chats are in flight already; try again.",
                headers={"retry-after": str(RETRY_AFTER_S)},
            )
        self._in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._idle.set()

    async def idle(self) -> None:
        """Wait until no chat is in flight."""
        await self._idle.wait()
