import asyncio
import json
from typing import Any

import pytest
from gateway_support import HandEngine, bench, bench_on, events_of, reply_of

from online_sao.engines.scripted import ScriptedEngine
from online_sao.errors import EngineTimeout
from online_sao.gateway import replies
from online_sao.types import ReplyChunk, TokenText, TopLogprob, VersionSpan


async def test_a_reply_has_openais_shape_and_ours_beside_it() -> None:
    async with bench() as b:
        answer = await b.chat()
        (rollout_id,) = b.store.rows
    body = answer.json()
    assert body.pop("created") > 1_700_000_000
    assert body == {
        "id": rollout_id,
        "object": "chat.completion",
        "model": "online-sao",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello there.", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 21, "completion_tokens": 3, "total_tokens": 24},
        "sao": {
            "inference_id": rollout_id,
            "policy_version": 3,
            "trainable": True,
            "trainable_reason": None,
        },
    }
    assert answer.headers["x-sao-inference-id"] == rollout_id
    assert answer.headers["x-sao-policy-version"] == "3"
    assert answer.headers["x-request-id"].startswith("req_")


async def test_a_stream_has_a_role_the_text_a_finish_and_done_and_no_empty_choices() -> None:
    async with bench() as b:
        answer = await b.chat(stream=True)
        (rollout_id,) = b.store.rows
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-sao-inference-id"] == rollout_id
    events = events_of(answer)
    assert events[-1] == "[DONE]"
    chunks: list[dict[str, Any]] = events[:-1]
    assert {chunk["id"] for chunk in chunks} == {rollout_id}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "Hello"},
        {"content": " there"},
        {"content": "."},
        {},
    ]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 4 + ["stop"]
    assert chunks[0]["sao"] == {"inference_id": rollout_id}
    assert chunks[-1]["sao"] == {
        "inference_id": rollout_id,
        "policy_version": 3,
        "trainable": True,
        "trainable_reason": None,
    }
    assert all("usage" not in chunk for chunk in chunks)


async def test_usage_comes_in_a_chunk_of_its_own_only_when_asked_for() -> None:
    async with bench() as b:
        answer = await b.chat(stream=True, stream_options={"include_usage": True})
    *chunks, last, done = events_of(answer)
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 21, "completion_tokens": 3, "total_tokens": 24}
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)


async def test_an_emoji_split_over_tokens_comes_whole_streamed_and_not() -> None:
    # The double's tokens are bytes: the emoji is four of them.
    async with bench_on(ScriptedEngine(replies=["ok \U0001f600!"])) as b:
        streamed = events_of(await b.chat(stream=True))[:-1]
        whole = (await b.chat()).json()["choices"][0]["message"]["content"]
        stored = [end.reply_ids for end in b.store.ends.values()]
    texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in streamed]
    assert "".join(texts) == whole == "ok \U0001f600!"
    assert texts == ["", "o", "k", " ", "\U0001f600", "!", ""]
    assert stored == [(*"ok \U0001f600!".encode(), 257)] * 2


async def test_logprobs_are_shown_only_when_asked_for_with_their_alternatives() -> None:
    token = TokenText(
        "Yes", (89, 101, 115), (TopLogprob("Yes", -0.1, (89,)), TopLogprob("No", -float("inf")))
    )
    chunks = [
        ReplyChunk("Yes", (7,), (-0.1,), (token,)),
        ReplyChunk("", (), (), (), "stop", (VersionSpan(1, 0, 1),), 1),
    ]
    expected = {
        "content": [
            {
                "token": "Yes",
                "logprob": -0.1,
                "bytes": [89, 101, 115],
                "top_logprobs": [
                    {"token": "Yes", "logprob": -0.1, "bytes": [89]},
                    {"token": "No", "logprob": -9999.0, "bytes": None},
                ],
            }
        ],
        "refusal": None,
    }
    async with bench(HandEngine(chunks)) as b:
        plain = (await b.chat()).json()
        whole = (await b.chat(logprobs=True, top_logprobs=2)).json()
        streamed = events_of(await b.chat(stream=True, logprobs=True, top_logprobs=2))
        assert b.engine.seen[1][1].top_logprobs == 2
    assert plain["choices"][0]["logprobs"] is None
    assert whole["choices"][0]["logprobs"] == expected
    assert streamed[1]["choices"][0]["logprobs"] == expected


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (-0.5, -0.5),
        (float("nan"), -9999.0),
        (-float("inf"), -9999.0),
        (1e-9, 0.0),
        (-9999.0, -9999),
    ],
)
def test_a_logprob_is_shown_as_json_can_carry_it(value: float, shown: float) -> None:
    assert replies.shown_logprob(value) == shown
    json.dumps(replies.shown_logprob(value), allow_nan=False)


async def test_a_silent_stream_is_pinged_before_and_between_its_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replies, "PING_AFTER_S", 0.05)
    async with bench(HandEngine(reply_of("a", "b"), delay=0.2)) as b:
        answer = await b.chat(stream=True)
    blocks = answer.text.split("\n\n")
    assert blocks[0] == ": ping"
    assert blocks.count(": ping") >= 6
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events_of(answer)[:-1]) == (
        "ab"
    )


async def test_a_stream_that_is_not_silent_is_not_pinged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "PING_AFTER_S", 0.2)
    async with bench(HandEngine(reply_of(*"abcdefgh"), delay=0.05)) as b:
        answer = await b.chat(stream=True)
    assert ": ping" not in answer.text


async def test_an_error_after_a_ping_is_an_event_in_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replies, "PING_AFTER_S", 0.05)
    engine = HandEngine(delay=0.2)
    async with bench(engine) as b:
        running = asyncio.create_task(b.chat(stream=True))
        await asyncio.sleep(0.1)
        engine.error, engine.error_after = EngineTimeout("slow"), 1
        answer = await running
    assert answer.status_code == 200
    assert events_of(answer)[-1]["error"]["code"] == "engine_timeout"
