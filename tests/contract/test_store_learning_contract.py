"""Claims, updates and policy versions on every kind of store."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from datetime import timedelta

import pytest
from store_world import NOON, World, new_version, same_bits

from online_sao.errors import LeaseLost, UnknownRecord, VersionConflict
from online_sao.types import (
    LedgerState,
    NewVersion,
    TokenTrace,
    Update,
    UpdateKind,
    VersionSpan,
    VersionState,
)

S = LedgerState
V = VersionState


# -- claims --------------------------------------------------------------------------------


async def test_ten_judged_and_a_batch_of_eight_leaves_two_waiting(world: World) -> None:
    ids = await world.judged(10)
    trajectories = await world.claim(8)
    assert [t.rollout_ids for t in trajectories] == [(rollout_id,) for rollout_id in ids[:8]]
    assert await world.counts() == {S.LEASED: 8, S.JUDGED: 2}
    assert await world.claim(8, owner="other") == []
    assert await world.counts() == {S.LEASED: 8, S.JUDGED: 2}
    assert len(await world.claim(2, owner="other")) == 2


async def test_a_trajectory_is_the_stored_prompt_and_reply_with_its_reward(world: World) -> None:
    (good,) = await world.judged(1, 1.0, finish_reason="length")
    (bad,) = await world.judged(1, 0.0)
    first, second = await world.claim(2)
    assert first.token_ids == (1, 2, 3, 4, 5)
    assert first.action_mask == (False, False, True, True, True)
    assert same_bits(first.logprobs, (math.nan, math.nan, -0.1, -0.2, -0.3))
    assert (first.reward, first.temperature, first.lag, first.cut) == (1.0, 1.0, 0, True)
    assert (second.reward, second.cut) == (0.0, False)
    assert (first.rollout_ids, second.rollout_ids) == ((good,), (bad,))


async def test_what_may_not_be_trained_on_is_discarded_on_the_way(world: World) -> None:
    await world.store.add_base_version("base", "00")
    fine = await world.judged(1)
    cut = await world.judged(1, finish_reason="length")
    long = await world.judged(1, prompt_ids=tuple(range(98)))  # 98 + 3 tokens
    fits = await world.judged(1, prompt_ids=tuple(range(97)))
    batch = await world.claim(2, max_train_tokens=100, skip_cut=True)
    assert [t.rollout_ids for t in batch] == [(fine[0],), (fits[0],)]
    assert [(await world.store.get_rollout(r)).reason for r in cut + long] == ["cut", "too_long"]
    assert await world.counts() == {S.LEASED: 2, S.DISCARDED: 2}
    reasons = (await world.store.ledger()).reasons
    assert reasons == {S.DISCARDED: {"cut": 1, "too_long": 1}}


async def test_discards_stand_even_when_too_few_remain(world: World) -> None:
    await world.judged(3, finish_reason="length")
    kept = await world.judged(1)
    assert await world.claim(2, skip_cut=True) == []
    assert await world.counts() == {S.DISCARDED: 3, S.JUDGED: 1}
    assert await world.states(kept) == [S.JUDGED]


async def test_a_batch_of_nothing_but_discards_and_an_empty_store_give_no_batch(
    world: World,
) -> None:
    assert await world.claim(1) == []
    await world.judged(70, prompt_ids=tuple(range(1000)))
    assert await world.claim(1) == []
    assert await world.counts() == {S.DISCARDED: 70}
    noop = await world.store.commit_update(
        "learner", replace(world.update([], UpdateKind.SKIPPED), note="all discarded"), None
    )
    assert noop.version is None
    assert (await world.store.list_updates())[0].note == "all discarded"
    assert await world.store.count_updates() == 1


async def test_a_large_batch_is_claimed_oldest_first(world: World) -> None:
    ids = await world.judged(70)
    assert [t.rollout_ids[0] for t in await world.claim(66)] == ids[:66]
    assert await world.counts() == {S.LEASED: 66, S.JUDGED: 4}


async def test_claims_at_the_same_time_are_distinct(world: World) -> None:
    await world.judged(40)
    batches = await asyncio.gather(*(world.claim(5, owner=f"learner-{n}") for n in range(8)))
    claimed = [t.rollout_ids[0] for batch in batches for t in batch]
    assert len(claimed) == len(set(claimed))
    assert len(claimed) % 5 == 0
    assert (await world.counts()).get(S.LEASED, 0) == len(claimed)
    # Whoever found the rest locked by others got none; nothing hinders it from coming again.
    while await world.claim(5, owner="again"):
        pass
    assert await world.counts() == {S.LEASED: 40}


async def test_claims_of_the_unjudged_at_the_same_time_are_distinct(world: World) -> None:
    for _ in range(30):
        await world.served()
    claims = await asyncio.gather(
        *(world.store.claim_unjudged(f"judge-{n}", limit=4, lease_s=60) for n in range(8))
    )
    ids = [rollout.id for claimed in claims for rollout, _ in claimed]
    assert len(ids) == len(set(ids))
    assert (await world.counts())[S.IN_JUDGEMENT] == len(ids)


# -- lag -----------------------------------------------------------------------------------


async def test_lag_counts_published_versions_and_the_bound_is_inclusive(world: World) -> None:
    await world.store.add_base_version("base", "00")
    old = await world.judged(2, version=0)
    await world.claim(2, owner="keeper")  # out of the publishers' way
    for parent in range(3):
        assert await world.publish(parent) == parent + 1
    await world.store.release_leases("keeper")
    new = await world.judged(1, version=3)
    mixed = await world.judged(1, version_spans=(VersionSpan(3, 0, 1), VersionSpan(1, 1, 3)))
    assert [t.lag for t in await world.claim(4, max_lag=3)] == [3, 3, 0, 2]
    await world.store.release_leases("learner")
    assert [t.lag for t in await world.claim(2, max_lag=2)] == [0, 2]
    assert await world.states(old + new + mixed) == [S.DISCARDED] * 2 + [S.LEASED] * 2
    assert (await world.store.ledger()).reasons[S.DISCARDED] == {"stale": 2}


async def test_an_unpublished_version_counts_for_the_lag_too(world: World) -> None:
    await world.store.add_base_version("base", "00")
    await world.publish(0, live=False)
    await world.judged(1, version=0)
    assert [t.lag for t in await world.claim(1)] == [1]


async def test_a_branch_off_the_lineage_is_stale_whatever_the_bound(world: World) -> None:
    await world.store.add_base_version("base", "00")
    await world.publish(0)  # 1
    await world.publish(1)  # 2, from which nothing descends
    await world.publish(1)  # 3
    off = await world.judged(1, version=2)
    mixed = await world.judged(1, version_spans=(VersionSpan(2, 0, 1), VersionSpan(1, 1, 3)))
    on = await world.judged(1, version=1)
    unknown = await world.judged(1, version=99)
    assert [t.lag for t in await world.claim(1, max_lag=1000)] == [1]
    assert await world.claim(1, max_lag=1000) == []
    assert await world.states(off + mixed + on + unknown) == [
        S.DISCARDED,
        S.DISCARDED,
        S.LEASED,
        S.DISCARDED,
    ]


async def test_a_restart_keeps_the_staleness_bound(world: World) -> None:
    await world.store.add_base_version("base", "00")
    for parent in range(12):
        await world.publish(parent)
    await world.judged(1, version=3)  # lag 9
    fresh = await world.judged(1, version=4)  # lag 8
    store = world.reopen()
    await store.open()
    (trajectory,) = await store.claim_trajectories(
        "learner", size=1, lease_s=60, max_lag=8, max_train_tokens=100, skip_cut=False
    )
    assert (trajectory.rollout_ids, trajectory.lag) == ((fresh[0],), 8)
    assert (await store.ledger()).reasons[S.DISCARDED] == {"stale": 1}
    assert (await store.newest_stable()).number == 12


# -- leases --------------------------------------------------------------------------------


async def test_a_dead_learners_rollouts_go_to_the_next_and_it_cannot_commit(world: World) -> None:
    await world.store.add_base_version("base", "00")
    ids = await world.judged(2)
    await world.claim(2, owner="dead")
    world.clock.forward(60)
    update = world.update(ids)
    with pytest.raises(LeaseLost):
        await world.store.commit_update("dead", update, new_version(0))
    assert len(await world.claim(2, owner="next")) == 2
    with pytest.raises(LeaseLost):
        await world.store.commit_update("dead", update, new_version(0))
    assert await world.store.count_updates() == 0
    assert len(await world.store.list_versions()) == 1
    committed = await world.store.commit_update("next", update, new_version(0))
    assert committed.version == 1
    assert await world.counts() == {S.TRAINED: 2}


async def test_a_renewed_lease_holds_and_a_taken_one_cannot_be_renewed(world: World) -> None:
    ids = await world.judged(2)
    await world.claim(2, owner="slow")
    for _ in range(3):
        world.clock.forward(50)
        await world.store.renew_lease("slow", 60)
        assert await world.store.recover_leases() == 0
    world.clock.forward(70)
    assert await world.store.recover_leases() == 2
    assert await world.states(ids) == [S.JUDGED] * 2
    for _ in range(2):
        with pytest.raises(LeaseLost):
            await world.store.renew_lease("slow", 60)
    assert await world.store.release_leases("slow") == 0
    await world.store.renew_lease("slow", 60)
    await world.store.renew_lease("never held anything", 60)


async def test_whoever_claims_anew_has_heard_of_its_loss(world: World) -> None:
    await world.judged(1)
    await world.served()
    for claim in (
        world.claim(1, owner="slow"),
        world.store.claim_unjudged("slow", limit=1, lease_s=60),
    ):
        assert len(await claim) == 1
        world.clock.forward(61)
        await world.store.recover_leases()
        with pytest.raises(LeaseLost):
            await world.store.renew_lease("slow", 60)
    await world.claim(1, owner="slow")
    await world.store.renew_lease("slow", 60)


async def test_an_overdue_lease_that_nobody_took_is_still_its_owners(world: World) -> None:
    await world.judged(1)
    (trajectory,) = await world.claim(1)
    world.clock.forward(1000)
    await world.store.renew_lease("learner", 60)
    update = world.update(trajectory.rollout_ids, UpdateKind.CRITIC_ONLY)
    await world.store.commit_update("learner", update, None)
    assert await world.counts() == {S.CRITIC_ONLY: 1}


async def test_release_gives_back_all_that_an_owner_holds_and_nothing_else(world: World) -> None:
    await world.judged(3)
    waiting = await world.served()
    await world.claim(2)
    await world.claim(1, owner="other")
    await world.store.claim_unjudged("learner", limit=1, lease_s=60)
    assert await world.store.release_leases("learner") == 3
    assert await world.store.release_leases("learner") == 0
    assert await world.counts() == {S.JUDGED: 2, S.LEASED: 1, S.AWAITING_JUDGEMENT: 1}
    assert await world.states([waiting]) == [S.AWAITING_JUDGEMENT]


async def test_recovered_leases_go_back_to_where_they_were(world: World) -> None:
    judged = await world.judged(1)
    await world.claim(1)
    unjudged = [await world.served(), await world.served()]
    await world.store.claim_unjudged("j", limit=1, lease_s=10)
    await world.store.claim_unjudged("j2", limit=1, lease_s=100)
    world.clock.forward(60)
    assert await world.store.recover_leases() == 2
    assert await world.states(judged + unjudged) == [
        S.JUDGED,
        S.AWAITING_JUDGEMENT,
        S.IN_JUDGEMENT,
    ]
    await world.counts()


# -- updates -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "state", "reason"),
    [
        (UpdateKind.POLICY, S.TRAINED, None),
        (UpdateKind.CRITIC_ONLY, S.CRITIC_ONLY, "critic_only"),
        (UpdateKind.SKIPPED, S.CRITIC_ONLY, "skipped"),
        (UpdateKind.NOT_FINITE, S.DISCARDED, "not_finite"),
    ],
)
async def test_an_updates_kind_decides_where_its_rollouts_go(
    world: World, kind: UpdateKind, state: LedgerState, reason: str | None
) -> None:
    ids = await world.judged(2)
    await world.claim(2)
    update = Update(
        "upd_1",
        NOON,
        kind,
        (ids[1], ids[0]),
        {"loss": 0.5, "ev": None, "n": math.inf},
        note="n\x00",
    )
    assert await world.store.commit_update("learner", update, None) == update
    assert await world.store.list_updates() == [update]
    assert await world.states(ids) == [state] * 2
    assert (await world.store.get_rollout(ids[0])).reason == reason
    assert await world.counts() == {state: 2}
    assert await world.claim(1) == []


async def test_a_version_is_numbered_by_the_store_and_descends_from_its_parent(
    world: World,
) -> None:
    base = await world.store.add_base_version("base", "00")
    (rollout_id,) = await world.judged(1)
    await world.claim(1)
    update = replace(world.update([rollout_id]), version=77)
    committed = await world.store.commit_update(
        "learner", update, NewVersion("versions/x", "ab" * 32, 0)
    )
    assert committed == replace(update, version=1)
    version = await world.store.get_version(1)
    assert (version.number, version.parent, version.path) == (1, 0, "versions/x")
    assert (version.sha256, version.state, version.gate) == ("ab" * 32, V.STABLE, "passed")
    assert version.created_at == NOON
    assert await world.store.list_versions() == [version, base]
    assert await world.store.newest_stable() == version


async def test_a_refused_commit_changes_nothing(world: World) -> None:
    await world.store.add_base_version("base", "00")
    ids = await world.judged(3)
    await world.claim(2)
    before = await world.counts()
    for owner, update, version, error in (
        ("other", world.update(ids[:2]), new_version(0), LeaseLost),
        ("learner", world.update(ids), new_version(0), LeaseLost),
        ("learner", world.update([*ids[:2], "chatcmpl-none"]), new_version(0), LeaseLost),
        ("learner", world.update(ids[:2]), new_version(5), UnknownRecord),
        ("learner", world.update([]), new_version(0), ValueError),
        ("learner", world.update([ids[0], ids[0]]), new_version(0), ValueError),
        ("learner", world.update(ids[:2], UpdateKind.CRITIC_ONLY), new_version(0), ValueError),
    ):
        with pytest.raises(error):
            await world.store.commit_update(owner, update, version)
    assert await world.counts() == before
    assert await world.store.count_updates() == 0
    assert [v.number for v in await world.store.list_versions()] == [0]


async def test_a_commit_repeated_is_refused_and_trains_nothing_twice(world: World) -> None:
    await world.store.add_base_version("base", "00")
    ids = await world.judged(2)
    await world.claim(2)
    update = world.update(ids)
    results = await asyncio.gather(
        *(world.store.commit_update("learner", update, new_version(0)) for _ in range(4)),
        return_exceptions=True,
    )
    committed = [result for result in results if isinstance(result, Update)]
    assert [update.version for update in committed] == [1]
    assert all(isinstance(r, LeaseLost) for r in results if r not in committed)
    assert await world.counts() == {S.TRAINED: 2}
    assert await world.store.count_updates() == 1


async def test_two_learners_that_commit_at_once_get_different_numbers(world: World) -> None:
    await world.store.add_base_version("base", "00")
    ids = await world.judged(6)
    for n in range(6):
        await world.claim(1, owner=f"learner-{n}")
    committed = await asyncio.gather(
        *(
            world.store.commit_update(f"learner-{n}", world.update([ids[n]]), new_version(0))
            for n in range(6)
        )
    )
    assert sorted(update.version or 0 for update in committed) == [1, 2, 3, 4, 5, 6]
    assert await world.counts() == {S.TRAINED: 6}


async def test_updates_are_listed_newest_first_with_their_rollouts_in_order(world: World) -> None:
    updates = []
    for _ in range(3):
        ids = await world.judged(2)
        await world.claim(2)
        update = world.update(ids[::-1], UpdateKind.CRITIC_ONLY)
        updates.append(await world.store.commit_update("learner", update, None))
    assert await world.store.list_updates() == updates[::-1]
    assert await world.store.list_updates(limit=2) == updates[:0:-1]
    assert await world.store.count_updates() == 3


async def test_what_an_update_saw_at_each_token_is_kept_in_float32(world: World) -> None:
    (rollout_id,) = await world.judged(1)
    await world.claim(1)
    third = 0.3333333432674408  # the float32 nearest to 1/3
    trace = TokenTrace(rollout_id, (0.5, third), (-0.5, 1 / 3), (1.0, math.inf), (True, False))
    update = world.update([rollout_id])
    stranger = replace(trace, rollout_id="chatcmpl-other")
    with pytest.raises(ValueError, match="trace"):
        await world.store.commit_update("learner", update, None, [stranger])
    await world.store.commit_update("learner", update, None, [trace])
    assert await world.store.list_traces(rollout_id) == [
        TokenTrace(rollout_id, (0.5, third), (-0.5, third), (1.0, math.inf), (True, False))
    ]


# -- versions ------------------------------------------------------------------------------


async def test_the_base_version_is_added_once(world: World) -> None:
    base = await world.store.add_base_version("base", "00")
    assert (base.number, base.parent, base.state) == (0, None, V.STABLE)
    both = await asyncio.gather(*(world.store.add_base_version("other", "11") for _ in range(3)))
    assert both == [base] * 3
    assert await world.store.list_versions() == [base]
    assert await world.store.unpublished() == 1


async def test_publishing_retires_the_one_before_and_passes_over_those_between(
    world: World,
) -> None:
    await world.store.add_base_version("base", "00")
    await world.store.mark_live(0, {"sha256": "00"})
    for parent in range(3):
        await world.publish(parent, live=False)
    assert await world.store.unpublished() == 3
    await world.store.mark_live(2, {"sha256": "ab"})
    assert await version_states(world) == {0: V.RETIRED, 1: V.SUPERSEDED, 2: V.LIVE, 3: V.STABLE}
    assert await world.store.unpublished() == 1
    live = await world.store.live_version()
    assert live is not None
    assert live.number == 2
    assert (await world.store.newest_stable()).number == 3
    await world.store.mark_live(2, {"sha256": "ab"})
    assert (await version_states(world))[2] is V.LIVE
    with pytest.raises(UnknownRecord):
        await world.store.mark_live(4, {})
    await world.counts()


async def test_a_rollback_makes_an_older_version_live_and_keeps_the_newer_ones(
    world: World,
) -> None:
    await world.store.add_base_version("base", "00")
    for parent in range(2):
        await world.publish(parent)
    await world.publish(2, live=False)
    await world.store.mark_live(1, {"sha256": "ab"})
    assert await version_states(world) == {0: V.SUPERSEDED, 1: V.LIVE, 2: V.RETIRED, 3: V.STABLE}
    assert await world.store.unpublished() == 1
    assert (await world.store.newest_stable()).number == 3


async def version_states(world: World) -> dict[int, VersionState]:
    return {v.number: v.state for v in await world.store.list_versions()}


async def test_a_withdrawn_version_is_neither_newest_nor_served_again(sql_world: World) -> None:
    world = sql_world
    await world.store.add_base_version("base", "00")
    await world.publish(0)
    await world.publish(1)
    await world.judged(1, version=2)
    world.execute("UPDATE policy_versions SET state = 'withdrawn' WHERE number = 2")
    assert (await world.store.newest_stable()).number == 1
    with pytest.raises(VersionConflict):
        await world.store.mark_live(2, {})
    assert await world.claim(1, max_lag=1000) == []
    assert (await world.store.ledger()).reasons[S.DISCARDED] == {"stale": 1}
    assert await world.publish(1) == 3


async def test_leases_are_as_long_as_asked(world: World) -> None:
    await world.judged(2)
    await world.claim(1, owner="short", lease_s=1)
    await world.claim(1, owner="long", lease_s=timedelta(hours=1).total_seconds())
    world.clock.forward(3599)
    assert await world.store.recover_leases() == 1
    assert await world.counts() == {S.JUDGED: 1, S.LEASED: 1}
