"""A reply on the wire: server-sent events or one JSON object, both in OpenAI's shape.

Log-probabilities are clamped to [-9999, 0] here, for display; the record keeps the truth.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from starlette.types import Send

from online_sao.gateway.problems import ApiError
from online_sao.gateway.turn import ClientLeft, Ending
from online_sao.types import LOGPROB_FLOOR, ReplyChunk

PING_AFTER_S = 15.0
"""A stream that was silent this long gets a comment, so that no proxy takes it for dead."""


@dataclass(frozen=True, slots=True)
class ReplyShape:
    """What the client asked to see."""

    inference_id: str
    created: int
    model: str
    logprobs: bool = False
    include_usage: bool = False


def shown_logprob(value: float) -> float:
    """A log-probability as JSON can carry it."""
    if math.isnan(value):
        return LOGPROB_FLOOR
    return min(max(value, LOGPROB_FLOOR), 0.0)


def shown_tokens(chunk: ReplyChunk) -> list[dict[str, Any]]:
    """OpenAI's `logprobs.content` of a chunk: one entry per token that has a text."""
    return [
        {
            "token": token.token,
            "logprob": shown_logprob(logprob),
            "bytes": list(token.bytes) if token.bytes is not None else None,
            "top_logprobs": [
                {
                    "token": top.token,
                    "logprob": shown_logprob(top.logprob),
                    "bytes": list(top.bytes) if top.bytes is not None else None,
                }
                for top in token.top
            ],
        }
        for token, logprob in zip(chunk.tokens, _padded(chunk), strict=False)
    ]


def _padded(chunk: ReplyChunk) -> Iterator[float]:
    """The chunk's log-probabilities; a missing one is shown at the floor."""
    yield from chunk.logprobs
    while True:
        yield LOGPROB_FLOOR


def sao_of(shape: ReplyShape, ending: Ending) -> dict[str, Any]:
    """Our extension of a reply: its id, its policy, and whether it can be learnt from."""
    reason = ending.not_trainable
    return {
        "inference_id": shape.inference_id,
        "policy_version": ending.policy_version,
        "trainable": reason is None,
        "trainable_reason": reason.value if reason is not None else None,
    }


def usage_of(ending: Ending) -> dict[str, int]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": ending.prompt_tokens,
        "completion_tokens": ending.completion_tokens,
        "total_tokens": ending.prompt_tokens + ending.completion_tokens,
    }


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _headers(shape: ReplyShape, media_type: str, *more: tuple[str, str]) -> list[Any]:
    fields = [("content-type", media_type), ("x-sao-inference-id", shape.inference_id), *more]
    return [(name.encode(), value.encode()) for name, value in fields]


class Whole:
    """One JSON object, sent when the reply is whole."""

    def __init__(self, shape: ReplyShape, send: Send) -> None:
        self._shape = shape
        self._send = send
        self._texts: list[str] = []
        self._tokens: list[dict[str, Any]] = []

    def silence_left_s(self) -> float | None:
        """Never pings."""
        return None

    async def ping(self) -> None:
        """Nothing: a JSON object cannot be pinged."""

    async def chunk(self, chunk: ReplyChunk) -> None:
        """Keep it."""
        self._texts.append(chunk.text)
        if self._shape.logprobs:
            self._tokens += shown_tokens(chunk)

    async def end(self, ending: Ending) -> None:
        """Send all of it."""
        shape = self._shape
        body = {
            "id": shape.inference_id,
            "object": "chat.completion",
            "created": shape.created,
            "model": shape.model,
            "choices": [
                {
                    "index": 0,
                    "message": {
                        "role": "assistant",
                        "content": "".join(self._texts),
                        "refusal": None,
                    },
                    "logprobs": (
                        {"content": self._tokens, "refusal": None} if shape.logprobs else None
                    ),
                    "finish_reason": ending.finish_reason,
                }
            ],
            "usage": usage_of(ending),
            "sao": sao_of(shape, ending),
        }
        data = _dumps(body).encode("utf-8", "replace")
        headers = _headers(shape, "application/json", ("content-length", str(len(data))))
        if ending.policy_version is not None:
            headers.append((b"x-sao-policy-version", str(ending.policy_version).encode()))
        await _sent(self._send, {"type": "http.response.start", "status": 200, "headers": headers})
        await _sent(self._send, {"type": "http.response.body", "body": data})

    async def fail(self, problem: ApiError) -> None:
        """Send the error instead."""
        await send_error(self._send, self._shape, problem)


