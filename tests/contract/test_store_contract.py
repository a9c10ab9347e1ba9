"""Serving, feedback and judging on every kind of store."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from store_world import NOON, World, same_bits, thumb

from online_sao.errors import LeaseLost, UnknownRecord, VersionConflict
from online_sao.interfaces import Store
from online_sao.types import (
    FeedbackReceipt,
    JudgementState,
    LedgerState,
    Message,
    NotTrainable,
    Outcome,
    Sampling,
    VersionSpan,
)

S = LedgerState
NASTY = "nul \x00, lone surrogates \ud800 and \udfff, \\u0000 as text, 天, 🙂, \r\n, ' \" ; --"


async def test_every_implementation_is_a_store(world: World) -> None:
    assert isinstance(world.store, Store)


async def test_a_rollout_comes_back_as_it_was_asked_and_answered(world: World) -> None:
    request = world.request(
        messages=(
            Message("system", "Be brief.", name="house"),
            Message("assistant", None, tool_calls=({"id": "c1", "function": {"name": "f"}},)),
            Message("tool", "42", tool_call_id="c1"),
            Message("user", NASTY),
        ),
        sampling=Sampling(
            temperature=0.7,
            max_tokens=50,
            stop=("\x00", "END"),
            seed=7,
            logit_bias=((5, -1.5), (9, 2.0)),
            bad_words=("x",),
            allowed_token_ids=(1, 2),
        ),
        session_id=NASTY,
        user_hash="u\x00",
        stream=True,
        train=False,
    )
    completion = world.completion(request.id, text=NASTY, engine="boot\x00")
    await world.store.insert_rollout(request)
    assert (await world.store.get_rollout(request.id)).completion is None
    await world.store.complete_rollout(completion)
    rollout = await world.store.get_rollout(request.id)
    assert rollout.request == request
    assert rollout.completion == completion
    assert (rollout.state, rollout.reason) == (S.AWAITING_JUDGEMENT, None)


async def test_log_probabilities_come_back_bit_for_bit(world: World) -> None:
    values = (-0.1, -1e-300, -5e-324, -0.0, -1.7976931348623157e308, math.nan, -math.inf, 1e-9)
    rollout_id = await world.served(
        reply_ids=tuple(range(2**31 - 8, 2**31)),
        logprobs=values,
        not_trainable=NotTrainable.LOGPROB_NONFINITE,
    )
    completion = (await world.store.get_rollout(rollout_id)).completion
    assert completion is not None
    assert same_bits(completion.logprobs, values)
    assert completion.reply_ids == tuple(range(2147483640, 2147483648))


async def test_times_come_back_in_utc_whatever_zone_they_came_in(world: World) -> None:
    tokyo = datetime.fromisoformat("2026-03-01T21:00:00.123456+09:00")
    request = world.request(created_at=tokyo)
    await world.store.insert_rollout(request)
    created_at = (await world.store.get_rollout(request.id)).request.created_at
    assert created_at == tokyo
    assert created_at.utcoffset() in (timedelta(0), timedelta(hours=9))


async def test_an_id_is_inserted_once(world: World) -> None:
    request = world.request()
    await world.store.insert_rollout(request)
    with pytest.raises(VersionConflict):
        await world.store.insert_rollout(request)
    assert await world.counts() == {S.IN_FLIGHT: 1}


@pytest.mark.parametrize(
    ("changes", "state", "reason"),
    [
        ({}, S.AWAITING_JUDGEMENT, None),
        ({"not_trainable": NotTrainable.OPT_OUT}, S.NOT_TRAINABLE, "opt_out"),
        ({"outcome": Outcome.ABORTED}, S.NOT_TRAINABLE, "engine_abort"),
        (
            {"outcome": Outcome.ABORTED, "not_trainable": NotTrainable.CLIENT_DISCONNECTED},
            S.NOT_TRAINABLE,
            "client_disconnected",
        ),
        ({"outcome": Outcome.FAILED, "error": "engine_timeout"}, S.FAILED, "engine_timeout"),
    ],
)
async def test_how_a_rollout_ends_decides_where_it_stands(
    world: World, changes: dict[str, object], state: LedgerState, reason: str | None
) -> None:
    rollout = await world.store.get_rollout(await world.served(**changes))
    assert (rollout.state, rollout.reason) == (state, reason)
    assert (await world.store.ledger()).reasons == ({state: {reason: 1}} if reason else {})
    assert await world.counts() == {state: 1}


async def test_an_end_is_recorded_once(world: World) -> None:
    rollout_id = await world.served()
    with pytest.raises(VersionConflict):
        await world.store.complete_rollout(world.completion(rollout_id, text="another"))
    completion = (await world.store.get_rollout(rollout_id)).completion
    assert completion is not None
    assert completion.text == "Because."


async def test_what_is_not_there_is_said_to_be_unknown(world: World) -> None:
    for act in (
        world.store.get_rollout("chatcmpl-none"),
        world.store.get_rollout("chatcmpl-\x00"),
        world.store.complete_rollout(world.completion("chatcmpl-none")),
        world.store.add_feedback(thumb("chatcmpl-none")),
        world.store.active_rubric(),
        world.store.get_version(0),
        world.store.newest_stable(),
        world.store.mark_live(3, {}),
    ):
        with pytest.raises(UnknownRecord):
            await act
    assert await world.store.live_version() is None
    assert await world.store.list_feedback("chatcmpl-none") == []
    assert await world.store.list_judgements("chatcmpl-none") == []
    assert await world.store.list_traces("chatcmpl-none") == []


async def test_only_what_began_before_the_restart_is_failed_as_orphaned(world: World) -> None:
    old, new = world.request(), world.request()
    await world.store.insert_rollout(old)
    await world.store.insert_rollout(new)
    done = await world.served()
    assert await world.store.fail_orphans(new.created_at, "service_stopped") == 1
    assert await world.states([old.id, new.id, done]) == [
        S.FAILED,
        S.IN_FLIGHT,
        S.AWAITING_JUDGEMENT,
    ]
    failed = await world.store.get_rollout(old.id)
    assert failed.reason == "service_stopped"
    assert failed.completion is not None
    assert failed.completion.outcome is Outcome.FAILED
    assert failed.completion.completed_at == world.clock.now
    with pytest.raises(VersionConflict):
        await world.store.complete_rollout(world.completion(old.id))
    await world.counts()


# -- feedback ------------------------------------------------------------------------------


async def test_feedback_is_kept_whole_and_in_order(world: World) -> None:
    rollout_id = await world.served()
    told = [
        thumb(rollout_id, up=False, comment=NASTY),
        thumb(rollout_id, created_at=NOON + timedelta(seconds=1)),
        thumb(rollout_id, metric="rating", value=4.5, created_at=NOON + timedelta(seconds=2)),
        thumb(rollout_id, metric="comment", value=NASTY, created_at=NOON + timedelta(seconds=3)),
    ]
    for one in told:
        assert await world.store.add_feedback(one) is FeedbackReceipt.ACCEPTED
    kept = await world.store.list_feedback(rollout_id)
    assert kept == told
    assert [type(one.value) for one in kept] == [bool, bool, float, str]


async def test_the_same_client_id_is_one_row_and_other_content_a_conflict(world: World) -> None:
    rollout_id = await world.served()
    first = thumb(rollout_id, client_id="c\x001")
    assert await world.store.add_feedback(first) is FeedbackReceipt.ACCEPTED
    again = replace(first, id="fb_other", created_at=NOON + timedelta(minutes=1))
    assert await world.store.add_feedback(again) is FeedbackReceipt.DUPLICATE
    for other in (
        {"value": False},
        {"value": 1.0},
        {"metric": "rating"},
        {"comment": "hm"},
        {"user_hash": "u2"},
        {"source": "ui"},
    ):
        with pytest.raises(VersionConflict):
            await world.store.add_feedback(replace(again, **other))
    assert await world.store.list_feedback(rollout_id) == [first]
    elsewhere = await world.served()
    receipt = await world.store.add_feedback(thumb(elsewhere, client_id="c\x001"))
    assert receipt is FeedbackReceipt.ACCEPTED


async def test_one_client_id_sent_many_times_at_once_is_one_row(world: World) -> None:
    rollout_id = await world.served()
    receipts = await asyncio.gather(
        *(world.store.add_feedback(thumb(rollout_id, client_id="c1")) for _ in range(8))
    )
    assert sorted(receipts) == [FeedbackReceipt.ACCEPTED] + [FeedbackReceipt.DUPLICATE] * 7
    assert len(await world.store.list_feedback(rollout_id)) == 1


async def test_feedback_on_a_reply_still_streaming_is_kept_for_the_judge(world: World) -> None:
    request = world.request()
    await world.store.insert_rollout(request)
    said = thumb(request.id)
    assert await world.store.add_feedback(said) is FeedbackReceipt.ACCEPTED
    await world.store.complete_rollout(world.completion(request.id))
    ((rollout, feedback),) = await world.store.claim_unjudged("j", limit=5, lease_s=60)
    assert rollout.id == request.id
    assert rollout.state is S.IN_JUDGEMENT
    assert feedback == (said,)


async def test_feedback_ends_the_wait_for_it(world: World) -> None:
    rollout_id = await world.served()
    await world.store.claim_unjudged("j", limit=1, lease_s=60)
    await world.store.postpone_judgement(rollout_id, "j", NOON + timedelta(minutes=10))
    assert await world.store.claim_unjudged("j", limit=1, lease_s=60) == []
    await world.store.add_feedback(thumb(rollout_id))
    ((rollout, feedback),) = await world.store.claim_unjudged("j", limit=1, lease_s=60)
    assert (rollout.id, len(feedback)) == (rollout_id, 1)


async def test_feedback_that_comes_while_the_judge_looks_is_not_lost(world: World) -> None:
    waiting, scored = await world.served(), await world.served()
    await world.store.claim_unjudged("j", limit=2, lease_s=60)
    await world.store.add_feedback(thumb(waiting))
    await world.store.add_feedback(thumb(scored, up=False))
    await world.store.postpone_judgement(waiting, "j", NOON + timedelta(minutes=10))
    await world.store.record_judgement(await world.judgement(scored, 1.0), "j")
    assert await world.states([waiting, scored]) == [S.AWAITING_JUDGEMENT] * 2
    again = await world.store.claim_unjudged("j", limit=5, lease_s=60)
    assert [(rollout.id, len(said)) for rollout, said in again] == [(waiting, 1), (scored, 1)]
    await world.store.record_judgement(await world.judgement(scored, 0.0), "j")
    assert await world.states([scored]) == [S.JUDGED]
    assert [j.reward for j in await world.store.list_judgements(scored)] == [1.0, 0.0]


async def test_a_judged_reply_is_judged_again_and_a_leased_or_trained_one_is_not(
    world: World,
) -> None:
    await world.store.add_base_version("base", "00")
    waiting, trained = await world.judged(2)
    leased, again = waiting, trained
    (trajectory,) = await world.claim(1)
    assert trajectory.rollout_ids == (leased,)
    for rollout_id in (leased, again):
        receipt = await world.store.add_feedback(thumb(rollout_id, up=False))
        assert receipt is FeedbackReceipt.ACCEPTED
    assert await world.states([leased, again]) == [S.LEASED, S.AWAITING_JUDGEMENT]
    await world.store.commit_update("learner", world.update([leased]), None)
    receipt = await world.store.add_feedback(thumb(leased, up=True))
    assert receipt is FeedbackReceipt.ALREADY_TRAINED
    assert await world.states([leased]) == [S.TRAINED]
    assert len(await world.store.list_feedback(leased)) == 2
    await world.counts()


async def test_a_leased_reply_that_got_feedback_and_comes_back_is_judged_again(
    world: World,
) -> None:
    one, two = await world.judged(2)
    assert len(await world.claim(2)) == 2
    await world.store.add_feedback(thumb(one, up=False))
    assert await world.store.release_leases("learner") == 2
    assert await world.states([one, two]) == [S.AWAITING_JUDGEMENT, S.JUDGED]
    await world.judge(one, 0.0)
    assert [t.reward for t in await world.claim(2)] == [0.0, 1.0]


# -- rubrics -------------------------------------------------------------------------------


async def test_a_changed_rubric_is_a_new_version_and_the_same_one_is_not(world: World) -> None:
    put = world.store.put_rubric
    first = await put("tone", "a:J", {"max": 40, "words": ["a", "b"]}, message="m", author="ops")
    assert (first.number, first.message, first.author) == (1, "m", "ops")
    assert await put("tone", "a:J", {"words": ("a", "b"), "max": 40}) == first
    second = await put("tone", "a:J", {"max": 41})
    other = await put("length", "a:J", {"max": 41})
    third = await put("tone", "a:J", {"max": 41})
    assert [second.number, other.number, third.number] == [2, 1, 3]
    assert await world.store.active_rubric() == third
    assert third.created_at == NOON


async def test_versions_put_at_the_same_time_get_different_numbers(world: World) -> None:
    put = await asyncio.gather(
        *(world.store.put_rubric("tone", "a:J", {"max": n}) for n in range(6))
    )
    assert sorted(rubric.number for rubric in put) == [1, 2, 3, 4, 5, 6]
    assert await world.store.active_rubric() in put


# -- judging -------------------------------------------------------------------------------


async def test_the_oldest_are_claimed_first_and_nobody_else_gets_them(world: World) -> None:
    ids = [await world.served() for _ in range(5)]
    mine = await world.store.claim_unjudged("a", limit=2, lease_s=60)
    theirs = await world.store.claim_unjudged("b", limit=10, lease_s=60)
    assert [rollout.id for rollout, _ in mine] == ids[:2]
    assert [rollout.id for rollout, _ in theirs] == ids[2:]
    assert mine[0][0].completion == world.completion(ids[0])
    assert await world.store.claim_unjudged("c", limit=10, lease_s=60) == []
    assert await world.counts() == {S.IN_JUDGEMENT: 5}


async def test_a_verdict_moves_its_rollout_and_only_a_score_is_a_reward(world: World) -> None:
    states = list(JudgementState)
    ids = [await world.served() for _ in states]
    await world.store.claim_unjudged("j", limit=9, lease_s=60)
    for rollout_id, state in zip(ids, states, strict=True):
        scored = await world.judgement(rollout_id, 1.0)
        no_reward = {"reward": None, "quality": None, "style": None, "reason": "no_thumb"}
        changes = {} if state is JudgementState.SCORED else no_reward
        judgement = replace(scored, state=state, latency_s=0.25, attempts=2, **changes)
        await world.store.record_judgement(judgement, "j")
        assert await world.store.list_judgements(rollout_id) == [judgement]
    assert dict(zip(states, await world.states(ids), strict=True)) == {
        JudgementState.SCORED: S.JUDGED,
        JudgementState.UNSCORABLE: S.UNSCORABLE,
        JudgementState.ERROR: S.AWAITING_JUDGEMENT,
        JudgementState.EXPIRED: S.EXPIRED,
    }
    ledger = await world.store.ledger()
    assert ledger.reasons == {S.UNSCORABLE: {"no_thumb": 1}, S.EXPIRED: {"no_thumb": 1}}
    assert (await world.store.reward_stats()).count == 1
    await world.counts()


async def test_a_judges_prose_is_kept_but_not_counted_by(world: World) -> None:
    rollout_id = await world.served()
    await world.store.claim_unjudged("j", limit=1, lease_s=60)
    judgement = replace(await world.judgement(rollout_id, None), reason="Hard to say, " + NASTY)
    await world.store.record_judgement(judgement, "j")
    assert (await world.store.list_judgements(rollout_id))[0].reason == judgement.reason
    assert (await world.store.ledger()).reasons == {}


async def test_a_judgement_needs_the_lease_and_a_rubric_version(world: World) -> None:
    rollout_id, other = await world.served(), await world.served()
    judgement = await world.judgement(rollout_id)
    with pytest.raises(LeaseLost):
        await world.store.record_judgement(judgement, "j")
    await world.store.claim_unjudged("j", limit=2, lease_s=60)
    with pytest.raises(LeaseLost):
        await world.store.record_judgement(judgement, "another")
    with pytest.raises(LeaseLost):
        await world.store.postpone_judgement(rollout_id, "another", NOON)
    with pytest.raises(UnknownRecord):
        await world.store.record_judgement(replace(judgement, rubric_id="rub_none"), "j")
    await world.store.record_judgement(judgement, "j")
    with pytest.raises(LeaseLost):
        await world.store.record_judgement(judgement, "j")
    with pytest.raises(VersionConflict):
        await world.store.record_judgement(replace(judgement, rollout_id=other), "j")
    assert await world.store.list_judgements(rollout_id) == [judgement]
    assert await world.states([rollout_id, other]) == [S.JUDGED, S.IN_JUDGEMENT]


async def test_a_judges_lease_runs_out_and_another_takes_over(world: World) -> None:
    rollout_id = await world.served()
    await world.store.claim_unjudged("dead", limit=1, lease_s=60)
    world.clock.forward(59.9)
    assert await world.store.claim_unjudged("next", limit=1, lease_s=60) == []
    world.clock.forward(0.1)
    judgement = await world.judgement(rollout_id)
    with pytest.raises(LeaseLost):
        await world.store.record_judgement(judgement, "dead")
    ((rollout, _),) = await world.store.claim_unjudged("next", limit=1, lease_s=60)
    assert rollout.id == rollout_id
    with pytest.raises(LeaseLost):
        await world.store.record_judgement(judgement, "dead")
    await world.store.record_judgement(judgement, "next")
    assert await world.states([rollout_id]) == [S.JUDGED]


async def test_postponed_until_its_time_and_not_a_moment_longer(world: World) -> None:
    rollout_id = await world.served()
    await world.store.claim_unjudged("j", limit=1, lease_s=60)
    await world.store.postpone_judgement(rollout_id, "j", NOON + timedelta(seconds=30))
    assert await world.states([rollout_id]) == [S.AWAITING_JUDGEMENT]
    world.clock.forward(29.9)
    assert await world.store.claim_unjudged("j", limit=1, lease_s=60) == []
    world.clock.forward(0.1)
    assert len(await world.store.claim_unjudged("j", limit=1, lease_s=60)) == 1


async def test_rewards_are_counted_once_a_reply_by_when_they_were_given(world: World) -> None:
    assert await world.store.reward_stats() == await world.store.reward_stats(NOON)
    assert (await world.store.reward_stats()).mean is None
    await world.judged(3, reward=1.0)
    world.clock.forward(10)
    (late,) = await world.judged(1, reward=0.0)
    whole = await world.store.reward_stats()
    assert (whole.count, whole.mean) == (4, 0.75)
    since = await world.store.reward_stats(NOON)
    assert (since.count, since.mean) == (1, 0.0)
    world.clock.forward(10)
    await world.store.add_feedback(thumb(late))
    await world.judge(late, 1.0)
    again = await world.store.reward_stats()
    assert (again.count, again.mean) == (4, 1.0)


async def test_mixed_version_spans_come_back(world: World) -> None:
    spans = (VersionSpan(0, 0, 1), VersionSpan(2, 1, 3))
    completion = (await world.store.get_rollout(await world.served(version_spans=spans))).completion
    assert completion is not None
    assert completion.version_spans == spans
