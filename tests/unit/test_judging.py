"""The judging worker: every reply gets its own verdict, and a failed judge never becomes a 0."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from online_sao.config import JudgingSettings
from online_sao.errors import ConfigError, DatabaseUnavailable, JudgeError, UnknownRecord
from online_sao.interfaces import Judge
from online_sao.judging import (
    ALARM,
    ALARM_AFTER,
    RETRY_CAP_S,
    Breaker,
    JudgingWorker,
    build_evidence,
    full_jitter,
)
from online_sao.rubrics import load_judge, load_rubric
from online_sao.store.memory import MemoryStore
from online_sao.types import (
    FEEDBACK_PREFIX,
    JSON,
    ROLLOUT_PREFIX,
    Evidence,
    Expired,
    Feedback,
    JudgementState,
    LedgerState,
    Message,
    Outcome,
    Rollout,
    RolloutCompletion,
    RolloutRequest,
    RubricVersion,
    Sampling,
    Scored,
    Unscorable,
    Verdict,
    VersionSpan,
    Wait,
    new_id,
    utc_now,
)

GOOD = Scored(1, 1, "good")
Ask = Callable[[Evidence, RubricVersion], Awaitable[Any]]


class AskJudge:
    """A judge that does what its test says."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def judge(self, evidence: Evidence, rubric: RubricVersion) -> Verdict:
        verdict: Verdict = await self._ask(evidence, rubric)
        return verdict

    def check(self, criteria: JSON) -> list[str]:
        return []


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    memory = MemoryStore()
    await memory.open()
    await memory.add_base_version("versions/0", "0" * 64)
    await memory.put_rubric("first", "tests:AskJudge", {})
    yield memory
    await memory.aclose()


async def serve(
    store: MemoryStore, n: int = 1, session: str = "s", episode_id: str | None = None
) -> list[str]:
    """n served, trainable replies of two tokens each; their ids."""
    ids = []
    for i in range(n):
        rollout_id = new_id(ROLLOUT_PREFIX)
        messages = (Message("user", f"question {i}"),)
        now = utc_now()
        request = RolloutRequest(
            rollout_id, now, messages, Sampling(), session, episode_id=episode_id
        )
        await store.insert_rollout(request)
        await store.complete_rollout(
            RolloutCompletion(
                rollout_id=rollout_id,
                completed_at=now,
                outcome=Outcome.COMPLETED,
                text=f"answer {i}",
                prompt_ids=(1, 2),
                reply_ids=(3, 4),
                logprobs=(-0.5, -0.25),
                version_spans=(VersionSpan(0, 0, 2),),
                finish_reason="stop",
            )
        )
        ids.append(rollout_id)
    return ids


def make_worker(
    store: MemoryStore, ask: Ask, owner: str = "judge-1", **settings: Any
) -> JudgingWorker:
    return JudgingWorker(
        store,
        JudgingSettings(**settings),
        owner=owner,
        load_judge=lambda name: AskJudge(ask),
        retry_base_s=0.0,
    )


@asynccontextmanager
async def running(worker: JudgingWorker) -> AsyncIterator[asyncio.Event]:
    stop = asyncio.Event()
    task = asyncio.create_task(worker.run(stop))
    try:
        yield stop
    finally:
        stop.set()
        await asyncio.wait_for(task, 10)


async def until(condition: Callable[[], Awaitable[bool]], limit_s: float = 20.0) -> None:
    async with asyncio.timeout(limit_s):
        while not await condition():  # noqa: ASYNC110 - the store has no event to wait for
            await asyncio.sleep(0.01)


async def state_of(store: MemoryStore, rollout_id: str) -> LedgerState:
    return (await store.get_rollout(rollout_id)).state


async def count(store: MemoryStore, state: LedgerState) -> int:
    ledger = await store.ledger()
    assert ledger.problems == ()
    return ledger.counts.get(state, 0)


async def always_good(evidence: Evidence, rubric: RubricVersion) -> Verdict:
    return GOOD


