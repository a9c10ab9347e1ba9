"""Tool episodes on every kind of store: judged as one or each, claimed whole or not at all."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import replace
from typing import Any

import pytest
from store_world import World, new_version, same_bits, thumb

from online_sao.errors import EpisodeClosed, UnknownRecord, VersionConflict
from online_sao.types import (
    EPISODE_PREFIX,
    EpisodeRewards,
    JudgementState,
    LedgerState,
    NotTrainable,
    Outcome,
    RolloutCompletion,
    UpdateKind,
    VersionSpan,
    new_id,
)

S = LedgerState
FIRST = {"prompt_ids": (1, 2), "reply_ids": (3, 4, 5)}
SECOND = {"prompt_ids": (1, 2, 3, 4, 5, 6), "reply_ids": (7, 8, 9)}
"""Extends FIRST by one observation token."""
THIRD = {"prompt_ids": (1, 2, 3, 4, 5, 6, 7, 8, 9), "reply_ids": (10, 11, 12)}
"""Extends SECOND by none."""
STRANGER = {"prompt_ids": (1, 2, 3, 99, 5, 6), "reply_ids": (7, 8, 9)}
"""As long as SECOND, but one of FIRST's ids is another."""


async def declared(world: World) -> str:
    return (await world.store.open_episode(new_id(EPISODE_PREFIX))).id


async def reply(world: World, episode_id: str, **completion: Any) -> str:
    """A reply of the episode, complete."""
    request = world.request(episode_id=episode_id)
    await world.store.insert_rollout(request)
    await world.store.complete_rollout(world.completion(request.id, **completion))
    return request.id


async def played(world: World, *replies: dict[str, Any]) -> tuple[str, list[str]]:
    """A closed episode of these replies: its id and theirs."""
    episode_id = await declared(world)
    ids = [await reply(world, episode_id, **each) for each in replies]
    await world.store.close_episode(episode_id)
    return episode_id, ids


async def waiting(world: World) -> list[str]:
    """Who can be judged now; given back at once."""
    claimed = await world.store.claim_unjudged("looker", limit=100, lease_s=60)
    await world.store.release_leases("looker")
    return [rollout.id for rollout, _ in claimed]


async def judged(world: World, *replies: dict[str, Any], reward: float = 1.0) -> list[str]:
    """A closed episode whose last reply was judged for all; its replies' ids."""
    _, ids = await played(world, *replies)
    await world.judge(ids[-1], reward)
    return ids


async def each_judged_alone(world: World) -> None:
    await world.store.put_rubric("each", "a:J", {}, episodes=EpisodeRewards.EACH)


# -- declared, joined, closed --------------------------------------------------------------------


async def test_an_episode_counts_its_replies_and_takes_none_once_closed(world: World) -> None:
    episode_id = await declared(world)
    ids = [await reply(world, episode_id, **FIRST)]
    request = world.request(episode_id=episode_id)
    await world.store.insert_rollout(request)
    world.clock.forward(5)
    closed = await world.store.close_episode(episode_id)
    assert closed.counts == {S.AWAITING_JUDGEMENT: 1, S.IN_FLIGHT: 1}
    assert (closed.closed_at, closed.rewards) == (world.clock.now, None)
    with pytest.raises(EpisodeClosed):
        await world.store.insert_rollout(world.request(episode_id=episode_id))
    assert sum((await world.counts()).values()) == 2
    # It ends with the reply that was in flight, which is its last.
    assert await waiting(world) == []
    await world.store.complete_rollout(world.completion(request.id, **SECOND))
    assert await waiting(world) == [request.id]
    world.clock.forward(5)
    again = await world.store.close_episode(episode_id)
    assert again == await world.store.get_episode(episode_id)
    assert (again.closed_at, again.rewards) == (closed.closed_at, EpisodeRewards.ONE)
    assert (await world.store.get_rollout(ids[0])).request.episode_id == episode_id


