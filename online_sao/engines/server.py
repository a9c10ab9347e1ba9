"""The HTTP face of our own engines: vLLM's paths over any `Backend`. No torch here.

Beside vLLM's paths: `GET /status` (everything about the process in one answer) and
`POST /revert_weight_update` (put the weights back that served before an unfinished update).
`/start_weight_update` takes the same `update_info` as `/update_weights`, so that bytes are read
and checked while replies are still being decoded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from online_sao import __version__
from online_sao.engines import wire
from online_sao.errors import (
    EngineError,
    EngineRefused,
    EngineUnavailable,
    OnlineSaoError,
    SwapFailed,
)
from online_sao.types import ReplyChunk

logger = logging.getLogger(__name__)

DISCONNECT_POLL_S = 0.25


class Backend(Protocol):
    """What an engine of ours does behind its HTTP face."""

    def status(self) -> Mapping[str, Any]:
        """Boot id, version, sha256, probe, paused, model, max_model_len, in_flight."""
        ...

    def render(self, chat: wire.ChatBody) -> list[int]:
        """The prompt's ids. Raises EngineRefused."""
        ...

    def check(self, body: wire.GenerateBody) -> None:
        """Raises EngineRefused where a request cannot be served."""
        ...

    def generate(self, body: wire.GenerateBody) -> AsyncGenerator[ReplyChunk, None]:
        """One reply; closing the generator drops the work. Only after `check`."""
        ...

    async def score(self, token_ids: list[int]) -> list[float]:
        """log p of every prompt token but the first."""
        ...

    def abort(self, request_ids: list[str]) -> None:
        """Drop these requests."""
        ...

    def touch(self) -> None:
        """A controller was heard."""
        ...

    async def pause(self) -> None:
        """Hold decoding, keep what is in flight."""
        ...

    async def resume(self) -> None:
        """Go on; an update that was not finished is reverted first."""
        ...

    async def stage(self, info: wire.UpdateInfo) -> None:
        """Read and check new weights beside the old ones. Raises SwapFailed."""
        ...

    async def update(self, info: wire.UpdateInfo) -> None:
        """Put them in place, between two steps. Raises SwapFailed."""
        ...

    async def finish(self, label: str) -> None:
        """The update is good: forget the old weights. Raises SwapFailed."""
        ...

    async def revert(self) -> None:
        """Put the old weights back, drop what was staged; nothing if there is none."""
        ...


def build_app(backend: Backend) -> FastAPI:
    """The application; `backend` is started and stopped by whoever runs the server."""
    app = FastAPI(title="online-sao engine", version=__version__, openapi_url=None)
    app.add_exception_handler(OnlineSaoError, _answer_error)
    _add_generation(app, backend)
    _add_control(app, backend)
    _add_facts(app, backend)
    return app


def _add_generation(app: FastAPI, backend: Backend) -> None:
    @app.post("/v1/chat/completions/render")
    async def render(request: Request) -> Response:
        chat = wire.parse(wire.ChatBody, await request.body())
        _check_model(chat.model, backend)
        return JSONResponse({"token_ids": await asyncio.to_thread(backend.render, chat)})

    @app.post("/inference/v1/generate")
    async def generate(request: Request) -> Response:
        body = wire.parse(wire.GenerateBody, await request.body())
        _check_model(body.model, backend)
        backend.check(body)
        if body.stream:
            return StreamingResponse(_stream(backend, body), media_type="text/event-stream")
        return await _while_connected(request, _whole(backend, body))

    @app.post("/inference/v1/abort_requests")
    async def abort(request: Request) -> Response:
        backend.abort(wire.parse(wire.AbortBody, await request.body()).request_ids)
        return Response()


def _add_control(app: FastAPI, backend: Backend) -> None:
    def control(path: str, action: Callable[[Request], Awaitable[Mapping[str, Any]]]) -> None:
        async def handler(request: Request) -> Response:
            backend.touch()
            return JSONResponse(await action(request))

        app.add_api_route(path, handler, methods=["POST"])

    async def pause(request: Request) -> Mapping[str, Any]:
        if request.query_params.get("mode", "keep") != "keep":
            raise EngineRefused("this engine pauses with mode=keep alone", param="mode")
        await backend.pause()
        return {"status": "paused"}

    async def resume(_request: Request) -> Mapping[str, Any]:
        await backend.resume()
        return {"status": "resumed"}

    async def start(request: Request) -> Mapping[str, Any]:
        await backend.stage(wire.parse(wire.UpdateBody, await request.body()).update_info)
        return {"message": "Weight update started"}

    async def update(request: Request) -> Mapping[str, Any]:
        await backend.update(wire.parse(wire.UpdateBody, await request.body()).update_info)
        return {"message": "Weights updated"}

    async def finish(request: Request) -> Mapping[str, Any]:
        await backend.finish(wire.parse(wire.FinishBody, await request.body()).weight_version)
        return {"message": "Weight update finished"}

    async def revert(_request: Request) -> Mapping[str, Any]:
        await backend.revert()
        return {"message": "Weight update reverted"}

    control("/pause", pause)
    control("/resume", resume)
    control("/start_weight_update", start)
    control("/update_weights", update)
    control("/finish_weight_update", finish)
    control("/revert_weight_update", revert)


