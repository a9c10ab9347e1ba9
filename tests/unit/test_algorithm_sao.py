"""The equations against an independent reference's numbers, hand-worked cases and identities."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from online_sao.algorithm import sao

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "sao_vectors.json").read_text()
)["cases"]
JUNK = (math.nan, math.inf, -math.inf, 1e30, -9999.0)
TOLERANCE = {"rtol": 0.0, "atol": 1e-9}


def padded(rows: list[list[float]], fill: float) -> Tensor:
    """Ragged rows as (B, T) doubles, `fill` behind each row's end."""
    width = max(len(row) for row in rows)
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows], dtype=torch.float64)


def mask_of(rows: list[list[bool]]) -> Tensor:
    return padded([[float(x) for x in row] for row in rows], 0.0).bool()


def spoiled(x: Tensor, mask: Tensor, junk: float) -> Tensor:
    return torch.where(mask, x, junk)


@pytest.fixture(params=range(len(CASES)))
def case(request: pytest.FixtureRequest) -> dict[str, Any]:
    return CASES[request.param]


@pytest.mark.parametrize("junk", [0.0, *JUNK])
def test_dis_loss_and_gradient_equal_the_reference(case: dict[str, Any], junk: float) -> None:
    given_, want = case["inputs"], case["expected"]["dis"]
    mask = mask_of(given_["action_mask"])
    names = ("logprobs", "rollout_logprobs", "advantages")
    logprobs, rollout, advantages = (spoiled(padded(given_[n], 0.0), mask, junk) for n in names)
    logprobs.requires_grad_()
    band = {"eps_low": given_["eps_low"], "eps_high": given_["eps_high"]}
    loss = sao.dis_loss(logprobs, rollout, advantages, mask, **band)
    loss.backward()
    assert loss.item() == pytest.approx(want["loss"], abs=1e-9)
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, padded(want["grad"], 0.0), **TOLERANCE)


def test_ratio_and_band_equal_the_reference(case: dict[str, Any]) -> None:
    given_, want = case["inputs"], case["expected"]["dis"]
    mask = mask_of(given_["action_mask"])
    ratio = sao.importance_ratio(
        padded(given_["logprobs"], 0.0), padded(given_["rollout_logprobs"], 0.0)
    )
    torch.testing.assert_close(ratio[mask], padded(want["ratio"], 0.0)[mask], **TOLERANCE)
    kept = sao.calibrate(ratio, given_["eps_low"], given_["eps_high"]) != 0
    assert torch.equal(kept & mask, mask_of(want["kept"]))
    clipped = (~kept & mask).sum() / mask.sum()
    assert clipped.item() == pytest.approx(want["clip_ratio"], abs=1e-7)


@pytest.mark.parametrize("junk", [0.0, *JUNK])
def test_gae_targets_and_lambda_equal_the_reference(case: dict[str, Any], junk: float) -> None:
    given_, rows = case["inputs"], case["expected"]["rows"]
    mask = mask_of(given_["action_mask"])
    rewards = spoiled(padded(given_["rewards"], 0.0), mask, junk)
    values = spoiled(padded(given_["values"], 0.0), mask, junk)
    gamma = given_["gamma"]
    advantages, targets = sao.skip_observation_gae(
        rewards, values, mask, gamma=gamma, lam=given_["lam"]
    )
    torch.testing.assert_close(advantages, padded([r["gae"] for r in rows], 0.0), **TOLERANCE)
    torch.testing.assert_close(targets, padded([r["returns"] for r in rows], 0.0), **TOLERANCE)
    lam = sao.length_adaptive_lambda(mask, given_["alpha"])
    want = torch.tensor([r["lam_tokens"] for r in rows], dtype=torch.float64)
    torch.testing.assert_close(lam, want, **TOLERANCE)


@pytest.mark.parametrize("junk", [0.0, *JUNK])
def test_explained_variance_equals_the_reference(case: dict[str, Any], junk: float) -> None:
    given_, want = case["inputs"], case["expected"]
    mask = mask_of(given_["action_mask"])
    values = spoiled(padded(given_["values"], 0.0), mask, junk)
    returns = spoiled(padded([r["returns"] for r in want["rows"]], 0.0), mask, junk)
    got = sao.explained_variance(values, returns, mask)
    assert got == (
        None
        if want["explained_variance"] is None
        else pytest.approx(want["explained_variance"], abs=1e-9)
    )