async def test_what_is_not_declared_cannot_be_joined_or_closed(world: World) -> None:
    with pytest.raises(UnknownRecord):
        await world.store.insert_rollout(world.request(episode_id="ep_none"))
    for call in (world.store.close_episode, world.store.get_episode):
        with pytest.raises(UnknownRecord):
            await call("ep_none")
    episode_id = await declared(world)
    with pytest.raises(VersionConflict):
        await world.store.open_episode(episode_id)
    assert await world.counts() == {}
    # A closed episode without a reply asks nothing of anybody.
    await world.store.close_episode(episode_id)
    assert await world.claim(1) == []


async def test_an_idle_episode_is_closed_but_not_while_a_request_is_in_flight(
    world: World,
) -> None:
    idle, busy, young = [await declared(world) for _ in range(3)]
    request = world.request(episode_id=busy)
    await world.store.insert_rollout(request)
    only = await reply(world, idle, **FIRST)
    world.clock.forward(599)
    await reply(world, young, **FIRST)
    assert await world.store.close_idle_episodes(600) == 0
    world.clock.forward(1)
    assert await world.store.close_idle_episodes(600) == 1
    assert await waiting(world) == [only]
    open_still = [(await world.store.get_episode(i)).closed_at is None for i in (busy, young)]
    assert open_still == [True, True]
    await world.store.complete_rollout(world.completion(request.id))
    assert await world.store.close_idle_episodes(600) == 0  # its time begins anew
    world.clock.forward(600)
    assert await world.store.close_idle_episodes(600) == 2


async def test_more_idle_episodes_than_one_transaction_takes_are_closed(world: World) -> None:
    for _ in range(60):
        await declared(world)
    world.clock.forward(10)
    assert await world.store.close_idle_episodes(10) == 60


async def test_a_dead_process_s_request_ends_an_episode_that_waited_for_it(world: World) -> None:
    episode_id = await declared(world)
    first = await reply(world, episode_id, **FIRST)
    request = world.request(episode_id=episode_id)
    await world.store.insert_rollout(request)
    await world.store.close_episode(episode_id)
    assert await waiting(world) == []
    assert await world.store.fail_orphans(world.clock.now, "service_died") == 1
    assert await waiting(world) == [first]


# -- judged --------------------------------------------------------------------------------------


async def test_the_last_reply_s_verdict_is_the_episode_s_and_is_passed_on(world: World) -> None:
    episode_id = await declared(world)
    first = await reply(world, episode_id, **FIRST)
    second = await reply(world, episode_id, **SECOND)
    assert await waiting(world) == []
    reasons = (await world.store.ledger()).reasons
    assert reasons == {S.AWAITING_JUDGEMENT: {"episode": 2}}
    await world.store.close_episode(episode_id)
    assert await waiting(world) == [second]
    await world.judge(second, 1.0)
    assert await world.counts() == {S.JUDGED: 2}
    (own,) = await world.store.list_judgements(second)
    (passed,) = await world.store.list_judgements(first)
    assert (passed.state, passed.reward, passed.judge) == (JudgementState.SCORED, 1.0, "episode")
    assert passed.reason == f"the reward of its episode: {own.id} on {second}"
    # The look of the judge counts once, whatever follows from it.
    stats = await world.store.reward_stats()
    assert (stats.count, stats.mean) == (1, 1.0)


async def test_the_last_reply_that_is_judged_is_the_last_trainable_one(world: World) -> None:
    greedy = {**THIRD, "not_trainable": NotTrainable.GREEDY}
    _, ids = await played(world, FIRST, SECOND, greedy)
    assert await waiting(world) == [ids[1]]
    await world.judge(ids[1])
    (trajectory,) = await world.claim(1)
    assert trajectory.rollout_ids == tuple(ids[:2])
    assert await world.states(ids) == [S.LEASED, S.LEASED, S.NOT_TRAINABLE]


