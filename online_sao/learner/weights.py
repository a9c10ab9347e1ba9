"""fp32 master weights, their AdamW, and the compute copies they are rounded into.

bfloat16 parameters under Adam at small learning rates do not move, so the masters do the moving:
gradients of the compute copies are added into the masters' in fp32, AdamW steps the masters, and
the copies are set to the rounded masters. Where the network computes in fp32, master and copy are
one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from online_sao.config import LearnerSettings
from online_sao.errors import LearnerError, ModelError, UpdateNotFinite
from online_sao.learner.ranks import ALONE, Ranks
from online_sao.learner.sharding import clip_gradients, like, place, renewed, shard, whole

WEIGHT_DECAY = 0.0
"""The paper names none; the KL term is what holds the policy."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


class TrainedWeights:
    """The trained parameters of one network."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        lr: float,
        adam_eps: float,
        grad_clip: float,
        exact: Mapping[str, Tensor] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`exact`: fp32 values, where the compute copies are rounded from something wider."""
        self._ranks = ranks
        self.copies = dict(parameters)
        self._grad_clip = grad_clip
        self.masters: dict[str, nn.Parameter] = {}
        for name, copy in self.copies.items():
            copy.requires_grad_(True)
            if copy.dtype == torch.float32:
                self.masters[name] = copy
                continue
            source = copy if exact is None else exact[name]
            master = source.detach().to(copy.device, torch.float32, copy=True)
            self.masters[name] = nn.Parameter(master)
        shards = [p for p in self.masters.values() if isinstance(p, DTensor)]
        replicas = [p for p in self.masters.values() if not isinstance(p, DTensor)]
        groups = [{"params": group} for group in (replicas, shards) if group]  # never in one call
        self.optimizer = torch.optim.AdamW(
            groups, lr=lr, eps=adam_eps, weight_decay=WEIGHT_DECAY, fused=True
        )

    def accumulate(self) -> None:
        """Add the compute copies' gradients to the masters', in fp32, and drop them."""
        for name, master in self.masters.items():
            copy = self.copies[name]
            if copy is master or copy.grad is None:
                continue
            if master.grad is None:
                master.grad = copy.grad.float()
            else:
                master.grad.add_(copy.grad)
            copy.grad = None

    def clip(self) -> float:
        """Clip the gradients' norm; returns what it was. Raises UpdateNotFinite."""
        if self._ranks.size > 1:
            norm = clip_gradients(self.masters.values(), self._grad_clip, self._ranks)
        else:
            norm = float(nn.utils.clip_grad_norm_(self.masters.values(), self._grad_clip))
        if not math.isfinite(norm):
            raise UpdateNotFinite(f"gradient norm is {norm}")
        return norm

    def step(self) -> None:
        """One AdamW step on the masters; the compute copies follow.

        What no loss reaches (a bias that balances experts' loads) is stepped by a gradient of 0:
        left out, it would have no moments, and a state without them is not whole.
        """
        with self.gradients():
            for master in self.masters.values():
                if master.grad is None:
                    master.grad = torch.zeros_like(master)
            self.optimizer.step()
        self._round()

    @contextmanager
    def gradients(self) -> Iterator[None]:
        """None are left when the block ends, however it ends."""
        try:
            yield
        finally:
            for parameter in (*self.masters.values(), *self.copies.values()):
                parameter.grad = None

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Masters, copies and optimizer are as they were if the block raises."""
        before = {name: tensor.clone() for name, tensor in self.state().items()}
        steps = self.steps()
        try:
            with self.gradients():
                yield
        except BaseException:
            self.load_state(before, steps)
            raise

    def steps(self) -> int:
        """Steps AdamW has done."""
        state = self.optimizer.state.get(next(iter(self.masters.values())), {})
        return int(state["step"].item()) if state else 0

    def state(self) -> dict[str, Tensor]:
        """Masters and moments by name (not copied); moments only after a first step."""
        tensors = {f"master.{name}": p.detach() for name, p in self.masters.items()}
        for name, master in self.masters.items():
            for moment in _MOMENTS:
                if master in self.optimizer.state:
                    tensors[f"{moment}.{name}"] = self.optimizer.state[master][moment]
        return tensors

    def whole_masters(self) -> dict[str, Tensor]:
        """The masters on the CPU, by name; empty but on rank 0. Every rank must ask."""
        return self._gathered({name: p.detach() for name, p in self.masters.items()})

    def whole_state(self) -> dict[str, Tensor]:
        """`state`, likewise."""
        return self._gathered(self.state())

    def _gathered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        kept = {}
        for name, tensor in tensors.items():
            full = whole(tensor)
            if self._ranks.first:
                kept[name] = full.to("cpu").contiguous()
        return kept

    def load_state(
        self, tensors: Mapping[str, Tensor], steps: int, *, masters: bool = True
    ) -> None:
        """Take what `state` gave; without `masters`, the optimizer's moments alone.

        Raises ModelError, with nothing changed, when names or shapes are not ours.
        """
        expected = {f"master.{name}": p.shape for name, p in self.masters.items()}
        if steps > 0:
            for moment in _MOMENTS:
                expected |= {f"{moment}.{name}": p.shape for name, p in self.masters.items()}
        if {name: t.shape for name, t in tensors.items()} != expected:
            raise ModelError("the saved state belongs to other trained parameters")
        if masters:
            with torch.no_grad():
                for name, master in self.masters.items():
                    master.copy_(like(tensors[f"master.{name}"], master))
        self._load_moments(tensors, steps)
        self._round()

    def _load_moments(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        if steps == 0:
            self.optimizer.state.clear()
            return
        for name, master in self.masters.items():
            moments = {moment: tensors[f"{moment}.{name}"] for moment in _MOMENTS}
            self.optimizer.state[master] = {
                "step": torch.tensor(float(steps), device=master.device),
                **{
                    moment: like(tensor, master).to(master.device).clone()
                    for moment, tensor in moments.items()
                },
            }

    @torch.no_grad()
    def _round(self) -> None:
        for name, master in self.masters.items():
            if self.copies[name] is not master:
                self.copies[name].copy_(master)


def train(
    network: nn.Module,
    base: nn.Module,
    layers: nn.ModuleList,
    parameters: Mapping[str, nn.Parameter],
    settings: LearnerSettings,
    ranks: Ranks,
    *,
    lr: float,
    exact: Mapping[str, Tensor] | None = None,
    exact_layers: nn.ModuleList | None = None,
) -> TrainedWeights:
    """Let `parameters` of the network train: its `layers`, which `base` runs, are cut up over the
    ranks first. `exact` and `exact_layers` are the same in fp32, where the network is rounded.
    """
    shard(base, layers, ranks, trained=parameters.values(), exact=exact_layers)
    place(network, ranks)
    return TrainedWeights(
        renewed(parameters, network, ranks),
        lr=lr,
        adam_eps=settings.adam_eps,
        grad_clip=settings.grad_clip,
        exact=exact,
        ranks=ranks,
    )


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Raises LearnerError when the file cannot be written (a full disk)."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise LearnerError(f"{path} could not be written ({error}): is the disk full?") from error
    path.chmod(0o644)  # an engine may run as another user
