"""The policy with its masters, beside the frozen start policy that the KL term looks at.

Where the policy trains its top N layers alone, the layers below (the trunk) are the start
policy's too: one forward of the trunk serves both, and the start policy is a frozen copy of the
top layers. Otherwise the start policy is a network of its own. With adapters it is the policy's
own layers with the adapters off.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from online_sao.config import LearnerSettings
from online_sao.learner import models
from online_sao.learner.batch import TrajectoryBatch
from online_sao.learner.head import ActionScores, HeadScorer, Objective
from online_sao.learner.lora import Adapter
from online_sao.learner.models import Decoder
from online_sao.learner.ranks import ALONE, Ranks
from online_sao.learner.sharding import place, shard
from online_sao.learner.weights import train


@dataclass(slots=True)
class _LayerCall:
    """What a decoder layer was called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StartPolicy:
    """pi_start, frozen: the layers from `shared` up with their norm, or (`shared` None) a whole
    network of its own, `base`. The layers may be the policy's, if `alone` makes them pi_start's.
    """

    head: nn.Module
    shared: int | None
    layers: nn.ModuleList = field(default_factory=nn.ModuleList)
    norm: nn.Module | None = None
    base: Any = None
    alone: Callable[[], AbstractContextManager[None]] = nullcontext
    """What the layers run under."""

    @classmethod
    def within(cls, policy: Decoder, first_adapted: int, adapter: Adapter) -> StartPolicy:
        """The start policy that `policy` is with its adapters off."""
        layers = policy.layers[first_adapted:]
        return cls(policy.head, first_adapted, layers, policy.norm, alone=adapter.off)

    @classmethod
    def beside(cls, policy: Decoder, first_trained: int | None, start: Decoder) -> StartPolicy:
        """The start policy that shares with `policy` all it can.

        `first_trained`: the policy's first layer that trains; None when everything does.
        """
        if first_trained is None or not _same(policy.embeddings, start.embeddings):
            return cls(start.head, None, start.layers, base=start.base)
        if not _same(policy.head, start.head):
            return cls(start.head, None, start.layers, base=start.base)
        shared = 0
        while shared < first_trained and _same(policy.layers[shared], start.layers[shared]):
            shared += 1
        top = copy.deepcopy(start.layers[shared:])
        return cls(policy.head, shared, top, copy.deepcopy(start.norm))

    def shard(self, ranks: Ranks) -> None:
        """Cut its own layers up; those of the policy are."""
        shard(self.base, self.layers, ranks)
        for part in (self.base, self.head, self.norm):
            if part is not None:
                place(part, ranks)

    @torch.no_grad()
    def hidden(self, token_ids: Tensor, calls: list[_LayerCall]) -> Tensor:
        """Final hidden states (B, T, D). `calls`: what the policy's layers were called with."""
        if self.shared is None or self.norm is None:
            final: Tensor = self.base(input_ids=token_ids, use_cache=False).last_hidden_state
            return final
        state = calls[0].args[0]
        with self.alone():
            for layer, call in zip(self.layers, calls, strict=True):
                out = layer(state, *call.args[1:], **call.kwargs)
                state = out[0] if isinstance(out, tuple) else out
        return self.norm(state)  # type: ignore[no-any-return]


class Policy:
    """pi_theta: compute network, trained weights, and the start policy if KL is asked for."""

    def __init__(
        self,
        model: Any,
        exact: Any | None,
        start: Any | None,
        settings: LearnerSettings,
        *,
        reverse_kl: bool = False,
        entropy_pulls: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        """`model` becomes the policy, its masters taken from `exact` if given (the same in fp32);
        `start` is the start policy as a model, where a KL to it is asked for. With `lora_rank` set
        the model must be the start policy itself: adapters are put on it, and a `start` is itself.
        """
        self.model = model
        self.decoder = Decoder.of(model)
        first = models.first_trained(self.decoder, settings.policy_layers)
        self.adapter: Adapter | None = None
        if settings.lora_rank > 0:
            self.adapter = Adapter.attach(model, self.decoder, settings)
            parameters = self.adapter.parameters()
        else:
            parameters = models.policy_parameters(model, self.decoder, settings.policy_layers)
        self.start = self._start_of(start, first)
        exacts = None if self.adapter else models.exact_parameters(parameters, exact)
        self.weights = train(
            model, self.decoder.base, self.decoder.layers, parameters, settings, ranks,
            lr=settings.policy_lr,
            exact=exacts,
            exact_layers=None if exact is None else Decoder.of(exact).layers,
        )  # fmt: skip
        if self.start is not None:
            self.start.shard(ranks)
        if settings.activation_checkpointing:
            models.enable_recomputation(model, self.decoder.layers[first:])
        start_head = self.decoder.head if self.start is None else self.start.head
        self._scorer = HeadScorer(
            self.decoder.head, start_head, reverse_kl, entropy_pulls, self.decoder.change
        )

    def _start_of(self, start: Any | None, first_trained: int) -> StartPolicy | None:
        if start is None:
            return None
        if self.adapter is not None:
            return StartPolicy.within(self.decoder, first_trained, self.adapter)
        return StartPolicy.beside(self.decoder, first_trained or None, Decoder.of(start))

    def score(self, part: TrajectoryBatch, objective: Objective | None) -> ActionScores:
        """Scores of the part's action tokens, in row-major order of its mask.

        With an objective, gradients arrive in the masters. Otherwise no graph is built.
        """
        rows, columns = part.action_mask.nonzero(as_tuple=True)
        with torch.set_grad_enabled(objective is not None), self._recorded() as calls:
            out = self.decoder.base(input_ids=part.token_ids, use_cache=False)
            states = out.last_hidden_state[rows, columns - 1]
        start_states = None
        if self.start is not None:
            start_states = self.start.hidden(part.token_ids, calls)[rows, columns - 1]
        scores = self._scorer.score(
            states,
            part.token_ids[rows, columns],
            part.temperatures[rows],
            start_states,
            objective,
        )
        self.weights.accumulate()
        return scores

    @contextmanager
    def _recorded(self) -> Iterator[list[_LayerCall]]:
        """What the layers that the start policy runs too are called with, while the block runs."""
        calls: list[_LayerCall] = []

        def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            kept = tuple(a.detach() if isinstance(a, Tensor) else a for a in args)
            calls.append(_LayerCall(kept if not calls else (None, *kept[1:]), kwargs))

        shared = self.start.shared if self.start is not None else None
        watched = self.decoder.layers[len(self.decoder.layers) if shared is None else shared :]
        hooks = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in watched]
        try:
            yield calls
        finally:
            for hook in hooks:
                hook.remove()


def _same(a: nn.Module, b: nn.Module) -> bool:
    """Every parameter and buffer equal to the last bit."""
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)