def _add_facts(app: FastAPI, backend: Backend) -> None:
    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/status")
    async def status() -> Mapping[str, Any]:
        return backend.status()

    @app.get("/weight_info")
    async def weight_info() -> Mapping[str, Any]:
        backend.touch()
        facts = backend.status()
        return {
            "weight_version": str(facts["version"]),
            "sha256": facts["sha256"],
            "probe": facts["probe"],
        }

    @app.get("/is_paused")
    async def is_paused() -> Mapping[str, Any]:
        backend.touch()
        return {"is_paused": backend.status()["paused"]}

    @app.get("/version")
    async def version() -> Mapping[str, Any]:
        return {"version": f"online-sao {__version__}"}

    @app.get("/v1/models")
    async def models() -> Mapping[str, Any]:
        facts = backend.status()
        card = {"id": facts["model"], "object": "model", "max_model_len": facts["max_model_len"]}
        return {"object": "list", "data": [card]}


def _check_model(model: str | None, backend: Backend) -> None:
    served = backend.status()["model"]
    if model is not None and model != served:
        raise EngineRefused(
            f"the model {model[:100]!r} is not served here, {served!r} is",
            param="model",
            code="model_not_found",
        )


async def _stream(backend: Backend, body: wire.GenerateBody) -> AsyncGenerator[bytes, None]:
    """Server-sent events; ends with an error event where the engine gives up in mid-stream."""
    wants_logprobs = body.sampling_params.logprobs is not None
    completion_tokens = 0
    try:
        async with aclosing(backend.generate(body)) as chunks:
            async for chunk in chunks:
                completion_tokens = chunk.completion_tokens or 0
                yield wire.sse(wire.chunk_to_wire(body.request_id, chunk, logprobs=wants_logprobs))
    except EngineError as error:
        yield wire.sse(_error_body(error)[1])
        yield wire.SSE_DONE
        return
    if body.stream_options is not None and body.stream_options.include_usage:
        usage = wire.usage(len(body.token_ids), completion_tokens)
        yield wire.sse({"request_id": body.request_id, "choices": [], "usage": usage})
    yield wire.SSE_DONE


async def _whole(backend: Backend, body: wire.GenerateBody) -> Response:
    prompt_logprobs = None
    if body.sampling_params.prompt_logprobs is not None:
        scores = await backend.score(body.token_ids)
        prompt_logprobs = [None] + [
            {str(token): {"logprob": score, "rank": None, "decoded_token": None}}
            for token, score in zip(body.token_ids[1:], scores, strict=True)
        ]
    async with aclosing(backend.generate(body)) as chunks:
        reply = wire.merge([chunk async for chunk in chunks])
    wants_logprobs = body.sampling_params.logprobs is not None
    answer = wire.chunk_to_wire(body.request_id, reply, logprobs=wants_logprobs)
    answer["usage"] = wire.usage(len(body.token_ids), reply.completion_tokens or 0)
    answer["prompt_logprobs"] = prompt_logprobs
    return Response(wire.dumps(answer), media_type="application/json")


async def _while_connected(request: Request, work: Awaitable[Response]) -> Response:
    """The work's answer; the work is cancelled as soon as nobody waits for it any more."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=DISCONNECT_POLL_S)
            if not task.done() and await request.is_disconnected():
                raise EngineUnavailable("the client left")
        return task.result()
    finally:
        task.cancel()


async def _answer_error(_request: Request, error: Exception) -> Response:
    status, body = _error_body(error)
    return JSONResponse(dict(body), status_code=status)


def _error_body(error: Exception) -> tuple[int, Mapping[str, Any]]:
    if isinstance(error, EngineRefused):
        status = 404 if error.code == "model_not_found" else 400
        return status, wire.error_to_wire(
            str(error), kind="invalid_request_error", param=error.param, code=error.code
        )
    if isinstance(error, SwapFailed):
        logger.error("action=weight_update_refused reason=%s", error)
        return 500, wire.error_to_wire(str(error), kind="engine_error", param=None, code="swap")
    return 503, wire.error_to_wire(
        str(error), kind="engine_error", param=None, code="engine_unavailable"
    )