async def always_broken(evidence: Evidence, rubric: RubricVersion) -> Verdict:
    raise JudgeError("HTTP 500")


async def test_a_verdict_is_recorded_with_rubric_judge_reason_and_time_taken(
    store: MemoryStore,
) -> None:
    async def ask(evidence: Evidence, rubric: RubricVersion) -> Verdict:
        await asyncio.sleep(0.02)
        return Scored(1, 0, f"saw {evidence.reply!r}")

    (rollout_id,) = await serve(store)
    worker = make_worker(store, ask)
    assert await worker.judge_once() == 1
    assert await state_of(store, rollout_id) is LedgerState.JUDGED
    (judgement,) = await store.list_judgements(rollout_id)
    assert (judgement.quality, judgement.style, judgement.reward) == (1, 0, 0.0)
    assert judgement.state is JudgementState.SCORED
    assert judgement.rubric_id == (await store.active_rubric()).id
    assert judgement.judge == "tests:AskJudge"
    assert judgement.reason == "saw 'answer 0'"
    assert judgement.attempts == 1
    assert 0.02 <= judgement.latency_s < 2.0
    assert (worker.judged, worker.failed) == (1, 0)
    assert await worker.judge_once() == 0


async def test_two_replies_of_one_session_judged_in_reverse_order_keep_their_own_rewards(
    store: MemoryStore,
) -> None:
    second_is_done = asyncio.Event()

    async def ask(evidence: Evidence, rubric: RubricVersion) -> Verdict:
        if evidence.messages[0].content == "question 0":
            await second_is_done.wait()
            return Scored(1, 1, "the first")
        second_is_done.set()
        return Scored(0, 1, "the second")

    first, second = await serve(store, 2, session="one")
    assert await make_worker(store, ask).judge_once() == 2
    rewards = {id_: (await store.list_judgements(id_))[0] for id_ in (first, second)}
    assert (rewards[first].reward, rewards[first].reason) == (1.0, "the first")
    assert (rewards[second].reward, rewards[second].reason) == (0.0, "the second")


async def test_a_judge_that_never_answers_for_one_reply_delays_no_other(
    store: MemoryStore,
) -> None:
    async def ask(evidence: Evidence, rubric: RubricVersion) -> Verdict:
        if evidence.messages[0].content == "question 0":
            await asyncio.Event().wait()
        return GOOD

    ids = await serve(store, 20)
    worker = make_worker(store, ask, concurrency=2, timeout_s=0.3, max_attempts=2)
    async with running(worker):
        await until(lambda: _is(count(store, LedgerState.JUDGED), 19))
        await until(lambda: _is(state_of(store, ids[0]), LedgerState.EXPIRED))
    first, last = await store.list_judgements(ids[0])
    assert (first.state, first.reward) == (JudgementState.ERROR, None)
    assert first.reason == "no verdict within 0.3 s"
    assert (last.state, last.reward, last.attempts) == (JudgementState.EXPIRED, None, 2)
    assert last.reason == "judge failed 2 times; the last time: no verdict within 0.3 s"


