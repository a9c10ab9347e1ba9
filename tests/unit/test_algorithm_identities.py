"""What must hold of the equations whatever the batch: the invariants of algorithm/README.md."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from algorithm_support import JUNK
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from online_sao.algorithm import baselines, sao, variants

seeds = st.integers(0, 2**31 - 1)
fractions = st.floats(0.0, 1.0)
any_batch = settings(max_examples=25, deadline=None)
B, T = 4, 12
BAND = {"eps_low": 0.3, "eps_high": 5.0}
CLIP = {"eps_low": 0.2, "eps_high": 0.28}


@dataclass(frozen=True)
class Batch:
    """(B, T) doubles and the mask; every row has an action."""

    logprobs: Tensor
    rollout: Tensor
    advantages: Tensor
    rewards: Tensor
    values: Tensor
    mask: Tensor

    def each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """All numbers changed, the mask as it is."""
        return Batch(*(change(x) for x in self.numbers()), mask=self.mask)

    def rows(self, where: Tensor | slice) -> Batch:
        return replace(self.each(lambda x: x[where]), mask=self.mask[where])

    def spoiled(self, junk: float) -> Batch:
        return self.each(lambda x: torch.where(self.mask, x, junk))

    def padded(self, left: int, right: int, junk: float) -> Batch:
        grown = self.each(lambda x: F.pad(x, (left, right), value=junk))
        return replace(grown, mask=F.pad(self.mask, (left, right), value=False))

    def answers_longer(self, times: int) -> Batch:
        """Each observation token `times` times, in the one trajectory of this batch."""
        repeats = torch.where(self.mask[0], 1, times)

        def stretched(x: Tensor) -> Tensor:
            return x.repeat_interleave(repeats, dim=1)

        return replace(self.each(stretched), mask=stretched(self.mask))

    def numbers(self) -> list[Tensor]:
        return [self.logprobs, self.rollout, self.advantages, self.rewards, self.values]


def drawn(seed: int, rows: int = B) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(4, rows, T, generator=generator, dtype=torch.float64)
    rewards = torch.rand(rows, T, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, T, generator=generator) > 0.4
    mask[:, -1] |= ~mask.any(dim=1)
    logprobs = -normal[0].abs()
    return Batch(logprobs, logprobs - 0.7 * normal[1], normal[2], rewards, normal[3], mask)


# Advantages and targets, at lambda 0.7 and gamma 0.9.
At = tuple[Tensor, Tensor]
ADVANTAGES: dict[str, Callable[[Batch], At]] = {
    "token": lambda b: sao.skip_observation_gae(b.rewards, b.values, b.mask, gamma=0.9, lam=0.7),
    "average": lambda b: variants.step_level_gae(
        b.rewards, b.values, b.mask, gamma=0.9, lam=0.7, value="average"
    ),
    "last_token": lambda b: variants.step_level_gae(
        b.rewards, b.values, b.mask, gamma=0.9, lam=0.7, value="last_token"
    ),
}
every_advantage = pytest.mark.parametrize("name", ADVANTAGES)


# What is minimised: of the batch, the leaf that is trained, and the denominator.
Loss = Callable[[Batch, Tensor, Tensor | None], Tensor]


def policy_loss(function: Callable[..., Tensor], **band: float) -> Loss:
    return lambda b, leaf, denominator: function(
        leaf, b.rollout, b.advantages, b.mask, denominator=denominator, **band
    )


LOSSES: dict[str, Loss] = {
    "dis": policy_loss(sao.dis_loss, **BAND),
    "ppo": policy_loss(variants.ppo_clip_loss, **CLIP),
    "unmasked": policy_loss(variants.unmasked_loss),
    "value": lambda b, leaf, d: sao.value_loss(leaf, b.rewards, b.mask, denominator=d),
    "bounded_value": lambda b, leaf, d: sao.bounded_value_loss(
        leaf, b.rewards, b.mask, denominator=d
    ),
    "last_token_value": lambda b, leaf, d: sao.value_loss(
        leaf, b.rewards, variants.last_tokens_of_steps(b.mask), denominator=d
    ),
}
POLICY_LOSSES = ("dis", "ppo", "unmasked")
every_loss = pytest.mark.parametrize("name", LOSSES)


def trained(name: str, batch: Batch, denominator: Tensor | None = None) -> tuple[float, Tensor]:
    """The loss and its gradient, both of the numbers given."""
    leaf = batch.logprobs if name in POLICY_LOSSES else batch.values
    leaf = leaf.clone().requires_grad_()
    loss = LOSSES[name](batch, leaf, denominator)
    loss.backward()
    assert leaf.grad is not None
    return loss.item(), leaf.grad


def denominator_of(name: str, batch: Batch, *, per_trajectory: bool) -> Tensor:
    last = name == "last_token_value"
    mask = variants.last_tokens_of_steps(batch.mask) if last else batch.mask
    return sao.mean_denominator(mask, per_trajectory=per_trajectory)


def assert_rounding(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


# What stands off the mask


@every_loss
@any_batch
@given(seed=seeds, junk=st.sampled_from(JUNK))
def test_junk_off_the_mask_changes_no_loss_and_no_gradient(
    name: str, seed: int, junk: float
) -> None:
    batch = drawn(seed)
    loss, gradient = trained(name, batch)
    spoiled_loss, spoiled_gradient = trained(name, batch.spoiled(junk))
    assert loss == spoiled_loss
    assert torch.equal(gradient, spoiled_gradient)
    assert (gradient[~batch.mask] == 0.0).all()


@every_advantage
@any_batch
@given(seed=seeds, junk=st.sampled_from(JUNK))
def test_junk_off_the_mask_changes_no_advantage(name: str, seed: int, junk: float) -> None:
    batch = drawn(seed)
    for clean, spoiled in zip(
        ADVANTAGES[name](batch), ADVANTAGES[name](batch.spoiled(junk)), strict=True
    ):
        assert torch.equal(clean, spoiled)
        assert (clean[~batch.mask] == 0.0).all()


@any_batch
@given(seed=seeds, junk=st.sampled_from(JUNK))
def test_junk_off_the_mask_changes_neither_explained_variance_nor_who_is_clipped(
    seed: int, junk: float
) -> None:
    def measured(b: Batch) -> tuple[float | None, Tensor, Tensor, Tensor]:
        ratio = sao.importance_ratio(b.logprobs, b.rollout)
        return (
            sao.explained_variance(b.values, b.rewards, b.mask),
            ratio[b.mask],
            sao.calibrate(ratio, **BAND)[b.mask],
            variants.ppo_clipped(ratio, b.advantages, **CLIP)[b.mask],
        )

    batch = drawn(seed)
    clean, spoiled = measured(batch), measured(batch.spoiled(junk))
    assert clean[0] == spoiled[0]
    assert all(torch.equal(x, y) for x, y in zip(clean[1:], spoiled[1:], strict=True))


@any_batch
@given(seed=seeds, junk=st.sampled_from(JUNK))
def test_junk_before_and_after_the_chain_changes_nothing_in_it(seed: int, junk: float) -> None:
    batch = drawn(seed)
    chain = replace(batch, mask=variants.chain_mask(batch.mask))
    clean, _ = ADVANTAGES["token"](chain)
    spoiled, _ = ADVANTAGES["token"](chain.spoiled(junk))
    assert torch.equal(clean, spoiled)


# Observations


@any_batch
@given(seed=seeds, gamma=fractions, lam=fractions)
def test_gae_equals_gae_with_the_observations_cut_out(seed: int, gamma: float, lam: float) -> None:
    b = drawn(seed)
    got, _ = sao.skip_observation_gae(b.rewards, b.values, b.mask, gamma=gamma, lam=lam)
    for row, mask in enumerate(b.mask):
        r, v = b.rewards[row][mask][None], b.values[row][mask][None]
        every = torch.ones_like(r, dtype=torch.bool)
        cut, _ = sao.skip_observation_gae(r, v, every, gamma=gamma, lam=lam)
        assert torch.equal(got[row][mask], cut[0])


@every_advantage
@any_batch
@given(seed=seeds)
def test_an_answer_ten_times_longer_changes_no_advantage(name: str, seed: int) -> None:
    batch = drawn(seed, rows=1)
    longer = batch.answers_longer(10)
    for short, long in zip(ADVANTAGES[name](batch), ADVANTAGES[name](longer), strict=True):
        assert torch.equal(short[batch.mask], long[longer.mask])


@every_loss
@any_batch
@given(seed=seeds)
def test_an_answer_ten_times_longer_changes_no_loss(name: str, seed: int) -> None:
    batch = drawn(seed, rows=1)
    longer = batch.answers_longer(10)
    (loss, gradient), (long_loss, long_gradient) = trained(name, batch), trained(name, longer)
    assert long_loss == pytest.approx(loss, rel=1e-12, abs=1e-14)
    assert_rounding(long_gradient[longer.mask], gradient[batch.mask])


def test_an_answer_ten_times_longer_changes_the_advantages_of_the_chain() -> None:
    def first_advantage(answer: int) -> tuple[float, float]:
        mask = torch.tensor([[True] + [False] * answer + [True]])
        rewards, values = mask.double(), torch.zeros(1, answer + 2)
        rewards[0, 0] = 0.0  # the judge's 1 on the last action
        return tuple(
            sao.skip_observation_gae(rewards, values, over, gamma=1.0, lam=0.5)[0][0, 0].item()
            for over in (mask, variants.chain_mask(mask))
        )

    # Values 0: A_0 = lambda^(tokens to the reward), 1 over the actions, 2 and 11 over the chain.
    assert first_advantage(1) == (0.5, 0.25)
    assert first_advantage(10) == (0.5, 1 / 2048)


# Order, padding, splitting


@every_loss
@any_batch
@given(seed=seeds, left=st.integers(0, 3), right=st.integers(0, 3), per_trajectory=st.booleans())
def test_order_and_padding_change_losses_by_rounding_only(
    name: str, seed: int, left: int, right: int, per_trajectory: bool
) -> None:
    batch = drawn(seed)
    order = torch.randperm(B, generator=torch.Generator().manual_seed(seed))
    moved = batch.rows(order).padded(left, right, math.nan)
    loss, gradient = trained(
        name, batch, denominator_of(name, batch, per_trajectory=per_trajectory)
    )
    moved_loss, moved_gradient = trained(
        name, moved, denominator_of(name, moved, per_trajectory=per_trajectory)
    )
    assert moved_loss == pytest.approx(loss, rel=1e-12, abs=1e-14)
    assert_rounding(moved_gradient[:, left : left + T], gradient[order])
    assert (moved_gradient[~moved.mask] == 0.0).all()


@every_advantage
@any_batch
@given(seed=seeds, left=st.integers(0, 3), right=st.integers(0, 3))
def test_order_and_padding_change_no_advantage(name: str, seed: int, left: int, right: int) -> None:
    batch = drawn(seed)
    order = torch.randperm(B, generator=torch.Generator().manual_seed(seed))
    moved = ADVANTAGES[name](batch.rows(order).padded(left, right, math.inf))
    for x, y in zip(ADVANTAGES[name](batch), moved, strict=True):
        assert torch.equal(x[order], y[:, left : left + T])


@any_batch
@given(seed=seeds, alpha=st.floats(0.1, 4.0))
def test_order_and_padding_change_no_lambda(seed: int, alpha: float) -> None:
    batch = drawn(seed)
    order = torch.randperm(B, generator=torch.Generator().manual_seed(seed))
    moved = batch.rows(order).padded(2, 3, 0.0)
    for function in (sao.length_adaptive_lambda, variants.step_length_adaptive_lambda):
        assert torch.equal(function(batch.mask, alpha)[order], function(moved.mask, alpha))


@every_loss
@any_batch
@given(seed=seeds, split=st.integers(1, B - 1), per_trajectory=st.booleans())
def test_micro_batches_add_up_to_the_whole(
    name: str, seed: int, split: int, per_trajectory: bool
) -> None:
    batch = drawn(seed)
    denominator = denominator_of(name, batch, per_trajectory=per_trajectory)
    whole, gradient = trained(name, batch, denominator)
    parts = [
        trained(name, batch.rows(rows), denominator[rows])
        for rows in (slice(split), slice(split, None))
    ]
    assert parts[0][0] + parts[1][0] == pytest.approx(whole, abs=1e-12)
    assert_rounding(torch.cat([g for _, g in parts]), gradient)


@every_loss
@any_batch
@given(seed=seeds)
def test_each_denominator_gives_the_mean_it_names(name: str, seed: int) -> None:
    batch = drawn(seed)

    def with_denominator(per_trajectory: bool) -> float:
        return trained(name, batch, denominator_of(name, batch, per_trajectory=per_trajectory))[0]

    alone = [trained(name, batch.rows(slice(i, i + 1)))[0] for i in range(B)]
    assert with_denominator(False) == pytest.approx(trained(name, batch)[0], abs=1e-12)
    assert with_denominator(True) == pytest.approx(sum(alone) / B, abs=1e-12)


# What carries no gradient


@every_loss
def test_neither_advantages_nor_targets_carry_a_gradient(name: str) -> None:
    batch = drawn(0)
    told = replace(
        batch,
        advantages=batch.advantages.clone().requires_grad_(),
        rewards=batch.rewards.clone().requires_grad_(),  # the targets of the value losses
    )
    assert torch.equal(trained(name, told)[1], trained(name, batch)[1])
    assert told.advantages.grad is None
    assert told.rewards.grad is None


@every_advantage
def test_advantages_carry_no_gradient_to_the_critic(name: str) -> None:
    batch = drawn(0)
    learning = replace(batch, values=batch.values.clone().requires_grad_())
    assert not any(x.requires_grad for x in ADVANTAGES[name](learning))


# Returns


@any_batch
@given(seed=seeds)
def test_lambda_one_gamma_one_gives_the_return_at_every_action(seed: int) -> None:
    b = drawn(seed)
    advantages, targets = sao.skip_observation_gae(b.rewards, b.values, b.mask, gamma=1.0, lam=1.0)
    to_go = torch.where(b.mask, b.rewards, 0.0).flip(1).cumsum(1).flip(1)
    assert_rounding((advantages + b.values)[b.mask], to_go[b.mask])
    assert_rounding(targets[b.mask], to_go[b.mask])


@pytest.mark.parametrize("value", ["average", "last_token"])
@any_batch
@given(seed=seeds)
def test_lambda_one_gamma_one_gives_the_return_from_the_start_of_the_step(
    value: variants.StepValue, seed: int
) -> None:
    b = drawn(seed)
    _, targets = variants.step_level_gae(
        b.rewards, b.values, b.mask, gamma=1.0, lam=1.0, value=value
    )
    to_go = torch.where(b.mask, b.rewards, 0.0).flip(1).cumsum(1).flip(1)
    for row in range(B):
        start = 0
        for t in range(T):
            if b.mask[row, t]:
                start = start if t and b.mask[row, t - 1] else t
                assert targets[row, t].item() == pytest.approx(to_go[row, start].item(), abs=1e-12)


# Small and extreme batches


@any_batch
@given(seed=seeds, reward=fractions)
def test_a_batch_of_one_has_advantage_reward_minus_value_and_no_explained_variance(
    seed: int, reward: float
) -> None:
    b = drawn(seed, rows=1)
    last = int(b.mask[0].nonzero().max())
    rewards = torch.zeros_like(b.rewards)
    rewards[0, last] = reward
    advantages, returns = sao.skip_observation_gae(rewards, b.values, b.mask, gamma=1.0, lam=1.0)
    assert torch.equal(advantages[b.mask], reward - b.values[b.mask])
    assert sao.explained_variance(b.values, returns, b.mask) is None
    one = torch.tensor([reward], dtype=torch.float64)
    assert baselines.batch_normalised(one).tolist() == [0.0]
    assert baselines.group_advantage(one).tolist() == [0.0]
    assert baselines.running_mean_advantage(one, [], 128).tolist() == [reward]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@any_batch
@given(eps_low=st.floats(0.01, 0.99), eps_high=st.floats(0.01, 10.0))
def test_the_band_is_strict_to_the_last_bit(
    dtype: torch.dtype, eps_low: float, eps_high: float
) -> None:
    edges = torch.tensor([1.0 - eps_low, 1.0 + eps_high], dtype=dtype)
    inside = torch.nextafter(edges, torch.ones(2, dtype=dtype))
    outside = torch.nextafter(edges, torch.tensor([0.0, math.inf], dtype=dtype))
    assert (sao.calibrate(edges, eps_low, eps_high) == 0.0).all()
    assert (sao.calibrate(outside, eps_low, eps_high) == 0.0).all()
    assert torch.equal(sao.calibrate(inside, eps_low, eps_high), inside)
    # PPO stops on the edge already, each side for its own sign of the advantage.
    signs = torch.tensor([-1.0, 1.0], dtype=dtype)
    assert variants.ppo_clipped(edges, signs, eps_low, eps_high).all()
    assert not variants.ppo_clipped(inside, signs, eps_low, eps_high).any()
    assert not variants.ppo_clipped(outside, -signs, eps_low, eps_high).any()


@any_batch
@given(seed=seeds, sign=st.sampled_from([-1.0, 1.0]))
def test_a_batch_masked_whole_gives_exactly_zero_and_a_clip_ratio_of_one(
    seed: int, sign: float
) -> None:
    batch = drawn(seed)
    far = replace(batch, rollout=batch.logprobs + sign * 3.0)  # e^3 > 6, e^-3 < 0.7
    loss, gradient = trained("dis", far)
    assert loss == 0.0
    assert (gradient == 0.0).all()
    ratio = sao.importance_ratio(far.logprobs, far.rollout)
    masked = far.mask & (sao.calibrate(ratio, **BAND) == 0.0)
    assert sao.masked_mean(masked.double(), far.mask).item() == 1.0


@every_loss
def test_a_batch_without_an_action_gives_exactly_zero(name: str) -> None:
    junk = drawn(0).each(lambda x: torch.full_like(x, math.nan))
    loss, gradient = trained(name, replace(junk, mask=torch.zeros_like(junk.mask)))
    assert loss == 0.0
    assert (gradient == 0.0).all()


# How the variants differ from SAO, and where they do not


@any_batch
@given(seed=seeds)
def test_a_band_that_holds_every_ratio_makes_dis_the_unmasked_loss(seed: int) -> None:
    batch = drawn(seed)
    near = replace(batch, rollout=batch.logprobs - batch.values.clamp(-0.3, 0.3))
    dis, unmasked = trained("dis", near), trained("unmasked", near)
    assert dis[0] == unmasked[0]
    assert torch.equal(dis[1], unmasked[1])


@any_batch
@given(seed=seeds)
def test_ppo_and_the_unmasked_loss_pull_alike_wherever_the_clip_lets_pass(seed: int) -> None:
    # d(r A) = r A d(log pi): the gradients are equal, the values are not.
    batch = drawn(seed)
    ratio = sao.importance_ratio(batch.logprobs, batch.rollout)
    stopped = variants.ppo_clipped(ratio, batch.advantages, **CLIP) & batch.mask
    (_, ppo), (_, unmasked) = trained("ppo", batch), trained("unmasked", batch)
    assert (ppo[stopped] == 0.0).all()
    assert_rounding(ppo[~stopped], unmasked[~stopped])


@any_batch
@given(seed=seeds)
def test_kl_is_never_negative_zero_at_home_and_its_directions_swap(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    theta, start = torch.randn(2, 6, 9, generator=generator).double().log_softmax(-1)
    assert (variants.kl_policy_start(theta, start) > 0.0).all()
    assert variants.kl_policy_start(theta, theta).tolist() == [0.0] * 6
    assert torch.equal(
        variants.kl_start_policy(theta, start), variants.kl_policy_start(start, theta)
    )


@any_batch
@given(rewards=st.lists(fractions, min_size=1, max_size=12), window=st.integers(1, 8))
def test_a_batch_seen_in_two_parts_has_the_running_means_of_the_whole(
    rewards: list[float], window: int
) -> None:
    r = torch.tensor(rewards, dtype=torch.float64)
    whole = baselines.running_mean_advantage(r, [], window)
    first = baselines.running_mean_advantage(r[:5], [], window)
    rest = baselines.running_mean_advantage(r[5:], rewards[:5], window)
    assert torch.equal(whole, torch.cat([first, rest]))
