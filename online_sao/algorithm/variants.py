"""What the paper compares SAO with, its other choices of action and clipping; one function each.

Shapes and promises are those of `sao.py`; also
    a step                 a maximal run of consecutive action tokens: one turn of the dialogue
    S                      the largest number of steps of a trajectory in the batch
What stands off the mask may be anything (NaN, inf, 1e30): it changes no value and no gradient.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from online_sao.algorithm import sao

StepValue = Literal["average", "last_token"]


def step_level_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    value: StepValue,
) -> tuple[Tensor, Tensor]:
    """GAE whose actions are steps (paper, A.1), spread evenly over the tokens of each step.

        V(S_i)  = mean of the step's token values ("average"), or its last token's ("last_token")
        delta_i = R_i + gamma V(S_{i+1}) - V(S_i),   R_i the sum of the step's rewards
        A_i     = delta_i + gamma lambda A_{i+1}

    Returns (advantages, targets), both (B, T) and 0 off the mask; the target of every token of
    step i is A_i + V(S_i) at this very lambda: with lambda = 1 the return from the start of the
    step. `lam` is a number or one per trajectory (B,). Raises ValueError for another `value`.
    """
    step, count = _step_index(mask), _step_count(mask)
    if value == "average":
        length = _step_sum(torch.where(mask, 1.0, 0.0).to(values.dtype), step, count)
        step_values = _step_sum(torch.where(mask, values.detach(), 0.0), step, count)
        step_values = step_values / length.clamp(min=1.0)
    elif value == "last_token":
        last = last_tokens_of_steps(mask)
        step_values = _step_sum(torch.where(last, values.detach(), 0.0), step, count)
    else:
        raise ValueError(f'a step\'s value is "average" or "last_token", not {value!r}')
    step_rewards = _step_sum(torch.where(mask, rewards, 0.0), step, count)
    steps = torch.arange(step_values.shape[1], device=mask.device) < count[:, None]
    by_step = sao.skip_observation_gae(step_rewards, step_values, steps, gamma=gamma, lam=lam)
    advantages, targets = (torch.where(mask, x.gather(1, step), 0.0) for x in by_step)
    return advantages, targets


def step_length_adaptive_lambda(mask: Tensor, alpha: float) -> Tensor:
    """lambda = 1 - 1/(alpha x number of steps), floored at 0 (paper, A.1).

    (B, T) -> (B,), in double precision. A trajectory without an action gets 0. Raises
    ValueError unless alpha > 0.
    """
    return sao.adaptive_lambda(_step_count(mask).double(), alpha)


def last_tokens_of_steps(mask: Tensor) -> Tensor:
    """The last token of each step: (B, T) -> (B, T) bool.

    The mask of the value loss under "last_token": all other tokens are left out of it.
    """
    following = torch.zeros_like(mask)
    following[:, :-1] = mask[:, 1:]
    return mask & ~following


def chain_mask(mask: Tensor) -> Tensor:
    """All tokens from a trajectory's first action to its last: (B, T) -> (B, T) bool.

    The observations between actions are included: `skip_observation_gae` over this mask is the
    GAE that does not skip them.
    """
    begun = mask.cumsum(dim=-1) > 0
    to_come = mask.flip(-1).cumsum(dim=-1).flip(-1) > 0
    return begun & to_come


def ppo_clip_loss(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_low: float,
    eps_high: float,
    denominator: float | Tensor | None = None,
) -> Tensor:
    """PPO's clipped objective, negated: -E_t[ min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) ].

    r is `sao.importance_ratio` against the recorded log-probabilities, and carries the gradient
    except where `ppo_clipped`; A carries none. Beyond the clamp of the log-ratio r is constant.
    A token whose log-ratio is not finite adds 0 and has no gradient, and counts in E_t.
    """
    usable = mask & _comparable(logprobs, rollout_logprobs)
    ratio = sao.importance_ratio(
        torch.where(usable, logprobs, 0.0), torch.where(usable, rollout_logprobs, 0.0)
    )
    advantages = torch.where(usable, advantages.detach(), 0.0)
    stopped = ppo_clipped(ratio, advantages, eps_low, eps_high)
    nearest = ratio.detach().clamp(1.0 - eps_low, 1.0 + eps_high)
    return -sao.masked_mean(torch.where(stopped, nearest, ratio) * advantages, mask, denominator)


def ppo_clipped(ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float) -> Tensor:
    """Where PPO's clip stops the gradient: (B, T), (B, T) -> (B, T) bool.

    A > 0 and r >= 1 + eps_high, or A < 0 and r <= 1 - eps_low; the other two corners pass,
    which is what equation 3 masks besides.
    """
    above = (advantages > 0.0) & (ratio >= 1.0 + eps_high)
    below = (advantages < 0.0) & (ratio <= 1.0 - eps_low)
    return above | below


def unmasked_loss(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    denominator: float | Tensor | None = None,
) -> Tensor:
    """Equation 1 without equation 3's band, negated: -E_t[ r_t A_t log pi_theta(a_t|s_t) ].

    r and A carry no gradient. A token whose log-ratio is not finite adds 0 and counts in E_t.
    """
    comparable = _comparable(logprobs, rollout_logprobs)
    return sao.dis_loss(
        logprobs,
        torch.where(comparable, rollout_logprobs, math.nan),  # which every band leaves out
        advantages,
        mask,
        eps_low=math.inf,
        eps_high=math.inf,
        denominator=denominator,
    )


def kl_policy_start(log_theta: Tensor, log_start: Tensor) -> Tensor:
    """KL(pi_theta || pi_start), full softmax: (C, V), (C, V) -> (C,), nats."""
    return sao.kl_divergence(log_theta, log_start)


def kl_start_policy(log_theta: Tensor, log_start: Tensor) -> Tensor:
    """KL(pi_start || pi_theta), full softmax: (C, V), (C, V) -> (C,), nats."""
    return sao.kl_divergence(log_start, log_theta)


def _comparable(logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """Where the log-ratio is a finite number: (B, T) bool."""
    return (logprobs.detach() - rollout_logprobs).isfinite()


def _first_tokens_of_steps(mask: Tensor) -> Tensor:
    before = torch.zeros_like(mask)
    before[:, 1:] = mask[:, :-1]
    return mask & ~before


def _step_count(mask: Tensor) -> Tensor:
    """(B, T) -> (B,) int."""
    return _first_tokens_of_steps(mask).sum(dim=-1)


def _step_index(mask: Tensor) -> Tensor:
    """The step each token belongs to, from 0: (B, T) int; meaningless off the mask, but valid."""
    return (_first_tokens_of_steps(mask).cumsum(dim=-1) - 1).clamp(min=0)


def _step_sum(x: Tensor, step: Tensor, count: Tensor) -> Tensor:
    """Sum of x, which is 0 off the mask, over each step: (B, T) -> (B, S)."""
    width = int(count.max().clamp(min=1))
    return x.new_zeros(len(x), width).scatter_add(1, step, x)
