import asyncio
import time
import uuid
from dataclasses import replace
from typing import Any

import httpx
import pytest
from gateway_support import Bench, FaultyStore, HandEngine, bench, error_of, reply_of

from online_sao.errors import DatabaseUnavailable
from online_sao.gateway import feedback as feedback_module
from online_sao.store.memory import MemoryStore
from online_sao.types import (
    Judgement,
    JudgementState,
    NewVersion,
    Update,
    UpdateKind,
    new_id,
    utc_now,
)


def id_at(seconds_from_now: float) -> str:
    ms = int((time.time() + seconds_from_now) * 1000)
    value = (ms << 80) | (7 << 76) | (2 << 62) | 12345
    return f"chatcmpl-{uuid.UUID(int=value)}"


async def say(
    b: Bench[HandEngine], inference_id: str, metric: str, value: Any, **more: Any
) -> httpx.Response:
    body = {"inference_id": inference_id, "metric_name": metric, "value": value, **more}
    return await b.client.post("/v1/feedback", json=body)


async def reply_id(b: Bench[HandEngine]) -> str:
    return str((await b.chat()).json()["id"])


async def train_on(store: MemoryStore, rollout_id: str) -> None:
    """Judge the one reply and commit an update that trained on it."""
    rubric = await store.put_rubric("r", "judges.rules:RulesJudge", {})
    await store.add_base_version("v0", "0" * 64)
    await store.claim_unjudged("j", limit=1, lease_s=60)
    await store.record_judgement(
        Judgement(
            new_id("jdg_"), rollout_id, utc_now(), rubric.id, rubric.judge,
            JudgementState.SCORED, 1, 1, 1.0,
        ),
        "j",
    )  # fmt: skip
    claimed = await store.claim_trajectories(
        "l", size=1, lease_s=60, max_lag=8, max_train_tokens=100, skip_cut=False
    )
    assert [trajectory.rollout_ids for trajectory in claimed] == [(rollout_id,)]
    update = Update(new_id("upd_"), utc_now(), UpdateKind.POLICY, (rollout_id,), {})
    await store.commit_update("l", update, NewVersion("v1", "0" * 64, 0))


@pytest.mark.parametrize(
    ("metric", "value"),
    [("thumbs", True), ("thumbs", False), ("rating", 1), ("rating", 4.5), ("comment", "fine")],
)
async def test_feedback_is_kept_as_it_was_said(metric: str, value: Any) -> None:
    async with bench() as b:
        target = await reply_id(b)
        answer = await say(b, target, metric, value, comment="why", user="ann")
        (said,) = await b.store.list_feedback(target)
    body = answer.json()
    assert answer.status_code == 200
    assert (body["status"], body["inference_id"]) == ("accepted", target)
    assert body["id"] == said.id
    assert said.id.startswith("fb_")
    assert (said.metric, said.value, said.comment) == (metric, value, "why")
    assert type(said.value) is (float if metric == "rating" else type(value))
    assert said.user_hash is not None
    assert "ann" not in said.user_hash


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("thumbs", "yes"),
        ("thumbs", 1),
        ("thumbs", None),
        ("rating", True),
        ("rating", "5"),
        ("rating", 0),
        ("rating", 5.01),
        ("rating", None),
        ("comment", ""),
        ("comment", 5),
        ("comment", "x" * 10_001),
        ("comment", ["x"]),
    ],
)
async def test_a_value_of_the_wrong_kind_is_a_400_naming_value(metric: str, value: Any) -> None:
    async with bench() as b:
        target = await reply_id(b)
        answer = await say(b, target, metric, value)
        assert await b.store.list_feedback(target) == []
    assert (answer.status_code, error_of(answer)["param"]) == (400, "value")
    assert len(answer.text) < 300


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "1e400", "-1e400"])
async def test_a_rating_that_is_no_finite_number_is_a_400(literal: str) -> None:
    async with bench() as b:
        target = await reply_id(b)
        body = f'{{"inference_id":"{target}","metric_name":"rating","value":{literal}}}'
        answer = await b.client.post("/v1/feedback", content=body)
        assert await b.store.list_feedback(target) == []
    assert answer.status_code == 400
    if literal.endswith("1e400"):
        assert error_of(answer)["param"] == "value"
    else:
        assert error_of(answer)["code"] == "invalid_json"


async def test_a_metric_nobody_knows_is_a_404() -> None:
    async with bench() as b:
        answer = await say(b, await reply_id(b), "smiles", True)
    assert (answer.status_code, error_of(answer)["code"]) == (404, "unknown_metric")


@pytest.mark.parametrize(
    "bad", ["", "abc", "chatcmpl-", "chatcmpl-x", f"chatcmpl-{uuid.UUID(int=5)}", new_id("fb_")]
)
async def test_what_is_no_replys_id_is_a_400(bad: str) -> None:
    async with bench() as b:
        answer = await say(b, bad, "thumbs", True)
    assert (answer.status_code, error_of(answer)["param"]) == (400, "inference_id")


