"""SAO, one function per equation, in the paper's letters (arXiv 2607.07508; README.md beside it).

Shapes, everywhere in this file:
    B trajectories, T tokens, V vocabulary, C positions (any leading shape)
    logprobs, rollout_logprobs, advantages, rewards, values, targets   (B, T) floating point
    mask                                                               (B, T) bool, true on actions
    a `denominator`        None, a number, or one divisor per trajectory (B,)

What stands off the mask may be anything (NaN, inf, 1e30): it changes no value and no gradient.
So masking is a `where`, never a product (inf * 0 is NaN). Everything here is pure: no settings,
no model, no device, no logging.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before `exp`: e^20 lies outside any band one would set."""


def importance_ratio(logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """Equation 2: r_t = exp(log pi_theta(a_t|s_t) - log pi_rollout(a_t|s_t)).

    (B, T) -> (B, T). The log-ratio is clamped first, so r_t is finite wherever both are numbers
    or infinite; NaN stays NaN.
    """
    log_ratio = logprobs - rollout_logprobs
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def calibrate(ratio: Tensor, eps_low: float, eps_high: float) -> Tensor:
    """Equation 3: f(x) = x if 1 - eps_low < x < 1 + eps_high, else 0.

    Strict on both sides, whatever the sign of the advantage; NaN becomes 0.
    """
    inside = (ratio > 1.0 - eps_low) & (ratio < 1.0 + eps_high)
    return torch.where(inside, ratio, 0.0)


def dis_loss(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_low: float,
    eps_high: float,
    denominator: float | Tensor | None = None,
) -> Tensor:
    """Equation 1, negated: -E_t[ f(r_t) A_t log pi_theta(a_t|s_t) ], a scalar to minimise.

    f and A carry no gradient. E_t is the mean over action tokens; those that f masks count in
    its denominator. A batch that f masks whole gives exactly 0. For `denominator` see
    `masked_mean`.
    """
    ratio = importance_ratio(logprobs.detach(), rollout_logprobs)
    weight = torch.where(mask, calibrate(ratio, eps_low, eps_high), 0.0)
    kept = weight != 0.0
    weighted = torch.where(kept, weight * advantages.detach(), 0.0)
    return -masked_mean(weighted * torch.where(kept, logprobs, 0.0), mask, denominator)


def skip_observation_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Equations 4 and 5: token-level GAE from action token to action token.

        delta_t = r_t + gamma V(next action) - V(a_t)
        A_t     = delta_t + gamma lambda A(next action)

    Returns (advantages, targets), both (B, T) and 0 off the mask, where targets = A + V at this
    very lambda: with lambda = 1 the plain returns, which are what the critic trains on. After
    the last action token the next value is 0. `lam` is a number or one per trajectory (B,).

    Computed as G_t = r_t + gamma ((1 - lambda) V(next) + lambda G(next)), A_t = G_t - V_t: the
    same recursion, in which the values cancel exactly at lambda = 1, so that returns of equal
    rewards are equal to the last bit.
    """
    rewards = torch.where(mask, rewards, 0.0)
    values = torch.where(mask, values.detach(), 0.0)
    decay = torch.as_tensor(lam, dtype=values.dtype, device=values.device)
    targets = torch.zeros_like(values)
    next_value = torch.zeros_like(values[:, 0])
    next_target = torch.zeros_like(next_value)
    for t in range(values.shape[1] - 1, -1, -1):
        action = mask[:, t]
        ahead = (1.0 - decay) * next_value + decay * next_target
        target = rewards[:, t] + gamma * ahead
        targets[:, t] = torch.where(action, target, 0.0)
        next_target = torch.where(action, target, next_target)
        next_value = torch.where(action, values[:, t], next_value)
    return targets - values, targets


def length_adaptive_lambda(mask: Tensor, alpha: float) -> Tensor:
    """lambda = 1 - 1/(alpha l), floored at 0; l = action tokens of the trajectory.

    (B, T) -> (B,), in double precision. A trajectory without an action gets 0. Raises
    ValueError unless alpha > 0.
    """
    return adaptive_lambda(mask.sum(dim=-1, dtype=torch.float64), alpha)


def adaptive_lambda(length: Tensor, alpha: float) -> Tensor:
    """lambda = 1 - 1/(alpha l), floored at 0, for lengths l (B,), tokens or steps: (B,).

    A length of 0 gets 0. Raises ValueError unless alpha > 0.
    """
    if not alpha > 0.0:
        raise ValueError(f"alpha must be above 0, got {alpha}")
    return (1.0 - 1.0 / (alpha * length)).clamp(min=0.0)


def value_loss(
    values: Tensor, targets: Tensor, mask: Tensor, *, denominator: float | Tensor | None = None
) -> Tensor:
    """Mean of (V - R)^2 over action tokens, the linear head's loss. `masked_mean`'s denominator."""
    error = torch.where(mask, values, 0.0) - torch.where(mask, targets, 0.0).detach()
    return masked_mean(error.square(), mask, denominator)


def bounded_value_loss(
    logits: Tensor, targets: Tensor, mask: Tensor, *, denominator: float | Tensor | None = None
) -> Tensor:
    """Cross-entropy of V = sigmoid(logit) against targets in [0, 1], over action tokens."""
    cross_entropy = F.binary_cross_entropy_with_logits(
        torch.where(mask, logits, 0.0),
        torch.where(mask, targets, 0.0).detach(),
        reduction="none",
    )
    return masked_mean(cross_entropy, mask, denominator)


def explained_variance(values: Tensor, targets: Tensor, mask: Tensor) -> float | None:
    """EV = 1 - Var(R - V)/Var(R) over all action tokens; None when Var(R) = 0."""
    v, r = values[mask].double(), targets[mask].double()
    if r.numel() == 0 or bool(r.min() == r.max()):
        return None
    return float(1.0 - (r - v).var(correction=0) / r.var(correction=0))


def log_policy(logits: Tensor, temperature: Tensor | float) -> Tensor:
    """log pi(.|s) = log-softmax(logits / T): (C, V) -> (C, V); T is a number or (C, 1)."""
    if not isinstance(temperature, Tensor) and temperature == 1.0:
        return logits.log_softmax(dim=-1)  # a division by 1 is a pass over (C, V) for nothing
    return (logits / temperature).log_softmax(dim=-1)


def kl_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Full-softmax KL(p || q) = sum_v p_v (log p_v - log q_v): (C, V), (C, V) -> (C,), nats.

    Log-probabilities are finite, as log-softmax gives them. `variants` names its two uses.
    """
    divergence: Tensor = torch.linalg.vecdot(log_p.exp(), log_p - log_q)
    return divergence


def entropy(log_p: Tensor) -> Tensor:
    """H(p) = -sum_v p_v log p_v: (C, V) -> (C,), nats; log-probabilities are finite."""
    negative: Tensor = torch.linalg.vecdot(log_p.exp(), log_p)
    return -negative


def masked_mean(x: Tensor, mask: Tensor, denominator: float | Tensor | None = None) -> Tensor:
    """Sum of x over the mask, divided by the number of true entries (at least 1), or else by
    `denominator`, that of a whole batch of which this is a part (see `mean_denominator`).
    """
    x = torch.where(mask, x, 0.0)
    if denominator is None:
        return x.sum() / mask.sum().clamp(min=1)
    divisor = torch.as_tensor(denominator, dtype=x.dtype, device=x.device)
    return (x.sum(dim=-1) / divisor).sum()


def mean_denominator(mask: Tensor, *, per_trajectory: bool) -> Tensor:
    """What each of the B trajectories divides its token sum by, for a mean over the batch.

    Over tokens: N, all action tokens of the batch. Per trajectory first: l_i times the number
    of trajectories that have an action. (B, T) -> (B,), so that any split of the batch into
    micro-batches adds up to the same mean.
    """
    lengths = mask.sum(dim=-1, dtype=torch.float64)
    if not per_trajectory:
        return lengths.sum().clamp(min=1.0).expand_as(lengths)
    return lengths.clamp(min=1.0) * (lengths > 0).sum().clamp(min=1)
