"""The HTTP face of our engines, over the double."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from online_sao.engines.scripted import ScriptedBackend
from online_sao.engines.server import build_app


@pytest.fixture
async def http() -> AsyncGenerator[httpx.AsyncClient, None]:
    app = build_app(ScriptedBackend(version=3, max_model_len=100))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        yield client


def body(**more: Any) -> dict[str, Any]:
    sampling = {"max_tokens": 4, "logprobs": 0}
    return {"request_id": "r", "token_ids": [1, 2, 3], "sampling_params": sampling,
            "output_mode": "text"} | more  # fmt: skip


async def test_a_whole_reply_carries_ids_logprobs_spans_and_usage(http: httpx.AsyncClient) -> None:
    answer = (await http.post("/inference/v1/generate", json=body())).json()
    choice = answer["choices"][0]
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (4, "length")
    assert len(choice["logprobs"]["content"]) == 4
    assert choice["weight_versions"] == [{"version": "3", "start": 0, "end": 4}]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert answer["prompt_logprobs"] is None


async def test_logprobs_come_only_when_they_are_asked_for(http: httpx.AsyncClient) -> None:
    plain = body(sampling_params={"max_tokens": 2})
    answer = (await http.post("/inference/v1/generate", json=plain)).json()
    assert answer["choices"][0]["logprobs"] is None


async def test_a_stream_ends_with_usage_only_where_it_was_asked_for(
    http: httpx.AsyncClient,
) -> None:
    for options, counted in (({"include_usage": True}, True), (None, False)):
        sent = body(stream=True, stream_options=options)
        text = (await http.post("/inference/v1/generate", json=sent)).text
        assert text.endswith("data: [DONE]\n\n")
        assert ('"usage"' in text) == counted


@pytest.mark.parametrize(
    ("path", "sent", "status", "param"),
    [
        ("/inference/v1/generate", body(model="other"), 404, "model"),
        ("/inference/v1/generate", body(output_mode="tokens"), 400, "output_mode"),
        ("/inference/v1/generate", body(priority=3), 400, "priority"),
        ("/inference/v1/generate", body(token_ids=[]), 400, "token_ids"),
        ("/inference/v1/generate", body(token_ids=[1] * 100), 400, "token_ids"),
        ("/v1/chat/completions/render", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions/render", {"messages": [{}], "n": 2}, 400, "n"),
        ("/pause?mode=abort", None, 400, "mode"),
        ("/update_weights", {"update_info": {"path": "x"}}, 400, "update_info"),
        ("/finish_weight_update", {"weight_version": "4"}, 500, None),
    ],
)
async def test_errors_have_openais_shape_and_name_the_field(
    http: httpx.AsyncClient, path: str, sent: Any, status: int, param: str | None
) -> None:
    answer = await http.post(path, json=sent)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param


async def test_facts_as_vllm_gives_them(http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).status_code == 200
    assert (await http.get("/weight_info")).json()["weight_version"] == "3"
    assert (await http.get("/is_paused")).json() == {"is_paused": False}
    card = (await http.get("/v1/models")).json()["data"][0]
    assert (card["id"], card["max_model_len"]) == ("online-sao", 100)
    assert "online-sao" in (await http.get("/version")).json()["version"]


async def test_pausing_and_resuming(http: httpx.AsyncClient) -> None:
    await http.post("/pause", params={"mode": "keep", "clear_cache": "true"})
    assert (await http.get("/is_paused")).json() == {"is_paused": True}
    await http.post("/resume")
    assert (await http.get("/is_paused")).json() == {"is_paused": False}
