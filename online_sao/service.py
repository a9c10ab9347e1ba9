"""`online-sao up`: one machine, one data folder, everything running.

This process serves HTTP, judges, publishes and runs the scheduled jobs; the engine and the
learner are children. What dies is restarted; what is stopped is stopped in order: no new chats,
replies in flight end, the learner commits, the engine goes last.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import uvicorn
from apscheduler.schedulers.asyncio import AsyncIOScheduler

from online_sao import wiring
from online_sao.config import Settings, to_toml
from online_sao.datafolder import DataFolder
from online_sao.errors import (
    DatabaseUnavailable,
    EngineError,
    OnlineSaoError,
)
from online_sao.interfaces import Engine, Store
from online_sao.manifest import Manifest
from online_sao.ports import Listening, free_port, listen
from online_sao.supervisor import Child, ChildSpec
from online_sao.types import new_uuid7, utc_now

logger = logging.getLogger(__name__)

LEARNER_GRACE_S = 120.0
"""The learner may finish its update and write its state."""
ENGINE_GRACE_S = 10.0
LEARNER_NICE = 10
"""Serving comes first when the cores are short."""
ENGINE_ALARM = "engine_down"
LEARNER_ALARM = "learner_died"
HEARTBEAT_NOTE = "learner_heartbeat"
"""Written by the learner; the pid in it (of several ranks, their torchrun's) proves that this very
process works."""
LEASE_RECOVERY_S = 10
IDLE_EPISODES_S = 5
ENGINE_PROBE_S = 5
PRUNE_S = 10
RETENTION_S = 3600


class Service:
    """Everything of one running service. Use `run`."""

    def __init__(
        self,
        settings: Settings,
        listening: Listening,
        admin_key: str,
        say: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._folder = DataFolder(settings.service.data)
        self._listening = listening
        self._say = say
        self._owner = f"up:{new_uuid7()}"
        self._engine_threads, self._learner_threads = wiring.split_cores(settings)
        self._store: Store = wiring.make_store(settings)
        own_engine = not settings.engine.kind.startswith("http")
        self._engine_port = free_port() if own_engine else 0
        base_url = f"http://127.0.0.1:{self._engine_port}" if own_engine else settings.engine.kind
        self._engine: Engine = wiring.make_engine(settings, base_url)
        self._app = wiring.make_app(settings, self._store, self._engine, admin_key)
        self._publisher = wiring.make_publisher(settings, self._store, self._engine)
        self._worker = wiring.make_judging_worker(settings, self._store, self._owner)
        self._engine_child = Child(self._engine_spec(), self._engine_died) if own_engine else None
        self._learner_child = Child(self._learner_spec(), self._learner_died)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`, then end in order."""
        started = utc_now()
        await self._store.open()
        try:
            await self._take_over(started)
            await self._serve(stop)
        finally:
            await self._engine.aclose()
            await self._store.aclose()

    async def _take_over(self, started: Any) -> None:
        """What the last life of this service left behind, put in order."""
        lost = await self._store.fail_orphans(started, "service_died")
        if lost:
            logger.warning("action=orphans_failed count=%d", lost)
        await self._store.recover_leases()
        manifest = await asyncio.to_thread(Manifest.read, self._folder.model)
        await self._store.add_base_version(str(self._folder.model.resolve()), manifest.sha256)
        rubric = wiring.load_rubric(self._settings)
        await self._store.put_rubric(
            rubric.name,
            rubric.judge,
            rubric.criteria,
            message="from the settings",
            episodes=rubric.episodes,
        )

    async def _serve(self, stop: asyncio.Event) -> None:
        server = uvicorn.Server(self._uvicorn_config())
        engine_stop, learner_stop, workers_stop = asyncio.Event(), asyncio.Event(), asyncio.Event()
        scheduler = self._scheduler()
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(server.serve(sockets=[self._listening.sock]))
            if self._engine_child is not None:
                group.create_task(self._engine_child.run(engine_stop))
            group.create_task(self._learner_child.run(learner_stop))
            workers = [
                group.create_task(self._publish(workers_stop)),
                group.create_task(self._worker.run(workers_stop)),
            ]
            greeting = group.create_task(self._greet(stop))
            scheduler.start()
            await stop.wait()
            greeting.cancel()
            await self._drain()
            scheduler.shutdown(wait=False)
            learner_stop.set()
            workers_stop.set()
            await asyncio.wait(workers)
            server.should_exit = True
            await serving
            engine_stop.set()

    async def _publish(self, stop: asyncio.Event) -> None:
        """Publish, once the engine answers for the first time."""
        await self._until_ready(stop)
        await self._publisher.run(stop)

    async def _until_ready(self, stop: asyncio.Event) -> None:
        if self._engine_child is not None:
            waits = {asyncio.create_task(e.wait()) for e in (self._engine_child.running, stop)}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()

    def _uvicorn_config(self) -> uvicorn.Config:
        return uvicorn.Config(
            self._app,
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=5,
            timeout_keep_alive=30,
        )

    async def _greet(self, stop: asyncio.Event) -> None:
        await self._until_ready(stop)
        url = self._listening.url
        self._say(
            f"\nReady: {url}/v1 (model `{self._settings.policy.served_name}`)\n"
            f"  chat here:   online-sao chat --data {self._settings.service.data}\n"
            f"  rate a reply: in the chat with + or -, or POST {url}/v1/feedback\n"
            f"  watch:       online-sao status --data {self._settings.service.data}\n"
            "  stop:        Ctrl-C"
        )

    async def _drain(self) -> None:
        """No new chats; those in flight may end, for as long as the setting says."""
        admission = self._app.state.services.admission
        admission.draining = True
        self._say("Stopping: replies in flight may end, the learner commits.")
        try:
            await asyncio.wait_for(admission.idle(), self._settings.service.drain_s)
        except TimeoutError:
            logger.warning("action=drain_timeout")

    # -- children ----------------------------------------------------------------------------

    def _engine_spec(self) -> ChildSpec:
        async def command() -> list[str]:
            version = await self._store.live_version() or await self._store.newest_stable()
            return wiring.engine_command(
                self._settings,
                model=Path(version.path),
                version=version.number,
                port=self._engine_port,
                threads=self._engine_threads,
            )

        async def ready() -> bool:
            try:
                await self._engine.status()
            except EngineError:
                return False
            return True

        return ChildSpec(
            name="engine",
            command=command,
            log=self._folder.logs / "engine.log",
            env=wiring.child_environment(self._engine_threads, wiring.ENGINE_MEMORY),
            ready=ready,
            grace_s=ENGINE_GRACE_S,
        )

    def _learner_spec(self) -> ChildSpec:
        async def command() -> list[str]:
            ranks = self._settings.learner.ranks
            return wiring.learner_command(self._folder.running_settings, ranks)

        return ChildSpec(
            name="learner",
            command=command,
            log=self._folder.logs / "learner.log",
            env=wiring.child_environment(
                max(1, self._learner_threads // self._settings.learner.ranks),
                wiring.LEARNER_MEMORY,
            ),
            grace_s=LEARNER_GRACE_S,
            nice=LEARNER_NICE,
        )

    async def _engine_died(self, code: int) -> None:
        await self._alarm(ENGINE_ALARM, f"the engine ended with code {code}; it is restarted")

    async def _learner_died(self, code: int) -> None:
        await self._alarm(LEARNER_ALARM, f"the learner ended with code {code}; it is restarted")

    async def _alarm(self, name: str, message: str) -> None:
        try:
            await self._store.raise_alarm(name, message)
        except DatabaseUnavailable as error:
            logger.error("action=alarm_not_stored alarm=%s error=%s", name, error)

    # -- scheduled work ----------------------------------------------------------------------

    def _scheduler(self) -> AsyncIOScheduler:
        """The periodic work. Each job catches its own boundary's errors and tries again later."""
        scheduler = AsyncIOScheduler(timezone="UTC")
        jobs: list[tuple[str, Callable[[], Awaitable[object]], int]] = [
            ("recover_leases", self._store.recover_leases, LEASE_RECOVERY_S),
            ("close_idle_episodes", self._close_idle_episodes, IDLE_EPISODES_S),
            ("probe_engine", self._probe_engine, ENGINE_PROBE_S),
            ("prune_versions", self._publisher.prune, PRUNE_S),
            ("prune_text", self._prune_text, RETENTION_S),
        ]
        for name, work, every in jobs:
            scheduler.add_job(
                _guarded(name, work), "interval", id=name, seconds=every,
                max_instances=1, coalesce=True, misfire_grace_time=every,
            )  # fmt: skip
        return scheduler

    async def _close_idle_episodes(self) -> None:
        closed = await self._store.close_idle_episodes(self._settings.judging.episode_idle_s)
        if closed:
            logger.info("action=idle_episodes_closed count=%d", closed)

    async def _prune_text(self) -> None:
        days = self._settings.retention.text_days
        await self._store.prune_text(utc_now() - timedelta(days=days))

    async def _probe_engine(self) -> None:
        child = self._engine_child
        try:
            await self._engine.status()
        except EngineError as error:
            # While it starts it is not down; its death is told by the supervisor.
            if child is None or child.running.is_set():
                await self._store.raise_alarm(ENGINE_ALARM, str(error))
            return
        await self._store.clear_alarm(ENGINE_ALARM)
        heartbeat = await self._store.get_note(HEARTBEAT_NOTE)
        pids = () if heartbeat is None else (heartbeat.get("pid"), heartbeat.get("parent"))
        if self._learner_child.pid is not None and self._learner_child.pid in pids:
            await self._store.clear_alarm(LEARNER_ALARM)


def _guarded(name: str, work: Callable[[], Awaitable[object]]) -> Callable[[], Awaitable[None]]:
    async def job() -> None:
        try:
            await work()
        except (OnlineSaoError, OSError) as error:
            logger.warning("action=job_failed job=%s error=%s", name, error)

    return job


async def up(
    settings: Settings, admin_key: str | None, stop: asyncio.Event, say: Callable[[str], None]
) -> None:
    """Run a whole service on the data folder until `stop`."""
    wiring.check_live(settings)
    folder = DataFolder(settings.service.data)
    folder.create()
    with folder.lock():
        listening = listen(settings.service.host, settings.service.port)
        key, made = folder.ensure_key(admin_key)
        if made:
            say(f"Admin key (shown once, kept in {folder.key_file}): {key}")
        bound = settings.model_copy(
            update={
                "service": settings.service.model_copy(
                    update={"port": listening.port, "data": folder.root.resolve()}
                )
            }
        )
        folder.running_settings.write_text(to_toml(bound))
        await asyncio.to_thread(wiring.migrate, settings)
        await wiring.prepare_model(settings)
        engine_threads, learner_threads = wiring.split_cores(settings)
        say(
            f"Cores: {wiring.cores()}; engine {engine_threads} thread(s), "
            f"learner {learner_threads} thread(s). Starting on {listening.url} ..."
        )
        await Service(settings, listening, key, say).run(stop)
