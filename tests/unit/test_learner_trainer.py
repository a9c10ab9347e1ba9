"""SAO updates on a tiny Llama: what they change, what they must not, and that they learn."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import VOCABULARY, make_folder, rescored, sampled
from transformers import LlamaForCausalLM

from online_sao.config import AlgorithmSettings, LearnerSettings
from online_sao.errors import LearnerError, UpdateNotFinite
from online_sao.learner.export import SavedState
from online_sao.learner.trainer import SaoTrainer
from online_sao.manifest import Manifest
from online_sao.types import TrainingResult, Trajectory, UpdateKind

FAST = {"policy_lr": 1e-2, "critic_lr": 1e-2, "policy_layers": 2, "critic_layers": 1}


def made(base: Path, learner: dict[str, Any] | None = None, **algorithm: Any) -> SaoTrainer:
    settings = LearnerSettings(**{**FAST, "dtype": "float32", **(learner or {})})
    trainer = SaoTrainer(AlgorithmSettings(**algorithm), settings, base)
    trainer.restore(base, None)
    return trainer


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "base", attention_dropout=0.1)


def update(trainer: SaoTrainer, batch: Sequence[Trajectory]) -> TrainingResult:
    return trainer.update(batch, critic_only=False)


def number(result: TrainingResult, name: str) -> float:
    value = result.metrics[name]
    assert value is not None
    return value


def weights(trainer: SaoTrainer, folder: Path) -> SavedState:
    trainer.save_state(folder)
    return SavedState.read(folder)


def test_an_update_before_restore_is_an_error(base: Path) -> None:
    trainer = SaoTrainer(AlgorithmSettings(), LearnerSettings(), base)
    with pytest.raises(LearnerError, match="restore"):
        update(trainer, sampled(base, 2))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_before_any_update_every_ratio_is_one_at_any_temperature(
    base: Path, temperature: float
) -> None:
    """In fp32, with attention_dropout 0.1 in the checkpoint's config."""
    result = update(made(base), sampled(base, 8, temperature=temperature))
    ratios = [r for trace in result.traces for r in trace.ratios]
    assert all(0.99 <= r <= 1.01 for r in ratios)
    assert result.metrics["clip_ratio"] == 0.0
    assert number(result, "log_ratio_abs_mean") < 1e-3
    assert number(result, "log_ratio_abs_max") < 1e-2


def test_before_any_update_bf16_stays_within_the_band(tmp_path: Path) -> None:
    base = make_folder(tmp_path / "bf16", torch.bfloat16)
    result = update(made(base, {"dtype": "bfloat16"}), sampled(base, 8))
    assert result.metrics["clip_ratio"] == 0.0
    assert number(result, "log_ratio_abs_mean") < 0.05


def test_ratios_use_the_stored_logprobs_not_the_present_policy(base: Path) -> None:
    """A reply from three versions ago: its own log-probabilities, so ratios differ from 1."""
    trainer, batch = made(base), sampled(base, 8)
    for _ in range(3):
        update(trainer, batch)
    result = update(trainer, [replace(t, lag=3) for t in batch])
    ratios = [r for trace in result.traces for r in trace.ratios]
    assert max(ratios) - min(ratios) > 0.1
    assert (result.metrics["lag_mean"], result.metrics["lag_max"]) == (3.0, 3.0)
    kept = [k for trace in result.traces for k in trace.kept]
    assert kept == [0.7 < r < 6.0 for r in ratios]
    assert number(result, "clip_ratio") == pytest.approx(1.0 - sum(kept) / len(kept))


