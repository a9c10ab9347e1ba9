"""Judging: claims replies that have no reward, asks the rubric's judge, records what it said.

    rollout awaiting judgement -> claim under the active rubric -> verdict or failure -> record

A judge that fails is no judgement: the failure is recorded as such, the rollout is judged again
later, and after `max_attempts` failures it expires with the reason. It never becomes a 0.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from online_sao.config import JudgingSettings
from online_sao.errors import ConfigError, JudgeError, LeaseLost, StoreError
from online_sao.interfaces import Judge, Store
from online_sao.rubrics import load_judge
from online_sao.types import (
    JUDGEMENT_PREFIX,
    Evidence,
    Expired,
    Feedback,
    Judgement,
    JudgementState,
    Rollout,
    RubricVersion,
    Scored,
    Unscorable,
    Verdict,
    Wait,
    new_id,
    utc_now,
)

logger = logging.getLogger(__name__)

ALARM = "judge_failing"
ALARM_AFTER = 5
"""Failures in a row, over all rollouts, that open the breaker and raise the alarm."""
POLL_S = 0.2
"""An idle worker looks for work this often (s)."""
LEASE_MARGIN_S = 30.0
"""A lease outlasts the judge's time-out by this (s), for the recording."""
RETRY_BASE_S, RETRY_CAP_S = 2.0, 120.0
"""A rollout's k-th failure puts it off by a random part of base * 2^(k-1), at most the cap."""
BREAKER_BASE_S, BREAKER_CAP_S = 0.5, 15.0
"""The same between single trials of a judge that keeps failing."""
STORE_BASE_S, STORE_CAP_S = 0.2, 5.0
"""The same for a database that cannot be reached."""
STOP_S = 2.0
"""How long a stopping worker lets judgements in hand finish (s); the rest is given back."""
MAX_ERROR = 300
"""Characters of an error that are recorded."""


def build_evidence(
    rollout: Rollout, feedback: Sequence[Feedback], feedback_wait_s: float
) -> Evidence:
    """What a judge may look at. Raises ValueError for a rollout that is not complete."""
    completion = rollout.completion
    if completion is None:
        raise ValueError(f"{rollout.id} is not complete")
    return Evidence(
        rollout_id=rollout.id,
        messages=rollout.request.messages,
        reply=completion.text,
        reply_tokens=len(completion.reply_ids),
        finish_reason=completion.finish_reason,
        completed_at=completion.completed_at,
        feedback_until=completion.completed_at + timedelta(seconds=feedback_wait_s),
        feedback=tuple(feedback),
    )


def full_jitter(
    failures: int, base_s: float, cap_s: float, source: random.Random | None = None
) -> float:
    """Seconds until the next try: uniform over [0, min(cap, base * 2^(failures-1))]."""
    ceiling = min(cap_s, base_s * 2.0 ** min(failures - 1, 60))
    return ceiling * (source.random() if source is not None else random.random())


class Breaker:
    """Keeps a judge that fails again and again from using up every rollout's attempts.

    From `ALARM_AFTER` failures in a row on, one rollout at a time is tried, with growing pauses;
    the first success ends it.
    """

    def __init__(self) -> None:
        self.failures = 0
        """In a row, over all rollouts."""
        self._closed_until = 0.0

    @property
    def is_open(self) -> bool:
        """True while the judge is taken to be down."""
        return self.failures >= ALARM_AFTER

    def allowed(self, slots: int) -> int:
        """How many judgements may be in hand now, of `slots`."""
        if not self.is_open:
            return slots
        return 1 if time.monotonic() >= self._closed_until else 0

    def failed(self) -> None:
        """One more failure."""
        self.failures += 1
        if self.is_open:
            pause = full_jitter(self.failures - ALARM_AFTER + 1, BREAKER_BASE_S, BREAKER_CAP_S)
            self._closed_until = time.monotonic() + pause

    def succeeded(self) -> None:
        """The judge gave a verdict."""
        self.failures = 0


@dataclass(frozen=True, slots=True)
class _Bench:
    """The judge of one rubric version; what is in hand keeps its own when the rubric changes."""

    rubric: RubricVersion
    judge: Judge
    breaker: Breaker


@dataclass(frozen=True, slots=True)
class _Draft:
    """What a judgement says beside its outcome."""

    rollout_id: str
    attempt: int
    """1 for the first look."""
    latency_s: float


