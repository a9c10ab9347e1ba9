import asyncio
import time

import httpx
import pytest
from gateway_support import (
    CHAT,
    NAN,
    Bench,
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
from online_sao.gateway.later import Later
from online_sao.gateway.record import ReplyRecord
from online_sao.gateway.turn import Turn
from online_sao.types import (
    LedgerState,
    Message,
    NotTrainable,
    Outcome,
    ReplyChunk,
    RolloutRequest,
    Sampling,
    VersionSpan,
    new_id,
    utc_now,
)

TURN, END = 256, 257
"""The shipped double's markers; its other tokens are bytes."""


async def test_a_reply_is_stored_as_the_engine_gave_it_and_awaits_judgement() -> None:
    async with bench() as b:
        body = (await b.chat()).json()
        rollout = await b.rollout(body["id"])
        boot_id = (await b.engine.status()).boot_id
    assert rollout.state is LedgerState.AWAITING_JUDGEMENT
    assert rollout.request.messages == (Message("user", "Hi"),)
    end = rollout.completion
    assert end is not None
    assert (end.text, end.finish_reason) == ("Hello there.", "stop")
    # The double's template in bytes: <turn> user: Hi <end> <turn> assistant:
    assert end.prompt_ids == (TURN, *b"user: Hi", END, TURN, *b"assistant:")
    assert end.engine == boot_id
    assert end.reply_ids == (10, 11, 12)
    assert end.logprobs == (-0.1, -0.2, -0.3)
    assert end.version_spans == (VersionSpan(3, 0, 3),)


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


async def test_a_text_that_would_retokenize_differently_keeps_the_engines_ids() -> None:
    engine = HandEngine(reply_of(" Hel", "lo", "<think>", ids=[500, 501, 1999]))
    async with bench(engine) as b:
        body = (await b.chat()).json()
        rollout = await b.rollout(body["id"])
    assert rollout.completion is not None
    assert rollout.completion.reply_ids == (500, 501, 1999)
    assert body["sao"]["trainable"] is True


async def test_an_end_of_turn_id_that_has_no_text_is_kept_with_its_logprob() -> None:
    async with bench_on(ScriptedEngine(replies=["Hi"])) as b:
        body = (await b.chat()).json()
        rollout = await b.rollout(body["id"])
    assert body["choices"][0]["message"]["content"] == "Hi"
    assert body["usage"]["completion_tokens"] == 3
    assert rollout.completion is not None
    assert rollout.completion.reply_ids == (*b"Hi", END)
    assert len(rollout.completion.logprobs) == 3
    assert body["sao"]["trainable"] is True


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_leaves_the_text_and_stays_in_ids_and_logprobs(stream: bool) -> None:
    async with bench_on(ScriptedEngine(replies=["Yes END no"])) as b:
        answer = await b.chat(stop="END", stream=stream)
        rollout = await b.only_rollout()
    if stream:
        shown = "".join(e["choices"][0]["delta"].get("content", "") for e in events_of(answer)[:-1])
    else:
        shown = answer.json()["choices"][0]["message"]["content"]
    assert shown == "Yes "
    assert rollout.completion is not None
    assert rollout.completion.reply_ids == tuple(b"Yes END")
    assert len(rollout.completion.logprobs) == 7
    assert rollout.completion.finish_reason == "stop"
    assert rollout.state is LedgerState.AWAITING_JUDGEMENT


async def test_streamed_or_not_the_same_ids_and_logprobs_are_stored() -> None:
    async with bench_on(ScriptedEngine()) as b:
        whole = (await b.chat(temperature=0)).json()["id"]
        streamed = events_of(await b.chat(temperature=0, stream=True))[0]["id"]
        one, two = (await b.rollout(whole)).completion, (await b.rollout(streamed)).completion
    assert one is not None
    assert two is not None
    assert len(one.reply_ids) > 5
    assert (one.reply_ids, one.logprobs, one.text) == (two.reply_ids, two.logprobs, two.text)


async def test_a_reply_cut_at_max_tokens_says_length_and_is_trainable() -> None:
    async with bench_on(ScriptedEngine(replies=["abcdef"])) as b:
        body = (await b.chat(max_tokens=3)).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["message"]["content"] == "abc"
    assert body["sao"]["trainable"] is True


@pytest.mark.parametrize("bad", [NAN, -float("inf"), -9999.0, 1e-9])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_logprob_that_is_no_number_is_served_and_not_trained_on(
    bad: float, stream: bool
) -> None:
    engine = HandEngine(reply_of("a", "b", logprobs=[-0.5, bad]))
    async with bench(engine) as b:
        answer = await b.chat(stream=stream, logprobs=True)
        rollout = await b.only_rollout()
        metrics = (await b.client.get("/metrics")).text
    assert answer.status_code == 200
    last = events_of(answer)[-2] if stream else answer.json()
    assert last["sao"]["trainable"] is False
    assert last["sao"]["trainable_reason"] == "logprob_nonfinite"
    shown = (
        events_of(answer)[2]["choices"][0]["logprobs"]["content"][0]["logprob"]
        if stream
        else answer.json()["choices"][0]["logprobs"]["content"][1]["logprob"]
    )
    assert shown == (0.0 if bad == 1e-9 else -9999.0)
    assert rollout.state is LedgerState.NOT_TRAINABLE
    assert rollout.reason == "logprob_nonfinite"
    assert rollout.completion is not None
    kept = rollout.completion.logprobs[1]
    assert kept == bad or (kept != kept and bad != bad)
    assert 'sao_not_trainable_total{reason="logprob_nonfinite"} 1.0' in metrics


async def test_one_logprob_too_few_is_served_counted_and_never_padded() -> None:
    engine = ScriptedEngine(replies=["ab"])
    engine.faults.drop_last_logprob = True
    async with bench_on(engine) as b:
        answer = await b.chat(logprobs=True)
        rollout = await b.only_rollout()
        metrics = (await b.client.get("/metrics")).text
    assert answer.status_code == 200
    assert answer.json()["sao"]["trainable_reason"] == "logprob_missing"
    assert answer.json()["choices"][0]["logprobs"]["content"][2]["logprob"] == -9999.0
    assert rollout.completion is not None
    assert rollout.completion.reply_ids == (*b"ab", END)
    assert len(rollout.completion.logprobs) == 2
    assert 'sao_not_trainable_total{reason="logprob_missing"} 1.0' in metrics


async def test_ids_that_are_not_as_many_as_the_engine_counted_are_not_trained_on() -> None:
    chunks = reply_of("a", "b")
    chunks[-1] = ReplyChunk("", (), (), (), "stop", (VersionSpan(1, 0, 2),), completion_tokens=3)
    async with bench(HandEngine(chunks)) as b:
        answer = await b.chat()
    assert answer.json()["sao"]["trainable_reason"] == "no_token_ids"
    assert answer.json()["usage"]["completion_tokens"] == 3


async def test_the_policy_version_of_a_reply_is_that_of_its_last_span() -> None:
    chunks = reply_of("a", "b")
    spans = (VersionSpan(3, 0, 1), VersionSpan(4, 1, 2))
    chunks[-1] = ReplyChunk("", (), (), (), "stop", spans, completion_tokens=2)
    async with bench(HandEngine(chunks)) as b:
        answer = await b.chat()
        rollout = await b.only_rollout()
    assert answer.json()["sao"]["policy_version"] == 4
    assert answer.headers["x-sao-policy-version"] == "4"
    assert rollout.completion is not None
    assert rollout.completion.version_spans == spans


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"top_p": 0.5}, "truncated_sampling"),
        ({"top_k": 5}, "truncated_sampling"),
        ({"min_p": 0.1}, "truncated_sampling"),
        ({"temperature": 0}, "greedy"),
        ({"presence_penalty": 0.5}, "penalties"),
        ({"repetition_penalty": 1.1}, "penalties"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"sao": {"train": False}}, "opt_out"),
        ({"metadata": {"train": "false"}}, "opt_out"),
        ({"store": False}, "store_false"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_of_another_distribution_or_wish_is_served_with_the_reason(
    fields: dict[str, object], reason: str, stream: bool
) -> None:
    async with bench() as b:
        answer = await b.chat(**fields, stream=stream)
        rollout = await b.only_rollout()
    assert answer.status_code == 200
    sao = (events_of(answer)[-2] if stream else answer.json())["sao"]
    assert (sao["trainable"], sao["trainable_reason"]) == (False, reason)
    assert (rollout.state, rollout.reason) == (LedgerState.NOT_TRAINABLE, reason)


async def test_a_temperature_alone_does_not_forbid_training() -> None:
    async with bench() as b:
        assert (await b.chat(temperature=0.5)).json()["sao"]["trainable"] is True


async def test_store_false_keeps_no_content_and_the_engine_still_gets_the_chat() -> None:
    async with bench() as b:
        assert (await b.chat("a secret", store=False)).status_code == 200
        rollout = await b.only_rollout()
        assert b.engine.rendered == [(Message("user", "a secret"),)]
    assert rollout.request.messages == ()
    end = rollout.completion
    assert end is not None
    assert (end.text, end.prompt_ids, end.reply_ids, end.logprobs) == ("", (), (), ())


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


# -- clients that leave -------------------------------------------------------------------------


class LeavingClient:
    """An ASGI client that sends one chat and leaves after so many body messages, or seconds."""

    def __init__(self, b: Bench[HandEngine], body: bytes) -> None:
        self._b = b
        self._body: list[bytes] = [body]
        self.gone = asyncio.Event()
        self.received: list[bytes] = []
        self.status = 0

    async def run(self, leave_after_chunks: int | None = None) -> None:
        async def receive() -> dict[str, object]:
            if self._body:
                return {"type": "http.request", "body": self._body.pop(), "more_body": False}
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message) -> None:  # type: ignore[no-untyped-def]
            if message["type"] == "http.response.start":
                self.status = message["status"]
            elif message.get("body"):
                self.received.append(message["body"])
            if len(self.received) == leave_after_chunks:
                self.gone.set()

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": CHAT,
            "raw_path": CHAT.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(b"authorization", b"Bearer test-key")],
        }
        await self._b.app(scope, receive, send)


