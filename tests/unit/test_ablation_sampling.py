"""Episodes token by token: what is an action, what was forced, how likely each was."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from online_sao.ablation import vocabulary as v
from online_sao.ablation.arms import ARMS, learner_settings
from online_sao.ablation.sampling import Episode, Sampler, success
from online_sao.ablation.tasks import Prompt, SingleTask, Task, ToolTask
from online_sao.ablation.tiny import TinyPolicy, prepare
from online_sao.learner.trainer import SaoTrainer

SMALL = TinyPolicy(width=32, layers=2, heads=2, steps=60, batch=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(SMALL, ToolTask(), tmp_path_factory.mktemp("policies"))


@dataclass
class Actor:
    """A policy that says the texts it is given, row by row, each token with certainty."""

    texts: Sequence[str]
    place: int = 0

    def __call__(self, input_ids: Tensor, use_cache: bool, cache: Any) -> Any:
        self.place += input_ids.shape[1]
        logits = torch.full((len(self.texts), input_ids.shape[1], len(v.TOKENS)), -100.0)
        for row, text in enumerate(self.texts):
            ids = v.encode(text)
            logits[row, -1, ids[min(self.place, len(ids) - 1)]] = 100.0
        return SimpleNamespace(logits=logits)


def acted(
    folder: Path, task: Task, prompts: Sequence[Prompt], texts: Sequence[str]
) -> list[Episode]:
    sampler = Sampler(folder, task, seed=0)
    sampler._model = Actor(texts)
    return sampler.sample(prompts)


def test_calls_are_actions_and_observations_are_not(folder: Path) -> None:
    text = "<bos>2+3*4=<call>3*4</call><obs>.12</obs><call>2+12</call><obs>.14</obs>14<end>"
    mask = "       ".replace(" ", "0") + "11111" + "00000" + "111111" + "00000" + "111"
    (episode,) = acted(folder, ToolTask(filler=1), [Prompt("2+3*4=", "14")], [text])
    assert v.decode(episode.token_ids) == text
    assert "".join(str(int(a)) for a in episode.action_mask) == mask
    assert (episode.reward, episode.calls, episode.cut) == (1.0, 2, False)
    for action, logprob in zip(episode.action_mask, episode.logprobs, strict=True):
        assert (logprob == 0.0) if action else math.isnan(logprob)


def test_rows_of_other_lengths_go_on_side_by_side(folder: Path) -> None:
    prompts = [Prompt("2+3*4=", "14"), Prompt("20-3-4=", "13")]
    texts = ["<bos>2+3*4=15<end>", "<bos>20-3-4=13<end>"]
    first, second = acted(folder, ToolTask(), prompts, texts)
    assert (v.decode(first.token_ids), first.reward) == (texts[0], 0.0)
    assert (v.decode(second.token_ids), second.reward) == (texts[1], 1.0)
    assert success([first, second]) == 0.5


def test_what_never_ends_is_cut_and_earns_nothing(folder: Path) -> None:
    (episode,) = acted(folder, SingleTask(digits=3), [Prompt("321=", "123")], ["<bos>321=1"])
    assert len(episode.token_ids) == SingleTask(digits=3).max_tokens == 11
    assert (episode.reward, episode.cut) == (0.0, True)
    assert episode.trajectory("r", 0).cut


def test_at_lag_0_the_trainer_finds_the_very_log_probabilities_that_were_sampled(
    folder: Path,
) -> None:
    """Through calls, forced observations and one key-value cache for rows of other lengths."""
    task, dice = ToolTask(), random.Random(4)
    episodes = Sampler(folder, task, seed=1).sample([task.prompt(dice) for _ in range(24)])
    assert any(episode.calls for episode in episodes)
    trainer = SaoTrainer(ARMS["sao"].algorithm(24), learner_settings(1e-3, 1e-3), folder)
    trainer.restore(folder, None)
    batch = [episode.trajectory(f"r{i}", 0) for i, episode in enumerate(episodes)]
    metrics = trainer.update(batch, critic_only=False).metrics
    assert metrics["clip_ratio"] == 0.0
    assert metrics["log_ratio_abs_max"] is not None
    assert metrics["log_ratio_abs_max"] < 1e-4


def test_the_sampler_s_weights_are_the_ones_it_is_given(folder: Path) -> None:
    task, dice = ToolTask(), random.Random(5)
    prompts = [task.prompt(dice) for _ in range(8)]
    sampler = Sampler(folder, task, seed=1)
    before = [e.token_ids for e in Sampler(folder, task, seed=1).sample(prompts)]
    weights = {n: torch.zeros_like(p) for n, p in sampler._model.named_parameters()}
    sampler.load(weights)
    episodes = sampler.sample(prompts)
    assert [e.token_ids for e in episodes] != before
    # A policy of zeros gives every token the same chance.
    uniform = -math.log(len(v.TOKENS))
    sampled = [p for e in episodes for p, a in zip(e.logprobs, e.action_mask, strict=True) if a]
    assert sampled == pytest.approx([uniform] * len(sampled), abs=1e-5)