async def test_fifty_replies_behind_a_broken_judge_are_all_judged_when_it_recovers(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("online_sao.judging.BREAKER_CAP_S", 0.05)
    broken, asked = True, 0

    async def ask(evidence: Evidence, rubric: RubricVersion) -> Verdict:
        nonlocal asked
        asked += 1
        if broken:
            raise JudgeError("HTTP 500")
        return GOOD

    ids = await serve(store, 50)
    worker = make_worker(store, ask, max_attempts=1000)
    async with running(worker):
        await until(lambda: _is_true(store.alarms()))
        await asyncio.sleep(0.6)
        asked_while_broken = asked
        assert await count(store, LedgerState.JUDGED) == 0
        assert [alarm.name for alarm in await store.alarms()] == [ALARM]
        broken = False
        await until(lambda: _is(count(store, LedgerState.JUDGED), 50))
        assert await store.alarms() == []
    judgements = [j for id_ in ids for j in await store.list_judgements(id_)]
    by_state = Counter((j.state, j.reward) for j in judgements)
    assert by_state.pop((JudgementState.SCORED, 1.0)) == 50
    assert by_state == {(JudgementState.ERROR, None): worker.failed}
    # Open, the breaker let single trials through: without it there were thousands in this time.
    assert ALARM_AFTER <= asked_while_broken < 50


async def test_failures_before_a_restart_count_after_it(store: MemoryStore) -> None:
    (rollout_id,) = await serve(store)
    for attempt in (1, 2, 3):
        worker = make_worker(store, always_broken, owner=f"judge-{attempt}", max_attempts=3)
        await until(lambda worker=worker: _is(worker.judge_once(), 1))
    states = [j.state for j in await store.list_judgements(rollout_id)]
    assert states == [JudgementState.ERROR, JudgementState.ERROR, JudgementState.EXPIRED]
    assert await state_of(store, rollout_id) is LedgerState.EXPIRED
    assert (await store.reward_stats()).count == 0


async def test_a_failed_reply_is_put_off_also_by_a_worker_that_was_restarted() -> None:
    now = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
    asked = 0

    async def ask(evidence: Evidence, rubric: RubricVersion) -> Verdict:
        nonlocal asked
        asked += 1
        raise JudgeError("HTTP 500")

    def restarted() -> JudgingWorker:
        return JudgingWorker(
            store,
            JudgingSettings(),
            owner="judge-1",
            load_judge=lambda name: AskJudge(ask),
            clock=lambda: now,
            retry_base_s=1e9,
        )

    store = MemoryStore(clock=lambda: now)
    await store.put_rubric("first", "tests:AskJudge", {})
    await serve(store)
    await restarted().judge_once()
    assert asked == 1
    for _ in range(3):
        await restarted().judge_once()
    assert asked == 1
    now += timedelta(seconds=RETRY_CAP_S)
    await restarted().judge_once()
    assert asked == 2


async def test_failures_under_an_older_rubric_version_are_forgiven(store: MemoryStore) -> None:
    (rollout_id,) = await serve(store)
    worker = make_worker(store, always_broken, max_attempts=2)
    await worker.judge_once()
    await store.put_rubric("first", "tests:AskJudge", {"changed": True})
    await until(lambda: _is(worker.judge_once(), 1))
    states = [j.state for j in await store.list_judgements(rollout_id)]
    assert states == [JudgementState.ERROR, JudgementState.ERROR]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (ValueError("odd reply"), "ValueError: odd reply"),
        (TimeoutError("read"), "TimeoutError: read"),
        (asyncio.CancelledError("pool closed"), "CancelledError: pool closed"),
        (0.5, "the judge returned a float, which is no verdict"),
        (None, "the judge returned a NoneType, which is no verdict"),
        (Wait(datetime(2026, 1, 1)), "the judge waits until a time that has no time zone"),
        (JudgeError("x" * 1000), "x" * 300),
    ],
    ids=[
        "raises",
        "its own timeout",
        "its own cancellation",
        "number",
        "nothing",
        "naive time",
        "long",
    ],
)
async def test_whatever_else_a_judge_does_is_a_failure_and_never_a_reward(
    store: MemoryStore, answer: object, reason: str
) -> None:
    async def ask(evidence: Evidence, rubric: RubricVersion) -> object:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    (rollout_id,) = await serve(store)
    worker = make_worker(store, ask)
    assert await worker.judge_once() == 1
    (judgement,) = await store.list_judgements(rollout_id)
    assert (judgement.state, judgement.reward) == (JudgementState.ERROR, None)
    assert judgement.reason == reason
    assert await state_of(store, rollout_id) is LedgerState.AWAITING_JUDGEMENT


