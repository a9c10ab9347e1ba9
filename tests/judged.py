"""Puts judged rollouts into a store, as the gateway and a judge would."""

from __future__ import annotations

from collections.abc import Sequence

from online_sao.interfaces import Store
from online_sao.types import (
    JUDGEMENT_PREFIX,
    ROLLOUT_PREFIX,
    Judgement,
    JudgementState,
    Message,
    Outcome,
    RolloutCompletion,
    RolloutRequest,
    Sampling,
    VersionSpan,
    new_id,
    utc_now,
)


async def serve(
    store: Store,
    *,
    version: int = 0,
    prompt: Sequence[int] = (5, 6, 7),
    reply: Sequence[int] = (8, 9, 10, 11),
    episode_id: str | None = None,
) -> str:
    """One reply; its id."""
    request = RolloutRequest(
        id=new_id(ROLLOUT_PREFIX),
        created_at=utc_now(),
        messages=(Message("user", "Hello?"),),
        sampling=Sampling(),
        session_id="session",
        episode_id=episode_id,
    )
    await store.insert_rollout(request)
    await store.complete_rollout(
        RolloutCompletion(
            rollout_id=request.id,
            completed_at=utc_now(),
            outcome=Outcome.COMPLETED,
            text="Hello.",
            prompt_ids=tuple(prompt),
            reply_ids=tuple(reply),
            logprobs=(-3.0,) * len(reply),
            version_spans=(VersionSpan(version, 0, len(reply)),),
            finish_reason="stop",
        )
    )
    return request.id


async def judge_all(store: Store, count: int, *, reward: int) -> set[str]:
    """Judge what awaits judgement, up to `count`; the ids."""
    rubric = await store.put_rubric("test", "tests:Judge", {})
    claimed = await store.claim_unjudged("judge", limit=count, lease_s=60)
    for rollout, _ in claimed:
        await store.record_judgement(
            Judgement(
                id=new_id(JUDGEMENT_PREFIX),
                rollout_id=rollout.id,
                created_at=utc_now(),
                rubric_id=rubric.id,
                judge=rubric.judge,
                state=JudgementState.SCORED,
                quality=1,
                style=reward,
                reward=float(reward),
            ),
            "judge",
        )
    return {rollout.id for rollout, _ in claimed}


async def serve_and_judge(
    store: Store,
    count: int,
    *,
    reward: int = 1,
    version: int = 0,
    prompt: Sequence[int] = (5, 6, 7),
    reply: Sequence[int] = (8, 9, 10, 11),
) -> list[str]:
    """`count` replies with this reward; their ids, oldest first."""
    ids = [await serve(store, version=version, prompt=prompt, reply=reply) for _ in range(count)]
    assert await judge_all(store, count, reward=reward) == set(ids)
    return ids
