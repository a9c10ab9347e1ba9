"""Keeps child processes alive: starts them, waits until they answer, restarts the dead.

Knows nothing of what its children do. A child gets its own process group and dies with this
process, however that ends (on Linux the kernel sees to it).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
HEALTHY_AFTER_S = 30.0
"""A child that lived so long has its backoff forgiven."""


class ChildState(StrEnum):
    """Where a child stands."""

    STARTING = "starting"
    RUNNING = "running"
    BACKOFF = "backoff"
    STOPPED = "stopped"


async def _always_ready() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run, and how to see that it works."""

    name: str
    command: Callable[[], Awaitable[list[str]]]
    """Asked anew at every start: what is to be served may have changed since."""
    log: Path
    env: Mapping[str, str]
    """The child's whole environment."""
    ready: Callable[[], Awaitable[bool]] = _always_ready
    """False or an OSError: not yet."""
    grace_s: float = 10.0
    """From SIGTERM to SIGKILL of the whole process group."""
    start_timeout_s: float = 300.0
    nice: int = 0


class Child:
    """One supervised process. `run` returns when `stop` was set and the process is gone."""

    def __init__(self, spec: ChildSpec, on_death: Callable[[int], Awaitable[None]]) -> None:
        self.spec = spec
        self.state = ChildState.STARTING
        self.restarts = 0
        self.running = asyncio.Event()
        """Set while the child answers."""
        self._on_death = on_death
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Process id, while there is one."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the child alive until `stop`."""
        backoff = FIRST_BACKOFF_S
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set():
                started = time.monotonic()
                code = await self._one_life(stopping)
                if stop.is_set():
                    break
                if time.monotonic() - started > HEALTHY_AFTER_S:
                    backoff = FIRST_BACKOFF_S
                self.state = ChildState.BACKOFF
                self.restarts += 1
                logger.warning(
                    "action=child_died child=%s code=%s restart_in_s=%.1f log=%s",
                    self.spec.name, code, backoff, self.spec.log,
                )  # fmt: skip
                await self._on_death(code)
                await asyncio.wait({stopping}, timeout=backoff)
                backoff = min(backoff * 2, LONGEST_BACKOFF_S)
        finally:
            stopping.cancel()
            await self._terminate()
            self.state = ChildState.STOPPED

    async def _one_life(self, stopping: asyncio.Task[bool]) -> int:
        """Start, wait until ready, wait for the end; the exit code."""
        self.state = ChildState.STARTING
        argv = await self.spec.command()
        with self.spec.log.open("ab") as log:
            self._process = process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.spec.env,
                start_new_session=True,
                preexec_fn=_before_exec(self.spec.nice),
            )
        logger.info("action=child_started child=%s pid=%d", self.spec.name, process.pid)
        ended = asyncio.create_task(process.wait())
        try:
            await self._until_ready(ended, stopping)
            await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.running.clear()
            await self._terminate()
            await ended
        return ended.result()

    async def _until_ready(self, ended: asyncio.Task[int], stopping: asyncio.Task[bool]) -> None:
        deadline = time.monotonic() + self.spec.start_timeout_s
        while not ended.done() and not stopping.done():
            if await self.spec.ready():
                self.state = ChildState.RUNNING
                self.running.set()
                return
            if time.monotonic() > deadline:
                logger.error("action=child_not_ready child=%s", self.spec.name)
                return
            await asyncio.wait({ended, stopping}, timeout=0.1, return_when="FIRST_COMPLETED")

    async def _terminate(self) -> None:
        """SIGTERM, a grace time, then SIGKILL of whatever is left of the process group."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), self.spec.grace_s)
            except TimeoutError:
                logger.warning("action=child_killed child=%s pid=%d", self.spec.name, process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _before_exec(nice: int) -> Callable[[], None]:
    """What the child does between fork and exec. Loads the C library before the fork."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def prepare() -> None:
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if nice:
            os.nice(nice)

    return prepare
