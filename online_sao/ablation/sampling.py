"""Episodes sampled side by side, token by token, each token's log-probability kept.

All rows stand at the same position: a row's next token is its prompt's, an observation's, or
sampled from the policy at temperature 1, and all rows are fed at once into one key-value cache.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from online_sao.ablation import vocabulary
from online_sao.ablation.tasks import Final, Prompt, Task
from online_sao.learner.models import load_causal_lm
from online_sao.types import Trajectory

_TURN_ENDS = frozenset((vocabulary.id_of(vocabulary.CALL_END), vocabulary.id_of(vocabulary.END)))
_PAD = vocabulary.id_of(vocabulary.PAD)


@dataclass(frozen=True, slots=True)
class Episode:
    """What happened: all token ids, which of them the policy sampled and how likely."""

    prompt: Prompt
    token_ids: tuple[int, ...]
    action_mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    """Of the sampled tokens; NaN on the others."""
    reward: float
    calls: int
    cut: bool

    def trajectory(self, name: str, lag: int) -> Trajectory:
        """As the learner sees it."""
        return Trajectory(
            rollout_ids=(name,),
            token_ids=self.token_ids,
            action_mask=self.action_mask,
            logprobs=self.logprobs,
            reward=self.reward,
            temperature=1.0,
            lag=lag,
            cut=self.cut,
        )


@dataclass(slots=True)
class _Row:
    """An episode under way."""

    prompt: Prompt
    forced: deque[int]
    """Tokens to come that are not the policy's."""
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    calls: int = 0
    reward: float | None = None
    """None while it goes on."""
    cut: bool = False

    def add(self, token: int, logprob: float, task: Task) -> int:
        """Take the sampled token, or the forced one that stands in its place; returns which."""
        if self.reward is not None:
            return _PAD
        if self.forced:
            self._append(self.forced.popleft(), False, math.nan)
        else:
            self._append(token, True, logprob)
            self.turn.append(token)
            if token in _TURN_ENDS:
                self._end_turn(task)
        if self.reward is None and len(self.ids) >= task.max_tokens:
            self.reward, self.cut = 0.0, True
        return self.ids[-1]

    def _append(self, token: int, action: bool, logprob: float) -> None:
        self.ids.append(token)
        self.mask.append(action)
        self.logprobs.append(logprob)

    def _end_turn(self, task: Task) -> None:
        answer = task.answer(self.prompt, self.turn, self.calls)
        self.turn = []
        if isinstance(answer, Final):
            self.reward = answer.reward
        else:
            self.calls += 1
            self.forced.extend(answer.ids)

    def episode(self) -> Episode:
        return Episode(
            self.prompt,
            tuple(self.ids),
            tuple(self.mask),
            tuple(self.logprobs),
            self.reward or 0.0,
            self.calls,
            self.cut,
        )


class Sampler:
    """A policy of its own that takes the learner's weights and samples episodes."""

    def __init__(self, folder: Path, task: Task, seed: int) -> None:
        """Loads the network of `folder` in float32. Raises ModelError."""
        self._model: Any = load_causal_lm(folder, torch.float32, torch.device("cpu"), "eager")
        self._task = task
        self._dice = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take the parameters `weights`, by name."""
        mine = dict(self._model.named_parameters())
        for name, tensor in weights.items():
            mine[name].copy_(tensor)

    @torch.inference_mode()
    def sample(self, prompts: Sequence[Prompt]) -> list[Episode]:
        """One episode for each prompt."""
        rows = [_Row(prompt, deque(prompt.ids)) for prompt in prompts]
        first = min(len(prompt.ids) for prompt in prompts)
        for row in rows:  # what all rows have in length is fed at once
            for _ in range(first):
                row.add(_PAD, math.nan, self._task)
        feed = torch.tensor([row.ids for row in rows])
        cache = DynamicCache()
        while True:
            logits = self._model(input_ids=feed, use_cache=True, cache=cache).logits[:, -1]
            log_p = logits.log_softmax(-1)
            tokens = torch.multinomial(log_p.exp(), 1, generator=self._dice)
            sampled = zip(
                rows, tokens[:, 0].tolist(), log_p.gather(1, tokens)[:, 0].tolist(), strict=True
            )
            fed = [row.add(token, logprob, self._task) for row, token, logprob in sampled]
            if all(row.reward is not None for row in rows):
                return [row.episode() for row in rows]
            feed = torch.tensor(fed)[:, None]


def success(episodes: Sequence[Episode]) -> float:
    """The share of episodes with reward 1."""
    return sum(episode.reward for episode in episodes) / len(episodes)