def test_the_first_update_s_numbers_by_hand(base: Path) -> None:
    """V = 0 and r = 1, so A is the reward times (lambda)^k and the loss is -mean(A log pi)."""
    batch = [replace(t, reward=float(i % 2)) for i, t in enumerate(sampled(base, 4))]
    result = update(made(base), batch)
    terms, advantages = [], []
    for trajectory, trace in zip(batch, result.traces, strict=True):
        n = sum(trajectory.action_mask)
        lam = 1.0 - 1.0 / (1.5 * n)
        want = [trajectory.reward * lam ** (n - 1 - t) for t in range(n)]
        assert trace.advantages == pytest.approx(want, abs=1e-6)
        assert trace.values == (0.0,) * n
        terms += [a * p for a, p in zip(want, trajectory.logprobs[-n:], strict=True)]
        advantages += want
    tokens = len(terms)
    assert number(result, "policy_loss") == pytest.approx(-sum(terms) / tokens, rel=1e-4)
    assert number(result, "advantage_mean") == pytest.approx(sum(advantages) / tokens, rel=1e-5)
    assert number(result, "value_loss") == pytest.approx(
        sum(sum(t.action_mask) for t in batch[1::2]) / tokens, rel=1e-5
    )
    assert number(result, "kl_start") == pytest.approx(0.0, abs=1e-6)
    assert result.metrics["explained_variance"] == pytest.approx(0.0, abs=1e-6)  # V is constant
    assert result.metrics["reward_mean"] == 0.5
    assert result.metrics["tokens"] == tokens


def test_a_batch_of_one_works_and_has_no_explained_variance(base: Path) -> None:
    (one,) = sampled(base, 1)
    result = update(made(base), [replace(one, reward=1.0)])
    assert result.kind is UpdateKind.POLICY
    assert result.metrics["explained_variance"] is None


def test_metrics_of_every_update_are_there(base: Path) -> None:
    metrics = update(made(base), sampled(base, 4)).metrics
    assert {
        "reward_mean", "explained_variance", "policy_loss", "kl_start", "value_loss",
        "policy_grad_norm", "critic_grad_norm", "clip_ratio", "clip_ratio_low",
        "clip_ratio_high", "log_ratio_abs_mean", "log_ratio_abs_max", "kl_rollout", "entropy",
        "advantage_mean", "advantage_std", "reply_tokens_mean", "cut_share", "lag_mean",
        "lag_max", "seconds_critic", "seconds_policy", "seconds_step", "tokens", "trajectories",
    } <= metrics.keys()  # fmt: skip
    assert all(value is None or math.isfinite(value) for value in metrics.values())


