"""The output head over action positions alone, in chunks.

A (batch, time, vocabulary) tensor never exists: each chunk's logits are made, used, sent backward
into its hidden states, and dropped before the next chunk's are made. So no logits are kept for
the backward pass and none are computed twice.

Shapes: N action tokens, D hidden, V vocabulary, C tokens of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from online_sao.algorithm import sao, variants
from online_sao.numerics import bf16_products

CHUNK_ELEMENTS = 1 << 23
"""Logits in one chunk: 32 MiB in fp32."""


@dataclass(frozen=True, slots=True)
class ActionScores:
    """What the policy makes of N sampled tokens."""

    logprobs: Tensor
    """(N,) log pi_theta(a_t|s_t) at the rollout's temperature."""
    kl: Tensor
    """(N,) full-softmax KL to the start policy in the asked direction; NaN without one."""
    entropy: Tensor
    """(N,) entropy of pi_theta(.|s_t); with a gradient only where a bonus on it is asked for."""


Objective = Callable[[ActionScores, slice], Tensor]
"""Loss of one chunk (a scalar) from its scores; the slice says which of the N tokens they are."""


Projection = Callable[[Tensor], Tensor]
"""Hidden states (C, D) -> fp32 logits (C, V)."""


@dataclass(frozen=True, slots=True)
class LogitChange:
    """What some families do to their logits after the output head: x -> cap tanh(scale x / cap)."""

    scale: float = 1.0
    cap: float | None = None
    """None: no cap, scale x alone."""

    def __call__(self, logits: Tensor) -> Tensor:
        """The logits the softmax is taken of; any shape, differentiable."""
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


@dataclass(frozen=True, slots=True)
class _Heads:
    """The policy's and the start policy's projections, ready for one call's chunks."""

    theta: Projection
    start: Projection
    products: Callable[[], AbstractContextManager[None]]
    """What the products run under."""


@dataclass(frozen=True, slots=True)
class HeadScorer:
    """Scores action tokens from the hidden states before them."""

    head: nn.Module
    start_head: nn.Module
    reverse_kl: bool
    """KL(start || policy) instead of KL(policy || start)."""
    entropy_pulls: bool = False
    """The objective has an entropy term."""
    change: LogitChange = LogitChange()
    """Of the policy's and the start policy's logits alike."""
    chunk_elements: int = CHUNK_ELEMENTS

    def score(
        self,
        states: Tensor,
        actions: Tensor,
        temperatures: Tensor,
        start_states: Tensor | None,
        objective: Objective | None,
    ) -> ActionScores:
        """Scores of `actions` (N,), detached, given hidden `states` (N, D) of the policy and of
        the start policy, at `temperatures` (N,).

        With an objective its gradient is sent backward through `states`' graph, and into the
        head's weights where those train.
        """
        leaf = states.detach().requires_grad_(objective is not None)
        step = max(1, self.chunk_elements // self._vocabulary())
        heads = self._heads(with_gradient=objective is not None)
        parts: list[ActionScores] = []
        for begin in range(0, len(actions), step):
            where = slice(begin, begin + step)
            start = None if start_states is None else start_states[where]
            with torch.set_grad_enabled(objective is not None), heads.products():
                scores = self._chunk(heads, leaf[where], actions[where], temperatures[where], start)
                if objective is not None:
                    objective(scores, where).backward()  # type: ignore[no-untyped-call]
            parts.append(
                ActionScores(scores.logprobs.detach(), scores.kl.detach(), scores.entropy.detach())
            )
        if objective is not None:
            states.backward(leaf.grad)  # type: ignore[no-untyped-call]
        return ActionScores(
            torch.cat([p.logprobs for p in parts]),
            torch.cat([p.kl for p in parts]),
            torch.cat([p.entropy for p in parts]),
        )

    def _heads(self, *, with_gradient: bool) -> _Heads:
        with torch.set_grad_enabled(with_gradient):
            theta = self._projection(self.head)
        start = theta if self.start_head is self.head else self._projection(self.start_head)
        return _Heads(theta, start, bf16_products if _rounds(self.head) else nullcontext)

    def _chunk(
        self,
        heads: _Heads,
        states: Tensor,
        actions: Tensor,
        temperatures: Tensor,
        start_states: Tensor | None,
    ) -> ActionScores:
        temperature = temperatures[:, None] if bool((temperatures != 1.0).any()) else 1.0
        log_theta = sao.log_policy(heads.theta(states), temperature)
        logprobs = log_theta.gather(1, actions[:, None]).squeeze(1)
        with torch.set_grad_enabled(self.entropy_pulls and torch.is_grad_enabled()):
            entropy = sao.entropy(log_theta)
        if start_states is None:
            return ActionScores(logprobs, torch.full_like(logprobs, torch.nan), entropy)
        with torch.no_grad():
            log_start = sao.log_policy(heads.start(start_states), temperature)
        kl = variants.kl_start_policy if self.reverse_kl else variants.kl_policy_start
        return ActionScores(logprobs, kl(log_theta, log_start), entropy)

    def _projection(self, head: nn.Module) -> Projection:
        """Hidden states -> fp32 logits; a bf16 head's sums are not rounded (see `numerics`)."""
        if not isinstance(head, nn.Linear) or not _rounds(head):
            return lambda states: self.change(head(states).float())
        weight = head.weight.float()
        bias = None if head.bias is None else head.bias.float()
        return lambda states: self.change(F.linear(states.float(), weight, bias))

    def _vocabulary(self) -> int:
        weight = self.head.weight
        assert isinstance(weight, Tensor)
        return len(weight)


def _rounds(head: nn.Module) -> bool:
    """Whether the head's sums would be rounded to bf16 (and the CPU can do without)."""
    weight = head.weight
    return (
        isinstance(head, nn.Linear)
        and isinstance(weight, Tensor)
        and weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
    )