@pytest.mark.parametrize("state", [S.UNSCORABLE, S.EXPIRED])
async def test_an_episode_without_a_verdict_ends_with_a_reason(
    world: World, state: LedgerState
) -> None:
    _, ids = await played(world, FIRST, SECOND)
    await world.store.claim_unjudged("judge", limit=1, lease_s=60)
    verdict = replace(await world.judgement(ids[1], None), state=JudgementState(state.value))
    await world.store.record_judgement(verdict, "judge")
    assert await world.states(ids) == [state, state]
    assert (await world.store.get_rollout(ids[0])).reason == "episode"
    (passed,) = await world.store.list_judgements(ids[0])
    assert (passed.state, passed.reward) == (JudgementState(state.value), None)
    assert passed.reason == f"as its episode: {verdict.id} on {ids[1]}"
    assert await world.counts() == {state: 2}


async def test_a_judge_that_failed_or_waits_moves_nobody_else(world: World) -> None:
    _, ids = await played(world, FIRST, SECOND)
    await world.store.claim_unjudged("judge", limit=1, lease_s=60)
    failure = replace(await world.judgement(ids[1], None), state=JudgementState.ERROR)
    await world.store.record_judgement(failure, "judge")
    assert await waiting(world) == [ids[1]]
    await world.store.claim_unjudged("judge", limit=1, lease_s=60)
    await world.store.postpone_judgement(ids[1], "judge", world.clock.forward(30))
    assert await world.store.list_judgements(ids[0]) == []
    assert (await world.store.get_rollout(ids[0])).reason == "episode"
    assert await waiting(world) == [ids[1]]


async def test_where_each_is_judged_the_learner_waits_for_the_last_verdict(world: World) -> None:
    await world.rubric_id()
    await each_judged_alone(world)
    episode_id, ids = await played(world, FIRST, SECOND)
    assert (await world.store.get_episode(episode_id)).rewards is EpisodeRewards.EACH
    assert await waiting(world) == ids
    await world.judge(ids[0], 1.0)
    assert await world.claim(1) == []
    assert (await world.store.ledger()).reasons == {S.JUDGED: {"episode": 1}}
    await world.judge(ids[1], 0.0)
    assert (await world.store.ledger()).reasons == {}
    (trajectory,) = await world.claim(1)
    assert trajectory.reward_at == ((4, 1.0), (8, 0.0))
    assert (trajectory.reward, trajectory.rollout_ids) == (1.0, tuple(ids))
    assert (await world.store.reward_stats()).count == 2


async def test_feedback_on_any_reply_reaches_the_judge_of_the_whole_episode(world: World) -> None:
    episode_id = await declared(world)
    ids = [await reply(world, episode_id, **each) for each in (FIRST, SECOND)]
    single = await world.served()
    up, down = thumb(ids[0], True), thumb(ids[1], False)
    other = thumb(single)
    for said in (up, other, down):
        await world.store.add_feedback(said)
    assert await waiting(world) == [single]  # a thumb ends no episode
    await world.store.close_episode(episode_id)
    claimed = await world.store.claim_unjudged("judge", limit=10, lease_s=60)
    assert {rollout.id: said for rollout, said in claimed} == {
        single: (other,),
        ids[1]: (up, down),
    }


async def test_feedback_after_the_verdict_has_the_whole_episode_judged_again(
    world: World,
) -> None:
    ids = await judged(world, FIRST, SECOND, reward=0.0)
    await world.store.add_feedback(thumb(ids[0]))
    assert await world.counts() == {S.AWAITING_JUDGEMENT: 2}
    assert await world.claim(1) == []
    assert await waiting(world) == [ids[1]]
    await world.judge(ids[1], 1.0)
    (trajectory,) = await world.claim(1)
    assert (trajectory.reward, trajectory.rollout_ids) == (1.0, tuple(ids))
    assert [j.reward for j in await world.store.list_judgements(ids[0])] == [0.0, 1.0]


async def test_feedback_while_the_learner_holds_it_counts_if_the_learner_gives_it_back(
    world: World,
) -> None:
    ids = await judged(world, FIRST, SECOND, reward=0.0)
    await world.claim(1)
    await world.store.add_feedback(thumb(ids[0]))
    await world.store.release_leases("learner")
    assert await world.claim(1) == []
    await world.judge(ids[1], 1.0)
    (trajectory,) = await world.claim(1)
    assert (trajectory.reward, trajectory.rollout_ids) == (1.0, tuple(ids))


