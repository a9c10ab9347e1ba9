"""`HttpEngine` against a made-up vLLM: what it sends, what it makes of the answers."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from online_sao.engines.client import HttpEngine, read_choice
from online_sao.errors import EngineRefused, EngineTimeout, EngineUnavailable
from online_sao.types import Message, RenderedPrompt, ReplyChunk, Sampling, VersionSpan

PROMPT = RenderedPrompt((1, 2, 3))
Answer = Callable[[httpx.Request], httpx.Response]


def engine(answer: Answer, **options: Any) -> HttpEngine:
    return HttpEngine("http://engine", transport=httpx.MockTransport(answer), **options)


def entry(logprob: float | None, token: str = "a") -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": None, "top_logprobs": []}


def event(ids: list[int], logprobs: list[float | None], **more: Any) -> dict[str, Any]:
    choice = {
        "index": 0, "text": "a" * len(ids), "token_ids": ids, "finish_reason": None,
        "logprobs": {"content": [entry(p) for p in logprobs]},
    }  # fmt: skip
    return {"request_id": "r", "choices": [choice | more]}


def last_event(ids: list[int], logprobs: list[float | None], total: int) -> dict[str, Any]:
    spans = [{"version": "4", "start": 0, "end": total}]
    return event(ids, logprobs, finish_reason="stop", weight_versions=spans)


def stream(*events: dict[str, Any] | str) -> httpx.Response:
    lines = [e if isinstance(e, str) else "data: " + json.dumps(e) for e in events]
    headers = {"content-type": "text/event-stream"}
    return httpx.Response(200, text="\n\n".join(lines) + "\n\n", headers=headers)


def usage(count: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": count}}


async def read(made: HttpEngine, sampling: Sampling | None = None) -> list[ReplyChunk]:
    async with asyncio.timeout(10):
        stream = made.generate(PROMPT, sampling or Sampling(), request_id="r")
        chunks = [chunk async for chunk in stream]
        await made.aclose()
        return chunks


async def test_a_reply_is_asked_for_and_read_as_vllm_does_it() -> None:
    seen: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/inference/v1/generate"
        seen.append(json.loads(request.content))
        return stream(
            ": ping",
            event([5], [-0.5]),
            last_event([6, 7], [-1.0, -0.1], 3),
            usage(3),
            "data: [DONE]",
        )

    chunks = await read(engine(answer, model="m"), Sampling(max_tokens=8, seed=1))
    assert seen[0]["model"] == "m"
    assert seen[0]["token_ids"] == [1, 2, 3]
    assert (seen[0]["stream"], seen[0]["output_mode"]) == (True, "text")
    assert seen[0]["sampling_params"]["max_tokens"] == 8
    assert [c.token_ids for c in chunks] == [(5,), (6, 7)]
    last = chunks[-1]
    assert (last.finish_reason, last.completion_tokens) == ("stop", 3)
    assert last.version_spans == (VersionSpan(4, 0, 3),)


@pytest.mark.parametrize("bad", [math.nan, -math.inf, -9999.0, 1e-9])
async def test_a_logprob_that_is_none_is_passed_on_as_it_is(bad: float) -> None:
    chunks = await read(engine(lambda _: stream(last_event([5], [bad], 1), "data: [DONE]")))
    (found,) = chunks[-1].logprobs
    assert found == bad or (math.isnan(found) and math.isnan(bad))


async def test_missing_logprobs_stay_missing_and_null_is_nan() -> None:
    chunks = await read(
        engine(lambda _: stream(last_event([5, 6], [-1.0], 2), usage(2), "data: [DONE]"))
    )
    assert (len(chunks[-1].token_ids), len(chunks[-1].logprobs)) == (2, 1)
    chunks = await read(engine(lambda _: stream(last_event([5], [None], 1), "data: [DONE]")))
    assert math.isnan(chunks[-1].logprobs[0])
    assert chunks[-1].completion_tokens is None


@pytest.mark.parametrize("label", ["base", "4.1", "", None, 4])
def test_a_label_that_is_none_of_our_numbers_gives_no_span(label: Any) -> None:
    spans = [{"version": label, "start": 0, "end": 1}]
    choice = event([5], [-1.0], finish_reason="stop", weight_versions=spans)["choices"][0]
    assert read_choice(choice, 0).version_spans == ()


def test_alternatives_are_given_only_where_they_were_asked_for() -> None:
    content = entry(-1.0) | {"top_logprobs": [entry(-1.0), entry(-2.0, "b")]}
    choice = {"token_ids": [5], "logprobs": {"content": [content]}}
    assert read_choice(choice, 0).tokens[0].top == ()
    assert [t.token for t in read_choice(choice, 2).tokens[0].top] == ["a", "b"]


@pytest.mark.parametrize(
    "events",
    [
        [event([5], [-1.0])],
        [event([5], [-1.0]), "data: [DONE]"],
        [event([5], [-1.0]), {"error": {"message": "out of memory"}}],
        [event([5], [-1.0]), "data: {broken"],
    ],
    ids=["ends", "done without a reason", "error", "nonsense"],
)
async def test_a_stream_that_breaks_off_is_unavailable(events: list[Any]) -> None:
    with pytest.raises(EngineUnavailable):
        await read(engine(lambda _: stream(*events)))


async def test_a_refusal_keeps_message_field_and_code() -> None:
    def ours(_: httpx.Request) -> httpx.Response:
        body = {"message": "too hot", "param": "temperature", "code": "invalid_value"}
        return httpx.Response(400, json={"error": body})

    with pytest.raises(EngineRefused, match="too hot") as caught:
        await read(engine(ours))
    assert (caught.value.param, caught.value.code) == ("temperature", "invalid_value")


async def test_vllms_numeric_code_becomes_a_word() -> None:
    def vllm(_: httpx.Request) -> httpx.Response:
        message = "This model's maximum context length is 64 tokens. However, you requested 99."
        return httpx.Response(400, json={"error": {"message": message, "param": None, "code": 400}})

    with pytest.raises(EngineRefused, match=r"64.*99") as caught:
        await engine(vllm).render([Message("user", "x")])
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("status", [500, 502, 503])
async def test_a_5xx_is_unavailable(status: int) -> None:
    with pytest.raises(EngineUnavailable):
        await read(engine(lambda _: httpx.Response(status, text="<html>")))


async def test_no_connection_is_unavailable_and_silence_is_a_time_out() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(EngineUnavailable):
        await engine(refuse).status()

    async def hang(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(30)
        return httpx.Response(200)

    hanging = HttpEngine(
        "http://engine", transport=httpx.MockTransport(hang), request_timeout_s=0.1
    )
    with pytest.raises(EngineTimeout):
        await read(hanging)


async def test_messages_and_tools_are_rendered_whole() -> None:
    seen: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(json.loads(request.content))
        return httpx.Response(200, json={"token_ids": [4, 5], "sampling_params": {}})

    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        Message("user", "x", name="kim"),
        Message("assistant", None, tool_calls=(call,)),
        Message("tool", "1", tool_call_id="c"),
    ]
    prompt = await engine(answer).render(messages, tools=[{"type": "function"}])
    assert prompt.token_ids == (4, 5)
    assert seen[0] == {
        "messages": [
            {"role": "user", "content": "x", "name": "kim"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "1", "tool_call_id": "c"},
        ],
        "tools": [{"type": "function"}],
    }


async def test_the_status_of_a_plain_vllm_is_put_together_from_its_own_paths() -> None:
    answers = {
        "/weight_info": {"weight_version": "default"},
        "/is_paused": {"is_paused": True},
        "/v1/models": {"data": [{"id": "m", "max_model_len": 64}]},
        "/version": {"version": "0.32.0"},
    }

    def answer(request: httpx.Request) -> httpx.Response:
        known = answers.get(request.url.path)
        return httpx.Response(404) if known is None else httpx.Response(200, json=known)

    status = await engine(answer).status()
    assert (status.version, status.paused, status.model, status.max_model_len) == (
        None,
        True,
        "m",
        64,
    )


def test_the_client_never_loads_torch() -> None:
    script = (
        "import sys; import online_sao.engines.client, online_sao.engines.launch, "
        "online_sao.engines.scripted; "
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == "[]"
