"""One run: an arm, a seed, a lag; sampling from old weights, updates by the real trainer."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from online_sao.ablation.arms import ARMS, GROUP, Arm, learner_settings
from online_sao.ablation.sampling import Sampler, success
from online_sao.ablation.tasks import TASKS, Prompt, Task
from online_sao.ablation.tiny import TinyPolicy
from online_sao.learner.trainer import SaoTrainer

FORMAT = 1
"""Raise when a run would come out another way with the same plan."""
_HELD_OUT_SEED = 10_000

Record = dict[str, Any]
Progress = Callable[[int, int], None]
"""Told (updates done, updates in all)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All that decides how a run comes out."""

    task: str
    arm: str
    seed: int
    lag: int
    """Rollouts come from the policy of this many versions ago."""
    updates: int
    tiny: TinyPolicy
    batch: int = 32
    policy_lr: float = 3e-4
    """Of every arm. Chosen on `sao` at lag 4: the highest of those tried at which none of three
    seeds collapsed (4e-4: one did)."""
    critic_lr: float = 1e-3
    pool: int = 256
    """Prompts that the run draws from; they come again, as in a training set."""
    held_out: int = 512
    """Fresh prompts that the final policy is tried on."""

    @property
    def name(self) -> str:
        """The run's name, and its file's."""
        return f"{self.task}-{self.arm}-lag{self.lag}-seed{self.seed}"

    @property
    def digest(self) -> str:
        """Of the plan and of what its arm and its task mean."""
        arm = {"what": self.arm, **ARMS[self.arm].changes}
        told = [FORMAT, asdict(self), arm, repr(TASKS[self.task])]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run measured."""

    plan: Plan
    updates: tuple[Record, ...]
    """Of every policy update, in order."""
    critic_only: int
    """Batches before them that trained the critic alone."""
    held_out: float
    """The final policy's success on fresh prompts."""
    start: float
    """The warm-started policy's, on the same prompts."""


def run(plan: Plan, folder: Path, progress: Progress | None = None) -> Outcome:
    """Do the run on the warm-started policy in `folder`."""
    task, arm = TASKS[plan.task], ARMS[plan.arm]
    algorithm = arm.algorithm(plan.batch)
    trainer = SaoTrainer(algorithm, learner_settings(plan.policy_lr, plan.critic_lr), folder)
    trainer.restore(folder, None)
    sampler = Sampler(folder, task, plan.seed)
    prompts = draw(task, arm, plan)
    versions = deque([trainer.policy_weights()], maxlen=plan.lag + 1)
    start = held_out(sampler, task, plan)

    def turn(number: int, *, critic_only: bool) -> Record:
        sampler.load(versions[0])
        episodes = sampler.sample(list(islice(prompts, plan.batch)))
        lag = len(versions) - 1
        batch = [e.trajectory(f"{number}-{i}", lag) for i, e in enumerate(episodes)]
        metrics = dict(trainer.update(batch, critic_only=critic_only).metrics)
        return {"calls_mean": sum(e.calls for e in episodes) / plan.batch, **metrics}

    critic_only = 0
    if algorithm.has_critic:
        pretraining = math.ceil(algorithm.value_pretrain_rollouts / plan.batch)
        critic_only = pretraining + algorithm.value_warmup_updates
    for number in range(critic_only):
        turn(-1 - number, critic_only=True)
    records = []
    for number in range(plan.updates):
        records.append({"update": number, **turn(number, critic_only=False)})
        versions.append(trainer.policy_weights())
        if progress is not None:
            progress(number + 1, plan.updates)
    sampler.load(versions[-1])
    return Outcome(plan, tuple(records), critic_only, held_out(sampler, task, plan), start)


def draw(task: Task, arm: Arm, plan: Plan) -> Iterator[Prompt]:
    """Prompts of the run's pool at random, without end; each one eight times over for groups."""
    dice = random.Random(plan.seed)
    pool = [task.prompt(dice) for _ in range(plan.pool)]
    while True:
        prompt = dice.choice(pool)
        yield from [prompt] * (GROUP if arm.grouped else 1)


def held_out(sampler: Sampler, task: Task, plan: Plan) -> float:
    """Success on fresh prompts, which are the same for every run of the task."""
    dice = random.Random(_HELD_OUT_SEED)
    return success(sampler.sample([task.prompt(dice) for _ in range(plan.held_out)]))
