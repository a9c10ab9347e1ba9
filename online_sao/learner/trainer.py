"""SAO on real networks: one `update` is the paper's loop for one batch.

An update applies nothing until everything it computes is known to be finite: the critic's K steps
are done first, under a snapshot that is put back if anything after them fails, and the policy's
step is the last thing that happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from online_sao.algorithm import sao
from online_sao.config import AlgorithmSettings, LearnerSettings
from online_sao.errors import LearnerError, ModelError, UpdateNotFinite
from online_sao.learner import metrics
from online_sao.learner.batch import TrajectoryBatch
from online_sao.learner.critic import Critic
from online_sao.learner.export import SavedState, VersionWriter, write_state
from online_sao.learner.facts import batch_facts
from online_sao.learner.head import ActionScores, Objective
from online_sao.learner.metrics import Evaluated, Metrics, Phases
from online_sao.learner.models import Compute
from online_sao.learner.policy import Policy
from online_sao.types import TrainingResult, Trajectory, UpdateKind

NOTHING_PULLS = 1e-6
"""Advantages below this, with no KL and no entropy term, skip the policy's step."""


class SaoTrainer:
    """The `Trainer` of the real service."""

    def __init__(
        self, settings: AlgorithmSettings, learner: LearnerSettings, start_policy: Path
    ) -> None:
        """`start_policy`: the folder of version 0, the KL term's pi_start. Loads nothing yet."""
        self._settings = settings
        self._learner = learner
        self._start_policy = start_policy
        if learner.threads > 0:
            torch.set_num_threads(learner.threads)
        self._compute = Compute.chosen(learner)
        self._updates = 0
        self._policy_: Policy | None = None
        self._critic_: Critic | None = None
        self._writer_: VersionWriter | None = None

    # -- one update ------------------------------------------------------------------------

    def update(self, trajectories: Sequence[Trajectory], *, critic_only: bool) -> TrainingResult:
        """One SAO update. Raises UpdateNotFinite with everything as it was before."""
        s = self._settings
        phases = Phases()
        batch = TrajectoryBatch.from_trajectories(trajectories, self._compute.device)
        mask = batch.action_mask
        share = sao.mean_denominator(mask, per_trajectory=s.loss_mean == "trajectory")
        nothing = torch.zeros_like(batch.rewards)
        _, returns = sao.skip_observation_gae(batch.rewards, nothing, mask, gamma=s.gamma, lam=1.0)

        with self._critic.weights.undone_on_error(), self._policy.weights.gradients():
            with phases.phase("critic"):
                values, found = self._train_critic(batch, returns, share)
                judging = values if s.advantage_critic == "before" else self._critic.values(batch)
            lam = sao.length_adaptive_lambda(mask, s.alpha)
            advantages, _ = sao.skip_observation_gae(
                batch.rewards, judging, mask, gamma=s.gamma, lam=lam
            )
            kind = self._kind(advantages, critic_only)
            with phases.phase("policy"):
                scores = self._score_policy(batch, advantages, share, kind)
            seen = Evaluated(values, returns, advantages, *scores)
            found |= self._policy_metrics(batch, seen, share)
            if kind is UpdateKind.POLICY:
                with phases.phase("step"):
                    found["policy_grad_norm"] = self._policy.weights.clip()
                    self._policy.weights.step()
        self._updates += 1
        band = (s.eps_low, s.eps_high)
        found |= batch_facts(trajectories) | phases.seconds
        traces = metrics.token_traces(trajectories, batch, seen, *band)
        return TrainingResult(kind, found, traces, _note(kind))

    def _train_critic(
        self, batch: TrajectoryBatch, returns: Tensor, share: Tensor
    ) -> tuple[Tensor, Metrics]:
        """K updates over the same batch; V as it was before them, from the first one's forward."""
        values, loss, norm = self._critic.update(batch, returns, share)
        for _ in range(self._settings.critic_updates - 1):
            self._critic.update(batch, returns, share)
        return values, {"value_loss": loss, "critic_grad_norm": norm}

    def _kind(self, advantages: Tensor, critic_only: bool) -> UpdateKind:
        """A step is skipped only when nothing pulls on the policy."""
        s = self._settings
        if critic_only:
            return UpdateKind.CRITIC_ONLY
        still = bool((advantages.abs() < NOTHING_PULLS).all())
        if still and s.kl_coef == 0.0 and s.entropy_coef == 0.0:
            return UpdateKind.SKIPPED
        return UpdateKind.POLICY

    def _score_policy(
        self, batch: TrajectoryBatch, advantages: Tensor, share: Tensor, kind: UpdateKind
    ) -> tuple[Tensor, Tensor, Tensor]:
        """log pi_theta, KL and entropy (B, T), with the loss' gradient in the masters if the
        policy is to move. Raises UpdateNotFinite.
        """
        results = tuple(torch.zeros_like(advantages) for _ in range(3))
        for rows in batch.micro_batches(self._learner.micro_batch_tokens):
            part = batch.select(rows)
            width = part.token_ids.shape[1]
            objective = None
            if kind is UpdateKind.POLICY:
                objective = self._objective(part, advantages[rows, :width], share[rows])
            scores = self._policy.score(part, objective)
            if not bool(torch.isfinite(scores.logprobs).all()):
                raise UpdateNotFinite("the policy's log-probabilities are not finite")
            for result, found in zip(
                results, (scores.logprobs, scores.kl, scores.entropy), strict=True
            ):
                placed = torch.zeros_like(part.rewards)
                placed[part.action_mask] = found
                result[rows, :width] = placed
        return results[0], results[1], results[2]

    def _objective(self, part: TrajectoryBatch, advantages: Tensor, share: Tensor) -> Objective:
        """-L of equation 1 plus the KL and entropy terms, for any slice of the part's actions.

        Each action token stands as a row of its own, (C, 1), with its row's denominator.
        """
        s, mask = self._settings, part.action_mask
        rollout = part.rollout_logprobs[mask][:, None]
        pull = advantages[mask][:, None]
        denominators = share[:, None].expand_as(mask)[mask]

        def loss(scores: ActionScores, where: slice) -> Tensor:
            each = denominators[where]
            every = torch.ones_like(pull[where], dtype=torch.bool)
            total = sao.dis_loss(
                scores.logprobs[:, None],
                rollout[where],
                pull[where],
                every,
                eps_low=s.eps_low,
                eps_high=s.eps_high,
                denominator=each,
            )
            if s.kl_coef > 0.0:
                total = total + s.kl_coef * sao.masked_mean(scores.kl[:, None], every, each)
            if s.entropy_coef > 0.0:
                bonus = sao.masked_mean(scores.entropy[:, None], every, each)
                total = total - s.entropy_coef * bonus
            return total

        return loss

    def _policy_metrics(self, batch: TrajectoryBatch, seen: Evaluated, share: Tensor) -> Metrics:
        s = self._settings
        loss = sao.dis_loss(
            seen.logprobs,
            batch.rollout_logprobs,
            seen.advantages,
            batch.action_mask,
            eps_low=s.eps_low,
            eps_high=s.eps_high,
            denominator=share,
        )
        found = metrics.token_metrics(batch, seen, s.eps_low, s.eps_high)
        return {"policy_loss": float(loss), "policy_grad_norm": None, **found}

    # -- what is written and read ----------------------------------------------------------

    def restore(self, policy: Path, state: Path | None) -> str:
        """Load the policy's weights, and the rest from `state` (None: start afresh).

        With a state that belongs to other policy weights (a newer version, a withdrawn one) the
        policy comes from its folder and critic and optimizers from the state; the note says so.
        Raises ModelError.
        """
        self._policy_ = self._critic_ = self._writer_ = None  # free it before loading again
        s, compute = self._settings, self._compute
        saved = None if state is None else SavedState.read(state)
        writer = VersionWriter(self._start_policy, policy)
        start = compute.load(self._start_policy)
        critic = Critic(start, compute.load_exact(self._start_policy), self._learner, s.value_head)
        theta = Policy(
            compute.load(policy),
            compute.load_exact(policy),
            start if s.kl_coef > 0.0 else None,
            self._learner,
            reverse_kl=s.kl_direction == "start_policy",
            entropy_pulls=s.entropy_coef > 0.0,
        )
        self._policy_, self._critic_, self._writer_ = theta, critic, writer
        if saved is None:
            self._updates = 0
            return (
                ""
                if policy == self._start_policy
                else ("no learner state: critic and both optimizers start afresh")
            )
        self._updates = saved.updates
        return self._resume(saved, policy)

    def _resume(self, saved: SavedState, folder: Path) -> str:
        notes = []
        try:
            self._critic.weights.load_state(saved.critic, saved.critic_steps)
        except ModelError as error:
            notes.append(f"the critic starts afresh: {error}")
        same = self._is_policy_of(saved)
        try:
            self._policy.weights.load_state(saved.policy, saved.policy_steps, masters=same)
        except ModelError as error:
            return "; ".join([*notes, f"the policy's optimizer starts afresh: {error}"])
        if not same:
            notes.append(
                f"policy weights from {folder.name}; critic and optimizers from the learner's "
                f"state after update {saved.updates}, which belongs to other policy weights"
            )
        return "; ".join(notes)

    def _is_policy_of(self, saved: SavedState) -> bool:
        """Whether the saved masters, rounded as folders store them, are the restored policy."""
        for name, master in self._policy.weights.masters.items():
            before = saved.policy.get(f"master.{name}")
            if before is None:
                return False
            if not torch.equal(self._writer.stored(name, before).float(), master.cpu()):
                return False
        return True

    def export_policy(self, folder: Path) -> None:
        """Write a servable version with its manifest into the new folder `folder` (no fsync)."""
        self._writer.write(folder, self._policy.model, self._policy.weights)

    def save_state(self, folder: Path) -> None:
        """Write all of the trainer's state into the new folder `folder` (no fsync)."""
        write_state(folder, self._updates, self._policy.weights, self._critic.weights)

    @property
    def _policy(self) -> Policy:
        if self._policy_ is None:
            raise LearnerError("restore the trainer first")
        return self._policy_

    @property
    def _critic(self) -> Critic:
        if self._critic_ is None:
            raise LearnerError("restore the trainer first")
        return self._critic_

    @property
    def _writer(self) -> VersionWriter:
        if self._writer_ is None:
            raise LearnerError("restore the trainer first")
        return self._writer_


def _note(kind: UpdateKind) -> str:
    if kind is UpdateKind.SKIPPED:
        return "all advantages are 0 and there is no KL or entropy term: the policy stands still"
    return ""
