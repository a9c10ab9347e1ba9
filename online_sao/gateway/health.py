"""`/healthz`, `/readyz`, `/version`, `/metrics`: open, cheap, and never waiting long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from online_sao import __version__
from online_sao.errors import OnlineSaoError
from online_sao.gateway import probe
from online_sao.gateway.problems import RETRY_AFTER_S, error_type
from online_sao.gateway.services import Services
from online_sao.types import Alarm, Ledger

SCRAPE_CACHE_S = 1.0
"""Counts of the ledger are read at most this often: the endpoint is open to all."""

T = TypeVar("T")


def health_router(services: Services) -> APIRouter:
    """The operator's endpoints."""
    router = APIRouter()
    scrape = Scrape(services)

    @router.get("/healthz")
    async def healthz() -> Response:
        return JSONResponse({"status": "ok"})

    @router.get("/readyz")
    async def readyz() -> Response:
        return await _readiness(services)

    @router.get("/version")
    async def version() -> Response:
        status = await services.probe.fresh()
        return JSONResponse(
            {
                "version": __version__,
                "model": services.settings.policy.served_name,
                "policy_version": status.version if status is not None else None,
            }
        )

    @router.get("/metrics")
    async def metrics() -> Response:
        await scrape.refresh()
        return Response(services.metrics.text(), media_type="text/plain; version=0.0.4")

    return router


async def _answer(question: Awaitable[T]) -> T | None:
    """The answer in time, or None."""
    try:
        async with asyncio.timeout(probe.CHECK_TIMEOUT_S):
            return await question
    except (OnlineSaoError, TimeoutError):
        return None


async def _read_database(services: Services) -> bool:
    await services.store.get_note("readyz")
    return True


async def _readiness(services: Services) -> Response:
    """200, or 503 with every part that is missing."""
    status, database = await asyncio.gather(
        _answer(services.probe.ask()), _answer(_read_database(services))
    )
    missing: dict[str, str] = {}
    if services.admission.draining:
        missing["draining"] = "the service is shutting down"
    if status is None:
        missing["engine_loading"] = "the engine does not answer"
    if not database:
        missing["database_unavailable"] = "the database does not answer"
    if not missing:
        version = status.version if status is not None else None
        return JSONResponse({"status": "ready", "policy_version": version})
    error = {
        "message": "Not ready: " + "; ".join(missing.values()) + ".",
        "type": error_type(503),
        "param": None,
        "code": next(iter(missing)),
    }
    return JSONResponse(
        {"status": "not_ready", "missing": list(missing.values()), "error": error},
        status_code=503,
        headers={"retry-after": str(RETRY_AFTER_S)},
    )


class Scrape:
    """Sets the gauges whose values live elsewhere: engine, ledger, alarms."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._lock = asyncio.Lock()
        self._read_at = -float("inf")

    async def refresh(self) -> None:
        """Read what is older than the cache allows; one reader at a time."""
        metrics = self._services.metrics
        metrics.in_flight.set(self._services.admission.in_flight)
        async with self._lock:
            if time.monotonic() - self._read_at < SCRAPE_CACHE_S:
                return
            status, counts = await asyncio.gather(
                self._services.probe.fresh(), _answer(self._counts())
            )
            self._read_at = time.monotonic()
        metrics.engine_up.set(status is not None)
        if status is not None:
            metrics.served_version.set(-1 if status.version is None else status.version)
        metrics.database_up.set(counts is not None)
        if counts is not None:
            ledger, alarms = counts
            for state, count in ledger.counts.items():
                metrics.rollouts.labels(state.value).set(count)
            metrics.ledger_adds_up.set(ledger.adds_up)
            metrics.alarms.set(len(alarms))

    async def _counts(self) -> tuple[Ledger, list[Alarm]]:
        store = self._services.store
        return await store.ledger(), await store.alarms()
