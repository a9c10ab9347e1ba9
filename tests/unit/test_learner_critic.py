"""The critic: what it learns, what stays frozen to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tiny_llama import make_folder, sampled
from torch import Tensor

from online_sao.algorithm import sao
from online_sao.config import AlgorithmSettings, LearnerSettings
from online_sao.errors import UpdateNotFinite
from online_sao.learner.batch import TrajectoryBatch
from online_sao.learner.critic import Critic
from online_sao.learner.models import Compute


def made(folder: Path, head: Literal["linear", "sigmoid"] = "linear", **learner: Any) -> Critic:
    settings = LearnerSettings(**{"dtype": "float32", "critic_lr": 1e-2, **learner})
    compute = Compute.chosen(settings)
    algorithm = AlgorithmSettings(value_head=head)
    return Critic(compute.load(folder), compute.load_exact(folder), settings, algorithm)


def lesson(folder: Path) -> tuple[TrajectoryBatch, Tensor, Tensor]:
    """A batch, its returns, and the denominator of a token mean."""
    batch = TrajectoryBatch.from_trajectories(sampled(folder, 8))
    zeros = torch.zeros_like(batch.rewards)
    _, returns = sao.skip_observation_gae(
        batch.rewards, zeros, batch.action_mask, gamma=1.0, lam=1.0
    )
    return batch, returns, sao.mean_denominator(batch.action_mask, per_trajectory=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_and_embeddings_stay_to_the_bit_and_the_rest_moves(
    tmp_path: Path, dtype: str
) -> None:
    base = make_folder(tmp_path / "base", attention_bias=True)
    critic = made(base, dtype=dtype, critic_layers=2)
    before = {n: p.detach().clone() for n, p in critic.network.named_parameters()}
    for _ in range(3):
        critic.update(*lesson(base))
    for name, parameter in critic.network.named_parameters():
        frozen = ".self_attn." in name or "embed_tokens" in name
        assert torch.equal(parameter, before[name]) == frozen, name


@pytest.mark.parametrize("head", ["linear", "sigmoid"])
def test_it_learns_the_returns(tmp_path: Path, head: Literal["linear", "sigmoid"]) -> None:
    base = make_folder(tmp_path / "base")
    critic, (batch, returns, share) = made(base, head), lesson(base)
    _, first, _ = critic.update(batch, returns, share)
    for _ in range(60):
        _, last, _ = critic.update(batch, returns, share)
    assert last < 0.3 * first
    values = critic.values(batch)
    assert (values[~batch.action_mask] == 0).all()
    ev = sao.explained_variance(values, returns, batch.action_mask)
    assert ev is not None
    assert ev > 0.6
    if head == "sigmoid":
        assert values.min() >= 0.0
        assert values.max() <= 1.0


def test_an_update_s_values_are_those_from_before_it(tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base")
    critic, (batch, returns, share) = made(base), lesson(base)
    critic.update(batch, returns, share)
    before = critic.values(batch)
    got, _, _ = critic.update(batch, returns, share)
    assert torch.equal(got, before)
    assert not torch.equal(critic.values(batch), before)


def test_the_first_loss_is_that_of_values_of_zero(tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base")
    batch, returns, share = lesson(base)
    _, loss, _ = made(base).update(batch, returns, share)
    assert loss == pytest.approx(float(returns[batch.action_mask].square().mean()), rel=1e-5)
    _, bounded, _ = made(base, "sigmoid").update(batch, returns, share)
    assert bounded == pytest.approx(0.6931472, rel=1e-5)  # log 2: every logit is 0


def test_micro_batches_change_an_update_by_rounding_only(tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base")
    whole, split = made(base), made(base, micro_batch_tokens=16)
    for _ in range(2):
        one, two = whole.update(*lesson(base)), split.update(*lesson(base))
    torch.testing.assert_close(one[0], two[0], rtol=1e-3, atol=1e-5)
    assert one[1:] == pytest.approx(two[1:], rel=1e-3)


def test_returns_that_are_not_finite_are_refused_before_any_step(tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base")
    critic, (batch, returns, share) = made(base), lesson(base)
    before = {n: t.clone() for n, t in critic.weights.state().items()}
    with pytest.raises(UpdateNotFinite):
        critic.update(batch, returns * float("nan"), share)
    assert all(torch.equal(t, before[n]) for n, t in critic.weights.state().items())


def test_recomputed_activations_give_the_same_update(tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base")
    plain, again = made(base), made(base, activation_checkpointing=True)
    for critic in (plain, again):
        critic.update(*lesson(base))
        critic.update(*lesson(base))
    a, b = plain.weights.state(), again.weights.state()
    assert all(torch.equal(a[name], b[name]) for name in a)
