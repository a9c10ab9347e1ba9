import asyncio

import pytest
from gateway_support import (
    CHAT,
    FaultyStore,
    HandEngine,
    bench,
    bench_on,
    error_of,
    events_of,
    reply_of,
)

from online_sao.engines.scripted import ScriptedEngine
from online_sao.errors import (
    DatabaseUnavailable,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
)
from online_sao.types import (
    LedgerState,
    Outcome,
)


async def test_the_row_exists_before_the_engine_generates() -> None:
    states: list[LedgerState] = []
    store = FaultyStore()

    class Looking(HandEngine):
        def generate(self, prompt, sampling, *, request_id):  # type: ignore[no-untyped-def]
            end = store.ends.get(request_id)
            assert request_id in store.rows
            assert end is None
            states.append(LedgerState.IN_FLIGHT)
            return super().generate(prompt, sampling, request_id=request_id)

    async with bench(Looking(), store) as b:
        assert (await b.chat()).status_code == 200
    assert states == [LedgerState.IN_FLIGHT]


@pytest.mark.parametrize(
    ("error", "status", "code", "word"),
    [
        (EngineUnavailable("gone"), 503, "engine_error", "engine_unavailable"),
        (EngineTimeout("slow"), 504, "engine_timeout", "engine_timeout"),
        (EngineRefused("no", param="stop"), 400, "invalid_value", "invalid_value"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_error_before_the_first_byte_is_an_http_error(
    error: Exception, status: int, code: str, word: str, stream: bool
) -> None:
    async with bench(HandEngine(error=error)) as b:
        answer = await b.chat(stream=stream)
        rollout = await b.only_rollout()
    assert answer.status_code == status
    assert error_of(answer)["code"] == code
    assert ("retry-after" in answer.headers) == (status >= 500)
    assert (rollout.state, rollout.reason) == (LedgerState.FAILED, word)


async def test_an_engine_that_dies_in_mid_stream_fails_that_chat_alone() -> None:
    engine = ScriptedEngine(replies=["abcdef"])
    engine.faults.die_after = 3
    async with bench_on(engine) as b:
        answer = await b.chat(stream=True)
        rollout = await b.only_rollout()
        engine.faults.die_after = None
        assert (await b.chat()).status_code == 200
    assert events_of(answer)[-1]["error"]["code"] == "engine_error"
    assert (rollout.state, rollout.reason) == (LedgerState.FAILED, "engine_unavailable")
    assert rollout.completion is not None
    assert rollout.completion.reply_ids == tuple(b"abc")


async def test_an_engine_error_in_mid_stream_is_an_event_and_no_done_follows() -> None:
    async with bench(HandEngine(error=EngineUnavailable("x"), error_after=2)) as b:
        answer = await b.chat(stream=True)
        rollout = await b.only_rollout()
    events = events_of(answer)
    assert answer.status_code == 200
    assert events[-1]["error"]["code"] == "engine_error"
    assert "[DONE]" not in events
    assert rollout.state is LedgerState.FAILED
    assert rollout.completion is not None
    assert rollout.completion.text == "Hello there"


async def test_a_reply_that_stops_without_a_finish_reason_is_a_failure() -> None:
    async with bench(HandEngine(reply_of("a", "b")[:-1])) as b:
        answer = await b.chat()
        rollout = await b.only_rollout()
    assert (answer.status_code, error_of(answer)["code"]) == (503, "engine_error")
    assert rollout.state is LedgerState.FAILED


async def test_a_reply_that_the_engine_gave_up_is_not_trained_on() -> None:
    async with bench(HandEngine(reply_of("a", finish="abort"))) as b:
        answer = await b.chat()
        rollout = await b.only_rollout()
    assert answer.status_code == 503
    assert rollout.completion is not None
    assert rollout.completion.outcome is Outcome.ABORTED
    assert rollout.reason == "engine_abort"


async def test_a_chat_that_the_template_refuses_is_a_400_with_its_words() -> None:
    async with bench() as b:
        for messages in (
            [{"role": "assistant", "content": "I begin"}],
            [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
        ):
            answer = await b.client.post(CHAT, json={"model": "online-sao", "messages": messages})
            assert answer.status_code == 400
            assert error_of(answer)["message"] == "roles must alternate, the user first"
            assert error_of(answer)["param"] == "messages"
        assert b.engine.seen == []


async def test_a_token_id_the_engine_refuses_is_a_400_and_the_engine_lives() -> None:
    async with bench_on(ScriptedEngine()) as b:
        answer = await b.chat(logit_bias={"999999999": 5})
        rollout = await b.only_rollout()
        assert (await b.chat()).status_code == 200
    assert (answer.status_code, error_of(answer)["param"]) == (400, "logit_bias")
    assert (rollout.state, rollout.reason) == (LedgerState.FAILED, "invalid_value")


async def test_a_reply_no_context_could_hold_is_refused_with_both_numbers() -> None:
    async with bench() as b:
        answer = await b.chat(max_tokens=10**9)
        rollout = await b.only_rollout()
        # The prompt has 21 tokens, the context 100.
        fits = await b.chat(max_tokens=79)
        too_many = await b.chat(max_tokens=80)
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (
        400,
        "context_length_exceeded",
        "max_tokens",
    )
    assert "1000000000" in error["message"]
    assert "100 tokens" in error["message"]
    assert (rollout.state, rollout.reason) == (LedgerState.FAILED, "context_length_exceeded")
    assert (fits.status_code, too_many.status_code) == (200, 400)


async def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers() -> None:
    engine = HandEngine()
    engine.changed["max_model_len"] = 20
    async with bench(engine) as b:
        answer = await b.chat()
        assert b.engine.seen == []
    error = error_of(answer)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert "21 tokens" in error["message"]
    assert "20 tokens" in error["message"]


async def test_the_engines_own_refusal_of_a_long_prompt_is_passed_on() -> None:
    async with bench() as b:
        answer = await b.chat("x" * 200)
    error = error_of(answer)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert "100 tokens" in error["message"]
    assert "219 tokens" in error["message"]


async def test_an_engine_that_does_not_tell_its_context_is_held_to_the_settings() -> None:
    engine = HandEngine()
    engine.changed["max_model_len"] = 0
    async with bench(engine) as b:
        fits = await b.chat(max_tokens=2048 - 21)
        too_many = await b.chat(max_tokens=2048 - 20)
    assert (fits.status_code, too_many.status_code) == (200, 400)
    assert "2048 tokens" in error_of(too_many)["message"]


async def test_a_reply_that_takes_too_long_is_a_504_and_frees_the_engine() -> None:
    async with bench(HandEngine(delay=5.0), request_timeout_s=0.05) as b:
        answer = await b.chat()
        rollout = await b.only_rollout()
        assert len(b.engine.closed) == 1
    assert (answer.status_code, error_of(answer)["code"]) == (504, "engine_timeout")
    assert (rollout.state, rollout.reason) == (LedgerState.FAILED, "engine_timeout")


async def test_without_a_database_nothing_is_generated() -> None:
    store = FaultyStore()
    store.failing = DatabaseUnavailable("down")
    async with bench(store=store) as b:
        answer = await b.chat()
        assert b.engine.seen == []
    assert (answer.status_code, error_of(answer)["code"]) == (503, "database_unavailable")
    assert answer.headers["retry-after"] == "2"


async def test_a_reply_is_served_and_its_record_written_later_when_the_database_comes_back() -> (
    None
):
    store = FaultyStore()
    store.failing_complete = DatabaseUnavailable("down")
    async with bench(store=store) as b:
        answer = await b.chat()
        assert answer.status_code == 200
        assert b.store.ends == {}
        store.failing_complete = None
        await asyncio.sleep(0.4)
        rollout = await b.only_rollout()
    assert rollout.state is LedgerState.AWAITING_JUDGEMENT


async def test_an_error_nobody_foresaw_closes_the_row_and_says_nothing_of_itself() -> None:
    async with bench(HandEngine(error=RuntimeError("/secret/path"))) as b:
        answer = await b.chat()
        rollout = await b.only_rollout()
    assert (answer.status_code, error_of(answer)["code"]) == (500, "internal_error")
    assert "secret" not in answer.text
    assert (rollout.state, rollout.reason) == (LedgerState.FAILED, "internal_error")


async def test_a_row_is_completed_once_whatever_ends_the_turn() -> None:
    calls: list[Outcome] = []
    store = FaultyStore()
    inner = store.complete_rollout

    async def counting(completion) -> None:  # type: ignore[no-untyped-def]
        calls.append(completion.outcome)
        await inner(completion)

    store.complete_rollout = counting  # type: ignore[method-assign]
    async with bench(store=store) as b:
        await b.chat()
        await b.chat(stream=True)
        b.engine.error = EngineUnavailable("x")
        await b.chat()
        b.engine.error_after = 1
        await b.chat(stream=True)
    assert calls == [Outcome.COMPLETED, Outcome.COMPLETED, Outcome.FAILED, Outcome.FAILED]
    assert len(store.ends) == len(store.rows) == 4


@pytest.mark.parametrize(
    ("named", "default", "passed_on"), [(None, 0, None), (None, 30, 30), (7, 30, 7)]
)
async def test_a_client_that_names_no_max_tokens_gets_the_services_own_bound(
    named: int | None, default: int, passed_on: int | None
) -> None:
    async with bench() as b:
        services = b.app.state.services
        policy = services.settings.policy.model_copy(update={"default_max_tokens": default})
        bounded = services.settings.model_copy(update={"policy": policy})
        object.__setattr__(services, "settings", bounded)
        fields = {} if named is None else {"max_tokens": named}
        assert (await b.chat(**fields)).status_code == 200
        (rollout,) = [await b.only_rollout()]
    assert b.engine.seen[0][1].max_tokens == passed_on
    assert rollout.request.sampling.max_tokens == named  # the record says what was asked
