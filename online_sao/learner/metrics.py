"""The metrics of one update, by the names they are stored and shown under."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from online_sao.algorithm import sao
from online_sao.learner.batch import TrajectoryBatch
from online_sao.learner.losses import PolicyLoss
from online_sao.types import TokenTrace, Trajectory

Metrics = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What an update knows of its batch; all (B, T), float32 but for `valued`, anything off the
    mask.
    """

    values: Tensor
    """V(s_t) before the update, or the baseline that stands in for it."""
    returns: Tensor
    advantages: Tensor
    valued: Tensor
    """bool: the tokens over which the critic's explained variance is taken."""
    logprobs: Tensor
    """log pi_theta before the update."""
    kl: Tensor
    entropy: Tensor


class Phases:
    """Seconds spent in each named phase of an update."""

    def __init__(self) -> None:
        self.seconds: Metrics = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as `seconds_<name>`."""
        begin = time.perf_counter()
        yield
        self.seconds[f"seconds_{name}"] = time.perf_counter() - begin


def token_metrics(batch: TrajectoryBatch, seen: Evaluated, pull: PolicyLoss) -> Metrics:
    """Means over the batch's action tokens, from before the update.

    `clip_ratio` is the share of tokens that the loss leaves without a pull, by its own rule;
    `outside_band` the share outside the band, whatever the loss. `kl_rollout` estimates
    KL(rollout || theta) as the mean of r - 1 - log r.
    """
    mask = batch.action_mask
    ratio = sao.importance_ratio(seen.logprobs, batch.rollout_logprobs)[mask].double()
    log_ratio = ratio.log()
    advantages = seen.advantages[mask].double()
    low, high = pull.without_pull(ratio, advantages)
    below, above = pull.outside(ratio)
    kl = float(seen.kl[mask].double().mean())
    return {
        "explained_variance": sao.explained_variance(seen.values, seen.returns, seen.valued),
        "kl_start": None if kl != kl else kl,
        "entropy": float(seen.entropy[mask].double().mean()),
        "clip_ratio": float((low | high).double().mean()),
        "clip_ratio_low": float(low.double().mean()),
        "clip_ratio_high": float(high.double().mean()),
        "outside_band": float((below | above).double().mean()),
        "log_ratio_abs_mean": float(log_ratio.abs().mean()),
        "log_ratio_abs_max": float(log_ratio.abs().max()),
        "kl_rollout": float((ratio - 1.0 - log_ratio).mean()),
        "advantage_mean": float(advantages.mean()),
        "advantage_std": float(advantages.std(correction=0)),
        "value_mean": float(seen.values[mask].double().mean()),
    }


def token_traces(
    trajectories: Sequence[Trajectory],
    batch: TrajectoryBatch,
    seen: Evaluated,
    pull: PolicyLoss,
) -> tuple[TokenTrace, ...]:
    """V, A, r and kept or masked of every action token, one record per trajectory."""
    ratio = sao.importance_ratio(seen.logprobs, batch.rollout_logprobs)
    low, high = pull.without_pull(ratio, seen.advantages)
    kept = ~(low | high)
    traces = []
    for row, trajectory in enumerate(trajectories):
        mask = batch.action_mask[row]

        def of(x: Tensor, row: int = row, mask: Tensor = mask) -> tuple[float, ...]:
            return tuple(x[row][mask].tolist())

        traces.append(
            TokenTrace(
                rollout_id=trajectory.rollout_ids[0],
                values=of(seen.values),
                advantages=of(seen.advantages),
                ratios=of(ratio),
                kept=tuple(torch.masked_select(kept[row], mask).tolist()),
            )
        )
    return tuple(traces)
