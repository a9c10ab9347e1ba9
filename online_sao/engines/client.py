"""`HttpEngine`: an engine of vLLM's wire protocol, spoken to over httpx. No torch here.

What the engine reports is passed on as it is: missing, NaN and -inf log-probabilities too. What
may be trained on is the gateway's decision.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, cast

import httpx

from online_sao.engines.swap import Swapper
from online_sao.engines.transport import Wire, version_number, wire_errors
from online_sao.engines.wire import sampling_to_wire
from online_sao.errors import EngineUnavailable
from online_sao.types import (
    JSON,
    Delivery,
    EngineStatus,
    Message,
    PolicyVersion,
    RenderedPrompt,
    ReplyChunk,
    Sampling,
    TokenText,
    TopLogprob,
    VersionSpan,
)

CONTROL_TIMEOUT_S = 15.0
"""For status and recovery; vLLM's control calls took up to 6.6 s under a flood of streams."""
RENDER_TIMEOUT_S = 30.0
BODY_END_S = 1.0
"""How long the end of a body may take after the stream's last event."""


class HttpEngine:
    """A vLLM server, or one of ours, at `base_url`.

    `model` is named in requests where it is not empty. `swap_timeout_s` bounds a whole swap,
    its way back included; `probe_tolerance` is in nats; `request_timeout_s` bounds one reply.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str = "",
        swap_timeout_s: float = 30.0,
        probe_tolerance: float = 0.35,
        request_timeout_s: float = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._wire = Wire(base_url, transport)
        self._model = {"model": model} if model else {}
        self._request_timeout_s = request_timeout_s
        self._swapper = Swapper(
            self._wire, swap_timeout_s=swap_timeout_s, probe_tolerance=probe_tolerance
        )

    async def render(
        self, messages: Sequence[Message], *, tools: Sequence[JSON] = ()
    ) -> RenderedPrompt:
        """Token ids of a chat, by the engine's own template."""
        body: dict[str, Any] = {**self._model, "messages": [_message(m) for m in messages]}
        if tools:
            body["tools"] = [dict(tool) for tool in tools]
        answer = await self._wire.post(
            "/v1/chat/completions/render", body, timeout_s=RENDER_TIMEOUT_S
        )
        try:
            return RenderedPrompt(tuple(int(i) for i in answer["token_ids"]))
        except (KeyError, TypeError, ValueError) as error:
            raise EngineUnavailable(f"the engine's rendering has no token ids: {error}") from error

    async def generate(
        self, prompt: RenderedPrompt, sampling: Sampling, *, request_id: str
    ) -> AsyncGenerator[ReplyChunk, None]:
        """One reply, chunk by chunk; closing the generator closes the connection, which aborts."""
        body = {
            **self._model,
            "request_id": request_id,
            "token_ids": list(prompt.token_ids),
            "sampling_params": sampling_to_wire(sampling),
            "output_mode": "text",
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        deadline = time.monotonic() + self._request_timeout_s
        last: ReplyChunk | None = None
        usage: int | None = None
        with wire_errors("the engine"):
            async with aclosing(self._events(body, deadline)) as events:
                async for event in events:
                    usage = _completion_tokens(event, usage)
                    for choice in event.get("choices") or ():
                        chunk = read_choice(choice, sampling.top_logprobs)
                        if chunk.finish_reason is not None:
                            last = chunk  # held until the engine's own count is known
                        else:
                            yield chunk
        if last is None:
            raise EngineUnavailable("the engine's stream broke off before the reply was whole")
        yield _with_count(last, usage)

    async def load_version(self, version: PolicyVersion, fallback: PolicyVersion) -> Delivery:
        """Swap to `version` with requests in flight kept, and prove that it arrived."""
        return await self._swapper.swap(version, fallback)

    async def status(self) -> EngineStatus:
        """What is served now."""
        return await self._wire.status(timeout_s=CONTROL_TIMEOUT_S)

    async def recover(self) -> None:
        """Resume an engine that some dead controller left paused; nothing otherwise."""
        answer = await self._wire.get("/is_paused", timeout_s=CONTROL_TIMEOUT_S)
        if answer.get("is_paused"):
            await self._wire.post("/resume", None, timeout_s=CONTROL_TIMEOUT_S)

    async def aclose(self) -> None:
        """Close connections."""
        await self._wire.aclose()

    async def _events(
        self, body: Mapping[str, Any], deadline: float
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        """The data of each server-sent event; ends at [DONE]."""
        async with self._wire.stream("/inference/v1/generate", body, deadline) as response:
            lines = cast(AsyncGenerator[str, None], response.aiter_lines())
            async with aclosing(lines):
                while True:
                    async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                        line = await anext(lines, None)
                    if line is None:
                        raise EngineUnavailable("the engine's stream broke off")
                    data = line.removeprefix("data:").strip()
                    if not line.startswith("data:"):
                        continue
                    if data == "[DONE]":
                        await _read_out(lines)
                        return
                    event = json.loads(data)
                    if "error" in event:
                        raise EngineUnavailable(f"the engine gave up: {_said(event['error'])}")
                    yield event


async def _read_out(lines: AsyncGenerator[str, None]) -> None:
    """To the body's end, so that the connection can be used again; not for long."""
    with suppress(TimeoutError):
        async with asyncio.timeout(BODY_END_S):
            async for _ in lines:
                pass


def _message(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        fields["tool_calls"] = [dict(call) for call in message.tool_calls]
    return fields


def read_choice(choice: Mapping[str, Any], top_logprobs: int) -> ReplyChunk:
    """One choice of a chunk, as it stands; an entry without a number is NaN, never left out."""
    content = (choice.get("logprobs") or {}).get("content") or ()
    spans = []
    for span in choice.get("weight_versions") or ():
        number = version_number(span.get("version"))
        if number is not None:
            spans.append(VersionSpan(number, int(span["start"]), int(span["end"])))
    return ReplyChunk(
        text=choice.get("text") or "",
        token_ids=tuple(choice.get("token_ids") or ()),
        logprobs=tuple(_number(entry.get("logprob")) for entry in content),
        tokens=tuple(_token(entry, top_logprobs) for entry in content),
        finish_reason=choice.get("finish_reason"),
        version_spans=tuple(spans),
    )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _token(entry: Mapping[str, Any], top_logprobs: int) -> TokenText:
    top = (entry.get("top_logprobs") or ()) if top_logprobs else ()
    return TokenText(
        entry.get("token") or "",
        _bytes(entry.get("bytes")),
        tuple(
            TopLogprob(t.get("token") or "", _number(t.get("logprob")), _bytes(t.get("bytes")))
            for t in top
        ),
    )


def _bytes(value: Any) -> tuple[int, ...] | None:
    return None if value is None else tuple(value)


def _completion_tokens(event: Mapping[str, Any], before: int | None) -> int | None:
    usage = event.get("usage")
    return before if not usage else usage.get("completion_tokens", before)


def _with_count(chunk: ReplyChunk, count: int | None) -> ReplyChunk:
    return ReplyChunk(
        chunk.text,
        chunk.token_ids,
        chunk.logprobs,
        chunk.tokens,
        chunk.finish_reason,
        chunk.version_spans,
        count,
    )


def _said(error: Any) -> str:
    message = error.get("message") if isinstance(error, Mapping) else error
    return str(message)[:300]
