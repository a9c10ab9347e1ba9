"""Writes that could not be made yet, tried again for a while: bounded, counted, never silent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

Attempt = Callable[[], Awaitable[bool]]
"""Tries once; True when it need not be tried again. Raises nothing it expects."""


class Later:
    """At most `limit` writes waiting for their next attempt; `on_drop` counts those given up."""

    def __init__(self, on_drop: Callable[[], None], limit: int = 1024) -> None:
        self._on_drop = on_drop
        self._limit = limit
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, name: str, attempt: Attempt, delays_s: Sequence[float]) -> bool:
        """Try `attempt` after each of the delays until it succeeds; False when full."""
        if len(self._tasks) >= self._limit:
            return False
        task = asyncio.create_task(self._run(name, attempt, delays_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def settle(self) -> None:
        """Make every waiting write's last attempt now."""
        self._closing.set()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _run(self, name: str, attempt: Attempt, delays_s: Sequence[float]) -> None:
        for delay in delays_s:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), delay)
            if await attempt():
                return
            if self._closing.is_set():
                break
        self._on_drop()
        logger.error("action=late_write_dropped name=%s", name)


async def uninterrupted(work: Coroutine[Any, Any, T] | asyncio.Task[T]) -> T:
    """The result of `work`, which runs to its end even if the caller is cancelled meanwhile.

    The cancellation is raised afterwards: a row is never left half known.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # seen: the caller's cancellation is what counts
        raise cancelled
    return task.result()
