"""The equations against TorchRL's, which know nothing of ours.

Equal where the definitions are equal; where they differ, a test states the difference with a
number. The names follow ours: `peer_*` is what TorchRL says.
"""

from __future__ import annotations

import math

import pytest
import torch
from algorithm_support import mask_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.llm import MCAdvantage
from torchrl.objectives.value.functional import generalized_advantage_estimate

from online_sao.algorithm import baselines, sao, variants

seeds = st.integers(0, 2**31 - 1)
fractions = st.floats(0.0, 1.0)


def peer_gae(
    rewards: Tensor, values: Tensor, *, gamma: float, lam: float, cut_before: float | None = None
) -> tuple[Tensor, Tensor]:
    """Of (B, T) whole trajectories; `cut_before` is the value of the state a cut one stopped at."""
    following = values.new_zeros(values.shape)
    following[:, :-1] = values[:, 1:]
    done = torch.zeros(values.shape, dtype=torch.bool)
    done[:, -1] = True
    terminated = done.clone()
    if cut_before is not None:
        following[:, -1] = cut_before
        terminated[:, -1] = False
    columns = [x[..., None] for x in (values, following, rewards, done, terminated)]
    # A plain number would become single precision beside the peer's integer masks.
    discounts = [torch.tensor(x, dtype=torch.float64) for x in (gamma, lam)]
    advantages, targets = generalized_advantage_estimate(*discounts, *columns)
    return advantages[..., 0], targets[..., 0]


