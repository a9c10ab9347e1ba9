"""Where a batch's advantages come from: the critic (SAO, VAPO), or rewards seen before.

| variant | baseline |
|---|---|
| `sao`, `vapo` | a critic, and GAE over tokens or steps: equations 4 and 5, A.1 |
| `running_mean` | mean of the last W rewards |
| `grpo`, `grpo_dis` | mean of the group |
| `spo` | per-prompt success rate with forgetting; the batch normalised |

A prompt is told by its token ids before the first action.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from online_sao.algorithm import baselines, sao, variants
from online_sao.config import AlgorithmSettings
from online_sao.errors import LearnerError, ModelError
from online_sao.learner.batch import TrajectoryBatch
from online_sao.learner.critic import Critic
from online_sao.learner.metrics import Metrics
from online_sao.types import Trajectory

EVERYWHERE = "all"
"""The running mean's one key where prompts share it."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a batch was found to be worth; tensors are (B, T) float32, 0 off the mask."""

    advantages: Tensor
    values: Tensor
    """The baseline: V before this batch's updates, or what stands in for it."""
    returns: Tensor
    valued: Tensor
    """(B, T) bool: the action tokens at which the baseline was asked to be right."""
    metrics: Metrics


class Estimator(Protocol):
    """Gives a batch its advantages, and learns from it."""

    def estimate(self, trajectories: Sequence[Trajectory], batch: TrajectoryBatch) -> Estimate:
        """Advantages of the batch. Raises UpdateNotFinite, or LearnerError for a batch it cannot
        judge.
        """
        ...

    def undone_on_error(self) -> AbstractContextManager[None]:
        """What was learned is forgotten if the block raises."""
        ...

    def memory(self) -> dict[str, Any]:
        """What it has learned beside weights, as JSON."""
        ...

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Take what `memory` gave. Raises ModelError where it is another estimator's."""
        ...


