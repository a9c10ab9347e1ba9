"""What a batch's trajectories say by themselves. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from online_sao.types import Trajectory


def batch_facts(trajectories: Sequence[Trajectory]) -> dict[str, float | None]:
    """Metrics that need no network: counts, rewards, lengths, lag."""
    n = len(trajectories)
    actions = [sum(t.action_mask) for t in trajectories]
    return {
        "trajectories": float(n),
        "tokens": float(sum(actions)),
        "reward_mean": sum(t.reward for t in trajectories) / n,
        "reply_tokens_mean": sum(actions) / n,
        "cut_share": sum(t.cut for t in trajectories) / n,
        "lag_mean": sum(t.lag for t in trajectories) / n,
        "lag_max": float(max(t.lag for t in trajectories)),
    }