async def test_unscorable_and_expired_verdicts_carry_no_reward(store: MemoryStore) -> None:
    verdicts = {"question 0": Unscorable("not English"), "question 1": Expired("too late")}

    async def ask(evidence: Evidence, rubric: RubricVersion) -> Verdict:
        return verdicts[str(evidence.messages[0].content)]

    first, second = await serve(store, 2)
    await make_worker(store, ask).judge_once()
    assert await state_of(store, first) is LedgerState.UNSCORABLE
    assert await state_of(store, second) is LedgerState.EXPIRED
    assert [j.reward for j in await store.list_judgements(first)] == [None]


async def test_a_thumb_ends_the_wait_and_no_thumb_expires_the_reply(store: MemoryStore) -> None:
    rubric = load_rubric("thumbs")
    await store.put_rubric(rubric.name, rubric.judge, rubric.criteria)
    rated, silent = await serve(store, 2)
    worker = JudgingWorker(store, JudgingSettings(feedback_wait_s=0.8), owner="judge-1")
    async with running(worker):
        await until(lambda: _is_true(_waits(store, rated, silent)))
        await asyncio.sleep(0.1)
        assert await store.list_judgements(rated) == []
        await store.add_feedback(
            Feedback(new_id(FEEDBACK_PREFIX), rated, utc_now(), "thumbs", True)
        )
        worker.wake()
        await until(lambda: _is(state_of(store, rated), LedgerState.JUDGED), 0.5)
        await until(lambda: _is(state_of(store, silent), LedgerState.EXPIRED))
    assert [j.reward for j in await store.list_judgements(rated)] == [1.0]
    (expired,) = await store.list_judgements(silent)
    assert (expired.reward, expired.reason) == (None, "no thumb within 0.8 s")


async def test_a_rubric_edited_in_mid_flight_changes_none_of_fifty_running_judgements(
    store: MemoryStore,
) -> None:
    started, go_on = 0, asyncio.Event()

    async def ask(evidence: Evidence, rubric: RubricVersion) -> Verdict:
        nonlocal started
        started += 1
        await go_on.wait()
        return Scored(1, 1, rubric.id)

    old = await store.active_rubric()
    ids = await serve(store, 60)
    worker = make_worker(store, ask, concurrency=50)
    async with running(worker):
        await until(lambda: _is(_now(lambda: started), 50))
        new = await store.put_rubric("first", "tests:AskJudge", {"edited": 1})
        go_on.set()
        await until(lambda: _is(count(store, LedgerState.JUDGED), 60))
    judgements = [(await store.list_judgements(id_))[0] for id_ in ids]
    assert Counter(j.rubric_id for j in judgements) == {old.id: 50, new.id: 10}
    assert all(j.reason == j.rubric_id for j in judgements)


async def test_an_episode_has_one_look_and_a_thumb_on_any_of_its_replies_decides(
    store: MemoryStore,
) -> None:
    rubric = load_rubric("thumbs")
    await store.put_rubric(rubric.name, rubric.judge, rubric.criteria)
    await store.open_episode("ep_1")
    ids = await serve(store, 3, episode_id="ep_1")
    worker = JudgingWorker(store, JudgingSettings(feedback_wait_s=600), owner="judge-1")
    said = Feedback(new_id(FEEDBACK_PREFIX), ids[0], utc_now(), "thumbs", True)
    await store.add_feedback(said)
    assert await worker.judge_once() == 0  # nothing before the end
    await store.close_episode("ep_1")
    assert await worker.judge_once() == 1
    told = [await store.list_judgements(rollout_id) for rollout_id in ids]
    assert [[j.reward for j in each] for each in told] == [[1.0]] * 3
    assert [each[0].judge for each in told] == ["episode", "episode", rubric.judge]
    assert worker.judged == 1


async def test_a_judge_that_fails_on_an_episode_for_good_expires_all_of_it(
    store: MemoryStore,
) -> None:
    async def ask(evidence: Evidence, rubric: RubricVersion) -> Verdict:
        raise JudgeError("down")

    await store.open_episode("ep_1")
    ids = await serve(store, 2, episode_id="ep_1")
    await store.close_episode("ep_1")
    worker = make_worker(store, ask, max_attempts=2)
    for _ in range(2):
        await worker.judge_once()
    assert [await state_of(store, i) for i in ids] == [LedgerState.EXPIRED] * 2
    told = [[j.reward for j in await store.list_judgements(i)] for i in ids]
    assert told == [[None], [None, None]]  # the last one's failure is its alone


