"""What the gateway's tests share: an app over doubles, a client, and a reply written by hand."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

import httpx
from fastapi import FastAPI

from online_sao.config import Settings, load_settings
from online_sao.engines.scripted import ScriptedEngine
from online_sao.gateway.app import create_app
from online_sao.store.memory import MemoryStore
from online_sao.types import (
    JSON,
    EngineStatus,
    Feedback,
    FeedbackReceipt,
    Ledger,
    Message,
    RenderedPrompt,
    ReplyChunk,
    Rollout,
    RolloutCompletion,
    RolloutRequest,
    Sampling,
    TokenText,
    VersionSpan,
)

KEY = "test-key"
HEADERS = {"authorization": f"Bearer {KEY}"}
CHAT = "/v1/chat/completions"


def reply_of(
    *texts: str,
    logprobs: Sequence[float] | None = None,
    ids: Sequence[int] | None = None,
    finish: str = "stop",
    version: int = 3,
) -> list[ReplyChunk]:
    """One token per text; token i has id 10 + i and log-probability -(i + 1) / 10."""
    n = len(texts)
    ids = list(range(10, 10 + n)) if ids is None else list(ids)
    logprobs = [-(i + 1) / 10 for i in range(n)] if logprobs is None else list(logprobs)
    chunks = [
        ReplyChunk(
            text=text,
            token_ids=(ids[i],),
            logprobs=tuple(logprobs[i : i + 1]),
            tokens=(TokenText(text, tuple(text.encode())),),
        )
        for i, text in enumerate(texts)
    ]
    chunks.append(
        ReplyChunk("", (), (), (), finish, (VersionSpan(version, 0, n),), completion_tokens=n)
    )
    return chunks


class HandEngine(ScriptedEngine):
    """The shipped double, whose replies a test may write by hand, chunk by chunk.

    `chunks` None: the double's own reply. `delay` is between hand-written chunks; `error` is
    raised before chunk `error_after`.
    """

    def __init__(
        self,
        chunks: list[ReplyChunk] | None = None,
        *,
        delay: float = 0.0,
        error: Exception | None = None,
        error_after: int = 0,
        version: int = 3,
        **options: Any,
    ) -> None:
        super().__init__(version=version, max_model_len=100, **options)
        self.chunks = reply_of("Hello", " there", ".") if chunks is None else chunks
        self.delay, self.error, self.error_after = delay, error, error_after
        self.changed: dict[str, Any] = {}
        """What `status` says instead."""
        self.seen: list[tuple[RenderedPrompt, Sampling, str]] = []
        self.rendered: list[tuple[Message, ...]] = []
        self.closed: dict[str, float] = {}

    async def render(
        self, messages: Sequence[Message], *, tools: Sequence[JSON] = ()
    ) -> RenderedPrompt:
        self.rendered.append(tuple(messages))
        return await super().render(messages, tools=tools)

    async def generate(
        self, prompt: RenderedPrompt, sampling: Sampling, *, request_id: str
    ) -> AsyncGenerator[ReplyChunk, None]:
        self.seen.append((prompt, sampling, request_id))
        try:
            for i, chunk in enumerate(self.chunks):
                if self.error is not None and i == self.error_after:
                    raise self.error
                await asyncio.sleep(self.delay)
                yield chunk
        finally:
            self.closed[request_id] = asyncio.get_running_loop().time()

    async def status(self) -> EngineStatus:
        return replace(await super().status(), **self.changed)


class FaultyStore(MemoryStore):
    """The shipped double, remembering what was written; a test may make it slow or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[str, RolloutRequest] = {}
        self.ends: dict[str, RolloutCompletion] = {}
        self.failing: Exception | None = None
        self.failing_complete: Exception | None = None
        self.delay = 0.0

    async def insert_rollout(self, request: RolloutRequest) -> None:
        await self._fault()
        await super().insert_rollout(request)
        self.rows[request.id] = request

    async def complete_rollout(self, completion: RolloutCompletion) -> None:
        await self._fault()
        if self.failing_complete is not None:
            raise self.failing_complete
        await super().complete_rollout(completion)
        self.ends[completion.rollout_id] = completion

    async def add_feedback(self, feedback: Feedback) -> FeedbackReceipt:
        await self._fault()
        return await super().add_feedback(feedback)

    async def get_note(self, key: str) -> JSON | None:
        await self._fault()
        return await super().get_note(key)

    async def ledger(self) -> Ledger:
        await self._fault()
        return await super().ledger()

    async def _fault(self) -> None:
        if self.failing is not None:
            raise self.failing
        if self.delay:
            await asyncio.sleep(self.delay)


E = TypeVar("E", bound=ScriptedEngine)


@dataclass
class Bench(Generic[E]):
    """An app with its doubles and a client that carries the key."""

    app: FastAPI
    engine: E
    store: FaultyStore
    client: httpx.AsyncClient

    async def chat(self, text: str = "Hi", **fields: Any) -> httpx.Response:
        body = {"model": "online-sao", "messages": [{"role": "user", "content": text}], **fields}
        return await self.client.post(CHAT, content=json.dumps(body))

    async def rollout(self, rollout_id: str) -> Rollout:
        return await self.store.get_rollout(rollout_id)

    async def only_rollout(self) -> Rollout:
        (rollout_id,) = self.store.rows
        return await self.store.get_rollout(rollout_id)


def settings_with(**service: Any) -> Settings:
    return load_settings(overrides={"service": service}, environ={})


@asynccontextmanager
async def bench_on(
    engine: E, store: FaultyStore | None = None, **service: Any
) -> AsyncIterator[Bench[E]]:
    """An app over any double of the engine."""
    store = store or FaultyStore()
    app = create_app(
        engine=engine,
        store=store,
        settings=settings_with(**service),
        admin_key=KEY,
    )
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://t", headers=HEADERS) as client,
    ):
        yield Bench(app, engine, store, client)


def bench(
    engine: HandEngine | None = None, store: FaultyStore | None = None, **service: Any
) -> AbstractAsyncContextManager[Bench[HandEngine]]:
    """An app over replies written by hand."""
    return bench_on(engine or HandEngine(), store, **service)


def events_of(response: httpx.Response) -> list[Any]:
    """The JSON of a stream's events, `[DONE]` as the string."""
    events: list[Any] = []
    for block in response.text.split("\n\n"):
        if block.startswith("data: "):
            data = block.removeprefix("data: ")
            events.append(data if data == "[DONE]" else json.loads(data))
    return events


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object, after a look at its shape."""
    body = response.json()
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert isinstance(error["code"], str)
    return cast(dict[str, Any], error)


NAN = math.nan
