"""Over a real server: what only a socket shows, and what the OpenAI SDK makes of it."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from gateway_support import HEADERS, KEY, FaultyStore, HandEngine, reply_of, settings_with
from openai import AsyncOpenAI

from online_sao.engines.client import HttpEngine
from online_sao.engines.scripted import ScriptedBackend
from online_sao.engines.server import build_app
from online_sao.errors import EngineUnavailable
from online_sao.gateway.app import create_app
from online_sao.interfaces import Engine, Store
from online_sao.store.migrate import migrate
from online_sao.store.sql import SqlStore
from online_sao.types import LedgerState

HI: Any = [{"role": "user", "content": "Hi"}]


@dataclass
class Live:
    url: str
    engine: Any
    store: FaultyStore
    server: uvicorn.Server
    serving: asyncio.Task[None]

    def sdk(self, **options: Any) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=KEY, **options)


async def until(ready: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait for a fact that announces itself nowhere."""
    async with asyncio.timeout(timeout_s):
        while not ready():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[tuple[str, uvicorn.Server, asyncio.Task[None]]]:
    """Any ASGI application on a port of its own."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", ws="none")
    config.timeout_graceful_shutdown = 1
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", server, serving
    finally:
        server.should_exit = True
        await serving


@asynccontextmanager
async def over_http(backend: ScriptedBackend) -> AsyncIterator[Live]:
    """The gateway with its engine behind the real wire."""
    async with served(build_app(backend)) as (engine_url, _, _):
        engine = HttpEngine(engine_url)
        async with live(engine) as service:
            yield service
        await engine.aclose()


@asynccontextmanager
async def live(
    engine: Engine | None = None, store: Store | None = None, **service: Any
) -> AsyncIterator[Live]:
    engine, memory = engine or HandEngine(), FaultyStore()
    app = create_app(
        engine=engine,
        store=store or memory,
        settings=settings_with(**service),
        admin_key=KEY,
    )
    async with served(app) as (url, server, serving):
        yield Live(url, engine, memory, server, serving)


async def test_the_openai_sdk_gets_a_reply_with_its_id_and_policy() -> None:
    async with live() as service, service.sdk() as sdk:
        answer = await sdk.chat.completions.with_raw_response.create(
            model="online-sao", messages=HI, temperature=0.7, user="ann", logprobs=True
        )
        reply = answer.parse()
    assert reply.choices[0].message.content == "Hello there."
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.total_tokens == 24
    assert reply.choices[0].logprobs is not None
    assert reply.choices[0].logprobs.content is not None
    assert [t.logprob for t in reply.choices[0].logprobs.content] == [-0.1, -0.2, -0.3]
    assert reply.model_extra is not None
    assert reply.model_extra["sao"]["inference_id"] == reply.id
    assert answer.headers["x-sao-policy-version"] == "3"
    assert answer.request_id is not None
    assert answer.request_id.startswith("req_")


async def test_the_openai_sdk_reads_a_stream_and_choices_zero_of_every_chunk() -> None:
    async with live(HandEngine(delay=0.01)) as service, service.sdk() as sdk:
        stream = await sdk.chat.completions.create(model="online-sao", messages=HI, stream=True)
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello there."
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].model_extra is not None
    assert chunks[-1].model_extra["sao"]["trainable"] is True


async def test_a_reply_can_be_sent_back_as_the_sdk_gave_it() -> None:
    async with live() as service, service.sdk() as sdk:
        first = await sdk.chat.completions.create(model="online-sao", messages=HI)
        said: Any = [*HI, first.choices[0].message, *HI]
        await sdk.chat.completions.create(model="online-sao", messages=said)
        dumped: Any = [*HI, first.choices[0].message.model_dump(), *HI]
        await sdk.chat.completions.create(model="online-sao", messages=dumped)
        assert [m.content for m in service.engine.rendered[1]] == ["Hi", "Hello there.", "Hi"]
        assert service.engine.rendered[1] == service.engine.rendered[2]


async def test_the_openai_sdk_shows_message_and_code_of_a_bad_request() -> None:
    async with live() as service, service.sdk() as sdk:
        with pytest.raises(openai.BadRequestError) as caught:
            await sdk.chat.completions.create(model="online-sao", messages=HI, max_tokens=0)
        with pytest.raises(openai.NotFoundError) as missing:
            await sdk.chat.completions.create(model="other", messages=HI)
        with pytest.raises(openai.AuthenticationError) as stranger:
            await sdk.with_options(api_key="wrong").models.list()
    assert caught.value.code == "invalid_value"
    assert caught.value.param == "max_tokens"
    assert "`max_tokens` is 0" in caught.value.message
    assert missing.value.code == "model_not_found"
    assert stranger.value.code == "invalid_api_key"


async def test_the_openai_sdk_raises_an_error_in_mid_stream_with_its_code() -> None:
    engine = HandEngine(error=EngineUnavailable("x"), error_after=2)
    async with live(engine) as service, service.sdk() as sdk:
        stream = await sdk.chat.completions.create(model="online-sao", messages=HI, stream=True)
        texts: list[str] = []

        async def read_all() -> None:
            async for chunk in stream:
                texts.append(chunk.choices[0].delta.content or "")

        with pytest.raises(openai.APIError) as caught:
            await read_all()
    assert caught.value.code == "engine_error"
    assert "".join(texts) == "Hello there"


async def test_the_openai_sdk_does_not_retry_feedback_that_conflicts() -> None:
    async with live() as service, service.sdk(max_retries=2) as sdk:
        reply = await sdk.chat.completions.create(model="online-sao", messages=HI)
        calls: list[int] = []

        def body(value: bool) -> dict[str, Any]:
            return {
                "inference_id": reply.id,
                "metric_name": "thumbs",
                "value": value,
                "id": "mine",
            }

        inner = service.store.add_feedback

        async def counting(feedback: Any) -> Any:
            calls.append(1)
            return await inner(feedback)

        service.store.add_feedback = counting  # type: ignore[method-assign]
        await sdk.post("/feedback", body=body(True), cast_to=httpx.Response)
        with pytest.raises(openai.ConflictError) as caught:
            await sdk.post("/feedback", body=body(False), cast_to=httpx.Response)
    assert caught.value.code == "id_reused"
    assert len(calls) == 2


async def test_a_client_that_leaves_its_stream_frees_the_engine_within_a_second() -> None:
    engine = HandEngine(reply_of(*(f"t{i} " for i in range(500))), delay=0.02)
    async with live(engine) as service, service.sdk() as sdk:
        stream = await sdk.chat.completions.create(model="online-sao", messages=HI, stream=True)
        seen = 0
        async for _ in stream:
            seen += 1
            if seen == 3:
                break
        left_at = asyncio.get_running_loop().time()
        await stream.close()
        await until(lambda: bool(service.store.ends))
        (closed_at,) = engine.closed.values()
        (rollout_id,) = service.store.rows
        rollout = await service.store.get_rollout(rollout_id)
    assert closed_at - left_at < 1.0
    assert (rollout.state, rollout.reason) == (LedgerState.NOT_TRAINABLE, "client_disconnected")


async def test_a_client_that_leaves_an_unstreamed_chat_frees_the_engine_within_a_second() -> None:
    engine = HandEngine(reply_of(*(f"t{i} " for i in range(500))), delay=0.02)
    async with live(engine) as service, httpx.AsyncClient(headers=HEADERS, timeout=0.3) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post(
                f"{service.url}/v1/chat/completions", json={"model": "online-sao", "messages": HI}
            )
        left_at = asyncio.get_running_loop().time()
        await until(lambda: bool(service.store.ends))
        (closed_at,) = engine.closed.values()
        (end,) = service.store.ends.values()
    assert closed_at - left_at < 1.0
    assert end.not_trainable == "client_disconnected"


async def test_over_the_wire_the_engines_ids_and_logprobs_are_stored() -> None:
    backend = ScriptedBackend(replies=["Caf\u00e9 \U0001f600"], version=5)
    async with over_http(backend) as service, service.sdk() as sdk:
        stream = await sdk.chat.completions.create(
            model="online-sao", messages=HI, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        (end,) = service.store.ends.values()
    expected = "Caf\u00e9 \U0001f600"
    texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(texts) == expected
    assert end.reply_ids == (*expected.encode(), 257)
    assert len(end.logprobs) == len(end.reply_ids)
    assert [(s.version, s.start, s.end) for s in end.version_spans] == [(5, 0, len(end.reply_ids))]
    assert end.not_trainable is None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(end.reply_ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_over_the_wire_a_client_that_leaves_aborts_the_engines_work_within_a_second(
    stream: bool,
) -> None:
    backend = ScriptedBackend(replies=["x" * 500], tokens_per_s=50)
    async with over_http(backend) as service, httpx.AsyncClient(headers=HEADERS) as client:
        body = {"model": "online-sao", "messages": HI, "stream": stream}
        asking = asyncio.create_task(client.post(f"{service.url}/v1/chat/completions", json=body))
        await until(lambda: backend.status()["in_flight"] == 1)
        await asyncio.sleep(0.1)
        asking.cancel()
        await until(lambda: backend.status()["in_flight"] == 0, timeout_s=1.0)
        await until(lambda: bool(service.store.ends))
        (end,) = service.store.ends.values()
    assert (end.outcome, end.not_trainable) == ("aborted", "client_disconnected")


async def test_over_the_wire_an_engine_that_is_gone_is_a_503_and_comes_back() -> None:
    backend = ScriptedBackend(replies=["ok"])
    async with over_http(backend) as service, service.sdk(max_retries=0) as sdk:
        backend.faults.unavailable = True
        with pytest.raises(openai.InternalServerError) as caught:
            await sdk.chat.completions.create(model="online-sao", messages=HI)
        backend.faults.unavailable = False
        reply = await sdk.chat.completions.create(model="online-sao", messages=HI)
        ends = list(service.store.ends.values())
    assert caught.value.status_code == 503
    assert caught.value.code == "engine_error"
    assert caught.value.response.headers["retry-after"] == "2"
    assert reply.choices[0].message.content == "ok"
    assert [(end.outcome, end.error) for end in ends] == [
        ("failed", "engine_unavailable"),
        ("completed", None),
    ]


async def test_a_server_that_shuts_down_leaves_no_row_open() -> None:
    engine = HandEngine(reply_of(*(f"t{i} " for i in range(500))), delay=0.02)
    async with live(engine) as service, httpx.AsyncClient(headers=HEADERS) as client:
        body = {"model": "online-sao", "messages": HI, "stream": True}
        running = asyncio.create_task(client.post(f"{service.url}/v1/chat/completions", json=body))
        await asyncio.sleep(0.2)
        service.server.should_exit = True
        await service.serving
        (end,) = service.store.ends.values()
        assert (end.outcome, end.error) == ("failed", "shutdown")
        with pytest.raises(httpx.HTTPError):
            await running


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


async def test_a_body_of_200_mb_is_refused_and_memory_stays_flat() -> None:
    async def body() -> AsyncIterator[bytes]:
        block = b"x" * 65536
        for _ in range(200 * 16):
            yield block

    async with live() as service, httpx.AsyncClient(headers=HEADERS) as client:
        url = f"{service.url}/v1/chat/completions"
        await client.post(url, content=b"{}")
        before = _peak_kib()
        counted = await client.post(url, content=body())
        headers = {"content-length": str(200 * 16 * 65536)}
        declared = await client.post(url, content=body(), headers=headers)
        grown_mib = (_peak_kib() - before) / 1024
        assert (await client.get(f"{service.url}/healthz")).status_code == 200
    assert (counted.status_code, declared.status_code) == (413, 413)
    assert counted.json()["error"]["code"] == "request_too_large"
    assert grown_mib < 32


async def test_deep_nesting_is_refused_and_memory_stays_flat() -> None:
    async with live() as service, httpx.AsyncClient(headers=HEADERS) as client:
        url = f"{service.url}/v1/chat/completions"
        await client.post(url, content=b"{}")
        before, began = _peak_kib(), time.monotonic()
        for _ in range(20):
            answer = await client.post(url, content=b"[" * 100_000 + b"]" * 100_000)
            assert answer.status_code == 400
        assert (_peak_kib() - before) / 1024 < 32
        assert time.monotonic() - began < 5


async def test_thirty_slow_streams_on_a_database_leave_the_other_endpoints_answering(
    tmp_path: Path,
) -> None:
    url = f"sqlite:///{tmp_path / 'gateway.db'}"
    migrate(url)
    store = SqlStore(url)
    await store.open()
    engine = HandEngine(reply_of(*"abcdefghijklmnopqrst"), delay=0.3)
    limits = httpx.Limits(max_connections=100)
    async with (
        live(engine, store) as service,
        httpx.AsyncClient(headers=HEADERS, base_url=service.url, limits=limits) as client,
    ):
        body = {"model": "online-sao", "messages": HI, "stream": True}
        streams = [
            asyncio.create_task(client.post("/v1/chat/completions", json=body)) for _ in range(30)
        ]
        await asyncio.sleep(0.4)
        for path in ("/healthz", "/readyz", "/metrics", "/v1/models"):
            began = time.monotonic()
            assert (await client.get(path)).status_code == 200
            assert time.monotonic() - began < 1.0
        assert (await store.ledger()).counts[LedgerState.IN_FLIGHT] == 30
        assert [(await stream).status_code for stream in streams] == [200] * 30
    ledger = await store.ledger()
    await store.aclose()
    assert ledger.counts[LedgerState.AWAITING_JUDGEMENT] == 30
    assert ledger.adds_up


_IMPORTS = """
import sys
import online_sao.gateway.app as app
from online_sao.config import load_settings
app.create_app(engine=None, store=None, settings=load_settings(environ={}), admin_key="k")
heavy = {"torch", "transformers", "vllm", "numpy", "safetensors"} & set(sys.modules)
print(sorted(heavy))
"""


def test_the_serving_process_loads_neither_torch_nor_numpy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTS], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
