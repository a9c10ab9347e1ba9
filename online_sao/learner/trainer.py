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
from online_sao.learner.advantages import Estimator, make_estimator
from online_sao.learner.batch import TrajectoryBatch
from online_sao.learner.critic import Critic
from online_sao.learner.dealing import micro_batches
from online_sao.learner.export import SavedState, VersionWriter
from online_sao.learner.facts import batch_facts
from online_sao.learner.head import ActionScores, Objective
from online_sao.learner.losses import PolicyLoss
from online_sao.learner.metrics import Evaluated, Metrics, Phases
from online_sao.learner.models import Compute
from online_sao.learner.policy import Policy
from online_sao.learner.ranks import ALONE, Ranks
from online_sao.learner.sharding import whole
from online_sao.types import TrainingResult, Trajectory, UpdateKind

NOTHING_PULLS = 1e-6
"""Advantages below this, with no KL and no entropy term, skip the policy's step."""


class SaoTrainer:
    """The `Trainer` of the real service."""

    def __init__(
        self,
        settings: AlgorithmSettings,
        learner: LearnerSettings,
        start_policy: Path,
        ranks: Ranks = ALONE,
    ) -> None:
        """`start_policy`: the folder of version 0, the KL term's pi_start. Loads nothing yet.

        On several `ranks` each method is called on all of them, with the same arguments.
        """
        learner.check_ranks(ranks.size)
        self._ranks = ranks
        self._settings = settings
        self._learner = learner
        self._start_policy = start_policy
        if learner.threads > 0:
            torch.set_num_threads(max(1, learner.threads // ranks.size))
        self._pull = PolicyLoss.of(settings)
        self._compute = Compute.chosen(learner)
        self._updates = 0
        self._policy_: Policy | None = None
        self._critic: Critic | None = None
        """None where the variant has none."""
        self._estimator_: Estimator | None = None
        self._writer_: VersionWriter | None = None

    # -- one update ------------------------------------------------------------------------

    def update(self, trajectories: Sequence[Trajectory], *, critic_only: bool) -> TrainingResult:
        """One SAO update. Raises UpdateNotFinite, or LearnerError for trajectories that cannot
        be trained on, with everything as it was before.
        """
        self._check(trajectories, critic_only=critic_only)
        phases = Phases()
        batch = TrajectoryBatch.from_trajectories(trajectories, self._compute.device)
        share = sao.mean_denominator(
            batch.action_mask, per_trajectory=self._settings.loss_mean == "trajectory"
        )
        with self._estimator.undone_on_error(), self._policy.weights.gradients():
            with phases.phase("critic"):
                found = self._estimator.estimate(trajectories, batch)
            kind = self._kind(found.advantages, critic_only)
            with phases.phase("policy"):
                scores = self._score_policy(batch, found.advantages, share, kind)
            seen = Evaluated(found.values, found.returns, found.advantages, found.valued, *scores)
            measured = found.metrics | self._policy_metrics(batch, seen, share)
            if kind is UpdateKind.POLICY:
                with phases.phase("step"):
                    measured["policy_grad_norm"] = self._policy.weights.clip()
                    self._policy.weights.step()
        self._updates += 1
        measured |= batch_facts(trajectories) | phases.seconds
        traces = metrics.token_traces(trajectories, batch, seen, self._pull)
        return TrainingResult(kind, measured, traces, _note(kind))

    def _check(self, trajectories: Sequence[Trajectory], *, critic_only: bool) -> None:
        """Raises LearnerError, naming the rollout, for what no part of an update can take."""
        if critic_only and not self._settings.has_critic:
            raise LearnerError(f"{self._settings.variant} has no critic to train alone")
        vocabulary: int = self._policy.model.get_input_embeddings().num_embeddings
        for trajectory in trajectories:
            if not 0 <= min(trajectory.token_ids) <= max(trajectory.token_ids) < vocabulary:
                raise LearnerError(
                    f"{trajectory.rollout_ids[0]} has token ids outside the vocabulary of "
                    f"{vocabulary}: it is not this policy's"
                )

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
        for micro in micro_batches(batch, self._learner.micro_batch_tokens, self._ranks):
            rows = micro.rows
            part = batch.select(rows)
            width = part.token_ids.shape[1]
            objective = None
            if kind is UpdateKind.POLICY:
                denominators = micro.denominators(share)
                objective = self._objective(part, advantages[rows, :width], denominators)
            scores = self._policy.score(part, objective)
            if not micro.counts:
                continue
            for result, found in zip(
                results, (scores.logprobs, scores.kl, scores.entropy), strict=True
            ):
                placed = torch.zeros_like(part.rewards)
                placed[part.action_mask] = found
                result[rows, :width] = placed
        self._ranks.sum(*results)
        if not bool(torch.isfinite(results[0]).all()):
            raise UpdateNotFinite("the policy's log-probabilities are not finite")
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
            total = self._pull(scores.logprobs[:, None], rollout[where], pull[where], every, each)
            if s.kl_coef > 0.0:
                total = total + s.kl_coef * sao.masked_mean(scores.kl[:, None], every, each)
            if s.entropy_coef > 0.0:
                bonus = sao.masked_mean(scores.entropy[:, None], every, each)
                total = total - s.entropy_coef * bonus
            return total

        return loss

    def _policy_metrics(self, batch: TrajectoryBatch, seen: Evaluated, share: Tensor) -> Metrics:
        loss = self._pull(
            seen.logprobs, batch.rollout_logprobs, seen.advantages, batch.action_mask, share
        )
        found = metrics.token_metrics(batch, seen, self._pull)
        return {"policy_loss": float(loss), "policy_grad_norm": None, **found}

    def _drift(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """KL(policy that sampled || policy now) of each trajectory: the mean of r - 1 - log r over
        its action tokens. One forward pass.
        """
        batch = TrajectoryBatch.from_trajectories(trajectories, self._compute.device)
        nothing = torch.zeros_like(batch.rewards)
        share = torch.ones_like(batch.temperatures)
        logprobs, _, _ = self._score_policy(batch, nothing, share, UpdateKind.SKIPPED)
        mask = batch.action_mask
        ratio = sao.importance_ratio(logprobs, batch.rollout_logprobs).double()
        drift = torch.where(mask, ratio - 1.0 - ratio.log(), 0.0).sum(dim=1) / mask.sum(dim=1)
        return drift.tolist()

    # -- what is written and read ----------------------------------------------------------

    def restore(self, policy: Path, state: Path | None) -> str:
        """Load the policy's weights, and the rest from `state` (None: start afresh).

        With a state that belongs to other policy weights (a newer version, a withdrawn one) the
        policy comes from its folder and critic and optimizers from the state; the note says so.
        Raises ModelError.
        """
        self._policy_ = self._critic = self._estimator_ = self._writer_ = None  # free it first
        s, compute = self._settings, self._compute.before_sharding(self._ranks)
        saved = None if state is None else SavedState.read(state)
        adapted = self._learner.lora_rank > 0
        writer = VersionWriter(self._start_policy, self._start_policy if adapted else policy)
        start = compute.load(self._start_policy)
        critic = None
        if s.has_critic:
            exact = compute.load_exact(self._start_policy)
            critic = Critic(start, exact, self._learner, s, self._ranks)
        theta = Policy(
            start if adapted else compute.load(policy),
            None if adapted else compute.load_exact(policy),
            start if s.kl_coef > 0.0 else None,
            self._learner,
            reverse_kl=s.kl_direction == "start_policy",
            entropy_pulls=s.entropy_coef > 0.0,
            ranks=self._ranks,
        )
        if theta.adapter is not None:
            theta.adapter.restore(theta.weights, policy, self._start_policy)
        self._policy_, self._critic, self._writer_ = theta, critic, writer
        self._estimator_ = make_estimator(s, critic, self._drift)
        if saved is None:
            self._updates = 0
            fresh = "critic and both optimizers start" if s.has_critic else "the optimizer starts"
            return "" if policy == self._start_policy else f"no learner state: {fresh} afresh"
        self._updates = saved.updates
        return self._resume(saved, policy)

    def _resume(self, saved: SavedState, folder: Path) -> str:
        notes = []
        if self._critic is not None:
            try:
                self._critic.weights.load_state(saved.critic, saved.critic_steps)
            except ModelError as error:
                notes.append(f"the critic starts afresh: {error}")
        try:
            self._estimator.remember(saved.memory)
        except ModelError as error:
            notes.append(f"the baseline starts afresh: {error}")
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
            if not torch.equal(self._writer.stored(name, before).float(), whole(master).cpu()):
                return False
        return True

    def export_policy(self, folder: Path) -> None:
        """Write a servable version with its manifest into the new folder `folder` (no fsync)."""
        theta = self._policy
        masters = theta.weights.whole_masters()
        if self._ranks.first:
            self._writer.write(folder, theta.model, theta.weights.copies, masters, theta.adapter)

    def save_state(self, folder: Path) -> None:
        """Write all of the trainer's state into the new folder `folder` (no fsync)."""
        theta = self._policy.weights
        critic = None if self._critic is None else self._critic.weights
        state = SavedState(
            updates=self._updates,
            policy=theta.whole_state(),
            policy_steps=theta.steps(),
            critic={} if critic is None else critic.whole_state(),
            critic_steps=0 if critic is None else critic.steps(),
            memory=self._estimator.memory(),
        )
        if self._ranks.first:
            state.write(folder)

    def policy_weights(self) -> dict[str, Tensor]:
        """A copy of the policy network's parameters by name, in its compute dtype; adapters, where
        there are some, as parameters of their own.
        """
        parameters = self._policy.model.named_parameters()
        return {name: whole(p.detach()).clone() for name, p in parameters}

    @property
    def _policy(self) -> Policy:
        if self._policy_ is None:
            raise LearnerError("restore the trainer first")
        return self._policy_

    @property
    def _estimator(self) -> Estimator:
        if self._estimator_ is None:
            raise LearnerError("restore the trainer first")
        return self._estimator_

    @property
    def _writer(self) -> VersionWriter:
        if self._writer_ is None:
            raise LearnerError("restore the trainer first")
        return self._writer_


def _note(kind: UpdateKind) -> str:
    if kind is UpdateKind.SKIPPED:
        return "all advantages are 0 and there is no KL or entropy term: the policy stands still"
    return ""
