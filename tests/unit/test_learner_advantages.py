"""Each variant's advantages by hand, and what its baseline remembers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import make_folder, sampled
from torch import Tensor

from online_sao.config import CRITIC_VARIANTS, VARIANTS, AlgorithmSettings, LearnerSettings
from online_sao.errors import LearnerError, ModelError, UpdateNotFinite
from online_sao.learner.advantages import (
    EVERYWHERE,
    Estimate,
    Estimator,
    GroupAdvantages,
    RunningMeanAdvantages,
    SingleStreamAdvantages,
    prompt_key,
)
from online_sao.learner.batch import TrajectoryBatch
from online_sao.learner.export import SavedState
from online_sao.learner.trainer import SaoTrainer
from online_sao.types import TrainingResult, Trajectory, UpdateKind

NAN = math.nan
WITHOUT_CRITIC = sorted(set(VARIANTS) - set(CRITIC_VARIANTS))


def replied(
    reward: float, prompt: tuple[int, ...] = (3, 4), reply: tuple[int, ...] = (5, 6)
) -> Trajectory:
    p, n = len(prompt), len(reply)
    return Trajectory(
        (f"rollout-{reward}",), prompt + reply, (False,) * p + (True,) * n,
        (NAN,) * p + (-4.0,) * n, reward, 1.0,
    )  # fmt: skip


def episode(reward: float, observation: int = 3) -> Trajectory:
    """Two steps of two tokens with an observation between them."""
    ids = (3, 4, 5, 6, *(7 + i for i in range(observation)), 8, 9)
    mask = (False, False, True, True, *(False,) * observation, True, True)
    logprobs = tuple(-4.0 if action else NAN for action in mask)
    return Trajectory(("episode",), ids, mask, logprobs, reward, 1.0)


def estimated(estimator: Estimator, trajectories: Sequence[Trajectory]) -> Estimate:
    return estimator.estimate(trajectories, TrajectoryBatch.from_trajectories(trajectories))


def each(x: Tensor, trajectories: Sequence[Trajectory]) -> list[float]:
    """The one number on all action tokens of each trajectory."""
    found = []
    for row, trajectory in zip(x, trajectories, strict=True):
        mask = torch.tensor(trajectory.action_mask)
        on, off = row[: len(mask)][mask], row[: len(mask)][~mask]
        assert bool((on == on[0]).all())
        assert bool((off == 0).all())
        found.append(float(on[0]))
    return found


def made(base: Path, **algorithm: Any) -> SaoTrainer:
    learner = LearnerSettings(
        policy_lr=1e-2, critic_lr=1e-2, policy_layers=2, critic_layers=2, dtype="float32"
    )
    trainer = SaoTrainer(AlgorithmSettings(**{"kl_coef": 0.0, **algorithm}), learner, base)
    trainer.restore(base, None)
    return trainer


def updated(trainer: SaoTrainer, batch: Sequence[Trajectory]) -> TrainingResult:
    return trainer.update(batch, critic_only=False)


def state_of(trainer: SaoTrainer, folder: Path) -> SavedState:
    trainer.save_state(folder)
    return SavedState.read(folder)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "base")


def batch_for(variant: str, base: Path) -> list[Trajectory]:
    """Replies of the tiny Llama, arranged as the variant needs them (groups of two)."""
    if not variant.startswith("grpo"):
        return sampled(base, 6)
    first, second = (t for t in sampled(base, 2, seed=3))
    return [replace(t, reward=r) for t in (first, second) for r in (0.0, 1.0)]


# -- running mean --------------------------------------------------------------------------------


def test_running_mean_by_hand_over_two_batches() -> None:
    estimator = RunningMeanAdvantages(
        AlgorithmSettings(variant="running_mean", running_mean_window=2)
    )
    batch = [replied(1.0), replied(0.0), replied(1.0)]
    found = estimated(estimator, batch)
    # Baselines: nothing seen 0; then 1; then (1 + 0)/2.
    assert each(found.values, batch) == [0.0, 1.0, 0.5]
    assert each(found.advantages, batch) == [1.0, -1.0, 0.5]
    assert each(found.returns, batch) == [1.0, 0.0, 1.0]
    (one,) = [replied(1.0)]
    assert each(estimated(estimator, [one]).values, [one]) == [0.5]  # of the window's (0, 1)
    assert estimator.memory() == {"seen": {EVERYWHERE: [1.0, 1.0]}}


def test_running_mean_per_prompt_keeps_prompts_apart() -> None:
    estimator = RunningMeanAdvantages(
        AlgorithmSettings(variant="running_mean", running_mean_window=8, running_mean_per="prompt")
    )
    a, b = (3, 4), (3, 5)
    batch = [replied(1.0, a), replied(0.0, b), replied(0.0, a), replied(1.0, b)]
    assert each(estimated(estimator, batch).values, batch) == [0.0, 0.0, 1.0, 0.0]


# -- groups --------------------------------------------------------------------------------------


def test_group_advantages_of_one_success_in_four_by_hand() -> None:
    estimator = GroupAdvantages(AlgorithmSettings(variant="grpo", group_size=4))
    batch = [replied(r) for r in (1.0, 0.0, 0.0, 0.0)]
    found = estimated(estimator, batch)
    std = math.sqrt(3) / 4  # mean 1/4: (9 + 3 x 1)/16/4 = 3/16
    want = [0.75 / (std + 1e-6)] + [-0.25 / (std + 1e-6)] * 3
    assert each(found.advantages, batch) == pytest.approx(want, rel=1e-6)
    assert each(found.values, batch) == [0.25] * 4


def test_groups_are_found_however_they_are_interleaved() -> None:
    estimator = GroupAdvantages(AlgorithmSettings(variant="grpo", group_size=2))
    a, b = (3, 4), (3, 5, 6)
    batch = [replied(1.0, a), replied(1.0, b), replied(0.0, a), replied(1.0, b)]
    found = each(estimated(estimator, batch).advantages, batch)
    assert found == pytest.approx([1.0, 0.0, -1.0, 0.0], abs=1e-5)


def test_a_group_that_is_not_whole_has_to_wait() -> None:
    estimator = GroupAdvantages(AlgorithmSettings(variant="grpo", group_size=4))
    with pytest.raises(LearnerError, match="4 replies to one prompt, and this batch has 3"):
        estimated(estimator, [replied(0.0)] * 3)


# -- single stream -------------------------------------------------------------------------------


def test_single_stream_by_hand_with_a_drift_of_one_half_life() -> None:
    asked: list[Sequence[Trajectory]] = []

    def drift(trajectories: Sequence[Trajectory]) -> list[float]:
        asked.append(trajectories)
        return [0.1] * len(trajectories)

    estimator = SingleStreamAdvantages(AlgorithmSettings(variant="spo", spo_half_life=0.1), drift)
    first = [replied(1.0), replied(1.0), replied(0.0)]
    found = estimated(estimator, first)
    # No counts: 1/2; then 1/1; then 2/2. r - value: 1/2, 0, -1; mean -1/6, variance 7/18.
    assert each(found.values, first) == [0.5, 1.0, 1.0]
    std = math.sqrt(7 / 18) + 1e-6
    want = [(2 / 3) / std, (1 / 6) / std, (-5 / 6) / std]
    assert each(found.advantages, first) == pytest.approx(want, rel=1e-6)
    assert asked == []
    # Counts (2, 1) halve to (1, 0.5), after a visit (1, 1.5): the value before it is 2/3.
    second = [replied(0.0)]
    assert each(estimated(estimator, second).values, second) == pytest.approx([2 / 3])
    assert asked == [[first[-1]]]
    (visit,) = estimator.memory()["visits"].values()
    assert visit["counts"] == pytest.approx([1.0, 1.5])


def test_single_stream_refuses_a_reward_that_is_no_success_rate() -> None:
    estimator = SingleStreamAdvantages(AlgorithmSettings(variant="spo"), lambda ts: [0.0] * len(ts))
    with pytest.raises(LearnerError, match=r"rollout-2.0: .*\[0, 1\]"):
        estimated(estimator, [replied(2.0)])


def test_drift_is_0_before_any_update_and_counts_the_policy_s_moves(base: Path) -> None:
    trainer, batch = made(base, variant="spo"), sampled(base, 4)
    assert trainer._drift(batch) == pytest.approx([0.0] * 4, abs=1e-6)
    for _ in range(3):
        updated(trainer, batch)
    moved = trainer._drift(batch)
    traces = updated(trainer, batch).traces
    want = [sum(r - 1 - math.log(r) for r in t.ratios) / len(t.ratios) for t in traces]
    assert moved == pytest.approx(want, rel=1e-4)
    assert max(moved) > 1e-3


# -- all of them through the trainer -------------------------------------------------------------


@pytest.mark.parametrize("variant", WITHOUT_CRITIC)
def test_without_a_critic_there_is_none_to_measure_or_to_train_alone(
    base: Path, variant: str
) -> None:
    trainer = made(base, variant=variant, group_size=2)
    batch = batch_for(variant, base)
    result = updated(trainer, batch)
    assert result.kind is UpdateKind.POLICY
    for name in ("explained_variance", "value_loss", "critic_grad_norm"):
        assert result.metrics[name] is None
    for trajectory, trace in zip(batch, result.traces, strict=True):
        assert len(set(trace.advantages)) == 1
        if variant == "running_mean":
            assert trace.advantages[0] == pytest.approx(trajectory.reward - trace.values[0])
    with pytest.raises(LearnerError, match="no critic"):
        trainer.update(batch, critic_only=True)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_resumed_is_as_if_it_had_never_stopped(base: Path, tmp_path: Path, variant: str) -> None:
    trainer = made(base, variant=variant, group_size=2)
    first, second = batch_for(variant, base), batch_for(variant, base)[::-1]
    updated(trainer, first)
    trainer.export_policy(tmp_path / "policy")
    trainer.save_state(tmp_path / "state")
    other = made(base, variant=variant, group_size=2)
    assert other.restore(tmp_path / "policy", tmp_path / "state") == ""
    assert updated(other, second).traces == updated(trainer, second).traces
    a, b = state_of(trainer, tmp_path / "a"), state_of(other, tmp_path / "b")
    assert a.memory == b.memory
    assert all(torch.equal(a.policy[name], b.policy[name]) for name in a.policy)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_what_a_failed_update_saw_is_forgotten(base: Path, tmp_path: Path, variant: str) -> None:
    trainer = made(base, variant=variant, group_size=2)
    batch = batch_for(variant, base)
    updated(trainer, batch)
    before = state_of(trainer, tmp_path / "before")
    with pytest.raises(UpdateNotFinite):
        updated(trainer, [*batch[:-1], replace(batch[-1], temperature=NAN)])
    after = state_of(trainer, tmp_path / "after")
    assert after.memory == before.memory
    assert all(torch.equal(after.critic[name], before.critic[name]) for name in before.critic)
    assert all(torch.equal(after.policy[name], before.policy[name]) for name in before.policy)


def test_another_variant_s_state_is_said_to_be_of_no_use(base: Path, tmp_path: Path) -> None:
    trainer = made(base, variant="sao")
    updated(trainer, sampled(base, 4))
    trainer.export_policy(tmp_path / "policy")
    trainer.save_state(tmp_path / "state")
    other = made(base, variant="running_mean")
    note = other.restore(tmp_path / "policy", tmp_path / "state")
    assert "the baseline starts afresh: the saved state has no `seen`" in note
    other.save_state(tmp_path / "running")
    back = made(base, variant="sao")
    assert "the critic starts afresh" in back.restore(tmp_path / "policy", tmp_path / "running")


def test_token_ids_of_another_policy_are_refused_by_name_and_nothing_changes(
    base: Path, tmp_path: Path
) -> None:
    trainer, batch = made(base), sampled(base, 3)
    foreign = replace(replied(1.0, reply=(5, 64)), rollout_ids=("foreign",))
    before = state_of(trainer, tmp_path / "before")
    with pytest.raises(LearnerError, match=r"foreign .*vocabulary of 64"):
        updated(trainer, [*batch, foreign])
    after = state_of(trainer, tmp_path / "after")
    assert all(torch.equal(after.critic[name], before.critic[name]) for name in before.critic)


# -- SAO's switches ------------------------------------------------------------------------------


def fitted(trainer: SaoTrainer, batch: Sequence[Trajectory], times: int = 3) -> TrainingResult:
    """An update after the critic has learned a little, so that V is no constant."""
    for _ in range(times):
        trainer.update(batch, critic_only=True)
    return updated(trainer, batch)


def moved(before: SavedState, after: SavedState) -> set[str]:
    return {
        name.removeprefix("master.")
        for name in before.critic
        if name.startswith("master.") and not torch.equal(before.critic[name], after.critic[name])
    }


def test_vapo_trains_all_of_the_critic_once_and_sao_not_its_attention(
    base: Path, tmp_path: Path
) -> None:
    found = {}
    for variant in ("sao", "vapo"):
        trainer = made(base, variant=variant)
        before = state_of(trainer, tmp_path / f"{variant}-before")
        for _ in range(2):  # the head starts at 0: the first update has no gradient below it
            updated(trainer, sampled(base, 6))
        after = state_of(trainer, tmp_path / f"{variant}-after")
        found[variant] = moved(before, after)
        assert after.critic_steps == {"sao": 4, "vapo": 2}[variant]
    extra = found["vapo"] - found["sao"]
    assert any("self_attn" in name for name in extra)
    assert any("embed_tokens" in name for name in extra)
    assert not any("self_attn" in name or "embed_tokens" in name for name in found["sao"])


def test_attention_alone_can_be_let_go(base: Path, tmp_path: Path) -> None:
    trainer = made(base, critic_attention="trained")
    before = state_of(trainer, tmp_path / "before")
    for _ in range(2):
        updated(trainer, sampled(base, 6))
    changed = moved(before, state_of(trainer, tmp_path / "after"))
    assert any("self_attn" in name for name in changed)
    assert not any("embed_tokens" in name for name in changed)


def test_included_observations_change_two_steps_and_not_one(base: Path) -> None:
    one = [replace(t, reward=float(i % 2)) for i, t in enumerate(sampled(base, 4))]
    two = [episode(1.0), episode(0.0, 5)]
    for batch, same in ((one, True), (two, False)):
        skip = fitted(made(base, gae_observations="skip"), batch)
        include = fitted(made(base, gae_observations="include"), batch)
        pairs = zip(skip.traces, include.traces, strict=True)
        assert all((a.advantages == b.advantages) is same for a, b in pairs)
        assert [len(t.values) for t in include.traces] == [sum(t.action_mask) for t in batch]


def test_included_observations_lengthen_the_chain_by_hand(base: Path) -> None:
    """V = 0 before the first update: A = lambda^k, l of 4 actions, or of 7 links."""
    (skip,) = updated(made(base, gae_observations="skip"), [episode(1.0)]).traces
    (include,) = updated(made(base, gae_observations="include"), [episode(1.0)]).traces
    near, far = 1 - 1 / (1.5 * 4), 1 - 1 / (1.5 * 7)
    assert skip.advantages == pytest.approx([near**3, near**2, near, 1.0])
    assert include.advantages == pytest.approx([far**6, far**5, far, 1.0])


@pytest.mark.parametrize("level", ["step_average", "step_last_token"])
def test_a_step_has_one_advantage_by_hand(base: Path, level: str) -> None:
    """V = 0 before the first update; two steps: lambda = 1 - 1/(1.5 x 2) = 2/3."""
    trainer, batch = made(base, action_level=level), [episode(1.0)]
    (trace,) = updated(trainer, batch).traces
    assert trace.advantages == pytest.approx([2 / 3, 2 / 3, 1.0, 1.0])
    (later,) = fitted(trainer, batch).traces
    assert later.advantages[0] == later.advantages[1] != later.advantages[2]
    values = later.values
    want = (values[2] + values[3]) / 2 if level == "step_average" else values[3]
    assert later.advantages[3] == pytest.approx(1.0 - want, abs=1e-6)


def test_last_token_s_value_loss_sees_the_last_token_of_each_step_alone(base: Path) -> None:
    """After a few steps its loss is that of two tokens; the average's is that of all four."""
    for level, where in (("step_last_token", (1, 3)), ("step_average", (0, 1, 2, 3))):
        result = fitted(made(base, action_level=level), [episode(1.0)])
        (trace,) = result.traces
        want = sum((1.0 - trace.values[i]) ** 2 for i in where) / len(where)
        assert result.metrics["value_loss"] == pytest.approx(want, rel=1e-4)


