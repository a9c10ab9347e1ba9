"""What a batch's trajectories say by themselves. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from online_sao.types import Trajectory


def batch_facts(trajectories: Sequence[Trajectory]) -> dict[str, float | None]:
    """Metrics that need no network: counts, rewards, lengths, lag.

    A merged tool episode is one trajectory of several rollouts: the mean length is a reply's, and
    the mean reward that of each reward given (one of the episode, or one of each reply).
    """
    n = len(trajectories)
    rollouts = sum(len(t.rollout_ids) for t in trajectories)
    tokens = sum(sum(t.action_mask) for t in trajectories)
    rewards = [reward for t in trajectories for _, reward in t.placed_rewards]
    return {
        "trajectories": float(n),
        "rollouts": float(rollouts),
        "tokens": float(tokens),
        "reward_mean": sum(rewards) / len(rewards),
        "reply_tokens_mean": tokens / rollouts,
        "cut_share": sum(t.cut for t in trajectories) / n,
        "lag_mean": sum(t.lag for t in trajectories) / n,
        "lag_max": float(max(t.lag for t in trajectories)),
    }