@settings(max_examples=30, deadline=None)
@given(seed=seeds, length=st.integers(1, 12), gamma=fractions, lam=fractions)
def test_gae_without_observations_is_the_peers(
    seed: int, length: int, gamma: float, lam: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 3, length, generator=generator, dtype=torch.float64)
    every = torch.ones(3, length, dtype=torch.bool)
    got = sao.skip_observation_gae(rewards, values, every, gamma=gamma, lam=lam)
    want = peer_gae(rewards, values, gamma=gamma, lam=lam)
    torch.testing.assert_close(got, want, rtol=0.0, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(seed=seeds, gamma=fractions, lam=fractions)
def test_gae_with_observations_is_the_peers_over_the_actions_alone(
    seed: int, gamma: float, lam: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 1, 20, generator=generator, dtype=torch.float64)
    mask = torch.rand(1, 20, generator=generator) > 0.5
    mask[:, 3] = True
    got = sao.skip_observation_gae(rewards, values, mask, gamma=gamma, lam=lam)
    want = peer_gae(rewards[mask][None], values[mask][None], gamma=gamma, lam=lam)
    for ours, peers in zip(got, want, strict=True):
        torch.testing.assert_close(ours[mask], peers[0], rtol=0.0, atol=1e-12)


def test_the_peer_does_not_skip_observations_and_our_chain_is_its_answer() -> None:
    mask = mask_of([[True, False, False, True]])
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    values = torch.tensor([[0.5, 0.25, 0.75, 0.5]], dtype=torch.float64)
    skipping, _ = sao.skip_observation_gae(rewards, values, mask, gamma=1.0, lam=0.5)
    # Two deltas: 0.5 - 0.5 and 1 - 0.5; A_0 = 0 + 0.5 x 0.5.
    assert skipping.tolist() == [[0.25, 0.0, 0.0, 0.5]]
    # Four: 0.25 - 0.5, 0.75 - 0.25, 0.5 - 0.75, 0.5; A_0 = -1/4 + 1/4 - 1/16 + 1/16.
    peers, _ = peer_gae(rewards, values, gamma=1.0, lam=0.5)
    assert peers.tolist() == [[0.0, 0.5, 0.0, 0.5]]
    chain = variants.chain_mask(mask)
    assert torch.equal(
        sao.skip_observation_gae(rewards, values, chain, gamma=1.0, lam=0.5)[0], peers
    )


def test_the_peer_bootstraps_a_cut_trajectory_and_we_do_not() -> None:
    rewards, values = torch.zeros(1, 1), torch.tensor([[0.5]])
    ours, _ = sao.skip_observation_gae(
        rewards, values, torch.ones(1, 1, dtype=torch.bool), gamma=1.0, lam=1.0
    )
    peers, _ = peer_gae(rewards, values, gamma=1.0, lam=1.0, cut_before=0.75)
    assert ours.item() == -0.5  # what was judged is final: 0 - V
    assert peers.item() == 0.25  # the rest is still to come: V(next) - V


def peer_ppo(
    logits: Tensor, actions: Tensor, recorded: Tensor, advantages: Tensor, low: float, high: float
) -> tuple[float, Tensor]:
    """Loss of N tokens, and its gradient by the logits (N, V)."""
    softmax = ProbabilisticTensorDictModule(
        in_keys=["logits"],
        out_keys=["action"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    given_logits = TensorDictModule(torch.nn.Identity(), ["observation"], ["logits"])
    policy = ProbabilisticTensorDictSequential(given_logits, softmax)
    loss = ClipPPOLoss(policy, clip_epsilon=(low, high), entropy_bonus=False).double()
    leaf = logits.clone().requires_grad_()
    batch = {
        "observation": leaf,
        "action": actions,
        "action_log_prob": recorded,
        "advantage": advantages[:, None],
    }
    objective = loss(TensorDict(batch, [len(actions)]))["loss_objective"]
    objective.backward()
    assert leaf.grad is not None
    return objective.item(), leaf.grad


def our_loss(
    name: str,
    logits: Tensor,
    actions: Tensor,
    recorded: Tensor,
    advantages: Tensor,
    low: float,
    high: float,
) -> tuple[float, Tensor]:
    """The same of `variants.ppo_clip_loss` or `sao.dis_loss`, as one trajectory of N actions."""
    leaf = logits.clone().requires_grad_()
    logprobs = sao.log_policy(leaf, 1.0).gather(1, actions[:, None])[:, 0][None]
    loss = {"ppo": variants.ppo_clip_loss, "dis": sao.dis_loss}[name](
        logprobs,
        recorded[None],
        advantages[None],
        torch.ones(1, len(actions), dtype=torch.bool),
        eps_low=low,
        eps_high=high,
    )
    loss.backward()
    assert leaf.grad is not None
    return loss.item(), leaf.grad


Batch = tuple[Tensor, Tensor, Tensor, Tensor]


def tokens(seed: int, count: int = 30) -> Batch:
    """(logits, actions, recorded log-probabilities, advantages), ratios e^-1.5 to e^1.5."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    actions = torch.randint(5, (count,), generator=generator)
    logprobs = logits.log_softmax(-1).gather(1, actions[:, None])[:, 0]
    shift = 3.0 * torch.rand(count, generator=generator, dtype=torch.float64) - 1.5
    advantages = torch.randn(count, generator=generator, dtype=torch.float64)
    return logits, actions, logprobs - shift, advantages


@pytest.mark.parametrize(("low", "high", "near"), [(0.25, 0.5, 1e-12), (0.2, 0.28, 1e-7)])
@settings(max_examples=20, deadline=None)
@given(seed=seeds)
def test_ppo_loss_and_gradient_are_the_peers(
    seed: int, low: float, high: float, near: float
) -> None:
    # The peer keeps its clip in single precision: 0.2 and 0.28 are not exact there.
    batch = tokens(seed)
    loss, gradient = our_loss("ppo", *batch, low, high)
    peer_loss, peer_gradient = peer_ppo(*batch, low, high)
    assert loss == pytest.approx(peer_loss, abs=near)
    torch.testing.assert_close(gradient, peer_gradient, rtol=0.0, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(seed=seeds)
def test_where_both_keep_a_token_dis_pulls_as_the_peers_ppo_does(seed: int) -> None:
    logits, actions, recorded, advantages = tokens(seed)
    logprobs = logits.log_softmax(-1).gather(1, actions[:, None])[:, 0]
    ratio = (logprobs - recorded).exp()
    inside = sao.calibrate(ratio, 0.25, 0.5) != 0.0
    stopped = variants.ppo_clipped(ratio, advantages, 0.25, 0.5)
    _, dis = our_loss("dis", logits, actions, recorded, advantages, 0.25, 0.5)
    _, peers = peer_ppo(logits, actions, recorded, advantages, 0.25, 0.5)
    torch.testing.assert_close(dis[inside], peers[inside], rtol=0.0, atol=1e-12)
    # Outside DIS never pulls; PPO does in the two corners its clip lets pass.
    assert (dis[~inside] == 0.0).all()
    assert (peers[stopped] == 0.0).all()
    assert (peers[~inside & ~stopped] != 0.0).any(dim=-1).all()


def one(ratio: float, advantage: float) -> Batch:
    """One token of two, log pi = log 1/2, with this ratio to what was recorded."""
    recorded = torch.tensor([math.log(0.5) - math.log(ratio)], dtype=torch.float64)
    return (
        torch.zeros(1, 2, dtype=torch.float64),
        torch.tensor([0]),
        recorded,
        torch.tensor([advantage], dtype=torch.float64),
    )


def test_the_peer_has_no_answer_to_a_recorded_logprob_that_is_nan_and_we_leave_it_out() -> None:
    logits, actions, _, advantages = one(1.0, -1.0)
    recorded = torch.tensor([math.nan], dtype=torch.float64)
    peer_loss, peer_gradient = peer_ppo(logits, actions, recorded, advantages, 0.25, 0.5)
    loss, gradient = our_loss("ppo", logits, actions, recorded, advantages, 0.25, 0.5)
    assert math.isnan(peer_loss)
    assert bool(peer_gradient.isnan().any())
    assert loss == 0.0
    assert (gradient == 0.0).all()


def test_the_peer_does_not_clamp_the_log_ratio_and_we_do_at_20() -> None:
    batch = one(math.exp(30.0), -1.0)  # A < 0 above the band: PPO's clip lets it pass
    peer_loss, peer_gradient = peer_ppo(*batch, 0.25, 0.5)
    loss, gradient = our_loss("ppo", *batch, 0.25, 0.5)
    assert peer_loss == pytest.approx(math.exp(30.0))
    assert loss == pytest.approx(math.exp(20.0))
    # d(r A)/d(logit) = r A (1 - 1/2): the peer pulls with e^30/2, we no longer.
    assert peer_gradient[0].tolist() == pytest.approx([math.exp(30.0) / 2, -math.exp(30.0) / 2])
    assert gradient[0].tolist() == [0.0, 0.0]


def peer_group_advantage(rewards: Tensor) -> Tensor:
    """Of one group, whose trajectories have one step each."""
    transform = MCAdvantage(grpo_size=len(rewards), prompt_key="group", trajectory_return="sum")
    whole = None
    for reward in rewards:
        outcome = TensorDict(
            {"reward": reward.reshape(1, 1), "done": torch.ones(1, 1, dtype=torch.bool)}, [1]
        )
        whole = transform.inv(TensorDict({"group": torch.zeros(1), "next": outcome}, [1]))
    assert whole is not None
    return whole["advantage"].flatten()


def test_the_peers_group_advantage_divides_by_the_sample_deviation_and_ours_by_the_groups() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    ours, peers = baselines.group_advantage(rewards), peer_group_advantage(rewards)
    # Deviations 1/2 of the group, sqrt(1/3) of a sample; the peer adds no epsilon to its own.
    assert ours.tolist() == pytest.approx([s * 0.5 / 0.500001 for s in (1, -1, -1, 1)], abs=1e-12)
    assert peers.tolist() == pytest.approx([s * math.sqrt(0.75) for s in (1, -1, -1, 1)], abs=1e-12)


@settings(max_examples=20, deadline=None)
@given(rewards=st.lists(st.floats(0.0, 1.0), min_size=2, max_size=8))
def test_group_advantages_are_the_peers_but_for_that_divisor(rewards: list[float]) -> None:
    r = torch.tensor(rewards, dtype=torch.float64)
    ours = baselines.group_advantage(r) * (r.std(correction=0) + baselines.EPSILON)
    peers = peer_group_advantage(r) * r.std().clamp_min(1e-6)
    torch.testing.assert_close(ours, peers, rtol=0.0, atol=1e-12)