BODY = b'{"model":"online-sao","messages":[{"role":"user","content":"Hi"}]%s}'
LONG = [f"t{i} " for i in range(200)]


async def test_a_client_that_leaves_after_three_chunks_aborts_the_engine_within_a_second() -> None:
    async with bench(HandEngine(reply_of(*LONG), delay=0.02)) as b:
        client = LeavingClient(b, BODY % b',"stream":true')
        began = time.monotonic()
        await client.run(leave_after_chunks=3)
        assert time.monotonic() - began < 1.0
        assert len(b.engine.closed) == 1
        rollout = await b.only_rollout()
    assert len(client.received) == 3
    assert rollout.completion is not None
    assert rollout.completion.outcome is Outcome.ABORTED
    assert rollout.completion.text == "t0 t1 t2 "
    assert (rollout.state, rollout.reason) == (LedgerState.NOT_TRAINABLE, "client_disconnected")


async def test_a_client_that_leaves_an_unstreamed_chat_aborts_the_engine_too() -> None:
    async with bench(HandEngine(reply_of(*LONG), delay=0.02)) as b:
        client = LeavingClient(b, BODY % b"")
        running = asyncio.create_task(client.run())
        await asyncio.sleep(0.1)
        client.gone.set()
        await asyncio.wait_for(running, 1.0)
        assert len(b.engine.closed) == 1
        rollout = await b.only_rollout()
    assert client.received == []
    assert rollout.reason == "client_disconnected"


