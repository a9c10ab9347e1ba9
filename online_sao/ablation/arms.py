"""The comparisons by name: what each changes of SAO, and in which table it stands.

All arms share one task, one warm-started policy, one learning rate and one batch size; an arm is
the settings below and nothing else. KL is 0 throughout, as in the paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from online_sao.config import AlgorithmSettings, LearnerSettings

GROUP = 8
PRETRAIN_BATCHES = 10
"""Value pretraining: batches of the warm-started policy that train the critic alone."""
WARMUP_BATCHES = 4


@dataclass(frozen=True, slots=True)
class Arm:
    """One side of a comparison."""

    name: str
    what: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Of `AlgorithmSettings`."""

    def algorithm(self, batch: int) -> AlgorithmSettings:
        """Its settings, for batches of `batch` trajectories."""
        shared = {
            "kl_coef": 0.0,
            "group_size": GROUP,
            "value_warmup_updates": WARMUP_BATCHES,
            "value_pretrain_rollouts": PRETRAIN_BATCHES * batch,
        }
        return AlgorithmSettings(**{**shared, **self.changes})

    @property
    def grouped(self) -> bool:
        """Whether replies to one prompt come in groups."""
        return str(self.changes.get("variant", "")).startswith("grpo")


TIGHT = {"eps_low": 0.2, "eps_high": 0.28}
ARMS = {
    arm.name: arm
    for arm in (
        Arm("sao", "SAO: double-sided mask (0.3, 5), critic with K = 2 and frozen attention"),
        Arm("grpo", "GRPO, groups of 8, PPO clip (0.2, 0.28)", {"variant": "grpo"}),
        Arm("grpo_dis", "GRPO with SAO's double-sided mask", {"variant": "grpo_dis"}),
        Arm("vapo", "VAPO: PPO clip (0.2, 0.28), K = 1, nothing frozen", {"variant": "vapo"}),
        Arm(
            "running_mean",
            "mean of the prompt's last 8 rewards in the critic's place",
            {"variant": "running_mean", "running_mean_window": 8, "running_mean_per": "prompt"},
        ),
        Arm("spo", "single-stream tracker of each prompt's success rate", {"variant": "spo"}),
        Arm("sao_k1", "one critic update per policy update", {"critic_updates": 1}),
        Arm("sao_attention", "the critic's attention trains too", {"critic_attention": "trained"}),
        Arm("sao_no_pretraining", "no value pretraining", {"value_pretrain_rollouts": 0}),
        Arm("sao_unmasked", "importance weights without a mask", {"policy_loss": "unmasked"}),
        Arm(
            "sao_one_sided",
            "PPO's one-sided clip, same band (0.3, 5), in the mask's place",
            {"policy_loss": "ppo_clip"},
        ),
        Arm(
            "sao_one_sided_tight",
            "PPO's one-sided clip with its usual band (0.2, 0.28)",
            {"policy_loss": "ppo_clip", **TIGHT},
        ),
        Arm("sao_tight", "the double-sided mask with the band (0.2, 0.28)", TIGHT),
        Arm(
            "sao_step_average",
            "steps as actions, a step's value the mean of its tokens'",
            {"action_level": "step_average"},
        ),
        Arm(
            "sao_step_last",
            "steps as actions, a step's value its last token's",
            {"action_level": "step_last_token"},
        ),
        Arm(
            "sao_observations",
            "observation tokens included in the GAE",
            {"gae_observations": "include"},
        ),
    )
}
"""By name, `sao` first."""

TABLES = {
    "Methods (the paper's table 3)": ("sao", "grpo", "grpo_dis", "vapo", "running_mean", "spo"),
    "The mask": ("sao", "sao_unmasked", "sao_one_sided", "sao_one_sided_tight", "sao_tight"),
    "The critic (the paper's table 4)": ("sao", "sao_k1", "sao_attention", "sao_no_pretraining"),
    "What is an action (the paper's table 5)": (
        "sao", "sao_step_average", "sao_step_last", "sao_observations",
    ),
}  # fmt: skip
QUICK = ("sao", "sao_unmasked", "sao_one_sided", "grpo", "vapo")


def learner_settings(policy_lr: float, critic_lr: float) -> LearnerSettings:
    """The same for every arm: all layers of both networks, float32, one thread."""
    return LearnerSettings(
        policy_lr=policy_lr,
        critic_lr=critic_lr,
        policy_layers=0,
        critic_layers=0,
        dtype="float32",
        threads=1,
        micro_batch_tokens=4096,
    )
