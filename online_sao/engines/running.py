"""How our engines run as processes: one uvicorn server that ends well.

SIGTERM ends the process with code 0; so does the death of the process that started it, since an
engine without its service serves nobody and holds the memory.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable

import uvicorn
from fastapi import FastAPI

logger = logging.getLogger(__name__)

PARENT_POLL_S = 0.5
GRACE_S = 2
BACKLOG = 2048


async def serve(
    app: FastAPI,
    *,
    host: str,
    port: int,
    started: Callable[[], Awaitable[None]],
    stopped: Callable[[], Awaitable[None]],
) -> None:
    """Serve until SIGTERM or SIGINT, or until the parent process is gone."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=GRACE_S,
        lifespan="off",
    )
    server = uvicorn.Server(config)
    # uvicorn raises the signal again when it is done; by then the work is done for us, too.
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: None)
    await started()
    watcher = asyncio.create_task(_watch_parent(server))
    try:
        await server.serve()
    finally:
        watcher.cancel()
        await stopped()


async def _watch_parent(server: uvicorn.Server) -> None:
    parent = os.getppid()
    while parent > 1:
        await asyncio.sleep(PARENT_POLL_S)
        if os.getppid() != parent:
            logger.error("action=parent_gone detail=the engine ends")
            server.should_exit = True
            return


def set_up_logging() -> None:
    """Plain lines on stderr; the supervisor keeps them."""
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    for noisy in ("httpx", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def fail(message: str, code: int = 2) -> int:
    """One clear line on stderr; the exit code."""
    sys.stderr.write(f"error: {message}\n")
    return code
