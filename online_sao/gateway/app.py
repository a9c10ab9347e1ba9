"""The gateway's application: an OpenAI-compatible endpoint over an engine and a store.

The process that runs it never imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from online_sao import __version__
from online_sao.config import Settings
from online_sao.errors import StoreError
from online_sao.gateway.admission import Admission
from online_sao.gateway.auth import Keys
from online_sao.gateway.chat import chat_route
from online_sao.gateway.door import Door
from online_sao.gateway.episodes import episodes_router
from online_sao.gateway.feedback import feedback_router
from online_sao.gateway.health import health_router
from online_sao.gateway.later import Later
from online_sao.gateway.metrics import Metrics
from online_sao.gateway.models import models_router
from online_sao.gateway.probe import EngineProbe
from online_sao.gateway.problems import (
    answer_http_error,
    answer_store_error,
    answer_validation_error,
)
from online_sao.gateway.services import Services
from online_sao.interfaces import Engine, Store

CLOSE_ROWS_S = 5.0
"""How long the rows of cancelled chats may take to be closed when the server stops."""


def create_app(*, engine: Engine, store: Store, settings: Settings, admin_key: str) -> FastAPI:
    """The application; `engine` and `store` stay the caller's, who opens and closes them.

    `app.state.services` (a `Services`) is for the runner. To drain: set
    `services.admission.draining`, then await `services.admission.idle()`; the lifespan's end
    waits for the rows of cancelled chats and makes the last attempt at records that the database
    could not take before.
    """
    metrics = Metrics()
    services = Services(
        engine=engine,
        store=store,
        settings=settings,
        keys=Keys(admin_key),
        admission=Admission(settings.service.max_in_flight),
        metrics=metrics,
        probe=EngineProbe(engine),
        later=Later(metrics.late_dropped.inc),
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        with contextlib.suppress(TimeoutError):
            # Servers cancel what runs and go on to this line: let those rows be closed first.
            await asyncio.wait_for(services.admission.idle(), CLOSE_ROWS_S)
        await services.later.settle()
        await services.probe.aclose()

    app = FastAPI(
        title="online-sao",
        version=__version__,
        lifespan=lifespan,
        openapi_url=None,  # bodies are read by hand, and OpenAI's own reference describes them
    )
    app.state.services = services
    app.add_middleware(
        Door,
        keys=services.keys,
        max_body_bytes=settings.service.max_body_bytes,
        metrics=metrics,
    )
    app.add_exception_handler(HTTPException, answer_http_error)
    app.add_exception_handler(RequestValidationError, answer_validation_error)
    app.add_exception_handler(StoreError, answer_store_error)
    app.router.routes.append(chat_route(services))
    for router in (models_router, feedback_router, episodes_router, health_router):
        app.include_router(router(services))
    return app
