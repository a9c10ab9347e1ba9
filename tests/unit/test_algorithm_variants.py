"""The variants against an independent reference's numbers and hand-worked cases."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
from algorithm_support import CASES, JUNK, PRECISIONS, assert_near, mask_of, padded, spoiled
from torch import Tensor

from online_sao.algorithm import sao, variants

CLIP = {"eps_low": 0.2, "eps_high": 0.28}
TWO_STEPS = torch.tensor([[False, True, True, False, False, True, False]])
"""Prompt; a step of two tokens; two observations; a step of one; an observation."""


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("value", ["average", "last_token"])
@pytest.mark.parametrize("junk", [0.0, *JUNK])
def test_step_level_advantages_equal_the_reference(
    case: dict[str, Any],
    dtype: torch.dtype,
    value: Literal["average", "last_token"],
    junk: float,
) -> None:
    given, rows = case["inputs"], case["expected"]["rows"]
    mask = mask_of(given["action_mask"])
    rewards = spoiled(padded(given["rewards"], dtype=dtype), mask, junk)
    values = spoiled(padded(given["values"], dtype=dtype), mask, junk)
    advantages, targets = variants.step_level_gae(
        rewards, values, mask, gamma=given["gamma"], lam=given["lam"], value=value
    )
    assert_near(advantages, padded([r[f"step_{value}"] for r in rows]), dtype)
    assert targets.dtype == dtype
    assert (targets[~mask] == 0).all()


@pytest.mark.parametrize("case", CASES)
def test_lambda_over_steps_equals_the_reference(case: dict[str, Any]) -> None:
    given, rows = case["inputs"], case["expected"]["rows"]
    got = variants.step_length_adaptive_lambda(mask_of(given["action_mask"]), given["alpha"])
    assert_near(got, padded([[r["lam_steps"]] for r in rows])[:, 0], torch.float64)


def test_step_level_gae_by_hand() -> None:
    rewards = torch.tensor([[9.0, 0.25, 0.0, 9.0, 9.0, 1.0, 9.0]])
    values = torch.tensor([[9.0, 0.5, 0.75, 9.0, 9.0, 0.25, 9.0]])

    def both(value: Literal["average", "last_token"], lam: float) -> tuple[list[float], ...]:
        got = variants.step_level_gae(rewards, values, TWO_STEPS, gamma=0.5, lam=lam, value=value)
        return tuple(x[0].tolist() for x in got)

    # V = (0.625, 0.25), R = (0.25, 1): delta = (0.25 + 0.125 - 0.625, 1 - 0.25) = (-0.25, 0.75).
    assert both("average", 0.0) == (
        [0.0, -0.25, -0.25, 0.0, 0.0, 0.75, 0.0],
        [0.0, 0.375, 0.375, 0.0, 0.0, 1.0, 0.0],
    )
    # lambda 1: A_1 = -0.25 + 0.5 x 0.75; the targets are the returns, 0.25 + 0.5 x 1 and 1.
    assert both("average", 1.0) == (
        [0.0, 0.125, 0.125, 0.0, 0.0, 0.75, 0.0],
        [0.0, 0.75, 0.75, 0.0, 0.0, 1.0, 0.0],
    )
    # V_1 = 0.75: delta_1 = 0.25 + 0.125 - 0.75.
    assert both("last_token", 0.0)[0] == [0.0, -0.375, -0.375, 0.0, 0.0, 0.75, 0.0]


def test_steps_of_one_token_make_step_level_gae_the_token_level() -> None:
    torch.manual_seed(0)
    mask = torch.tensor(
        [[False, True, False, True, False, True], [True, False, False, False, True, False]]
    )
    rewards, values = torch.rand(2, 6), torch.rand(2, 6)
    want = sao.skip_observation_gae(rewards, values, mask, gamma=0.9, lam=0.8)
    for value in ("average", "last_token"):
        got = variants.step_level_gae(rewards, values, mask, gamma=0.9, lam=0.8, value=value)  # type: ignore[arg-type]
        torch.testing.assert_close(got, want)


def test_an_unknown_value_of_a_step_is_refused() -> None:
    zero = torch.zeros(1, 7)
    with pytest.raises(ValueError, match="'first_token'"):
        variants.step_level_gae(zero, zero, TWO_STEPS, gamma=1.0, lam=1.0, value="first_token")  # type: ignore[arg-type]


def test_a_batch_without_an_action_has_no_steps() -> None:
    none = torch.zeros(2, 3, dtype=torch.bool)
    junk = torch.full((2, 3), math.nan)
    for x in variants.step_level_gae(junk, junk, none, gamma=1.0, lam=1.0, value="average"):
        assert x.tolist() == [[0.0] * 3] * 2
    assert variants.step_length_adaptive_lambda(none, 1.5).tolist() == [0.0, 0.0]


def test_lambda_over_steps_by_hand() -> None:
    # Two steps of three tokens in all: 1 - 1/(1.5 x 2), where the tokens give 1 - 1/(1.5 x 3).
    assert variants.step_length_adaptive_lambda(TWO_STEPS, 1.5).tolist() == pytest.approx([2 / 3])
    assert sao.length_adaptive_lambda(TWO_STEPS, 1.5).tolist() == pytest.approx([7 / 9])
    assert variants.step_length_adaptive_lambda(TWO_STEPS, 0.25).tolist() == [0.0]


@pytest.mark.parametrize("alpha", [0.0, -1.0, math.nan])
def test_an_alpha_that_is_not_positive_is_refused(alpha: float) -> None:
    for function in (variants.step_length_adaptive_lambda, sao.length_adaptive_lambda):
        with pytest.raises(ValueError, match="alpha must be above 0"):
            function(TWO_STEPS, alpha)


def test_last_tokens_and_chain_by_hand() -> None:
    mask = torch.cat([TWO_STEPS, torch.zeros(1, 7, dtype=torch.bool), ~TWO_STEPS])
    last = [[0, 0, 1, 0, 0, 1, 0], [0] * 7, [1, 0, 0, 0, 1, 0, 1]]
    chain = [[0, 1, 1, 1, 1, 1, 0], [0] * 7, [1] * 7]
    assert variants.last_tokens_of_steps(mask).int().tolist() == last
    assert variants.chain_mask(mask).int().tolist() == chain


# Four corners and the middle of PPO's clip: (r, A) -> min(r A, clip(r) A), and its slope in r A.
CORNERS = [
    (2.0, 1.0, 1.28, 0.0),  # above, A > 0: clipped
    (0.5, 1.0, 0.5, 1.0),  # below, A > 0: passes
    (2.0, -1.0, -2.0, 1.0),  # above, A < 0: passes
    (0.5, -1.0, -0.8, 0.0),  # below, A < 0: clipped
    (1.1, -3.0, -3.3, 1.0),  # inside
]


@pytest.mark.parametrize(("r", "a", "objective", "slope"), CORNERS)
def test_ppo_clip_by_hand(r: float, a: float, objective: float, slope: float) -> None:
    logprobs = torch.tensor([[-1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    rollout = torch.tensor([[-1.0 - math.log(r), -1.0]], dtype=torch.float64)
    advantages, mask = torch.tensor([[a, 0.0]]).double(), torch.ones(1, 2, dtype=torch.bool)
    loss = variants.ppo_clip_loss(logprobs, rollout, advantages, mask, **CLIP)
    loss.backward()
    assert loss.item() == pytest.approx(-objective / 2, abs=1e-12)  # the other token adds 0
    assert logprobs.grad is not None
    # d(r A)/d(log pi) = r A.
    assert logprobs.grad[0].tolist() == pytest.approx([-slope * r * a / 2, 0.0], abs=1e-12)
    ratio = torch.tensor([[r]])
    stopped = variants.ppo_clipped(ratio, torch.tensor([[a]]), **CLIP)
    assert stopped.item() is (slope == 0.0)


def test_ppo_stops_the_gradient_on_the_edges_themselves() -> None:
    ratio = torch.tensor([[3.0, 3.0, 0.5, 0.5, 3.0]])
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0, 0.0]])
    got = variants.ppo_clipped(ratio, advantages, 0.5, 2.0)
    assert got.tolist() == [[True, False, False, True, False]]


def losses(junk: float) -> list[Tensor]:
    """Both losses, by themselves, with one absurd log-probability on the mask."""
    mask = torch.ones(1, 2, dtype=torch.bool)
    found = []
    for ppo in (True, False):
        logprobs = torch.tensor([[-1.0, -1.0]], requires_grad=True)
        rollout, advantages = torch.tensor([[junk, -1.0]]), torch.tensor([[-2.0, 3.0]])
        loss = (
            variants.ppo_clip_loss(logprobs, rollout, advantages, mask, **CLIP)
            if ppo
            else variants.unmasked_loss(logprobs, rollout, advantages, mask)
        )
        loss.backward()
        assert logprobs.grad is not None
        found += [loss.detach(), logprobs.grad[0]]
    return found


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_a_recorded_logprob_that_is_no_number_adds_nothing(junk: float) -> None:
    ppo, ppo_slope, plain, plain_slope = losses(junk)
    # The other token alone: r = 1, A = 3; PPO's value is A, equation 1's A log pi = -3. Over 2.
    assert ppo.item() == -1.5
    assert plain.item() == 1.5
    assert ppo_slope.tolist() == [0.0, -1.5]
    assert plain_slope.tolist() == [0.0, -1.5]


def test_a_log_ratio_of_9999_is_finite_and_pulls_ppo_no_more() -> None:
    ppo, ppo_slope, plain, plain_slope = losses(-9999.0)
    largest = math.exp(sao.LOG_RATIO_LIMIT)
    # A = -2 passes PPO's upper edge at the clamped ratio; the clamp has no slope.
    assert ppo.item() == pytest.approx((2.0 * largest - 3.0) / 2, rel=1e-6)
    assert ppo_slope.tolist() == [0.0, -1.5]
    # Without a mask the weight is that ratio: -(e^20 x -2 x -1 + 3 x -1)/2, slope e^20.
    assert plain.item() == pytest.approx(-(2.0 * largest - 3.0) / 2, rel=1e-6)
    assert plain_slope.tolist() == pytest.approx([largest, -1.5], rel=1e-6)


def test_unmasked_loss_keeps_what_the_band_leaves_out() -> None:
    # r = (1, 2), A = (1, -1), log pi = (-1, -0.5): E = (1 x -1 + 2 x 0.5)/2 = 0, and -1/2 banded.
    logprobs = torch.tensor([[-1.0, -0.5]], dtype=torch.float64, requires_grad=True)
    rollout = logprobs.detach() - torch.tensor([[0.0, math.log(2.0)]], dtype=torch.float64)
    advantages, mask = torch.tensor([[1.0, -1.0]]), torch.ones(1, 2, dtype=torch.bool)
    loss = variants.unmasked_loss(logprobs, rollout, advantages, mask)
    loss.backward()
    assert loss.item() == pytest.approx(0.0, abs=1e-12)
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([-0.5, 1.0])
    banded = sao.dis_loss(logprobs, rollout, advantages, mask, eps_low=0.3, eps_high=0.5)
    assert banded.item() == pytest.approx(0.5, abs=1e-12)


def test_both_directions_of_the_kl_by_hand() -> None:
    theta, start = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    forward = 0.5 * math.log(2.0) + 0.5 * math.log(2.0 / 3.0)
    backward = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert variants.kl_policy_start(theta, start).tolist() == pytest.approx([forward])
    assert variants.kl_start_policy(theta, start).tolist() == pytest.approx([backward])