def moved_away(base: Path, **algorithm: Any) -> TrainingResult:
    """An update on replies whose recorded log-probabilities lie far off on both sides."""
    off = (0.0, 3.0, -3.0, 0.0)
    batch = []
    for trajectory in sampled(base, 4):
        n, start = sum(trajectory.action_mask), trajectory.action_mask.index(True)
        logprobs = [
            p if i < start else min(0.0, p + off[(i - start) % 4])
            for i, p in enumerate(trajectory.logprobs)
        ]
        assert n >= 3
        batch.append(replace(trajectory, logprobs=tuple(logprobs), reward=1.0))
    return updated(made(base, **algorithm), batch)


def test_each_loss_says_which_tokens_it_left_without_a_pull(base: Path) -> None:
    dis = moved_away(base)
    clip = moved_away(base, policy_loss="ppo_clip")
    free = moved_away(base, policy_loss="unmasked")
    shares = {"clip_ratio", "clip_ratio_low", "clip_ratio_high", "outside_band"}
    d, c, f = ({k: r.metrics[k] for k in shares} for r in (dis, clip, free))
    assert d["outside_band"] == c["outside_band"] == f["outside_band"] == d["clip_ratio"] > 0.3
    assert f["clip_ratio"] == 0.0
    # All advantages are positive here: only the high side stops PPO's gradient.
    assert (c["clip_ratio"], c["clip_ratio_low"]) == (d["clip_ratio_high"], 0.0)
    for result in (dis, clip, free):
        kept = [k for trace in result.traces for k in trace.kept]
        assert 1.0 - sum(kept) / len(kept) == pytest.approx(result.metrics["clip_ratio"])
    assert all(k for trace in free.traces for k in trace.kept)