def test_band_is_strict_on_both_sides() -> None:
    x = torch.tensor([0.5, 0.500001, 1.0, 2.999999, 3.0, math.nan, math.inf, 0.0])
    x = x.double()
    got = sao.calibrate(x, 0.5, 2.0)
    assert got.tolist() == [0.0, x[1].item(), 1.0, x[3].item(), 0.0, 0.0, 0.0, 0.0]


def test_hand_worked_dis_loss() -> None:
    # r = (1, 2), A = (1, -1), log pi = (-1, -0.5): E = (1*1*-1 + 2*-1*-0.5)/2 = 0; then drop one.
    logprobs = torch.tensor([[-1.0, -0.5]], dtype=torch.float64)
    rollout = logprobs - torch.tensor([[0.0, math.log(2.0)]], dtype=torch.float64)
    advantages, mask = torch.tensor([[1.0, -1.0]]), torch.ones(1, 2, dtype=torch.bool)
    wide = sao.dis_loss(logprobs, rollout, advantages, mask, eps_low=0.3, eps_high=5.0)
    narrow = sao.dis_loss(logprobs, rollout, advantages, mask, eps_low=0.3, eps_high=0.5)
    assert wide.item() == pytest.approx(0.0, abs=1e-12)
    assert narrow.item() == pytest.approx(0.5, abs=1e-12)  # 1/2: the masked token still counts


@pytest.mark.parametrize("reported", [math.nan, -math.inf, -9999.0, 1e-9, math.inf])
def test_an_absurd_rollout_logprob_gives_zero_and_finite_gradients(reported: float) -> None:
    logprobs = torch.full((1, 2), -3.0, requires_grad=True)
    rollout = torch.tensor([[reported, reported]])
    ones = torch.ones(1, 2)
    loss = sao.dis_loss(logprobs, rollout, ones, ones.bool(), eps_low=0.3, eps_high=5.0)
    loss.backward()
    assert loss.item() == 0.0
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0.0, 0.0]]


def test_ratio_of_a_log_ratio_of_9999_is_finite() -> None:
    ratio = sao.importance_ratio(torch.tensor([0.0, -9999.0]), torch.tensor([-9999.0, 0.0]))
    assert torch.isfinite(ratio).all()


def test_reward_before_trailing_observations_reaches_every_action() -> None:
    mask = torch.tensor([[False, True, True, False, True, False]])
    rewards = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0, 9.0]])
    values = torch.tensor([[9.0, 0.5, 0.25, 9.0, 0.75, 9.0]])
    advantages, targets = sao.skip_observation_gae(rewards, values, mask, gamma=1.0, lam=0.0)
    # lambda 0: delta alone. 0.25 - 0.5; 0.75 - 0.25 over the observation; 1 - 0.75.
    assert advantages.tolist() == [[0.0, -0.25, 0.5, 0.0, 0.25, 0.0]]
    assert targets.tolist() == [[0.0, 0.25, 0.75, 0.0, 1.0, 0.0]]


def test_lambda_per_trajectory_equals_one_call_each() -> None:
    torch.manual_seed(0)
    rewards, values = torch.rand(3, 7), torch.rand(3, 7)
    mask = torch.rand(3, 7) > 0.3
    lam = torch.tensor([0.0, 0.5, 1.0])
    together, _ = sao.skip_observation_gae(rewards, values, mask, gamma=0.9, lam=lam)
    for row in range(3):
        one = slice(row, row + 1)
        alone, _ = sao.skip_observation_gae(
            rewards[one], values[one], mask[one], gamma=0.9, lam=float(lam[row])
        )
        assert torch.equal(together[one], alone)


def test_length_adaptive_lambda_by_hand() -> None:
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    # 1 - 1/6; 1 - 1/1.5; no action. And alpha 0.5, l 1: 1 - 2, floored.
    assert sao.length_adaptive_lambda(mask, 1.5).tolist() == pytest.approx([5 / 6, 1 / 3, 0.0])
    assert sao.length_adaptive_lambda(mask, 0.5).tolist() == pytest.approx([0.5, 0.0, 0.0])


def test_value_losses_by_hand() -> None:
    values, mask = torch.tensor([[0.5, 1.0, 7.0]]), torch.tensor([[True, True, False]])
    targets = torch.tensor([[1.0, 0.0, math.nan]])
    assert sao.value_loss(values, targets, mask).item() == pytest.approx((0.25 + 1.0) / 2)
    zero = torch.zeros(1, 3)
    assert sao.bounded_value_loss(zero, targets, mask).item() == pytest.approx(math.log(2.0))


