"""The policy's loss as the settings name it, and which tokens it leaves without a pull."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from online_sao.algorithm import sao, variants
from online_sao.config import AlgorithmSettings


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Equation 1 with its band, without it, or PPO's one-sided clip in its place."""

    kind: Literal["dis", "unmasked", "ppo_clip"]
    eps_low: float
    eps_high: float

    @classmethod
    def of(cls, settings: AlgorithmSettings) -> PolicyLoss:
        """The settings' choice."""
        return cls(settings.policy_loss, settings.eps_low, settings.eps_high)

    def __call__(
        self,
        logprobs: Tensor,
        rollout_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        denominator: Tensor,
    ) -> Tensor:
        """A scalar to minimise, all else (B, T) but the denominators (B,)."""
        tensors = (logprobs, rollout_logprobs, advantages, mask)
        if self.kind == "unmasked":
            return variants.unmasked_loss(*tensors, denominator=denominator)
        loss = sao.dis_loss if self.kind == "dis" else variants.ppo_clip_loss
        return loss(*tensors, eps_low=self.eps_low, eps_high=self.eps_high, denominator=denominator)

    def outside(self, ratio: Tensor) -> tuple[Tensor, Tensor]:
        """Ratios (any shape) at or below the band, at or above it."""
        return ratio <= 1.0 - self.eps_low, ratio >= 1.0 + self.eps_high

    def without_pull(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens whose gradient this loss stops, on the low side and on the high side."""
        if self.kind == "unmasked":
            nothing = torch.zeros_like(ratio, dtype=torch.bool)
            return nothing, nothing
        low, high = self.outside(ratio)
        if self.kind == "dis":
            return low, high
        stopped = variants.ppo_clipped(ratio, advantages, self.eps_low, self.eps_high)
        return low & stopped, high & stopped