class Streamed:
    """Server-sent events, one write per chunk; the parts that never change are built once."""

    def __init__(self, shape: ReplyShape, send: Send) -> None:
        self._shape = shape
        self._send = send
        self._started = False
        self._spoke = False
        self._held = ""
        self._last_sent = asyncio.get_running_loop().time()
        head = {
            "id": shape.inference_id,
            "object": "chat.completion.chunk",
            "created": shape.created,
            "model": shape.model,
        }
        self._head = f"data: {_dumps(head)[:-1]},"
        self._before = f'{self._head}"choices":[{{"index":0,"delta":'
        self._usage = ',"usage":null' if shape.include_usage else ""
        self._after = f',"logprobs":null,"finish_reason":null}}]{self._usage}}}\n\n'

    def silence_left_s(self) -> float | None:
        """Seconds until a ping is due."""
        loop = asyncio.get_running_loop()
        return max(self._last_sent + PING_AFTER_S - loop.time(), 0.0)

    async def ping(self) -> None:
        """A comment, which clients skip. It commits the answer to status 200."""
        await self._write(": ping\n\n")

    async def chunk(self, chunk: ReplyChunk) -> None:
        """Send it, unless there is nothing to see in it; the last one goes out with `end`."""
        events = "" if self._spoke else self._first_event()
        self._spoke = True
        if self._shape.logprobs and chunk.tokens:
            shown = _dumps({"content": shown_tokens(chunk), "refusal": None})
            events += (
                f'{self._before}{{"content":{_dumps(chunk.text)}}},"logprobs":{shown},'
                f'"finish_reason":null}}]{self._usage}}}\n\n'
            )
        elif chunk.text:
            events += f'{self._before}{{"content":{_dumps(chunk.text)}}}{self._after}'
        if chunk.finish_reason is not None:
            self._held = events  # one write and one wake-up of the client, not two
        elif events:
            await self._write(events)

    async def end(self, ending: Ending) -> None:
        """The finish chunk with our extension, the usage if asked for, `[DONE]`."""
        events = self._held + (
            f'{self._before}{{}},"logprobs":null,"finish_reason":"{ending.finish_reason}"}}]'
            f'{self._usage},"sao":{_dumps(sao_of(self._shape, ending))}}}\n\n'
        )
        if self._shape.include_usage:
            events += f'{self._head}"choices":[],"usage":{_dumps(usage_of(ending))}}}\n\n'
        await self._write(events + "data: [DONE]\n\n", last=True)

    async def fail(self, problem: ApiError) -> None:
        """An HTTP error while nothing was sent; an error event, and no `[DONE]`, after that."""
        if not self._started:
            await send_error(self._send, self._shape, problem)
        else:
            await self._write(f"{self._held}data: {_dumps(problem.body())}\n\n", last=True)

    def _first_event(self) -> str:
        return (
            f'{self._before}{{"role":"assistant","content":""}},"logprobs":null,'
            f'"finish_reason":null}}]{self._usage},'
            f'"sao":{{"inference_id":"{self._shape.inference_id}"}}}}\n\n'
        )

    async def _write(self, events: str, *, last: bool = False) -> None:
        self._last_sent = asyncio.get_running_loop().time()
        if not self._started:
            self._started = True
            headers = _headers(
                self._shape,
                "text/event-stream; charset=utf-8",
                ("cache-control", "no-cache"),
                ("x-accel-buffering", "no"),
            )
            await _sent(
                self._send, {"type": "http.response.start", "status": 200, "headers": headers}
            )
        body = events.encode("utf-8", "replace")
        await _sent(self._send, {"type": "http.response.body", "body": body, "more_body": not last})


async def send_error(send: Send, shape: ReplyShape, problem: ApiError) -> None:
    """An error answer that names the reply's id."""
    data = _dumps(problem.body()).encode("utf-8", "replace")
    more = tuple((problem.headers or {}).items())
    headers = _headers(shape, "application/json", ("content-length", str(len(data))), *more)
    start = {"type": "http.response.start", "status": problem.status_code, "headers": headers}
    await _sent(send, start)
    await _sent(send, {"type": "http.response.body", "body": data})


async def _sent(send: Send, message: Any) -> None:
    try:
        await send(message)
    except OSError:  # how some ASGI servers say that the client is gone
        raise ClientLeft from None