async def test_a_client_that_leaves_while_the_row_is_inserted_leaves_no_row_open() -> None:
    store = FaultyStore()
    store.delay = 0.1
    async with bench(store=store) as b:
        client = LeavingClient(b, BODY % b"")
        running = asyncio.create_task(client.run())
        await asyncio.sleep(0.02)
        client.gone.set()
        await running
        rollout = await b.only_rollout()
        assert b.engine.seen == []
    assert rollout.reason == "client_disconnected"


async def test_a_client_that_leaves_while_the_record_is_written_finds_the_reply_completed() -> None:
    store = FaultyStore()
    async with bench(HandEngine(delay=0.01), store) as b:
        client = LeavingClient(b, BODY % b',"stream":true')
        inner = store.complete_rollout

        async def slow_complete(completion) -> None:  # type: ignore[no-untyped-def]
            client.gone.set()
            await asyncio.sleep(0.05)
            await inner(completion)

        store.complete_rollout = slow_complete  # type: ignore[method-assign]
        await client.run()
        rollout = await b.only_rollout()
    assert rollout.state is LedgerState.AWAITING_JUDGEMENT


async def test_a_server_that_stops_in_mid_reply_records_the_chat_as_failed() -> None:
    async with bench(HandEngine(reply_of(*LONG), delay=0.02)) as b:
        client = LeavingClient(b, BODY % b',"stream":true')
        running = asyncio.create_task(client.run())
        await asyncio.sleep(0.1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        rollout = await b.only_rollout()
        assert b.app.state.services.admission.in_flight == 0
    assert (rollout.state, rollout.reason) == (LedgerState.FAILED, "shutdown")


async def test_a_server_whose_send_fails_means_that_the_client_left() -> None:
    async with bench(HandEngine(delay=0.01)) as b:
        client = LeavingClient(b, BODY % b',"stream":true')
        app = b.app

        async def breaking(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
            async def broken(message) -> None:  # type: ignore[no-untyped-def]
                raise OSError("broken pipe")

            await app(scope, receive, broken)

        b.app = breaking  # type: ignore[assignment]
        await client.run()
        rollout = await b.only_rollout()
    assert rollout.reason == "client_disconnected"


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


async def test_the_finish_chunk_comes_after_the_record_is_durable() -> None:
    async with bench(HandEngine(delay=0.01)) as b:
        seen: list[tuple[bool, bool]] = []
        client = LeavingClient(b, BODY % b',"stream":true')
        app = b.app

        async def watching(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
            async def look(message) -> None:  # type: ignore[no-untyped-def]
                finished = b'"finish_reason":"stop"' in message.get("body", b"")
                seen.append((finished, bool(b.store.ends)))
                await send(message)

            await app(scope, receive, look)

        b.app = watching  # type: ignore[assignment]
        await client.run()
    assert seen[-1] == (True, True)
    assert all(durable is False for finished, durable in seen if not finished)


async def test_a_late_completion_gives_up_in_words_when_the_lifespan_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    later = Later()
    tries: list[int] = []

    async def never() -> bool:
        tries.append(1)
        return False

    assert later.add("chatcmpl-x", never, (60.0, 60.0))
    await asyncio.wait_for(later.settle(), 1.0)
    assert tries == [1]
    assert "action=late_write_dropped name=chatcmpl-x" in caplog.text


async def test_later_refuses_more_than_its_limit() -> None:
    later = Later(limit=1)

    async def done() -> bool:
        return True

    assert later.add("a", done, (60.0,))
    assert not later.add("b", done, (60.0,))
    await later.settle()
    assert len(later) == 0


async def test_an_unstarted_turn_says_why_its_record_is_not_trainable() -> None:
    request = RolloutRequest(
        new_id("chatcmpl-"), utc_now(), (Message("user", "x"),), Sampling(), "s"
    )
    async with bench() as b:
        turn = Turn(b.app.state.services, ReplyRecord(request))
        assert turn.record.not_trainable() is NotTrainable.NO_TOKEN_IDS


async def test_a_full_house_answers_429_and_a_closing_one_503() -> None:
    async with bench(HandEngine(reply_of(*LONG[:20]), delay=0.02), max_in_flight=2) as b:
        running = [asyncio.create_task(b.chat()) for _ in range(2)]
        await asyncio.sleep(0.05)
        full = await b.chat()
        admission = b.app.state.services.admission
        assert admission.in_flight == 2
        admission.draining = True
        closing = await b.chat(stream=True)
        ready = await b.client.get("/readyz")
        await asyncio.wait_for(admission.idle(), 10)
        assert [(await task).status_code for task in running] == [200, 200]
    assert (full.status_code, error_of(full)["code"]) == (429, "queue_full")
    assert (closing.status_code, error_of(closing)["code"]) == (503, "draining")
    assert full.headers["retry-after"] == closing.headers["retry-after"] == "2"
    assert (ready.status_code, ready.json()["error"]["code"]) == (503, "draining")
    assert len(b.store.rows) == 2


async def test_sessions_and_users_are_kept_as_said_and_users_only_as_hashes() -> None:
    async with bench() as b:
        await b.chat(user="ann@example.org", sao={"session_id": "s-1"})
        await b.chat(user="ann@example.org", metadata={"session_id": "s-2"})
        await b.client.post(
            CHAT,
            json={"model": "online-sao", "messages": [{"role": "user", "content": "x"}]},
            headers={"x-session-id": "s-3", "x-sao-train": "false"},
        )
        await b.chat()
        await b.chat()
        rows = list(b.store.rows.values())
    assert [row.session_id for row in rows[:3]] == ["s-1", "s-2", "s-3"]
    assert rows[2].train is False
    assert rows[3].session_id != rows[4].session_id
    assert rows[0].user_hash == rows[1].user_hash
    assert rows[0].user_hash is not None
    assert "ann" not in rows[0].user_hash
    assert len(rows[0].user_hash) == 64
    assert rows[3].user_hash is None


@pytest.mark.parametrize(
    ("fields", "headers", "param"),
    [
        ({"sao": {"session_id": "a"}}, {"x-session-id": "b"}, "session_id"),
        ({"sao": {"train": True}}, {"x-sao-train": "false"}, "train"),
        ({"metadata": {"train": "true"}, "sao": {"train": False}}, {}, "train"),
    ],
)
async def test_one_thing_said_twice_with_two_values_is_refused(
    fields: dict[str, object], headers: dict[str, str], param: str
) -> None:
    body = {"model": "online-sao", "messages": [{"role": "user", "content": "x"}], **fields}
    async with bench() as b:
        answer: httpx.Response = await b.client.post(CHAT, json=body, headers=headers)
        assert b.store.rows == {}
    assert answer.status_code == 400
    assert error_of(answer)["code"] == "conflicting_parameters"
    assert error_of(answer)["param"] == param
