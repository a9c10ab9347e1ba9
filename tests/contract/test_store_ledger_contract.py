"""Does the ledger add up, on every kind of store; and notes, alarms, retention."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from store_world import NOON, World, new_version, thumb

from online_sao.errors import OnlineSaoError
from online_sao.interfaces import Store
from online_sao.store.memory import MemoryStore
from online_sao.types import (
    Episode,
    EpisodeRewards,
    Judgement,
    JudgementState,
    LedgerState,
    NotTrainable,
    Outcome,
    TokenTrace,
    UpdateKind,
)

S = LedgerState


async def test_an_empty_ledger_counts_every_state_as_nothing(world: World) -> None:
    ledger = await world.store.ledger()
    assert ledger.adds_up
    assert ledger.requests == 0
    assert dict(ledger.counts) == dict.fromkeys(LedgerState, 0)
    assert ledger.reasons == {}


async def test_a_reopened_store_has_everything(sql_world: World) -> None:
    world = sql_world
    await world.judged(2)
    await world.served(not_trainable=NotTrainable.GREEDY)
    before = await world.store.ledger()
    await world.store.aclose()
    again = world.reopen()
    await again.open()
    assert await again.ledger() == before


# -- every way a ledger can be wrong is noticed --------------------------------------------


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("UPDATE counters SET value = value + 1", "7 requests were counted, but 6 stand"),
        ("DELETE FROM counters", "the counter of requests is missing"),
        ("DELETE FROM rollouts WHERE completed_at IS NULL", "6 rollouts stand in the ledger"),
        ("UPDATE rollouts SET completed_at = NULL", "1 rollouts are in flight, but 6 records"),
        ("UPDATE ledger_entries SET lease_owner = NULL", "1 rollouts are leased without an owner"),
        (
            "UPDATE ledger_entries SET lease_deadline = NULL",
            "1 rollouts are in_judgement without an owner and a deadline",
        ),
        ("UPDATE ledger_entries SET lease_owner = 'x'", "have a lease in a state that has none"),
        ("UPDATE judgements SET state = 'error'", "1 rollouts are trained without a scored"),
        ("UPDATE ledger_entries SET judgement_seq = NULL", "1 rollouts are judged without a sc"),
        ("DELETE FROM update_members", "1 rollouts are trained, but updates name 0"),
        ("UPDATE updates SET kind = 'critic_only'", "in an update of kind critic_only, but are tr"),
        (
            "UPDATE ledger_entries SET state = 'judged' WHERE state = 'trained'",
            "1 rollouts were in an update of kind policy, but are judged",
        ),
        (
            "UPDATE ledger_entries SET reason = 'episode' WHERE state = 'judged'",
            "1 rollouts wait for an episode and belong to none",
        ),
        (
            "UPDATE ledger_entries SET episode_id = 'ep_parted' WHERE state = 'trained'",
            "1 episodes were trained in part or by several updates",
        ),
        ("UPDATE policy_versions SET state = 'live'", "2 policy versions are live at once"),
        (
            "UPDATE updates SET version = NULL",
            "1 versions up to number 1 exist, but 0 updates made one",
        ),
    ],
)
async def test_damage_is_named(sql_world: World, damage: str, problem: str) -> None:
    world = sql_world
    await world.store.add_base_version("base", "00")
    await world.publish(0)
    await world.judged(1)
    await world.claim(1)
    await world.judged(1)
    await world.served()
    await world.store.claim_unjudged("j", limit=1, lease_s=60)
    await world.served()
    await world.store.insert_rollout(world.request())
    assert sorted(await world.counts()) == sorted(
        [S.TRAINED, S.LEASED, S.JUDGED, S.IN_JUDGEMENT, S.AWAITING_JUDGEMENT, S.IN_FLIGHT]
    )
    await world.store.open_episode("ep_parted")
    world.execute(
        "UPDATE ledger_entries SET episode_id = 'ep_parted' WHERE state = 'leased'", damage
    )
    ledger = await world.store.ledger()
    assert not ledger.adds_up
    assert [words for words in ledger.problems if problem in words], ledger.problems


# -- a long random walk --------------------------------------------------------------------


class Walk:
    """The same random steps on a store and on its double; they must agree after each one."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.double = MemoryStore(clock=world.clock)
        self.random = random.Random(seed)
        self.flying: list[str] = []
        self.ids: list[str] = []
        self.episodes: list[str] = []
        self.spoken: dict[str, tuple[int, ...]] = {}
        """Episode -> the ids so far, which the next prompt may extend."""
        self.merged = 0
        """Trajectories of several replies that a learner got."""
        self.rubric = ""

    async def both(self, act: Callable[[Store], Awaitable[Any]]) -> Any:
        """Do it on both; the result (or error class) must be the same."""
        results = []
        for store in (self.world.store, self.double):
            try:
                results.append(await act(store))
            except OnlineSaoError as error:
                results.append(type(error).__mro__[-5:])
        assert str(results[0]) == str(results[1])
        return results[0]

    async def request(self) -> None:
        request = self.world.request()
        await self.both(lambda store: store.insert_rollout(request))
        self.flying.append(request.id)
        self.ids.append(request.id)

    async def declare(self) -> None:
        episode_id = f"ep_{len(self.episodes)}"
        await self.both(lambda store: store.open_episode(episode_id))
        self.episodes.append(episode_id)

    async def join(self) -> None:
        """Some requests of an episode, closed ones included; most are answered at once."""
        if self.episodes:
            episode_id = self.random.choice(self.episodes[-4:])
            for _ in range(self.random.randint(1, 3)):
                await self.one_more(episode_id)

    async def one_more(self, episode_id: str) -> None:
        request = self.world.request(episode_id=episode_id)
        if await self.both(lambda store: store.insert_rollout(request)) is not None:
            return  # closed
        self.ids.append(request.id)
        self.flying.append(request.id)
        if self.random.random() < 0.9:
            self.flying.pop()
            newest = await self.double.newest_stable()
            before = self.spoken.get(episode_id, (1,)) if self.random.random() < 0.9 else (8, 8)
            changes = {"not_trainable": NotTrainable.GREEDY} if self.random.random() < 0.1 else {}
            completion = self.world.completion(
                request.id, version=newest.number, prompt_ids=(*before, 2), **changes
            )
            await self.both(lambda store: store.complete_rollout(completion))
            self.spoken[episode_id] = completion.prompt_ids + completion.reply_ids

    async def close(self) -> None:
        if self.episodes and self.random.random() < 0.8:
            episode_id = self.random.choice(self.episodes[-4:])
            await self.both(lambda store: shown(store.close_episode(episode_id)))
        else:
            await self.both(lambda store: store.close_idle_episodes(20))

    async def change_rubric(self) -> None:
        rewards = self.random.choice(list(EpisodeRewards))
        for store in (self.world.store, self.double):
            await store.put_rubric("walk", "a:J", {}, episodes=rewards)

    async def complete(self) -> None:
        if not self.flying:
            return
        rollout_id = self.flying.pop(self.random.randrange(len(self.flying)))
        changes = self.random.choice(
            [
                *[{}] * 6,
                {"finish_reason": "length"},
                {"prompt_ids": tuple(range(60))},
                {"not_trainable": NotTrainable.GREEDY},
                {"outcome": Outcome.FAILED, "error": "engine_timeout"},
                {"outcome": Outcome.ABORTED},
            ]
        )
        newest = await self.double.newest_stable()
        version = self.random.randint(max(0, newest.number - 4), newest.number)
        completion = self.world.completion(rollout_id, version=version, **changes)
        await self.both(lambda store: store.complete_rollout(completion))

    async def orphan(self) -> None:
        before = NOON - timedelta(days=1) + timedelta(seconds=len(self.ids) - 8)
        await self.both(lambda store: store.fail_orphans(before, "service_stopped"))
        self.flying = [
            rollout_id
            for rollout_id in self.flying
            if (await self.double.get_rollout(rollout_id)).state is S.IN_FLIGHT
        ]

    async def feedback(self) -> None:
        if self.ids:
            client_id = self.random.choice([None, "c1", "c2"])
            up = self.random.random() < 0.5
            said = thumb(self.random.choice(self.ids), up, client_id, metric="thumbs")
            await self.both(lambda store: store.add_feedback(said))

    async def judge(self) -> None:
        owner = self.random.choice(["j1", "j2"])
        limit = self.random.randint(1, 5)
        claimed = await self.both(
            lambda store: store.claim_unjudged(owner, limit=limit, lease_s=20)
        )
        for rollout, _ in claimed:
            await self.verdict(rollout.id, owner)

    async def verdict(self, rollout_id: str, owner: str) -> None:
        chance = self.random.random()
        scored = await self.world.judgement(rollout_id, float(self.random.random() < 0.5))
        state = self.random.choice(list(JudgementState))
        if chance < 0.1:
            return  # the judge died with it
        if chance < 0.25:
            until = self.world.clock.now + timedelta(seconds=self.random.randint(-5, 30))
            await self.both(lambda store: store.postpone_judgement(rollout_id, owner, until))
        elif chance < 0.85 or state is JudgementState.SCORED:
            await self.both(lambda store: store.record_judgement(scored, owner))
        else:
            empty = {"reward": None, "quality": None, "style": None, "reason": "no_thumb"}
            judgement = replace(scored, state=state, **empty)
            await self.both(lambda store: store.record_judgement(judgement, owner))

    async def learn(self) -> None:
        owner = self.random.choice(["l1", "l2"])
        size = self.random.randint(1, 4)
        batch = await self.both(
            lambda store: store.claim_trajectories(
                owner, size=size, lease_s=20, max_lag=3, max_train_tokens=50, skip_cut=True
            )
        )
        self.merged += sum(len(trajectory.rollout_ids) > 1 for trajectory in batch)
        chance = self.random.random()
        if not batch or chance < 0.15:
            return  # nothing there, or the learner died
        if chance < 0.3:
            self.world.clock.forward(self.random.choice([5, 25]))
        kind = self.random.choice([UpdateKind.POLICY] * 5 + list(UpdateKind))
        ids = [rollout_id for trajectory in batch for rollout_id in trajectory.rollout_ids]
        newest = await self.double.newest_stable()
        version = new_version(newest.number) if kind is UpdateKind.POLICY else None
        traces = [TokenTrace(rollout_id, (0.5,), (1.0,), (1.0,), (True,)) for rollout_id in ids]
        update = self.world.update(ids, kind)
        await self.both(lambda store: store.commit_update(owner, update, version, traces))

    async def publish(self) -> None:
        newest = await self.double.newest_stable()
        number = self.random.choice([newest.number, newest.number, max(0, newest.number - 1)])
        await self.both(lambda store: store.mark_live(number, {"ok": True}))

    async def lease(self) -> None:
        owner = self.random.choice(["j1", "j2", "l1", "l2"])
        act: Callable[[Store], Awaitable[Any]] = self.random.choice(
            [
                lambda store: store.renew_lease(owner, 20),
                lambda store: store.release_leases(owner),
                lambda store: store.recover_leases(),
            ]
        )
        await self.both(act)

    async def prune(self) -> None:
        before = NOON - timedelta(days=1) + timedelta(seconds=len(self.ids) // 2)
        await self.both(lambda store: store.prune_text(before))

    async def begin(self) -> None:
        await self.both(lambda store: store.add_base_version("base", "00"))
        await self.both(lambda store: store.mark_live(0, {}))
        self.rubric = await self.world.rubric_id()
        await self.double.put_rubric("short", "judges.rules:RulesJudge", {"max": 40})
        # One id in both, since judgements name it.
        self.double._rubrics = [await self.world.store.active_rubric()]

    async def step(self) -> None:
        steps = [
            *[self.request] * 8,
            *[self.complete] * 7,
            *[self.judge] * 4,
            *[self.learn] * 3,
            *[self.feedback] * 2,
            *[self.lease] * 2,
            *[self.join] * 5,
            *[self.close] * 2,
            self.declare,
            self.change_rubric,
            self.publish,
            self.orphan,
            self.prune,
        ]
        await self.random.choice(steps)()
        self.world.clock.forward(self.random.randint(0, 4))


async def shown(asked: Awaitable[Episode]) -> Any:
    """An episode with its counts in one order."""
    episode = await asked
    return replace(episode, counts=dict(sorted(episode.counts.items())))


async def without_ids(asked: Awaitable[list[Judgement]]) -> Any:
    """Judgements; what a store passed on by itself has an id of the store's own."""
    return [replace(j, id="" if j.judge == "episode" else j.id) for j in await asked]


@pytest.mark.parametrize(
    ("seed", "steps"),
    [(1, 400), *(pytest.param(n, 1500, marks=pytest.mark.slow) for n in range(2, 6))],
)
async def test_the_ledger_adds_up_after_every_step_of_a_long_walk(
    sql_world: World, seed: int, steps: int
) -> None:
    walk = Walk(sql_world, seed)
    await walk.begin()
    for _ in range(steps):
        await walk.step()
        ledger, double = await sql_world.store.ledger(), await walk.double.ledger()
        assert ledger.problems == double.problems == ()
        assert (ledger.requests, ledger.counts) == (double.requests, double.counts)
        assert ledger.reasons == double.reasons
    seen = {state for state, n in ledger.counts.items() if n}
    assert seen >= {S.TRAINED, S.CRITIC_ONLY, S.DISCARDED, S.EXPIRED, S.FAILED, S.NOT_TRAINABLE}
    assert ledger.counts[S.TRAINED] > 5
    assert await walk.both(lambda store: store.list_updates(limit=1000))
    assert await walk.both(lambda store: store.list_versions())
    for rollout_id in walk.ids:
        await walk.both(lambda store, i=rollout_id: store.get_rollout(i))  # type: ignore[misc]
        await walk.both(lambda store, i=rollout_id: store.list_traces(i))  # type: ignore[misc]
        await walk.both(lambda store, i=rollout_id: without_ids(store.list_judgements(i)))  # type: ignore[misc]
        await walk.both(lambda store, i=rollout_id: store.list_feedback(i))  # type: ignore[misc]
    for episode_id in walk.episodes:
        await walk.both(lambda store, i=episode_id: shown(store.get_episode(i)))  # type: ignore[misc]
    assert walk.merged > 0
    stats = await sql_world.store.reward_stats()
    double_stats = await walk.double.reward_stats()
    assert stats.count == double_stats.count
    assert stats.mean == pytest.approx(double_stats.mean)


# -- retention -----------------------------------------------------------------------------


async def test_retention_takes_the_words_of_what_is_finished_and_old_and_no_count(
    world: World,
) -> None:
    (trained,) = await world.judged(1)
    await world.claim(1)
    trace = TokenTrace(trained, (0.5,), (1.0,), (1.0,), (True,))
    update = world.update([trained], UpdateKind.CRITIC_ONLY)
    await world.store.commit_update("learner", update, None, [trace])
    greedy = await world.served(not_trainable=NotTrainable.GREEDY)
    waiting = await world.served()
    young = await world.served(not_trainable=NotTrainable.GREEDY)
    before = await world.counts()
    bound = (await world.store.get_rollout(young)).request.created_at
    assert await world.store.prune_text(bound) == 2
    assert await world.store.prune_text(bound) == 0
    assert await world.counts() == before
    for rollout_id, reason in (
        (trained, NotTrainable.REDACTED),
        (greedy, NotTrainable.GREEDY),
    ):
        rollout = await world.store.get_rollout(rollout_id)
        completion = rollout.completion
        assert completion is not None
        assert rollout.request.messages == ()
        assert (completion.text, completion.prompt_ids, completion.reply_ids) == ("", (), ())
        assert completion.logprobs == ()
        assert completion.not_trainable is reason
        assert completion.finish_reason == "stop"
    assert await world.store.list_traces(trained) == []
    for rollout_id in (waiting, young):
        kept = await world.store.get_rollout(rollout_id)
        assert kept.completion is not None
        assert kept.completion.text == "Because."
        assert kept.request.messages[0].content == "Why is the sky blue?"
    assert await world.states([trained]) == [S.CRITIC_ONLY]


async def test_retention_goes_on_until_nothing_old_is_left(world: World) -> None:
    ids = [await world.served(not_trainable=NotTrainable.GREEDY) for _ in range(120)]
    assert await world.store.prune_text(NOON) == 120
    last = await world.store.get_rollout(ids[-1])
    assert last.request.messages == ()


# -- notes and alarms ----------------------------------------------------------------------


async def test_a_note_is_replaced_whole(world: World) -> None:
    assert await world.store.get_note("learner") is None
    await world.store.put_note("learner", {"step": 1, "text": "nul \x00"})
    assert await world.store.get_note("learner") == {"step": 1, "text": "nul \x00"}
    await world.store.put_note("learner", {"paused": True})
    await world.store.put_note("other", {})
    assert await world.store.get_note("learner") == {"paused": True}
    assert await world.store.get_note("other") == {}


async def test_a_note_given_out_is_a_copy(world: World) -> None:
    value = {"paused": [1]}
    await world.store.put_note("learner", value)
    value["paused"].append(2)
    assert await world.store.get_note("learner") == {"paused": [1]}


async def test_an_alarm_is_one_row_while_it_lasts(world: World) -> None:
    await world.store.raise_alarm("swap_failed", "first")
    world.clock.forward(5)
    await world.store.raise_alarm("learner_dead", "exit 9")
    await world.store.raise_alarm("swap_failed", "second")
    swap, dead = await world.store.alarms()
    assert (swap.name, swap.message, swap.since, swap.count) == ("swap_failed", "second", NOON, 2)
    assert (dead.name, dead.count) == ("learner_dead", 1)
    await world.store.clear_alarm("swap_failed")
    await world.store.clear_alarm("swap_failed")
    assert await world.store.alarms() == [dead]
    await world.store.raise_alarm("swap_failed", "again")
    assert [(alarm.name, alarm.count) for alarm in await world.store.alarms()] == [
        ("learner_dead", 1),
        ("swap_failed", 1),
    ]
