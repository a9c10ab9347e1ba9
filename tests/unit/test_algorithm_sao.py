"""The equations against an independent reference's numbers and hand-worked cases."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from algorithm_support import CASES, JUNK, PRECISIONS, assert_near, mask_of, padded, spoiled

from online_sao.algorithm import sao


@pytest.fixture(params=range(len(CASES)))
def case(request: pytest.FixtureRequest) -> dict[str, Any]:
    return CASES[request.param]


@pytest.fixture(params=PRECISIONS, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.mark.parametrize("junk", [0.0, *JUNK])
def test_dis_loss_and_gradient_equal_the_reference(
    case: dict[str, Any], dtype: torch.dtype, junk: float
) -> None:
    given, want = case["inputs"], case["expected"]["dis"]
    mask = mask_of(given["action_mask"])
    names = ("logprobs", "rollout_logprobs", "advantages")
    logprobs, rollout, advantages = (
        spoiled(padded(given[n], dtype=dtype), mask, junk) for n in names
    )
    logprobs.requires_grad_()
    band = {"eps_low": given["eps_low"], "eps_high": given["eps_high"]}
    loss = sao.dis_loss(logprobs, rollout, advantages, mask, **band)
    loss.backward()
    assert loss.item() == pytest.approx(want["loss"], abs=PRECISIONS[dtype])
    assert logprobs.grad is not None
    assert_near(logprobs.grad, padded(want["grad"]), dtype)


def test_ratio_and_band_equal_the_reference(case: dict[str, Any], dtype: torch.dtype) -> None:
    given, want = case["inputs"], case["expected"]["dis"]
    mask = mask_of(given["action_mask"])
    ratio = sao.importance_ratio(
        padded(given["logprobs"], dtype=dtype), padded(given["rollout_logprobs"], dtype=dtype)
    )
    # exp makes an error relative: 1e-5 up to 10, wider than any band, 1e-6 of the ratio beyond.
    reference = padded(want["ratio"])[mask]
    scale = (10.0 / reference).clamp(max=1.0)
    assert_near(ratio[mask] * scale.to(dtype), reference * scale, dtype)
    kept = sao.calibrate(ratio, given["eps_low"], given["eps_high"]) != 0
    assert torch.equal(kept & mask, mask_of(want["kept"]))
    clipped = (~kept & mask).sum() / mask.sum()
    assert clipped.item() == pytest.approx(want["clip_ratio"], abs=1e-7)


def test_no_ratio_of_the_reference_is_so_near_an_edge_that_precision_could_decide(
    case: dict[str, Any],
) -> None:
    # So that what is kept may be asked of both types without a tolerance: the nearest ratio
    # of all cases is 0.007 from its edge, and single precision errs by less than 1e-5.
    given = case["inputs"]
    ratio = padded(case["expected"]["dis"]["ratio"])[mask_of(given["action_mask"])]
    for edge in (1.0 - given["eps_low"], 1.0 + given["eps_high"]):
        assert (ratio - edge).abs().min().item() > 100 * PRECISIONS[torch.float32]


@pytest.mark.parametrize("junk", [0.0, *JUNK])
def test_gae_targets_and_lambda_equal_the_reference(
    case: dict[str, Any], dtype: torch.dtype, junk: float
) -> None:
    given, rows = case["inputs"], case["expected"]["rows"]
    mask = mask_of(given["action_mask"])
    rewards = spoiled(padded(given["rewards"], dtype=dtype), mask, junk)
    values = spoiled(padded(given["values"], dtype=dtype), mask, junk)
    advantages, targets = sao.skip_observation_gae(
        rewards, values, mask, gamma=given["gamma"], lam=given["lam"]
    )
    assert_near(advantages, padded([r["gae"] for r in rows]), dtype)
    assert_near(targets, padded([r["returns"] for r in rows]), dtype)
    lam = sao.length_adaptive_lambda(mask, given["alpha"])  # in doubles whatever the batch is in
    assert_near(lam, padded([[r["lam_tokens"]] for r in rows])[:, 0], torch.float64)


@pytest.mark.parametrize("junk", [0.0, *JUNK])
def test_explained_variance_equals_the_reference(
    case: dict[str, Any], dtype: torch.dtype, junk: float
) -> None:
    given, want = case["inputs"], case["expected"]
    mask = mask_of(given["action_mask"])
    values = spoiled(padded(given["values"], dtype=dtype), mask, junk)
    returns = spoiled(padded([r["returns"] for r in want["rows"]], dtype=dtype), mask, junk)
    got = sao.explained_variance(values, returns, mask)
    if want["explained_variance"] is None:
        assert got is None
    else:
        assert got == pytest.approx(want["explained_variance"], abs=PRECISIONS[dtype])


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


def test_denominators_by_hand() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 1, 0], [0, 0, 0, 0]], dtype=torch.bool)
    # Four actions in all; or each its own number times the two trajectories that have any.
    assert sao.mean_denominator(mask, per_trajectory=False).tolist() == [4.0, 4.0, 4.0]
    assert sao.mean_denominator(mask, per_trajectory=True).tolist() == [6.0, 2.0, 2.0]


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