def test_a_prompt_is_told_by_its_ids_before_the_first_action() -> None:
    assert prompt_key(replied(1.0, (3, 4), (5, 6))) == prompt_key(replied(0.0, (3, 4), (9,)))
    assert prompt_key(replied(1.0, (3, 4))) != prompt_key(replied(1.0, (34,)))


@pytest.mark.parametrize(
    ("variant", "memory"),
    [
        ("running_mean", {"seen": {"all": 3}}),
        ("spo", {"visits": {"key": {}}}),
        ("spo", {"visits": {"key": {"counts": [1, 2]}}}),
    ],
)
def test_a_damaged_memory_is_said_to_be_one(base: Path, variant: str, memory: Any) -> None:
    estimator = made(base, variant=variant)._estimator
    with pytest.raises(ModelError, match="cannot be read"):
        estimator.remember(memory)


def test_a_step_s_return_is_discounted_by_steps(base: Path) -> None:
    """gamma 0.5, two steps, reward 1 at the end: the first step's return is 0.5 at each token."""
    for level, want in (("step_average", 0.5), ("step_last_token", 0.5), ("token", 0.125)):
        trainer = made(base, action_level=level, gamma=0.5)
        found = trainer._estimator.estimate(
            [episode(1.0)], TrajectoryBatch.from_trajectories([episode(1.0)])
        )
        assert float(found.returns[0, 2]) == want
        assert float(found.returns[0, -1]) == 1.0
