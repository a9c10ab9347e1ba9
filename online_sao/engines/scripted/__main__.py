"""`python -m online_sao.engines.scripted --port P --tokens-per-s R --version N`: the double.

`POST /scripted/faults` sets any field of `Faults` (and `tokens_per_s`, `replies`) while it runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict

from online_sao.engines import running
from online_sao.engines.scripted.backend import Faults, ScriptedBackend
from online_sao.engines.server import build_app

EXIT_SCRIPTED_DEATH = 70


class FaultsBody(BaseModel):
    """What to change; fields left out return to health, rate and replies stay."""

    model_config = ConfigDict(extra="forbid")

    tokens_per_s: float | None = None
    replies: list[str] | None = None
    faults: Faults = Faults()


def add_faults(app: FastAPI, backend: ScriptedBackend) -> None:
    """The path by which tests make the double misbehave."""

    @app.post("/scripted/faults")
    async def faults(body: FaultsBody) -> dict[str, str]:
        backend.faults = body.faults
        if body.tokens_per_s is not None:
            backend.tokens_per_s = body.tokens_per_s
        if body.replies is not None:
            backend.replies = body.replies
        return {"message": "so be it"}


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM; 0."""
    args = _parser().parse_args(argv)
    running.set_up_logging()
    asyncio.run(_serve(args))
    return 0


async def _serve(args: argparse.Namespace) -> None:
    backend = ScriptedBackend(
        version=args.version,
        tokens_per_s=args.tokens_per_s,
        model=args.served_name,
        max_model_len=args.max_model_len,
        silence_s=args.silence_s,
        die=lambda: os._exit(EXIT_SCRIPTED_DEATH),
    )
    app = build_app(backend)
    add_faults(app, backend)
    watch: list[asyncio.Task[None]] = []

    async def started() -> None:
        watch.append(asyncio.create_task(backend.watch()))

    async def stopped() -> None:
        for task in watch:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    await running.serve(app, host=args.host, port=args.port, started=started, stopped=stopped)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="online_sao.engines.scripted", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--version", type=int, default=0)
    parser.add_argument("--tokens-per-s", type=float, default=200.0, help="per reply; 0: at once")
    parser.add_argument("--served-name", default="online-sao")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--silence-s", type=float, default=30.0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
