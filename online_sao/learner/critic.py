"""The critic with its masters and its K updates."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from online_sao.algorithm import sao
from online_sao.config import LearnerSettings
from online_sao.errors import UpdateNotFinite
from online_sao.learner import models
from online_sao.learner.batch import TrajectoryBatch
from online_sao.learner.models import CriticNetwork, Decoder
from online_sao.learner.weights import TrainedWeights


class Critic:
    """V: the start policy's first layers and a scalar head; attention and embeddings frozen."""

    def __init__(
        self,
        start: Any,
        exact: Any | None,
        settings: LearnerSettings,
        head: Literal["linear", "sigmoid"],
    ) -> None:
        """Copies the layers it needs of `start`, and masters from `exact` (the same in fp32)."""
        layers = settings.critic_layers
        self.network = CriticNetwork(start, Decoder.of(start), layers)
        parameters = models.critic_parameters(self.network)
        twin = None if exact is None else CriticNetwork(exact, Decoder.of(exact), layers)
        self.weights = TrainedWeights(
            parameters,
            lr=settings.critic_lr,
            adam_eps=settings.adam_eps,
            grad_clip=settings.grad_clip,
            exact=models.exact_parameters(parameters, twin),
        )
        if settings.activation_checkpointing:
            models.enable_recomputation(self.network.backbone, self.network.layers)
        self._bounded = head == "sigmoid"
        self._max_tokens = settings.micro_batch_tokens

    def values(self, batch: TrajectoryBatch) -> Tensor:
        """V(s_t) (B, T) float32 as the critic is now; 0 off the mask."""
        values, _ = self._pass(batch, None, None)
        return values

    def update(
        self, batch: TrajectoryBatch, returns: Tensor, denominator: Tensor
    ) -> tuple[Tensor, float, float]:
        """One update towards `returns` (B, T).

        Returns V as it was before it (the same forward pass), the loss and the gradient's norm
        before clipping. Raises UpdateNotFinite before the step.
        """
        values, loss = self._pass(batch, returns, denominator)
        if not bool(torch.isfinite(values).all()):
            raise UpdateNotFinite("the critic's values are not finite")
        norm = self.weights.clip()
        self.weights.step()
        return values, loss, norm

    def _pass(
        self, batch: TrajectoryBatch, returns: Tensor | None, denominator: Tensor | None
    ) -> tuple[Tensor, float]:
        """Forward over the batch's micro-batches, and backward where there are returns."""
        values = torch.zeros_like(batch.rewards)
        total = 0.0
        loss_of = sao.bounded_value_loss if self._bounded else sao.value_loss
        for rows in batch.micro_batches(self._max_tokens):
            part = batch.select(rows)
            width = part.token_ids.shape[1]
            with torch.set_grad_enabled(returns is not None):
                outputs = self.network(part.token_ids)
            if returns is not None and denominator is not None:
                targets = returns[rows, :width]
                loss = loss_of(outputs, targets, part.action_mask, denominator=denominator[rows])
                loss.backward()  # type: ignore[no-untyped-call]
                self.weights.accumulate()
                total += loss.item()
            seen = outputs.detach()
            seen = seen.sigmoid() if self._bounded else seen
            values[rows, :width] = torch.where(part.action_mask, seen, 0.0)
        return values, total
