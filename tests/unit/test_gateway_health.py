import asyncio
import time

import pytest
from gateway_support import FaultyStore, HandEngine, bench, error_of

from online_sao.errors import DatabaseUnavailable, EngineUnavailable
from online_sao.gateway import probe
from online_sao.types import EngineStatus


def gone() -> HandEngine:
    engine = HandEngine()
    engine.faults.unavailable = True
    return engine


async def test_a_ready_service_says_which_version_it_serves() -> None:
    async with bench() as b:
        b.client.headers.pop("authorization")
        assert (await b.client.get("/healthz")).json() == {"status": "ok"}
        ready = await b.client.get("/readyz")
        version = await b.client.get("/version")
    assert (ready.status_code, ready.json()) == (200, {"status": "ready", "policy_version": 3})
    assert version.json()["model"] == "online-sao"
    assert version.json()["policy_version"] == 3


async def test_readiness_names_everything_that_is_missing() -> None:
    store = FaultyStore()
    store.failing = DatabaseUnavailable("secret host")
    async with bench(gone(), store) as b:
        ready = await b.client.get("/readyz")
        alive = await b.client.get("/healthz")
    assert (ready.status_code, alive.status_code) == (503, 200)
    body = ready.json()
    assert body["missing"] == ["the engine does not answer", "the database does not answer"]
    assert body["error"]["code"] == "engine_loading"
    assert ready.headers["retry-after"] == "2"
    assert "secret" not in ready.text


async def test_readiness_does_not_wait_for_an_engine_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "CHECK_TIMEOUT_S", 0.05)

    class Hanging(HandEngine):
        async def status(self) -> EngineStatus:
            await asyncio.sleep(60)
            raise AssertionError

    async with bench(Hanging()) as b:
        began = time.monotonic()
        ready = await b.client.get("/readyz")
        metrics = await b.client.get("/metrics")
        version = await b.client.get("/version")
        assert time.monotonic() - began < 1.0
    assert ready.json()["missing"] == ["the engine does not answer"]
    assert "sao_engine_up 0.0" in metrics.text
    assert version.json()["policy_version"] is None


async def test_metrics_count_what_happened() -> None:
    async with bench() as b:
        await b.chat()
        await b.chat(stream=True, temperature=0)
        await b.chat(max_tokens=0)
        b.engine.error = EngineUnavailable("x")
        await b.chat()
        text = (await b.client.get("/metrics")).text
    for line in (
        'sao_chats_total{outcome="completed"} 2.0',
        'sao_chats_total{outcome="refused"} 1.0',
        'sao_chats_total{outcome="failed"} 1.0',
        'sao_not_trainable_total{reason="greedy"} 1.0',
        'sao_tokens_total{kind="prompt"} 63.0',
        'sao_tokens_total{kind="reply"} 6.0',
        "sao_first_token_seconds_count 2.0",
        "sao_reply_seconds_count 2.0",
        'sao_http_responses_total{status="200"} 2.0',
        'sao_http_responses_total{status="400"} 1.0',
        'sao_http_responses_total{status="503"} 1.0',
        "sao_in_flight 0.0",
        "sao_served_version 3.0",
        "sao_engine_up 1.0",
        "sao_database_up 1.0",
        'sao_rollouts{state="awaiting_judgement"} 1.0',
        'sao_rollouts{state="not_trainable"} 1.0',
        'sao_rollouts{state="failed"} 1.0',
        "sao_ledger_adds_up 1.0",
        "sao_alarms 0.0",
    ):
        assert line in text.splitlines()


async def test_metrics_carry_no_user_session_or_key_and_each_app_its_own_registry() -> None:
    async with bench() as one, bench() as two:
        await one.chat(user="ann", sao={"session_id": "my-session"})
        text = (await one.client.get("/metrics")).text
        other = (await two.client.get("/metrics")).text
    for word in ("ann", "my-session", "test-key", "chatcmpl-"):
        assert word not in text
    names = [line.split("{")[0].split(" ")[0] for line in text.splitlines() if line[0] != "#"]
    assert all(name.startswith("sao_") for name in names)
    assert "sao_chats_total{" not in other


async def test_the_ledger_is_read_at_most_once_a_second_for_metrics() -> None:
    calls: list[int] = []

    class Counting(FaultyStore):
        async def ledger(self):  # type: ignore[no-untyped-def]
            calls.append(1)
            return await super().ledger()

    async with bench(store=Counting()) as b:
        await asyncio.gather(*(b.client.get("/metrics") for _ in range(20)))
    assert len(calls) == 1


async def test_metrics_answer_without_a_database() -> None:
    store = FaultyStore()
    store.failing = DatabaseUnavailable("x")
    async with bench(store=store) as b:
        answer = await b.client.get("/metrics")
    assert answer.status_code == 200
    assert "sao_database_up 0.0" in answer.text


async def test_models_lists_the_one_model_and_knows_no_other() -> None:
    async with bench() as b:
        listed = (await b.client.get("/v1/models")).json()
        single = await b.client.get("/v1/models/online-sao")
        other = await b.client.get("/v1/models/org/gpt")
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"]) == ("online-sao", "model")
    assert isinstance(model["created"], int)
    assert model["sao"] == {"policy_version": 3, "max_model_len": 100}
    assert single.json() == model
    assert (other.status_code, error_of(other)["code"]) == (404, "model_not_found")


async def test_models_are_listed_without_an_engine() -> None:
    async with bench(gone()) as b:
        listed = await b.client.get("/v1/models")
    assert listed.json()["data"][0]["sao"]["policy_version"] is None


async def test_the_version_shown_is_at_most_a_second_old(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench() as b:
        assert (await b.client.get("/version")).json()["policy_version"] == 3
        b.engine.changed["version"] = 4
        monkeypatch.setattr(probe, "REFRESH_AFTER_S", 0.0)
        assert (await b.client.get("/version")).json()["policy_version"] == 4
        models = (await b.client.get("/v1/models")).json()
        b.engine.faults.unavailable = True
        assert (await b.client.get("/version")).json()["policy_version"] is None
    assert models["data"][0]["sao"]["policy_version"] == 4


async def test_a_restarted_engine_is_known_by_its_new_boot_id() -> None:
    async with bench() as b:
        await b.chat()
        b.engine.changed["boot_id"] = "boot-2"
        await b.client.get("/readyz")
        answer = (await b.chat()).json()
        rollout = await b.rollout(answer["id"])
    assert rollout.completion is not None
    assert rollout.completion.engine == "boot-2"


async def test_an_old_status_is_renewed_beside_the_request_that_finds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("online_sao.gateway.probe.REFRESH_AFTER_S", 0.0)
    async with bench(HandEngine(delay=0.02)) as b:
        await b.chat()
        b.engine.changed["boot_id"] = "boot-2"
        answer = (await b.chat()).json()
        rollout = await b.rollout(answer["id"])
    assert rollout.completion is not None
    assert rollout.completion.engine == "boot-2"
