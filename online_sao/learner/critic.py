"""The critic with its masters and its K updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from online_sao.algorithm import sao
from online_sao.config import AlgorithmSettings, LearnerSettings
from online_sao.errors import UpdateNotFinite
from online_sao.learner import models
from online_sao.learner.batch import TrajectoryBatch
from online_sao.learner.dealing import MicroBatch, micro_batches
from online_sao.learner.models import CriticNetwork, Decoder
from online_sao.learner.ranks import ALONE, Ranks
from online_sao.learner.weights import train


class Critic:
    """V: the start policy's first layers and a scalar head; attention and embeddings frozen,
    unless the settings say otherwise.
    """

    def __init__(
        self,
        start: Any,
        exact: Any | None,
        settings: LearnerSettings,
        algorithm: AlgorithmSettings,
        ranks: Ranks = ALONE,
    ) -> None:
        """Copies the layers it needs of `start`, and masters from `exact` (the same in fp32)."""
        layers = settings.critic_layers
        self.network = CriticNetwork(start, Decoder.of(start), layers)
        parameters = models.critic_parameters(
            self.network,
            train_attention=algorithm.critic_attention == "trained",
            train_embeddings=algorithm.critic_embeddings == "trained",
        )
        twin = None if exact is None else CriticNetwork(exact, Decoder.of(exact), layers)
        self.weights = train(
            self.network, self.network.backbone, self.network.layers, parameters, settings, ranks,
            lr=settings.critic_lr,
            exact=models.exact_parameters(parameters, twin),
            exact_layers=None if twin is None else twin.layers,
        )  # fmt: skip
        if settings.activation_checkpointing:
            models.enable_recomputation(self.network.backbone, self.network.layers)
        self._bounded = algorithm.value_head == "sigmoid"
        self._ranks = ranks
        self._max_tokens = settings.micro_batch_tokens

    def values(self, batch: TrajectoryBatch, where: Tensor | None = None) -> Tensor:
        """V(s_t) (B, T) float32 as the critic is now; 0 off `where` (B, T), the action tokens."""
        values, _ = self._pass(batch, batch.action_mask if where is None else where, None)
        return values

    def update(
        self,
        batch: TrajectoryBatch,
        returns: Tensor,
        denominator: Tensor,
        where: Tensor | None = None,
        fitted: Tensor | None = None,
    ) -> tuple[Tensor, float, float]:
        """One update towards `returns` (B, T) at the tokens `fitted`; both (B, T) bool, None for
        the action tokens.

        Returns V at `where` as it was before it (the same forward pass), the loss and the
        gradient's norm before clipping. Raises UpdateNotFinite before the step.
        """
        mask = batch.action_mask
        target = _Target(returns, mask if fitted is None else fitted, denominator)
        values, loss = self._pass(batch, mask if where is None else where, target)
        if not bool(torch.isfinite(values).all()):
            raise UpdateNotFinite("the critic's values are not finite")
        norm = self.weights.clip()
        self.weights.step()
        return values, loss, norm

    def _pass(
        self, batch: TrajectoryBatch, where: Tensor, target: _Target | None
    ) -> tuple[Tensor, float]:
        """Forward over the batch's micro-batches, and backward where there is a target."""
        values = torch.zeros_like(batch.rewards)
        total = 0.0
        for micro in micro_batches(batch, self._max_tokens, self._ranks):
            rows = micro.rows
            part = batch.select(rows)
            width = part.token_ids.shape[1]
            with torch.set_grad_enabled(target is not None):
                outputs = self.network(part.token_ids)
            if target is not None:
                total += self._send_back(outputs, target, micro)
            seen = outputs.detach()
            seen = seen.sigmoid() if self._bounded else seen
            if micro.counts:
                values[rows, :width] = torch.where(where[rows, :width], seen, 0.0)
        sums = torch.tensor([total], device=values.device)
        self._ranks.sum(values, sums)
        return values, sums.item()

    def _send_back(self, outputs: Tensor, target: _Target, micro: MicroBatch) -> float:
        """The part's loss, its gradient added to the masters'."""
        rows, width = micro.rows, outputs.shape[1]
        loss_of = sao.bounded_value_loss if self._bounded else sao.value_loss
        loss = loss_of(
            outputs,
            target.returns[rows, :width],
            target.fitted[rows, :width],
            denominator=micro.denominators(target.denominator),
        )
        loss.backward()  # type: ignore[no-untyped-call]
        self.weights.accumulate()
        return loss.item()


@dataclass(frozen=True, slots=True)
class _Target:
    """What V is fitted to."""

    returns: Tensor
    """(B, T)."""
    fitted: Tensor
    """(B, T) bool: where."""
    denominator: Tensor
    """(B,) of the loss' mean."""