async def test_feedback_on_one_of_several_own_rewards_has_that_one_judged_again(
    world: World,
) -> None:
    await world.rubric_id()
    await each_judged_alone(world)
    _, ids = await played(world, FIRST, SECOND)
    for rollout_id in ids:
        await world.judge(rollout_id, 0.0)
    await world.store.add_feedback(thumb(ids[0]))
    assert await waiting(world) == [ids[0]]
    assert await world.claim(1) == []
    await world.judge(ids[0], 1.0)
    (trajectory,) = await world.claim(1)
    assert trajectory.reward_at == ((4, 1.0), (8, 0.0))


# -- claimed -------------------------------------------------------------------------------------


async def test_an_episode_is_one_trajectory_of_a_batch_and_one_update_trains_all_of_it(
    world: World,
) -> None:
    await world.store.add_base_version("base", "00")
    ids = await judged(
        world,
        {**FIRST, "logprobs": (-0.1, -0.2, -0.3)},
        {**SECOND, "logprobs": (-0.4, -0.5, -0.6)},
        {**THIRD, "logprobs": (-0.7, -0.8, -0.9)},
    )
    (single,) = await world.judged(1)
    merged, other = await world.claim(2)
    assert (merged.rollout_ids, other.rollout_ids) == (tuple(ids), (single,))
    assert merged.token_ids == (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)
    o, a, nan = False, True, math.nan
    assert merged.action_mask == (o, o, a, a, a, o, a, a, a, a, a, a)
    assert same_bits(
        merged.logprobs, (nan, nan, -0.1, -0.2, -0.3, nan, -0.4, -0.5, -0.6, -0.7, -0.8, -0.9)
    )
    assert (merged.reward, merged.reward_at) == (1.0, ())
    assert await world.counts() == {S.LEASED: 4}
    update = world.update([*merged.rollout_ids, single])
    committed = await world.store.commit_update("learner", update, new_version(0))
    assert committed.rollout_ids == (*ids, single)
    assert await world.counts() == {S.TRAINED: 4}
    assert await world.claim(1) == []


async def test_replies_whose_ids_do_not_extend_stay_their_own_in_one_batch(world: World) -> None:
    ids = await judged(world, FIRST, STRANGER, reward=1.0)
    assert await world.claim(3) == []
    batch = await world.claim(2)
    assert [(t.rollout_ids, t.reward) for t in batch] == [((i,), 1.0) for i in ids]


async def test_an_episode_that_overfills_a_batch_waits_for_the_next(world: World) -> None:
    (old,) = await world.judged(1)
    pair = await judged(world, FIRST, STRANGER)
    (young,) = await world.judged(1)
    assert [t.rollout_ids[0] for t in await world.claim(2)] == [old, young]
    assert [t.rollout_ids[0] for t in await world.claim(2)] == pair


async def test_where_nothing_else_fills_it_the_batch_takes_the_episode_and_is_larger(
    world: World,
) -> None:
    (old,) = await world.judged(1)
    pair = await judged(world, FIRST, STRANGER)
    assert [t.rollout_ids[0] for t in await world.claim(2)] == [old, *pair]


async def test_an_episode_larger_than_a_batch_is_a_batch(world: World) -> None:
    trio = await judged(world, FIRST, STRANGER, FIRST)
    await world.judged(2)
    assert [t.rollout_ids[0] for t in await world.claim(2)] == trio
    assert await world.counts() == {S.LEASED: 3, S.JUDGED: 2}