@torch.no_grad()
def chance(folder: Path, token: int, prompts: Sequence[Trajectory]) -> float:
    """Mean probability of `token` right after the prompts."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for t in prompts:
        prompt = t.token_ids[: t.action_mask.index(True)]
        logits = model(input_ids=torch.tensor([prompt])).logits[0, -1]
        found.append(float(logits.softmax(-1)[token]))
    return sum(found) / len(found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rewarding_one_token_raises_its_probability(base: Path, tmp_path: Path, dtype: str) -> None:
    """Half of the replies, other ones each time, begin with the token 9 and are rewarded. Each
    batch carries the log-probabilities of the version that is newest then.
    """
    trainer, prompts, newest = made(base, {"dtype": dtype}, kl_coef=0.0), sampled(base, 16), base
    for version in range(1, 9):
        dice, batch = random.Random(version), []
        for t in prompts:
            ids, first, hit = list(t.token_ids), t.action_mask.index(True), dice.random() < 0.5
            ids[first] = 9 if hit else dice.randrange(10, VOCABULARY)
            batch.append(replace(t, token_ids=tuple(ids), reward=float(hit)))
        update(trainer, rescored(newest, batch))
        newest = tmp_path / f"v{version}"
        trainer.export_policy(newest)
    assert chance(newest, 9, prompts) > 5 * chance(base, 9, prompts)


def test_kl_holds_the_policy_near_its_start(base: Path) -> None:
    distances = {}
    for kl_coef in (0.0, 1.0):
        trainer, batch = made(base, kl_coef=kl_coef), sampled(base, 8)
        for _ in range(6):
            update(trainer, batch)
        reference = made(base, kl_coef=1e-9)
        reference._policy.model.load_state_dict(trainer._policy.model.state_dict())
        distances[kl_coef] = number(update(reference, batch), "kl_start")
    assert distances[1.0] < 0.5 * distances[0.0]


def test_without_a_kl_term_there_is_no_start_policy_to_pay_for(base: Path) -> None:
    trainer = made(base, kl_coef=0.0)
    assert trainer._policy.start is None
    assert update(trainer, sampled(base, 2)).metrics["kl_start"] is None


@pytest.mark.parametrize("direction", ["policy_start", "start_policy"])
def test_both_directions_of_kl_pull(base: Path, direction: str) -> None:
    trainer = made(base, kl_coef=0.5, kl_direction=direction)
    batch = sampled(base, 4)
    update(trainer, batch)
    assert number(update(trainer, batch), "kl_start") > 0.0


def test_an_entropy_bonus_raises_the_entropy(base: Path) -> None:
    batch = [replace(t, reward=0.0) for t in sampled(base, 8)]
    trainer = made(base, kl_coef=0.0, entropy_coef=1.0)
    first = number(update(trainer, batch), "entropy")
    for _ in range(5):
        last = number(update(trainer, batch), "entropy")
    assert last > first + 0.1


def test_nothing_pulls_so_the_policy_stands_still_to_the_bit(base: Path, tmp_path: Path) -> None:
    trainer = made(base, kl_coef=0.0)
    batch = [replace(t, reward=0.0) for t in sampled(base, 4)]
    before = weights(trainer, tmp_path / "before")
    result = update(trainer, batch)
    after = weights(trainer, tmp_path / "after")
    assert result.kind is UpdateKind.SKIPPED
    assert result.metrics["policy_grad_norm"] is None
    assert after.policy_steps == 0
    assert all(torch.equal(after.policy[n], before.policy[n]) for n in before.policy)
    assert after.critic_steps == 2  # the critic learned that the reward is 0


def test_all_rewards_zero_with_kl_is_no_skip(base: Path) -> None:
    batch = [replace(t, reward=0.0) for t in sampled(base, 4)]
    assert update(made(base, kl_coef=0.2), batch).kind is UpdateKind.POLICY


def test_critic_only_trains_the_critic_k_times_and_never_the_policy(
    base: Path, tmp_path: Path
) -> None:
    trainer = made(base, critic_updates=3)
    before = weights(trainer, tmp_path / "before")
    result = trainer.update(sampled(base, 4), critic_only=True)
    after = weights(trainer, tmp_path / "after")
    assert result.kind is UpdateKind.CRITIC_ONLY
    assert (after.critic_steps, after.policy_steps) == (3, 0)
    assert all(torch.equal(after.policy[n], before.policy[n]) for n in before.policy)


def test_advantages_come_from_the_critic_before_or_after_its_updates(base: Path) -> None:
    batch = [replace(t, reward=1.0) for t in sampled(base, 4)]
    before = update(made(base, advantage_critic="before"), batch)
    after = update(made(base, advantage_critic="after"), batch)
    # Fitted to this very reward, the critic leaves less of an advantage.
    assert number(after, "advantage_mean") < number(before, "advantage_mean")
    assert before.traces[0].values == after.traces[0].values  # V shown is from before either way


def test_mean_over_trajectories_first_is_another_loss(base: Path) -> None:
    batch = [replace(t, reward=float(i == 0)) for i, t in enumerate(sampled(base, 4))]
    by_token = update(made(base, loss_mean="token"), batch)
    by_trajectory = update(made(base, loss_mean="trajectory"), batch)
    n, total = sum(batch[0].action_mask), number(by_token, "tokens")
    # Only the first reply has advantages: its sum over N tokens, or over n tokens times 4 replies.
    ratio = number(by_trajectory, "policy_loss") / number(by_token, "policy_loss")
    assert ratio == pytest.approx(total / (4 * n), rel=1e-4)


@pytest.mark.parametrize("temperature", [0.0, math.nan])
def test_nan_in_the_policy_undoes_the_critic_s_steps_too(
    base: Path, tmp_path: Path, temperature: float
) -> None:
    trainer, batch = made(base), sampled(base, 4)
    update(trainer, batch)
    before = weights(trainer, tmp_path / "before")
    values = trainer._critic.values  # the compute copies must follow as well
    with pytest.raises(UpdateNotFinite, match="log-probabilities"):
        update(trainer, [*batch[:3], replace(batch[3], temperature=temperature)])
    after = weights(trainer, tmp_path / "after")
    for x, y in ((before.policy, after.policy), (before.critic, after.critic)):
        assert all(torch.equal(x[n], y[n]) for n in x)
    assert (before.critic_steps, before.policy_steps) == (after.critic_steps, after.policy_steps)
    assert values == trainer._critic.values
    fresh = made(base)
    update(fresh, batch)
    assert update(trainer, batch).traces == update(fresh, batch).traces


def test_order_and_micro_batches_change_the_policy_by_rounding_only(
    base: Path, tmp_path: Path
) -> None:
    batch = sampled(base, 8)
    whole, split = made(base), made(base, {"micro_batch_tokens": 20})
    update(whole, batch)
    update(split, batch[::-1])
    a, b = weights(whole, tmp_path / "a").policy, weights(split, tmp_path / "b").policy
    for name in a:
        if name.startswith("exp_avg."):  # the gradient, clipped, times 0.1
            torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=1e-7)


def test_one_update_s_gradient_is_clipped_to_the_norm_set(base: Path, tmp_path: Path) -> None:
    trainer = made(base, {"grad_clip": 0.01})
    result = update(trainer, sampled(base, 4))
    state = weights(trainer, tmp_path / "s")
    first_moments = [t for n, t in state.policy.items() if n.startswith("exp_avg.")]
    norm = math.sqrt(sum(float(t.square().sum()) for t in first_moments)) / 0.1
    assert number(result, "policy_grad_norm") > 0.01
    assert norm == pytest.approx(0.01, rel=1e-3)


def test_a_changed_setting_starts_only_that_part_afresh(base: Path, tmp_path: Path) -> None:
    trainer = made(base)
    update(trainer, sampled(base, 4))
    trainer.export_policy(tmp_path / "v1")
    trainer.save_state(tmp_path / "s1")
    other = made(base, {"policy_layers": 1})
    note = other.restore(tmp_path / "v1", tmp_path / "s1")
    assert "the policy's optimizer starts afresh" in note
    assert "the critic starts afresh" not in note
    other.export_policy(tmp_path / "v1-again")
    assert Manifest.read(tmp_path / "v1-again").sha256 == Manifest.read(tmp_path / "v1").sha256
    shallower = made(base, {"critic_layers": 2})
    assert "the critic starts afresh" in shallower.restore(tmp_path / "v1", tmp_path / "s1")
    assert update(shallower, sampled(base, 4)).kind is UpdateKind.POLICY


def test_replies_cut_at_their_limit_are_counted(base: Path) -> None:
    batch = [replace(t, cut=i == 0) for i, t in enumerate(sampled(base, 4))]
    assert update(made(base), batch).metrics["cut_share"] == 0.25


@pytest.mark.parametrize(
    ("settings", "policy", "critic", "start"),
    [
        ({"kl_coef": 0.0}, 1, 2, 0),
        ({"kl_coef": 0.2}, 1, 2, 1),
        ({"kl_coef": 0.2, "critic_updates": 4}, 1, 4, 1),
        ({"kl_coef": 0.0, "variant": "vapo"}, 1, 1, 0),
        ({"kl_coef": 0.0, "variant": "running_mean"}, 1, 0, 0),
        ({"kl_coef": 0.0, "variant": "spo"}, 2, 0, 0),  # once more for the drift since last time
        ({"kl_coef": 0.0, "advantage_critic": "after"}, 1, 3, 0),
    ],
)
@pytest.mark.parametrize("policy_layers", [0, 2])
def test_an_update_runs_no_more_forwards_than_the_mathematics_needs(
    base: Path,
    settings: dict[str, Any],
    policy: int,
    critic: int,
    start: int,
    policy_layers: int,
) -> None:
    """Forwards of the top layer of each network; the trunk below is run once, for both policies."""
    trainer, batch = made(base, {"policy_layers": policy_layers}, **settings), sampled(base, 4)
    update(trainer, batch)
    seen: dict[str, int] = {"policy": 0, "critic": 0, "start": 0, "trunk": 0}

    def count(name: str, layer: torch.nn.Module) -> None:
        def hook(*_: Any) -> None:
            seen[name] += 1

        layer.register_forward_hook(hook)

    count("policy", trainer._policy.decoder.layers[-1])
    count("trunk", trainer._policy.decoder.layers[0])
    if trainer._critic is not None:
        count("critic", trainer._critic.network.layers[-1])
    if trainer._policy.start is not None:
        theirs = trainer._policy.start
        own = theirs.base.layers if theirs.base is not None else theirs.layers
        count("start", own[-1])
    update(trainer, batch)
    assert (seen["policy"], seen["critic"], seen["start"]) == (policy, critic, start)
    assert seen["trunk"] == policy