class CriticAdvantages:
    """V and its K updates; GAE as the settings have it."""

    def __init__(self, critic: Critic, settings: AlgorithmSettings) -> None:
        self._critic = critic
        self._settings = settings

    def estimate(self, trajectories: Sequence[Trajectory], batch: TrajectoryBatch) -> Estimate:
        """K updates towards the plain returns, from a pass of lambda = 1; V from before them."""
        s = self._settings
        mask = batch.action_mask
        chain = variants.chain_mask(mask) if s.gae_observations == "include" else mask
        lasts = s.action_level == "step_last_token"
        fitted = variants.last_tokens_of_steps(chain) if lasts else chain
        _, returns = self._gae(batch.rewards, torch.zeros_like(batch.rewards), chain, 1.0)
        share = sao.mean_denominator(fitted, per_trajectory=s.loss_mean == "trajectory")
        values, loss, norm = self._critic.update(batch, returns, share, chain, fitted)
        for _ in range(s.critic_updates - 1):
            self._critic.update(batch, returns, share, chain, fitted)
        judging = values if s.advantage_critic == "before" else self._critic.values(batch, chain)
        advantages, _ = self._gae(batch.rewards, judging, chain, self._policy_lambda(chain))
        return Estimate(
            advantages=torch.where(mask, advantages, 0.0),
            values=torch.where(mask, values, 0.0),
            returns=torch.where(mask, returns, 0.0),
            valued=fitted & mask,
            metrics={"value_loss": loss, "critic_grad_norm": norm},
        )

    def _gae(
        self, rewards: Tensor, values: Tensor, chain: Tensor, lam: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        """Advantages and targets over the chain's tokens, or over its steps."""
        s = self._settings
        if s.action_level == "token":
            return sao.skip_observation_gae(rewards, values, chain, gamma=s.gamma, lam=lam)
        value: variants.StepValue = "average" if s.action_level == "step_average" else "last_token"
        return variants.step_level_gae(rewards, values, chain, gamma=s.gamma, lam=lam, value=value)

    def _policy_lambda(self, chain: Tensor) -> Tensor:
        """lambda by the number of actions: of tokens, or of steps."""
        if self._settings.action_level == "token":
            return sao.length_adaptive_lambda(chain, self._settings.alpha)
        return variants.step_length_adaptive_lambda(chain, self._settings.alpha)

    def undone_on_error(self) -> AbstractContextManager[None]:
        """The critic's weights and optimizer."""
        return self._critic.weights.undone_on_error()

    def memory(self) -> dict[str, Any]:
        """Nothing: a critic's state is its weights."""
        return {}

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Nothing to take."""


class RunningMeanAdvantages:
    """A = reward - mean of the last W rewards seen before it, over all prompts or per prompt."""

    def __init__(self, settings: AlgorithmSettings) -> None:
        self._window = settings.running_mean_window
        self._per_prompt = settings.running_mean_per == "prompt"
        self._seen: dict[str, list[float]] = {}

    def estimate(self, trajectories: Sequence[Trajectory], batch: TrajectoryBatch) -> Estimate:
        """In the batch's order: earlier rewards of the batch count as seen."""
        rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
        advantages = torch.zeros_like(rewards)
        for key, rows in self._by_key(trajectories).items():
            seen = self._seen.get(key, [])
            advantages[rows] = baselines.running_mean_advantage(rewards[rows], seen, self._window)
            self._seen[key] = [*seen, *rewards[rows].tolist()][-self._window :]
        return _spread(batch, rewards, advantages, rewards - advantages)

    def _by_key(self, trajectories: Sequence[Trajectory]) -> dict[str, list[int]]:
        if self._per_prompt:
            return _rows_by_prompt(trajectories)
        return {EVERYWHERE: list(range(len(trajectories)))}

    def undone_on_error(self) -> AbstractContextManager[None]:
        """The rewards seen."""
        return _kept_on_error(self._seen)

    def memory(self) -> dict[str, Any]:
        """The rewards seen, oldest first, by key."""
        return {"seen": self._seen}

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Take them; of a wider window the newest."""
        seen = _part(memory, "seen")
        with _readable():
            self._seen = {key: list(rewards)[-self._window :] for key, rewards in seen.items()}


class GroupAdvantages:
    """GRPO: (r - mean)/(std + 1e-6) within each group of replies to one prompt."""

    def __init__(self, settings: AlgorithmSettings) -> None:
        self._size = settings.group_size

    def estimate(self, trajectories: Sequence[Trajectory], batch: TrajectoryBatch) -> Estimate:
        """Raises LearnerError unless the batch holds whole groups alone."""
        rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
        groups = torch.tensor(self._groups(trajectories))
        advantages, means = torch.zeros_like(rewards), torch.zeros_like(rewards)
        advantages[groups] = baselines.group_advantage(rewards[groups])
        means[groups] = rewards[groups].mean(dim=1, keepdim=True).expand_as(rewards[groups])
        return _spread(batch, rewards, advantages, means)

    def _groups(self, trajectories: Sequence[Trajectory]) -> list[list[int]]:
        """Rows of each group: the replies to one prompt in their order, `group_size` at a time."""
        by_prompt = _rows_by_prompt(trajectories)
        for rows in by_prompt.values():
            if len(rows) % self._size:
                raise LearnerError(
                    f"a group is {self._size} replies to one prompt, and this batch has "
                    f"{len(rows)} of {trajectories[rows[0]].rollout_ids[0]}'s: wait for the others"
                )
        return [
            rows[begin : begin + self._size]
            for rows in by_prompt.values()
            for begin in range(0, len(rows), self._size)
        ]

    def undone_on_error(self) -> AbstractContextManager[None]:
        """Nothing is learned."""
        return nullcontext()

    def memory(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Nothing to take."""


@dataclass(frozen=True, slots=True)
class _Visit:
    """A prompt's tracker, and the trajectory of its last visit."""

    tracker: baselines.BetaTracker
    last: Trajectory


Drift = Callable[[Sequence[Trajectory]], Sequence[float]]
"""KL(policy that sampled || policy now) of each trajectory: nats per action token, estimated."""


class SingleStreamAdvantages:
    """SPO: reward - the prompt's success rate before the visit; the batch normalised.

    Between two visits the tracker forgets with the drift of the policy, estimated on the tokens
    of the visit before. Replies to one prompt within a batch are visits one after the other, at
    one and the same policy, so the drift between those is 0.
    """

    def __init__(self, settings: AlgorithmSettings, drift: Drift) -> None:
        self._half_life = settings.spo_half_life
        self._drift = drift
        self._visits: dict[str, _Visit] = {}

    def estimate(self, trajectories: Sequence[Trajectory], batch: TrajectoryBatch) -> Estimate:
        """Raises LearnerError for a reward outside [0, 1]: it is no success or failure."""
        keys = [prompt_key(t) for t in trajectories]
        trackers = self._forgotten(set(keys))
        values = []
        for key, trajectory in zip(keys, trajectories, strict=True):
            tracker = trackers.get(key, baselines.BetaTracker(0.0, 0.0))
            values.append(tracker.value)
            try:
                trackers[key] = tracker.visited(trajectory.reward)
            except ValueError as error:
                raise LearnerError(f"{trajectory.rollout_ids[0]}: {error}") from error
            self._visits[key] = _Visit(trackers[key], trajectory)
        rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
        before = torch.tensor(values, dtype=torch.float64)
        return _spread(batch, rewards, baselines.batch_normalised(rewards - before), before)

    def _forgotten(self, keys: set[str]) -> dict[str, baselines.BetaTracker]:
        """The trackers of the known among these prompts, after the drift since their last visit."""
        known = sorted(key for key in keys if key in self._visits)
        if not known:
            return {}
        drifts = self._drift([self._visits[key].last for key in known])
        return {
            key: self._visits[key].tracker.forgotten(drift, self._half_life)
            for key, drift in zip(known, drifts, strict=True)
        }

    def undone_on_error(self) -> AbstractContextManager[None]:
        """The visits."""
        return _kept_on_error(self._visits)

    def memory(self) -> dict[str, Any]:
        """Each prompt's counts and its last visit; a log-probability off the mask is null."""
        return {"visits": {key: _visit_json(visit) for key, visit in self._visits.items()}}

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Take them."""
        visits = _part(memory, "visits")
        with _readable():
            self._visits = {key: _visit_from(visit) for key, visit in visits.items()}


def make_estimator(settings: AlgorithmSettings, critic: Critic | None, drift: Drift) -> Estimator:
    """The estimator of the settings' variant. `critic` is None where it has none."""
    if critic is not None:
        return CriticAdvantages(critic, settings)
    if settings.variant == "running_mean":
        return RunningMeanAdvantages(settings)
    if settings.variant == "spo":
        return SingleStreamAdvantages(settings, drift)
    return GroupAdvantages(settings)


def prompt_key(trajectory: Trajectory) -> str:
    """A digest of the token ids before the first action."""
    prompt = trajectory.token_ids[: trajectory.action_mask.index(True)]
    return hashlib.sha256(",".join(map(str, prompt)).encode()).hexdigest()


def _rows_by_prompt(trajectories: Sequence[Trajectory]) -> dict[str, list[int]]:
    rows: dict[str, list[int]] = defaultdict(list)
    for row, trajectory in enumerate(trajectories):
        rows[prompt_key(trajectory)].append(row)
    return rows


@contextmanager
def _kept_on_error(learned: dict[str, Any]) -> Iterator[None]:
    """Its entries are what they were, if the block raises."""
    before = dict(learned)
    try:
        yield
    except BaseException:
        learned.clear()
        learned.update(before)
        raise


def _spread(
    batch: TrajectoryBatch, rewards: Tensor, advantages: Tensor, baseline: Tensor
) -> Estimate:
    """One number per trajectory, on each of its action tokens."""
    mask = batch.action_mask

    def everywhere(x: Tensor) -> Tensor:
        return torch.where(mask, x.to(batch.rewards)[:, None], 0.0)

    return Estimate(
        advantages=everywhere(advantages),
        values=everywhere(baseline),
        returns=everywhere(rewards),
        valued=torch.zeros_like(mask),  # no critic, no explained variance
        metrics={"value_loss": None, "critic_grad_norm": None},
    )


def _part(memory: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = memory.get(name)
    if not isinstance(part, Mapping):
        raise ModelError(f"the saved state has no `{name}`: it is another variant's")
    return part


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"the saved state cannot be read: {error!r}") from error


def _visit_json(visit: _Visit) -> dict[str, Any]:
    last = visit.last
    sampled = zip(last.logprobs, last.action_mask, strict=True)
    return {
        "counts": [visit.tracker.successes, visit.tracker.failures],
        "rollout_ids": last.rollout_ids,
        "token_ids": last.token_ids,
        "action_mask": last.action_mask,
        "logprobs": [logprob if action else None for logprob, action in sampled],
        "reward": last.reward,
        "temperature": last.temperature,
    }  # fmt: skip


def _visit_from(saved: Mapping[str, Any]) -> _Visit:
    last = Trajectory(
        rollout_ids=tuple(saved["rollout_ids"]),
        token_ids=tuple(saved["token_ids"]),
        action_mask=tuple(saved["action_mask"]),
        logprobs=tuple(math.nan if p is None else p for p in saved["logprobs"]),
        reward=saved["reward"],
        temperature=saved["temperature"],
    )
    return _Visit(baselines.BetaTracker(*saved["counts"]), last)