async def test_a_failed_request_breaks_no_chain_but_an_untrainable_reply_does(
    world: World,
) -> None:
    episode_id = await declared(world)
    first = await reply(world, episode_id, **FIRST)
    request = world.request(episode_id=episode_id)
    await world.store.insert_rollout(request)
    await world.store.complete_rollout(
        RolloutCompletion(request.id, world.clock.now, Outcome.FAILED, error="engine_timeout")
    )
    second = await reply(world, episode_id, **SECOND)
    await world.store.close_episode(episode_id)
    await world.judge(second)
    assert [t.rollout_ids for t in await world.claim(1)] == [(first, second)]
    greedy = {**SECOND, "not_trainable": NotTrainable.GREEDY}
    one, _, three = await judged(world, FIRST, greedy, THIRD)
    assert [t.rollout_ids for t in await world.claim(2)] == [(one,), (three,)]


async def test_what_refuses_one_reply_discards_the_episode(world: World) -> None:
    await world.store.add_base_version("base", "00")
    await world.publish(0)
    await world.publish(1)
    stale = await judged(
        world, {**FIRST, "version_spans": (VersionSpan(0, 0, 3),)}, {**SECOND, "version": 2}
    )
    cut = await judged(
        world, {**FIRST, "version": 2, "finish_reason": "length"}, {**SECOND, "version": 2}
    )
    long = await judged(
        world, {**FIRST, "version": 2}, {**SECOND, "version": 2}, {**THIRD, "version": 2}
    )
    fine = await judged(world, {**FIRST, "version": 1}, {**SECOND, "version": 2})
    (trajectory,) = await world.claim(1, max_lag=1, max_train_tokens=11, skip_cut=True)
    assert (trajectory.rollout_ids, trajectory.lag) == (tuple(fine), 1)
    reasons = [(await world.store.get_rollout(i)).reason for i in (*stale, *cut, *long)]
    assert reasons == ["stale"] * 2 + ["cut"] * 2 + ["too_long"] * 3
    assert (await world.counts())[S.DISCARDED] == 7


async def test_a_lost_lease_gives_the_whole_episode_to_the_next(world: World) -> None:
    ids = await judged(world, FIRST, SECOND)
    await world.claim(1, owner="dead")
    world.clock.forward(61)
    assert [t.rollout_ids for t in await world.claim(1, owner="next")] == [tuple(ids)]
    assert await world.counts() == {S.LEASED: 2}


async def test_learners_that_race_get_whole_episodes_each_once(world: World) -> None:
    episodes = {tuple(await judged(world, FIRST, STRANGER, THIRD)) for _ in range(8)}
    batches = await asyncio.gather(*(world.claim(3, owner=f"learner-{n}") for n in range(6)))
    while more := await world.claim(3, owner="again"):
        batches.append(more)
    claimed = [tuple(t.rollout_ids[0] for t in batch) for batch in batches if batch]
    assert set(claimed) == episodes
    assert len(claimed) == 8
    assert await world.counts() == {S.LEASED: 24}


async def test_however_the_end_and_the_replies_cross_one_reply_is_judged(world: World) -> None:
    for _ in range(5):
        episode_id = await declared(world)
        requests = [world.request(episode_id=episode_id) for _ in range(4)]
        for request in requests:
            await world.store.insert_rollout(request)
        await asyncio.gather(
            *(world.store.complete_rollout(world.completion(r.id)) for r in requests[:2]),
            world.store.close_episode(episode_id),
            *(world.store.complete_rollout(world.completion(r.id)) for r in requests[2:]),
        )
        assert await waiting(world) == [requests[-1].id]
        await world.judge(requests[-1].id)


