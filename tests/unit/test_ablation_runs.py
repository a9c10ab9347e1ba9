"""One run: who samples when, what is counted, what a plan's digest stands for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from online_sao.ablation.arms import ARMS, PRETRAIN_BATCHES, TABLES, WARMUP_BATCHES
from online_sao.ablation.runs import Plan, draw, run
from online_sao.ablation.tasks import TASKS, SingleTask
from online_sao.ablation.tiny import TinyPolicy, prepare

SMALL = TinyPolicy(width=32, layers=2, heads=2, steps=60, batch=16)
PLAN = Plan(
    task="single", arm="sao", seed=0, lag=2, updates=4, tiny=SMALL, batch=8, pool=4, held_out=16
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of a task so small that a policy taught for seconds earns a reward now and then."""
    easy = SingleTask(digits=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS, "single", easy)
        yield prepare(SMALL, easy, tmp_path_factory.mktemp("policies"))


def test_rollouts_are_lag_versions_old_as_soon_as_there_are_so_many(folder: Path) -> None:
    told: list[tuple[int, int]] = []
    outcome = run(PLAN, folder, lambda done, total: told.append((done, total)))
    assert [r["lag_mean"] for r in outcome.updates] == [0.0, 1.0, 2.0, 2.0]
    moved = [r["log_ratio_abs_mean"] for r in outcome.updates]
    assert moved[0] < 1e-5 < min(moved[1:])
    assert outcome.critic_only == PRETRAIN_BATCHES + WARMUP_BATCHES
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert 0.0 <= outcome.held_out <= 1.0


def test_without_a_lag_every_ratio_is_one(folder: Path) -> None:
    outcome = run(replace(PLAN, lag=0), folder)
    assert all(r["log_ratio_abs_max"] < 1e-4 for r in outcome.updates)
    assert {r["lag_max"] for r in outcome.updates} == {0.0}


def test_the_same_plan_comes_out_the_same(folder: Path) -> None:
    first, second = (run(PLAN, folder) for _ in range(2))
    assert [r["reward_mean"] for r in first.updates] == [r["reward_mean"] for r in second.updates]
    assert [r["policy_loss"] for r in first.updates] == [r["policy_loss"] for r in second.updates]
    assert (first.start, first.held_out) == (second.start, second.held_out)


@pytest.mark.parametrize("arm", sorted(ARMS))
def test_every_arm_runs_on_the_task_with_turns(
    arm: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    policies = tmp_path_factory.getbasetemp() / "tools"
    policies.mkdir(exist_ok=True)
    tools = prepare(SMALL, TASKS["tools"], policies)
    outcome = run(replace(PLAN, task="tools", arm=arm, updates=2, held_out=4), tools)
    assert len(outcome.updates) == 2
    known = outcome.updates[0]["critic_grad_norm"] is not None
    assert known == ARMS[arm].algorithm(8).has_critic
    if not known:
        assert outcome.critic_only == 0


def test_groups_are_eight_replies_to_one_prompt() -> None:
    drawn = list(islice(draw(TASKS["single"], ARMS["grpo"], PLAN), 24))
    assert [drawn[i : i + 8] for i in (0, 8, 16)] == [[drawn[i]] * 8 for i in (0, 8, 16)]
    single = list(islice(draw(TASKS["single"], ARMS["sao"], PLAN), 24))
    assert len({prompt.text for prompt in single}) <= PLAN.pool
    assert single[:8] != [single[0]] * 8


def test_a_digest_changes_with_all_that_decides_the_outcome() -> None:
    others = [
        replace(PLAN, seed=1),
        replace(PLAN, lag=3),
        replace(PLAN, arm="vapo"),
        replace(PLAN, policy_lr=1e-4),
        replace(PLAN, tiny=replace(SMALL, steps=61)),
        PLAN,
    ]
    assert len({plan.digest for plan in others}) == len(others)
    assert replace(PLAN).digest == PLAN.digest


def test_every_table_s_arms_exist_and_compare_with_sao() -> None:
    for arms in TABLES.values():
        assert arms[0] == "sao"
        assert set(arms) <= set(ARMS)
    assert set(ARMS) == {arm for arms in TABLES.values() for arm in arms}
