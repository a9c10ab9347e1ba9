"""What a batch says by itself."""

from __future__ import annotations

import math

from online_sao.learner.facts import batch_facts
from online_sao.types import Trajectory

NAN = math.nan
SINGLE = Trajectory(
    ("a",), (1, 2, 3), (False, True, True), (NAN, -1.0, -1.0), 1.0, 1.0, lag=1, cut=True
)
EPISODE = Trajectory(
    ("b", "c"),
    (1, 2, 3, 4, 5),
    (False, True, True, False, True),
    (NAN, -1.0, -1.0, NAN, -1.0),
    0.5,
    1.0,
    lag=3,
    reward_at=((2, 0.5), (4, 0.0)),
)


def test_a_merged_episode_is_one_trajectory_of_several_replies() -> None:
    assert batch_facts([SINGLE, EPISODE]) == {
        "trajectories": 2.0,
        "rollouts": 3.0,
        "tokens": 5.0,
        "reward_mean": 0.5,  # 1, 0.5 and 0
        "reply_tokens_mean": 5 / 3,
        "cut_share": 0.5,
        "lag_mean": 2.0,
        "lag_max": 3.0,
    }