async def test_an_id_from_the_future_is_a_400_and_an_old_unknown_one_a_404() -> None:
    async with bench() as b:
        future = await say(b, id_at(3600), "thumbs", True)
        old = await say(b, id_at(-301), "thumbs", True)
    assert (future.status_code, error_of(future)["param"]) == (400, "inference_id")
    assert (old.status_code, error_of(old)["code"]) == (404, "inference_not_found")


async def test_feedback_on_a_reply_still_streaming_is_accepted() -> None:
    async with bench(HandEngine(reply_of(*"abcdefgh"), delay=0.05)) as b:
        running = asyncio.create_task(b.chat(stream=True))
        await asyncio.sleep(0.1)
        (target,) = b.store.rows
        answer = await say(b, target, "thumbs", True)
        assert target not in b.store.ends
        await running
    assert (answer.status_code, answer.json()["status"]) == (200, "accepted")


async def test_feedback_on_a_young_unknown_id_is_kept_until_its_row_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feedback_module, "PENDING_DELAYS_S", (0.05,) * 5)
    async with bench() as b:
        target = id_at(-1)
        answer = await say(b, target, "thumbs", True)
        assert (answer.status_code, answer.json()["status"]) == (202, "pending")
        known = b.store.rows[await reply_id(b)]
        await b.store.insert_rollout(replace(known, id=target))
        await asyncio.sleep(0.15)
        (said,) = await b.store.list_feedback(target)
    assert said.id == answer.json()["id"]


async def test_feedback_that_stays_unknown_is_dropped_in_words(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(feedback_module, "PENDING_DELAYS_S", (0.02, 0.02))
    async with bench() as b:
        answer = await say(b, id_at(-1), "thumbs", True)
        await asyncio.sleep(0.1)
        metrics = (await b.client.get("/metrics")).text
    assert answer.status_code == 202
    assert f"action=late_write_dropped name={answer.json()['id']}" in caplog.text
    assert 'sao_feedback_total{status="pending"} 1.0' in metrics
    assert "sao_late_writes_dropped_total 1.0" in metrics


async def test_thumbs_down_then_up_are_both_kept_in_order() -> None:
    async with bench() as b:
        target = await reply_id(b)
        for thumb in (False, True):
            assert (await say(b, target, "thumbs", thumb, user="ann")).status_code == 200
        said = await b.store.list_feedback(target)
    assert [one.value for one in said] == [False, True]
    assert said[0].user_hash == said[1].user_hash


async def test_the_same_feedback_twice_is_one_row_and_other_content_a_409() -> None:
    async with bench() as b:
        target = await reply_id(b)
        first = await say(b, target, "thumbs", True, id="mine")
        again = await say(b, target, "thumbs", True, id="mine")
        other = await say(b, target, "thumbs", False, id="mine")
        assert len(await b.store.list_feedback(target)) == 1
    assert first.json()["status"] == "accepted"
    assert again.status_code == 200
    assert again.json()["status"] == "duplicate"
    assert again.json()["id"] == first.json()["id"]
    assert (other.status_code, error_of(other)["code"]) == (409, "id_reused")
    assert other.headers["x-should-retry"] == "false"


async def test_feedback_on_a_trained_reply_says_so() -> None:
    async with bench(HandEngine(reply_of("a", version=0))) as b:
        target = await reply_id(b)
        await train_on(b.store, target)
        answer = await say(b, target, "thumbs", True)
    assert answer.json()["status"] == "already_trained"


async def test_feedback_without_a_database_is_a_503() -> None:
    store = FaultyStore()
    async with bench(store=store) as b:
        target = await reply_id(b)
        store.failing = DatabaseUnavailable("down")
        answer = await say(b, target, "thumbs", True)
    assert (answer.status_code, error_of(answer)["code"]) == (503, "database_unavailable")
    assert answer.headers["retry-after"] == "2"


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"metric_name": "thumbs", "value": True}, "missing_field", "inference_id"),
        ({"inference_id": "x", "metric_name": "thumbs"}, "missing_field", "value"),
        (
            {"inference_id": "x", "metric_name": "thumbs", "value": True, "extra": 1},
            "unsupported_parameter",
            "extra",
        ),
        (
            {"inference_id": "x", "metric_name": "thumbs", "value": True, "comment": 4},
            "invalid_value",
            "comment",
        ),
    ],
)
async def test_a_feedback_of_another_shape_is_refused_by_name(
    body: dict[str, Any], code: str, param: str
) -> None:
    async with bench() as b:
        answer = await b.client.post("/v1/feedback", json=body)
    assert (error_of(answer)["code"], error_of(answer)["param"]) == (code, param)