async def test_players_judges_learners_and_users_at_once_leave_every_episode_whole(
    world: World,
) -> None:
    await world.store.add_base_version("base", "00")
    await world.rubric_id()
    dice, episodes = random.Random(4), []
    done = asyncio.Event()

    async def play() -> None:
        for _ in range(5):
            episode_id = await declared(world)
            episodes.append(episode_id)
            for completion in (FIRST, dice.choice([SECOND, STRANGER]), THIRD):
                rollout_id = await reply(world, episode_id, **completion)
                if dice.random() < 0.3:
                    await world.store.add_feedback(thumb(rollout_id))
            late = world.store.add_feedback(thumb(rollout_id, False))
            await asyncio.gather(world.store.close_episode(episode_id), late)

    async def judge_all(owner: str) -> None:
        while not done.is_set():
            for rollout, _ in await world.store.claim_unjudged(owner, limit=3, lease_s=60):
                verdict = await world.judgement(rollout.id, float(dice.random() < 0.5))
                await world.store.record_judgement(verdict, owner)
            await asyncio.sleep(0.001)

    async def learn(owner: str) -> None:
        while not done.is_set():
            batch = await world.claim(dice.choice([1, 2]), owner=owner)
            ids = [rollout_id for t in batch for rollout_id in t.rollout_ids]
            if batch:
                update = world.update(ids, UpdateKind.CRITIC_ONLY)
                await world.store.commit_update(owner, update, None)
            await asyncio.sleep(0.001)

    async def watch() -> None:
        while (await world.counts()).get(S.CRITIC_ONLY) != 60:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        done.set()

    async with asyncio.timeout(60):
        await asyncio.gather(
            *(play() for _ in range(4)),
            *(judge_all(f"judge-{n}") for n in range(2)),
            *(learn(f"learner-{n}") for n in range(2)),
            watch(),
        )
    assert len(episodes) == 20
    for episode_id in episodes:
        assert (await world.store.get_episode(episode_id)).counts == {S.CRITIC_ONLY: 3}


# -- records that make no trajectory -------------------------------------------------------------


@pytest.mark.parametrize("reward", [math.nan, math.inf])
async def test_a_reward_that_is_not_finite_discards_that_reply_alone(
    world: World, reward: float
) -> None:
    (bad,) = [await world.served()]
    await world.store.claim_unjudged("judge", limit=1, lease_s=60)
    verdict = replace(await world.judgement(bad, 1.0), reward=reward)
    await world.store.record_judgement(verdict, "judge")
    good = await world.judged(2)
    assert [t.rollout_ids[0] for t in await world.claim(2)] == good
    assert (await world.store.ledger()).reasons == {S.DISCARDED: {"malformed": 1}}
    assert await world.counts() == {S.DISCARDED: 1, S.LEASED: 2}


@pytest.mark.parametrize(
    "spoil",
    [
        "reply_ids = substr(reply_ids, 1, 8)",  # two ids for three log-probabilities
        "reply_ids = substr(reply_ids, 1, 7)",  # not a whole number of ids
        "logprobs = substr(logprobs, 1, 16)",
        "reply_ids = substr(reply_ids, 1, 0), logprobs = substr(logprobs, 1, 0)",
        "prompt_ids = substr(prompt_ids, 1, 0)",
        "version_spans = '[[0,0,2]]'",
        "version_spans = 'torn'",
        "version_spans = NULL",
        "sampling = '{\"tempo\": 1}'",
    ],
)
async def test_a_corrupt_row_is_discarded_alone_and_the_rest_is_claimed(
    sql_world: World, spoil: str
) -> None:
    world = sql_world
    bad, *good = await world.judged(3)
    world.execute(f"UPDATE rollouts SET {spoil} WHERE id = '{bad}'")
    assert [t.rollout_ids[0] for t in await world.claim(2)] == good
    assert (await world.store.ledger()).reasons == {S.DISCARDED: {"malformed": 1}}
    assert await world.counts() == {S.DISCARDED: 1, S.LEASED: 2}


async def test_a_corrupt_reply_discards_its_whole_episode(sql_world: World) -> None:
    world = sql_world
    ids = await judged(world, FIRST, SECOND, THIRD)
    (single,) = await world.judged(1)
    world.execute(f"UPDATE rollouts SET logprobs = substr(logprobs, 1, 8) WHERE id = '{ids[1]}'")
    assert [t.rollout_ids[0] for t in await world.claim(1)] == [single]
    assert await world.states(ids[::2]) == [S.DISCARDED] * 2
    assert await world.counts() == {S.DISCARDED: 3, S.LEASED: 1}
