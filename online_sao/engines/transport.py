"""HTTP calls to an engine, with the engine's errors named by the boundary they crossed."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx

from online_sao.errors import EngineRefused, EngineTimeout, EngineUnavailable
from online_sao.types import EngineStatus

CONNECT_S = 5.0
_TOO_LONG = re.compile(r"context length|max_model_len|maximum model length", re.IGNORECASE)


@contextmanager
def wire_errors(what: str) -> Generator[None, None, None]:
    """Turns transport failures into EngineUnavailable and EngineTimeout."""
    try:
        yield
    except (httpx.TimeoutException, TimeoutError) as error:
        raise EngineTimeout(f"{what} did not answer in time") from error
    except httpx.HTTPError as error:
        raise EngineUnavailable(f"{what} cannot be reached: {_line(error)}") from error
    except ValueError as error:  # an answer that is no JSON
        raise EngineUnavailable(f"{what} answered nonsense: {_line(error)}") from error


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200] or type(error).__name__


class Wire:
    """One engine's HTTP connections: control calls never wait behind streams."""

    def __init__(self, base_url: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._streams, self._control = (
            httpx.AsyncClient(
                base_url=base_url.rstrip("/"),
                limits=unlimited,
                timeout=httpx.Timeout(None, connect=CONNECT_S),
                transport=transport,
                trust_env=False,
            )
            for _ in range(2)
        )

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | None,
        *,
        timeout_s: float,
        params: Mapping[str, str] | None = None,
    ) -> Mapping[str, Any]:
        """POST a JSON body; the answer's JSON object ({} where it has none)."""
        return await self._call("POST", path, body, timeout_s, params)

    async def get(self, path: str, *, timeout_s: float) -> Mapping[str, Any]:
        """GET; the answer's JSON object."""
        return await self._call("GET", path, None, timeout_s, None)

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        timeout_s: float,
        params: Mapping[str, str] | None,
    ) -> Mapping[str, Any]:
        with wire_errors(f"the engine's {path}"):
            async with asyncio.timeout(timeout_s):
                response = await self._control.request(
                    method, path, content=encode(body), params=params, headers=JSON_HEADER
                )
            if response.is_error:
                raise refusal(response.status_code, response.content)
            data = json.loads(response.content) if response.content else {}
            if not isinstance(data, dict):
                raise ValueError("not a JSON object")
            return data

    @asynccontextmanager
    async def stream(
        self, path: str, body: Mapping[str, Any], deadline: float
    ) -> AsyncGenerator[httpx.Response, None]:
        """POST and keep the response open; leaving the context closes the connection."""
        request = self._streams.build_request(
            "POST", path, content=encode(body), headers=JSON_HEADER
        )
        async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
            response = await self._streams.send(request, stream=True)
        try:
            if response.is_error:
                async with asyncio.timeout(CONNECT_S):
                    raise refusal(response.status_code, await response.aread())
            yield response
        finally:
            await response.aclose()

    async def status(self, *, timeout_s: float) -> EngineStatus:
        """What the engine says of itself: our engines in one answer, vLLM in three."""
        try:
            facts = await self.get("/status", timeout_s=timeout_s)
        except EngineRefused:
            return await self._vllm_status(timeout_s)
        with wire_errors("the engine's /status"):
            return EngineStatus(
                boot_id=str(facts.get("boot_id")),
                version=facts.get("version"),
                paused=bool(facts.get("paused")),
                model=str(facts.get("model")),
                max_model_len=int(facts.get("max_model_len") or 0),
                in_flight=int(facts.get("in_flight") or 0),
            )

    async def _vllm_status(self, timeout_s: float) -> EngineStatus:
        info = await self.get("/weight_info", timeout_s=timeout_s)
        paused = await self.get("/is_paused", timeout_s=timeout_s)
        models = await self.get("/v1/models", timeout_s=timeout_s)
        version = await self.get("/version", timeout_s=timeout_s)
        card = (models.get("data") or [{}])[0]
        return EngineStatus(
            boot_id=f"vllm-{version.get('version')}",
            version=version_number(info.get("weight_version")),
            paused=bool(paused.get("is_paused")),
            model=str(card.get("id")),
            max_model_len=int(card.get("max_model_len") or 0),
        )

    async def aclose(self) -> None:
        """Close all connections."""
        await self._streams.aclose()
        await self._control.aclose()


JSON_HEADER = {"content-type": "application/json"}


def encode(body: Mapping[str, Any] | None) -> bytes | None:
    """JSON bytes of a request's body."""
    return None if body is None else json.dumps(body, separators=(",", ":")).encode()


def version_number(label: Any) -> int | None:
    """Our version behind an engine's label; None where it is not one of ours."""
    return int(label) if isinstance(label, str) and re.fullmatch(r"\d{1,18}", label) else None


def refusal(status: int, content: bytes) -> EngineRefused | EngineUnavailable:
    """The error behind an engine's 4xx or 5xx answer."""
    try:
        error = json.loads(content)["error"]
    except (ValueError, KeyError, TypeError):
        error = {}
    if isinstance(error, str):
        error = {"message": error}
    message = str(error.get("message") or f"the engine answered {status}")[:1000]
    if not 400 <= status < 500:
        return EngineUnavailable(message)
    code = error.get("code")
    if not isinstance(code, str):
        code = "context_length_exceeded" if _TOO_LONG.search(message) else "invalid_value"
    param = error.get("param")
    return EngineRefused(message, param=param if isinstance(param, str) else None, code=code)
