"""Publishing: the newest stable version becomes what the engine serves.

The parent's work and not the learner's, so that a dead learner leaves no paused engine and a
version can be published while learning stands. No torch here: a version is a folder, its proof
of delivery is a hash and a few probe tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from online_sao.config import PublishingSettings
from online_sao.errors import EngineError, StoreError, UnknownRecord
from online_sao.interfaces import Engine, Store
from online_sao.types import PolicyVersion, VersionState

logger = logging.getLogger(__name__)

POLL_S = 0.5
LONGEST_BACKOFF_S = 30.0
SWAP_ALARM = "swap_failed"
SWAP_NOTE = "last_swap"

Gate = Callable[[PolicyVersion], Awaitable[str]]
"""Looks at a stable version; "" lets it pass, anything else says why not."""


async def pass_all(version: PolicyVersion) -> str:
    """The gate that lets every version pass."""
    return ""


class Publisher:
    """Loads the newest stable version that passes the gate; says what is live."""

    def __init__(
        self,
        store: Store,
        engine: Engine,
        settings: PublishingSettings,
        *,
        versions_dir: Path,
        gate: Gate = pass_all,
    ) -> None:
        self._store = store
        self._engine = engine
        self._settings = settings
        self._versions_dir = versions_dir
        self._gate = gate
        self._alarm_may_stand = True
        """At first too: this service's last life may have raised it."""

    async def run(self, stop: asyncio.Event) -> None:
        """Publish until `stop`; a failure is an alarm and a retry, never the end."""
        pause, recovered = POLL_S, False
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set():
                try:
                    if not recovered:
                        # Some controller, perhaps this one's last life, died while it had paused.
                        await self._engine.recover()
                    await self.publish_once()
                    pause, recovered = POLL_S, True
                except (EngineError, StoreError) as error:
                    pause, recovered = min(pause * 2, LONGEST_BACKOFF_S), False
                    logger.warning("action=publish_failed retry_in_s=%.1f error=%s", pause, error)
                await asyncio.wait({stopping}, timeout=pause)
        finally:
            stopping.cancel()

    async def publish_once(self) -> PolicyVersion | None:
        """Bring the engine to the version it should serve; what was loaded, if anything was."""
        target = await self._target()
        status = await self._engine.status()
        live = await self._store.live_version()
        if status.version != target.number:
            await self._swap(target, fallback=await self._served_now(status.version, live, target))
            return target
        if live is None or live.number != target.number:
            # The engine was started on it: nothing to load, only to write down.
            await self._store.mark_live(target.number, {"boot_id": status.boot_id})
        await self._clear_alarm()
        return None

    async def _target(self) -> PolicyVersion:
        """The newest version that is whole, not withdrawn, and passes the gate."""
        newest = await self._store.newest_stable()
        verdict = await self._gate(newest)
        if not verdict:
            return newest
        logger.warning("action=gate_refused version=%d reason=%s", newest.number, verdict)
        live = await self._store.live_version()
        return live if live is not None else await self._store.get_version(0)

    async def _served_now(
        self, served: int | None, live: PolicyVersion | None, target: PolicyVersion
    ) -> PolicyVersion:
        """What a failed swap goes back to."""
        if served is not None:
            with contextlib.suppress(UnknownRecord):  # the engine came with some other number
                return await self._store.get_version(served)
        return live if live is not None else target

    async def _swap(self, target: PolicyVersion, fallback: PolicyVersion) -> None:
        try:
            delivery = await self._engine.load_version(target, fallback)
        except EngineError as error:
            self._alarm_may_stand = True
            await self._store.raise_alarm(
                SWAP_ALARM, f"version {target.number} was not taken by the engine: {error}"
            )
            raise
        await self._store.mark_live(target.number, asdict(delivery))
        await self._store.put_note(SWAP_NOTE, asdict(delivery))
        await self._clear_alarm()
        logger.info(
            "action=policy_published version=%d paused_s=%.3f total_s=%.3f probe_error=%.4f",
            delivery.version, delivery.paused_s, delivery.total_s, delivery.probe_error,
        )  # fmt: skip

    async def _clear_alarm(self) -> None:
        """The engine serves what it should; one write, however often it is asked."""
        if self._alarm_may_stand:
            await self._store.clear_alarm(SWAP_ALARM)
            self._alarm_may_stand = False

    async def prune(self) -> list[int]:
        """Delete the folders of old versions; the numbers pruned.

        Kept: version 0 (the start of KL and of every rollback), what is live, what may still be
        published, and the newest `keep_versions`.
        """
        versions = await self._store.list_versions()
        newest = {v.number for v in versions[: self._settings.keep_versions]}
        kept_states = (VersionState.STABLE, VersionState.LIVE)
        old = {
            v.path: v.number
            for v in versions
            if v.number not in newest and v.number != 0 and v.state not in kept_states
        }
        pruned = await asyncio.to_thread(_delete_folders, self._versions_dir, old)
        if pruned:
            logger.info("action=versions_pruned versions=%s", pruned)
        return pruned


def _delete_folders(versions_dir: Path, old: Mapping[str, int]) -> list[int]:
    pruned = []
    for folder in versions_dir.iterdir():
        if (number := old.get(str(folder))) is not None:
            shutil.rmtree(folder)
            pruned.append(number)
    return sorted(pruned)