def test_batch_of_one_has_advantage_reward_minus_value_and_no_explained_variance() -> None:
    mask = torch.tensor([[False, True, True, True]])
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    values = torch.tensor([[0.0, 0.2, 0.7, 0.4]])
    advantages, returns = sao.skip_observation_gae(rewards, values, mask, gamma=1.0, lam=1.0)
    torch.testing.assert_close(advantages, torch.tensor([[0.0, 0.8, 0.3, 0.6]]))
    assert sao.explained_variance(values, returns, mask) is None


@pytest.mark.parametrize("reward", [0.1, 0.7, 1.0])
def test_returns_of_equal_rewards_are_equal_to_the_last_bit(reward: float) -> None:
    values = torch.rand(4, 50)
    mask = torch.rand(4, 50) > 0.2
    mask[:, -1] = True
    rewards = torch.zeros(4, 50)
    rewards[:, -1] = reward
    _, returns = sao.skip_observation_gae(rewards, values, mask, gamma=1.0, lam=1.0)
    assert sao.explained_variance(values, returns, mask) is None


def test_kl_and_entropy_by_hand() -> None:
    p, q = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
    forward = 0.5 * math.log(2.0) + 0.5 * math.log(2.0 / 3.0)
    backward = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert sao.kl_divergence(p, q).item() == pytest.approx(forward)
    assert sao.kl_divergence(q, p).item() == pytest.approx(backward)
    assert sao.entropy(p).item() == pytest.approx(math.log(2.0))
    certain = torch.tensor([[100.0, -900.0]]).log_softmax(-1)
    assert sao.entropy(certain).item() == pytest.approx(0.0)
    assert sao.kl_divergence(certain, p[None]).item() == pytest.approx(math.log(2.0))


def test_log_policy_divides_by_the_temperature_first() -> None:
    got = sao.log_policy(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5]]))
    assert got[0, 0].item() == pytest.approx(-math.log1p(math.exp(-2.0)))
    logits = torch.randn(3, 5)
    assert torch.equal(sao.log_policy(logits, 1.0), sao.log_policy(logits, torch.ones(3, 1)))


seeds = st.integers(0, 2**31 - 1)
fractions = st.floats(0.0, 1.0)


