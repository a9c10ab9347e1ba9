"""A tiny policy learns to use a calculator: the real trainer on real tokens, in a minute or two."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from online_sao.ablation import vocabulary
from online_sao.ablation.runs import Plan, run
from online_sao.ablation.sampling import Episode, Sampler
from online_sao.ablation.tasks import TASKS, ToolTask
from online_sao.ablation.tiny import TinyPolicy, prepare
from online_sao.algorithm import sao, variants
from online_sao.learner.batch import TrajectoryBatch

pytestmark = pytest.mark.slow
TINY = TinyPolicy()
FILLER = vocabulary.id_of(vocabulary.FILLER)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return prepare(TINY, TASKS["tools"], tmp_path_factory.mktemp("policies"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1])
def test_sao_learns_to_use_the_tool_from_single_rollouts(folder: Path, seed: int) -> None:
    """From versions 2 behind; about a second per three updates."""
    plan = Plan("tools", "sao", seed, lag=2, updates=45, tiny=TINY, policy_lr=3e-4)
    outcome = run(plan, folder)
    assert outcome.start < 0.6
    assert outcome.held_out > outcome.start + 0.2
    rewards = [r["reward_mean"] for r in outcome.updates]
    assert sum(rewards[-10:]) > sum(rewards[:10]) + 1.0
    assert max(r["clip_ratio"] for r in outcome.updates) > 0.0  # the lag is felt


def longer(episode: Episode, times: int) -> Episode:
    """The same with each filler token of the tool's answers `times` times over."""
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    for token, action, logprob in zip(
        episode.token_ids, episode.action_mask, episode.logprobs, strict=True
    ):
        repeat = times if token == FILLER and not action else 1
        ids += [token] * repeat
        mask += [action] * repeat
        logprobs += [logprob] * repeat
    return replace(episode, token_ids=tuple(ids), action_mask=tuple(mask), logprobs=tuple(logprobs))


def advantages(
    episodes: Sequence[Episode], values: list[list[float]], *, skip: bool
) -> list[float]:
    """On the action tokens, V as given there (0.5 on observations)."""
    batch = TrajectoryBatch.from_trajectories([e.trajectory("r", 0) for e in episodes])
    v = torch.full_like(batch.rewards, 0.5)
    v[batch.action_mask] = torch.tensor([x for row in values for x in row])
    chain = batch.action_mask if skip else variants.chain_mask(batch.action_mask)
    lam = sao.length_adaptive_lambda(chain, 1.5)
    found, _ = sao.skip_observation_gae(batch.rewards, v, chain, gamma=1.0, lam=lam)
    return found[batch.action_mask].tolist()


def largest_difference(a: Sequence[float], b: Sequence[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def test_a_tool_s_answer_ten_times_longer_changes_what_is_included_and_not_what_is_skipped(
    folder: Path,
) -> None:
    """On episodes that the policy itself sampled, at given values."""
    task, dice = ToolTask(), random.Random(8)
    sampled = Sampler(folder, task, seed=2).sample([task.prompt(dice) for _ in range(16)])
    episodes = [episode for episode in sampled if episode.calls > 1]
    assert len(episodes) > 3
    values = [[dice.random() for a in e.action_mask if a] for e in episodes]
    wordy = [longer(episode, 10) for episode in episodes]
    assert all(
        len(w.token_ids) > len(e.token_ids) + 60 for w, e in zip(wordy, episodes, strict=True)
    )
    short = advantages(episodes, values, skip=True)
    assert advantages(wordy, values, skip=True) == short
    included = advantages(episodes, values, skip=False)
    assert largest_difference(included, short) > 0.05
    assert largest_difference(advantages(wordy, values, skip=False), included) > 0.01
