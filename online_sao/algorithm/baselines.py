"""Advantages without a critic, which the paper compares SAO with; pure torch.

A reward that is not finite is a ValueError everywhere here: a failed judge is no judgement.
`rewards` and `advantages` are floating point tensors; statistics are taken in double precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""


def running_mean_advantage(
    rewards: Tensor, history: Sequence[float] | Tensor, window: int
) -> Tensor:
    """A_i = r_i - mean of the last `window` rewards seen before r_i: (B,) -> (B,).

    Seen before are `history` (H,), oldest first, and then the rewards of this batch that stand
    before r_i; its own is left out. With none seen the baseline is 0. The paper's window is 128
    over all prompts online, 8 per prompt in its ablation. Raises ValueError for a window below 1.
    """
    if window < 1:
        raise ValueError(f"a window holds at least 1 reward, got {window}")
    past = torch.as_tensor(history, dtype=torch.float64, device=rewards.device)
    seen = torch.cat([_finite(past), _finite(rewards)])
    baselines = [
        seen[max(0, end - window) : end].mean() if end else seen.new_zeros(())
        for end in range(len(past), len(seen))
    ]
    if not baselines:
        return torch.zeros_like(rewards)
    return (seen[len(past) :] - torch.stack(baselines)).to(rewards.dtype)


def group_advantage(rewards: Tensor) -> Tensor:
    """GRPO: A = (r - mean)/(population std + 1e-6) within each group: (..., G) -> (..., G).

    A group of equal rewards gives exactly 0.
    """
    return _standardised(rewards)


def batch_normalised(advantages: Tensor) -> Tensor:
    """SPO: (A - mean)/(population std + 1e-6) over the batch: (B,) -> (B,).

    A batch of one, or of equal advantages, gives exactly 0.
    """
    return _standardised(advantages)


@dataclass(frozen=True)
class BetaTracker:
    """SPO's running success rate of one prompt: counts of a Beta distribution, forgotten with
    the distance the policy has moved. The advantage of a visit is reward - `value` before it.
    """

    successes: float
    failures: float

    def __post_init__(self) -> None:
        """Raises ValueError unless both counts are finite and not negative."""
        if not (0.0 <= self.successes < math.inf and 0.0 <= self.failures < math.inf):
            raise ValueError(f"counts are finite and not negative, got {self}")

    @property
    def value(self) -> float:
        """Success rate, successes/(successes + failures); 1/2 when there are no counts."""
        total = self.successes + self.failures
        return self.successes / total if total > 0.0 else 0.5

    def forgotten(self, kl: float, half_life: float) -> BetaTracker:
        """Both counts times 2^(-kl/half_life); kl and half-life in nats.

        A kl below 0 (an estimate's rounding) counts as 0: nothing is learned by forgetting.
        Raises ValueError for a kl that is not finite, or a half-life that is not above 0.
        """
        if not math.isfinite(kl) or not half_life > 0.0:
            raise ValueError(f"kl must be finite and half_life above 0, got {kl}, {half_life}")
        kept = 2.0 ** (-max(kl, 0.0) / half_life)
        return BetaTracker(self.successes * kept, self.failures * kept)

    def visited(self, reward: float) -> BetaTracker:
        """successes + r, failures + 1 - r. Raises ValueError for a reward outside [0, 1]."""
        if not 0.0 <= reward <= 1.0:
            raise ValueError(f"a success is a reward in [0, 1], got {reward}")
        return BetaTracker(self.successes + reward, self.failures + 1.0 - reward)


def _finite(rewards: Tensor) -> Tensor:
    """In double precision. Raises ValueError for numbers that are not finite, or are integers."""
    if not rewards.is_floating_point():
        raise ValueError(f"rewards are floating point, got {rewards.dtype}")
    if not bool(rewards.isfinite().all()):
        raise ValueError(f"{int((~rewards.isfinite()).sum())} rewards are not finite")
    return rewards.double()


def _standardised(rewards: Tensor) -> Tensor:
    """(x - mean)/(population std + 1e-6) over the last dimension, exactly 0 for equal x."""
    if rewards.shape[-1] == 0:
        return torch.zeros_like(rewards)
    x = _finite(rewards)
    centred = x - x.mean(dim=-1, keepdim=True)
    spread = x.std(dim=-1, correction=0, keepdim=True)
    equal = x.amin(dim=-1, keepdim=True) == x.amax(dim=-1, keepdim=True)
    return torch.where(equal, 0.0, centred / (spread + EPSILON)).to(rewards.dtype)
