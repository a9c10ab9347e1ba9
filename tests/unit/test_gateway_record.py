import pytest
from gateway_support import (
    NAN,
    HandEngine,
    bench,
    bench_on,
    events_of,
    reply_of,
)

from online_sao.engines.scripted import ScriptedEngine
from online_sao.gateway.record import ReplyRecord
from online_sao.gateway.turn import Turn
from online_sao.types import (
    LedgerState,
    Message,
    NotTrainable,
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


async def test_an_unstarted_turn_says_why_its_record_is_not_trainable() -> None:
    request = RolloutRequest(
        new_id("chatcmpl-"), utc_now(), (Message("user", "x"),), Sampling(), "s"
    )
    async with bench() as b:
        turn = Turn(b.app.state.services, ReplyRecord(request))
        assert turn.record.not_trainable() is NotTrainable.NO_TOKEN_IDS