def drawn(seed: int, b: int = 4, t: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    """(rewards, values, mask) in doubles; each row has an action."""
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.rand(b, t, generator=generator, dtype=torch.float64)
    values = torch.randn(b, t, generator=generator, dtype=torch.float64)
    mask = torch.rand(b, t, generator=generator) > 0.4
    mask[:, -1] |= ~mask.any(dim=1)
    return rewards, values, mask


@settings(max_examples=50)
@given(seed=seeds, gamma=fractions, lam=fractions)
def test_gae_equals_gae_with_the_observations_cut_out(seed: int, gamma: float, lam: float) -> None:
    rewards, values, mask = drawn(seed)
    got, _ = sao.skip_observation_gae(rewards, values, mask, gamma=gamma, lam=lam)
    for row in range(len(mask)):
        r, v = rewards[row][mask[row]][None], values[row][mask[row]][None]
        all_actions = torch.ones_like(r, dtype=torch.bool)
        cut, _ = sao.skip_observation_gae(r, v, all_actions, gamma=gamma, lam=lam)
        assert torch.equal(got[row][mask[row]], cut[0])


@settings(max_examples=50)
@given(seed=seeds)
def test_lambda_one_gamma_one_gives_the_return_at_every_action(seed: int) -> None:
    rewards, values, mask = drawn(seed)
    advantages, targets = sao.skip_observation_gae(rewards, values, mask, gamma=1.0, lam=1.0)
    kept = torch.where(mask, rewards, 0.0)
    to_go = kept.flip(1).cumsum(1).flip(1)
    torch.testing.assert_close((advantages + values)[mask], to_go[mask])
    torch.testing.assert_close(targets[mask], to_go[mask])


@settings(max_examples=50)
@given(seed=seeds, junk=st.sampled_from(JUNK), lam=fractions)
def test_what_stands_off_the_mask_changes_nothing(seed: int, junk: float, lam: float) -> None:
    rewards, values, mask = drawn(seed)
    logprobs = -values.abs()
    rollout = logprobs - 0.1 * rewards

    def everything(fill: float | None) -> list[Tensor]:
        def put(x: Tensor) -> Tensor:
            return x.clone() if fill is None else torch.where(mask, x, fill)

        theta, v = put(logprobs).requires_grad_(), put(values).requires_grad_()
        advantages, _ = sao.skip_observation_gae(put(rewards), v, mask, gamma=0.9, lam=lam)
        _, returns = sao.skip_observation_gae(put(rewards), v, mask, gamma=0.9, lam=1.0)
        dis = sao.dis_loss(theta, put(rollout), put(advantages), mask, eps_low=0.3, eps_high=5.0)
        loss = dis + sao.value_loss(v, put(returns), mask)
        loss.backward()
        ev = sao.explained_variance(v.detach(), put(returns), mask)
        assert theta.grad is not None
        assert v.grad is not None
        return [advantages, returns, loss, theta.grad, v.grad, torch.tensor(ev or 0.0)]

    for clean, dirty in zip(everything(None), everything(junk), strict=True):
        assert torch.equal(clean, dirty)


@settings(max_examples=50)
@given(seed=seeds, per_trajectory=st.booleans())
def test_order_and_padding_change_nothing_but_rounding(seed: int, per_trajectory: bool) -> None:
    rewards, values, mask = drawn(seed)
    order = torch.randperm(4, generator=torch.Generator().manual_seed(seed))
    logprobs, rollout = -values.abs(), -values.abs() - 0.1 * rewards

    def gradient(rows: Tensor, pad: int) -> Tensor:
        def grown(x: Tensor, fill: float) -> Tensor:
            return torch.nn.functional.pad(x[rows], (0, pad), value=fill)

        m = grown(mask, 0)
        theta = grown(logprobs, math.nan).requires_grad_()
        denominator = sao.mean_denominator(m, per_trajectory=per_trajectory)
        loss = sao.dis_loss(
            theta, grown(rollout, math.inf), grown(values, 1e30), m,
            eps_low=0.3, eps_high=5.0, denominator=denominator,
        )  # fmt: skip
        loss.backward()
        assert theta.grad is not None
        return theta.grad

    plain = gradient(torch.arange(4), 0)
    moved = gradient(order, 3)
    torch.testing.assert_close(moved[:, :12], plain[order], rtol=1e-12, atol=1e-15)
    assert (moved[:, 12:] == 0).all()


@settings(max_examples=50)
@given(seed=seeds, split=st.integers(1, 3), per_trajectory=st.booleans())
def test_micro_batches_add_up_to_the_whole(seed: int, split: int, per_trajectory: bool) -> None:
    rewards, values, mask = drawn(seed)
    logprobs, rollout = -values.abs(), -values.abs() - 0.1 * rewards
    denominator = sao.mean_denominator(mask, per_trajectory=per_trajectory)

    def losses(rows: slice) -> tuple[float, float]:
        d = denominator[rows]
        dis = sao.dis_loss(
            logprobs[rows], rollout[rows], values[rows], mask[rows],
            eps_low=0.3, eps_high=5.0, denominator=d,
        )  # fmt: skip
        return dis.item(), sao.value_loss(
            values[rows], rewards[rows], mask[rows], denominator=d
        ).item()

    first, second, whole = losses(slice(split)), losses(slice(split, None)), losses(slice(None))
    assert first[0] + second[0] == pytest.approx(whole[0], abs=1e-12)
    assert first[1] + second[1] == pytest.approx(whole[1], abs=1e-12)
    if not per_trajectory:
        unsplit = sao.value_loss(values, rewards, mask).item()
        assert whole[1] == pytest.approx(unsplit, abs=1e-12)
    else:
        per_row = [
            sao.value_loss(values[i : i + 1], rewards[i : i + 1], mask[i : i + 1]).item()
            for i in range(4)
        ]
        assert whole[1] == pytest.approx(sum(per_row) / 4, abs=1e-12)


@settings(max_examples=50)
@given(seed=seeds)
def test_a_batch_masked_whole_gives_exactly_zero(seed: int) -> None:
    _, values, mask = drawn(seed)
    theta = (-values.abs()).requires_grad_()
    loss = sao.dis_loss(
        theta, theta.detach() - 3.0, values, mask, eps_low=0.3, eps_high=5.0
    )  # e^3 > 6
    loss.backward()
    assert loss.item() == 0.0
    assert theta.grad is not None
    assert (theta.grad == 0).all()