async def test_never_more_than_concurrency_judgements_at_once(store: MemoryStore) -> None:
    now, most = 0, 0

    async def ask(evidence: Evidence, rubric: RubricVersion) -> Verdict:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1
        return GOOD

    await serve(store, 20)
    async with running(make_worker(store, ask, concurrency=3)):
        await until(lambda: _is(count(store, LedgerState.JUDGED), 20))
    assert most == 3


async def test_a_lost_lease_is_normal_and_the_other_worker_s_verdict_stands(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    async def slow(evidence: Evidence, rubric: RubricVersion) -> Verdict:
        await store.release_leases("judge-1")
        assert await make_worker(store, always_good, owner="judge-2").judge_once() == 1
        return Scored(0, 0, "too late")

    (rollout_id,) = await serve(store)
    with caplog.at_level(logging.INFO, "online_sao.judging"):
        await make_worker(store, slow).judge_once()
    assert [j.reward for j in await store.list_judgements(rollout_id)] == [1.0]
    assert "action=judgement_lease_lost" in caplog.text


async def test_a_database_that_is_away_for_a_while_stops_nothing(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim, refused = store.claim_unjudged, 0

    async def flaky(owner: str, *, limit: int, lease_s: float) -> Any:
        nonlocal refused
        if refused < 3:
            refused += 1
            raise DatabaseUnavailable("no connection within 5 s")
        return await claim(owner, limit=limit, lease_s=lease_s)

    monkeypatch.setattr(store, "claim_unjudged", flaky)
    (rollout_id,) = await serve(store)
    async with running(make_worker(store, always_good)):
        await until(lambda: _is(state_of(store, rollout_id), LedgerState.JUDGED))
    assert refused == 3


async def test_a_judge_that_cannot_be_loaded_costs_no_reply_an_attempt(store: MemoryStore) -> None:
    await store.put_rubric("typo", "judges.rules:RulesJugde", {})
    (rollout_id,) = await serve(store)
    worker = JudgingWorker(store, JudgingSettings(), owner="judge-1")
    with pytest.raises(ConfigError, match="RulesJugde"):
        await worker.judge_once()
    assert await state_of(store, rollout_id) is LedgerState.AWAITING_JUDGEMENT
    assert await store.list_judgements(rollout_id) == []
    assert [alarm.name for alarm in await store.alarms()] == [ALARM]
    async with running(worker):
        await store.put_rubric("typo", "judges.rules:RulesJudge", {})
        await until(lambda: _is(state_of(store, rollout_id), LedgerState.JUDGED))
    assert await store.alarms() == []


async def test_without_an_active_rubric_nothing_is_claimed() -> None:
    store = MemoryStore()
    await store.open()
    with pytest.raises(UnknownRecord):
        await make_worker(store, always_good).judge_once()
    await store.aclose()


async def test_a_stopped_worker_gives_back_what_it_could_not_finish(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("online_sao.judging.STOP_S", 0.05)
    asked = asyncio.Event()

    async def ask(evidence: Evidence, rubric: RubricVersion) -> Verdict:
        asked.set()
        await asyncio.Event().wait()
        return GOOD

    (rollout_id,) = await serve(store)
    async with running(make_worker(store, ask)):
        await asked.wait()
        assert await state_of(store, rollout_id) is LedgerState.IN_JUDGEMENT
    assert await state_of(store, rollout_id) is LedgerState.AWAITING_JUDGEMENT
    assert await make_worker(store, always_good, owner="judge-2").judge_once() == 1


async def test_a_stopped_worker_finishes_what_is_nearly_done(store: MemoryStore) -> None:
    asked = asyncio.Event()

    async def ask(evidence: Evidence, rubric: RubricVersion) -> Verdict:
        asked.set()
        await asyncio.sleep(0.1)
        return GOOD

    (rollout_id,) = await serve(store)
    async with running(make_worker(store, ask)):
        await asked.wait()
    assert await state_of(store, rollout_id) is LedgerState.JUDGED


async def test_wake_starts_a_look_before_the_next_poll(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("online_sao.judging.POLL_S", 30.0)
    worker = make_worker(store, always_good)
    async with running(worker):
        await asyncio.sleep(0.05)
        (rollout_id,) = await serve(store)
        start = time.perf_counter()
        worker.wake()
        await until(lambda: _is(state_of(store, rollout_id), LedgerState.JUDGED))
        assert time.perf_counter() - start < 2.0


async def test_a_judge_that_waits_for_the_past_does_not_make_the_worker_spin(
    store: MemoryStore,
) -> None:
    asked = 0

    async def ask(evidence: Evidence, rubric: RubricVersion) -> Verdict:
        nonlocal asked
        asked += 1
        return Wait(datetime(2000, 1, 1, tzinfo=UTC))

    await serve(store)
    async with running(make_worker(store, ask)):
        await asyncio.sleep(0.7)
    assert 1 <= asked <= 4


async def test_evidence_is_the_reply_with_its_feedback_and_its_wait(store: MemoryStore) -> None:
    (rollout_id,) = await serve(store)
    said = Feedback(new_id(FEEDBACK_PREFIX), rollout_id, utc_now(), "thumbs", True)
    rollout = await store.get_rollout(rollout_id)
    evidence = build_evidence(rollout, [said], 60.0)
    assert rollout.completion is not None
    assert evidence.rollout_id == rollout_id
    assert evidence.messages == (Message("user", "question 0"),)
    assert (evidence.reply, evidence.reply_tokens) == ("answer 0", 2)
    assert evidence.finish_reason == "stop"
    assert evidence.feedback_until - rollout.completion.completed_at == timedelta(seconds=60)
    assert evidence.feedback == (said,)
    unfinished = Rollout(rollout.request, None, LedgerState.IN_FLIGHT)
    with pytest.raises(ValueError, match="is not complete"):
        build_evidence(unfinished, [], 60.0)


def test_full_jitter_doubles_its_ceiling_up_to_the_cap() -> None:
    for failures, ceiling in ((1, 2.0), (2, 4.0), (4, 16.0), (5, 20.0), (5000, 20.0)):
        delays = [full_jitter(failures, 2.0, 20.0) for _ in range(400)]
        assert min(delays) >= 0.0
        assert 0.8 * ceiling < max(delays) <= ceiling


def test_the_breaker_opens_at_the_fifth_failure_in_a_row_and_one_success_closes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("online_sao.judging.full_jitter", lambda *_: 10.0)
    now = 100.0
    monkeypatch.setattr("online_sao.judging.time.monotonic", lambda: now)
    breaker = Breaker()
    for _ in range(4):
        breaker.failed()
    assert (breaker.is_open, breaker.allowed(8)) == (False, 8)
    breaker.failed()
    assert (breaker.is_open, breaker.allowed(8)) == (True, 0)
    now = 110.0
    assert breaker.allowed(8) == 1
    breaker.succeeded()
    assert (breaker.is_open, breaker.allowed(8)) == (False, 8)


def test_the_shipped_judges_can_be_loaded_by_the_worker_s_default() -> None:
    assert isinstance(load_judge(load_rubric("brief").judge), Judge)


async def _is(value: Awaitable[Any], expected: object) -> bool:
    return bool(await value == expected)


async def _is_true(value: Awaitable[Any]) -> bool:
    return bool(await value)


async def _now(value: Callable[[], Any]) -> Any:
    return value()


async def _waits(store: MemoryStore, *rollout_ids: str) -> bool:
    states = [await state_of(store, rollout_id) for rollout_id in rollout_ids]
    return states == [LedgerState.AWAITING_JUDGEMENT] * len(states)