class JudgingWorker:
    """Judges what awaits judgement, some at a time, until it is stopped.

    Several may run on one store: claims are leases. `judged` counts this worker's verdicts
    (those that only wait left out), `failed` the looks in which the judge failed.
    """

    def __init__(
        self,
        store: Store,
        settings: JudgingSettings,
        *,
        owner: str,
        load_judge: Callable[[str], Judge] = load_judge,
        clock: Callable[[], datetime] = utc_now,
        retry_base_s: float = RETRY_BASE_S,
    ) -> None:
        self._store = store
        self._settings = settings
        self._owner = owner
        self._load_judge = load_judge
        self._clock = clock
        self._retry_base_s = retry_base_s
        self._bench: _Bench | None = None
        self._alarm_may_be_open = True
        self._woken = asyncio.Event()
        self.judged = 0
        self.failed = 0

    def wake(self) -> None:
        """There may be work: look now, not at the next poll."""
        self._woken.set()

    async def run(self, stop: asyncio.Event) -> None:
        """Judge until `stop`; then finish what can be finished soon, and give the rest back."""
        looks: set[asyncio.Task[None]] = set()
        stopping = asyncio.create_task(stop.wait())
        put_off = 0
        try:
            while not stop.is_set():
                pause_s = POLL_S
                self._woken.clear()
                try:
                    looks |= await self._start_looks(in_hand=len(looks))
                    put_off = 0
                except (StoreError, ConfigError) as error:
                    put_off += 1
                    pause_s += full_jitter(put_off, STORE_BASE_S, STORE_CAP_S)
                    logger.warning("action=judging_put_off error=%s", _describe(error))
                looks = await self._pause(looks, stopping, pause_s)
        finally:
            stopping.cancel()
            await self._wind_up(looks)

    async def judge_once(self) -> int:
        """Claim as many rollouts as may be judged at once, judge them; how many were claimed.

        Raises DatabaseUnavailable, UnknownRecord (no active rubric) and ConfigError (the
        rubric's judge cannot be loaded), all before anything is claimed.
        """
        looks = await self._start_looks(in_hand=0)
        await asyncio.gather(*looks)
        return len(looks)

    async def _start_looks(self, *, in_hand: int) -> set[asyncio.Task[None]]:
        """Claim what may be judged now, under the rubric that is active now; a task for each."""
        bench = await self._active_bench()
        limit = bench.breaker.allowed(self._settings.concurrency) - in_hand
        if limit <= 0:
            return set()
        claimed = await self._store.claim_unjudged(
            self._owner, limit=limit, lease_s=self._settings.timeout_s + LEASE_MARGIN_S
        )
        return {
            asyncio.create_task(self._look(rollout, feedback, bench))
            for rollout, feedback in claimed
        }

    async def _active_bench(self) -> _Bench:
        """The active rubric with its judge; made anew, and unsuspected, when the rubric changes."""
        rubric = await self._store.active_rubric()
        if self._bench is None or rubric.id != self._bench.rubric.id:
            try:
                judge = self._load_judge(rubric.judge)
            except ConfigError as error:
                self._alarm_may_be_open = True
                await self._store.raise_alarm(ALARM, str(error))
                raise
            self._bench = _Bench(rubric, judge, Breaker())
        return self._bench

    async def _pause(
        self, looks: set[asyncio.Task[None]], stopping: asyncio.Task[Any], pause_s: float
    ) -> set[asyncio.Task[None]]:
        """Until a look ends, somebody wakes us, we are stopped, or `pause_s` is over."""
        woken = asyncio.create_task(self._woken.wait())
        try:
            await asyncio.wait(
                {*looks, stopping, woken}, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            woken.cancel()
        for look in looks:
            if look.done():
                look.result()
        return {look for look in looks if not look.done()}

    async def _wind_up(self, looks: set[asyncio.Task[None]]) -> None:
        if looks:
            _, late = await asyncio.wait(looks, timeout=STOP_S)
            for look in late:
                look.cancel()
            await asyncio.gather(*looks, return_exceptions=True)
        with suppress(StoreError):  # The leases run out by themselves.
            await self._store.release_leases(self._owner)

    async def _look(self, rollout: Rollout, feedback: Sequence[Feedback], bench: _Bench) -> None:
        """One look at one rollout, with all that may come of it."""
        try:
            failures = await self._failures(bench, rollout.id)
            retry_at = self._retry_at(failures)
            if retry_at is not None and retry_at > self._clock():
                await self._store.postpone_judgement(rollout.id, self._owner, retry_at)
                return
            evidence = build_evidence(rollout, feedback, self._settings.feedback_wait_s)
            start = time.perf_counter()
            try:
                outcome: Verdict | JudgeError = await self._ask(bench, evidence)
            except JudgeError as error:
                outcome = error
            draft = _Draft(rollout.id, 1 + len(failures), time.perf_counter() - start)
            if isinstance(outcome, JudgeError):
                await self._record_failure(bench, draft, outcome)
            else:
                await self._record_verdict(bench, draft, outcome)
        except LeaseLost:
            logger.info("action=judgement_lease_lost rollout=%s", rollout.id)
        except StoreError as error:
            logger.warning(
                "action=judgement_not_recorded rollout=%s error=%s", rollout.id, _describe(error)
            )

    async def _failures(self, bench: _Bench, rollout_id: str) -> list[Judgement]:
        """The judge's failures on a rollout since its last verdict, under this rubric version.

        They are read from the store, so that a restart forgets none.
        """
        failures: list[Judgement] = []
        for judgement in reversed(await self._store.list_judgements(rollout_id)):
            if judgement.state is not JudgementState.ERROR:
                break
            if judgement.rubric_id == bench.rubric.id:
                failures.append(judgement)
        return failures[::-1]

    def _retry_at(self, failures: Sequence[Judgement]) -> datetime | None:
        """When a rollout may be looked at again; the same whoever asks, and after a restart."""
        if not failures:
            return None
        last = failures[-1]
        delay_s = full_jitter(
            len(failures), self._retry_base_s, RETRY_CAP_S, random.Random(last.id)
        )
        return last.created_at + timedelta(seconds=delay_s)

    async def _ask(self, bench: _Bench, evidence: Evidence) -> Verdict:
        """The judge's verdict; JudgeError for everything else that can become of asking."""
        deadline = asyncio.timeout(self._settings.timeout_s)
        try:
            async with deadline:
                verdict: object = await bench.judge.judge(evidence, bench.rubric)
        except JudgeError:
            raise
        except (Exception, asyncio.CancelledError) as error:  # User code may raise anything.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            if deadline.expired():
                raise JudgeError(f"no verdict within {self._settings.timeout_s:g} s") from error
            logger.exception("action=judge_raised rollout=%s", evidence.rollout_id)
            raise JudgeError(_describe(error)) from error
        if not isinstance(verdict, Scored | Wait | Unscorable | Expired):
            raise JudgeError(f"the judge returned a {type(verdict).__name__}, which is no verdict")
        if isinstance(verdict, Wait) and verdict.until.tzinfo is None:
            raise JudgeError("the judge waits until a time that has no time zone")
        return verdict

    async def _record_verdict(self, bench: _Bench, draft: _Draft, verdict: Verdict) -> None:
        bench.breaker.succeeded()
        if isinstance(verdict, Wait):
            # A judge that waits for the past must not have this worker spin.
            until = max(verdict.until, self._clock() + timedelta(seconds=POLL_S))
            await self._store.postpone_judgement(draft.rollout_id, self._owner, until)
        else:
            await self._record(bench, draft, verdict)
            self.judged += 1
        if self._alarm_may_be_open:
            await self._store.clear_alarm(ALARM)
            self._alarm_may_be_open = False

    async def _record_failure(self, bench: _Bench, draft: _Draft, error: JudgeError) -> None:
        """Record it; `_retry_at` puts the next look off."""
        bench.breaker.failed()
        self.failed += 1
        n, said = draft.attempt, str(error)[:MAX_ERROR]
        logger.warning(
            "action=judge_failed rollout=%s attempt=%d error=%s", draft.rollout_id, n, said
        )
        if bench.breaker.is_open:
            self._alarm_may_be_open = True
            await self._store.raise_alarm(
                ALARM, f"{bench.rubric.judge} failed {bench.breaker.failures} times: {said}"
            )
        if n >= self._settings.max_attempts:
            await self._record(
                bench, draft, Expired(f"judge failed {n} times; the last time: {said}")
            )
        else:
            await self._record(bench, draft, JudgeError(said))

    async def _record(
        self, bench: _Bench, draft: _Draft, outcome: Scored | Unscorable | Expired | JudgeError
    ) -> None:
        scored = outcome if isinstance(outcome, Scored) else None
        judgement = Judgement(
            id=new_id(JUDGEMENT_PREFIX),
            rollout_id=draft.rollout_id,
            created_at=self._clock(),
            rubric_id=bench.rubric.id,
            judge=bench.rubric.judge,
            state=_state_of(outcome),
            quality=scored.quality if scored else None,
            style=scored.style if scored else None,
            reward=scored.reward if scored else None,
            reason=str(outcome) if isinstance(outcome, JudgeError) else outcome.reason,
            latency_s=draft.latency_s,
            attempts=draft.attempt,
        )
        await self._store.record_judgement(judgement, self._owner)


def _state_of(outcome: Scored | Unscorable | Expired | JudgeError) -> JudgementState:
    if isinstance(outcome, Scored):
        return JudgementState.SCORED
    if isinstance(outcome, Unscorable):
        return JudgementState.UNSCORABLE
    return JudgementState.EXPIRED if isinstance(outcome, Expired) else JudgementState.ERROR


def _describe(error: BaseException) -> str:
    """An error for a log line or a record, never at length."""
    return f"{type(error).__name__}: {error}"[:MAX_ERROR]
