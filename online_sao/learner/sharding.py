"""A network's decoder layers, cut up over the ranks with FSDP2; one process cuts nothing.

Each layer's parameters are shards. What trains is sharded in fp32 and gathered in the compute
dtype, so a shard is its own master; what is frozen is sharded as it is. Embeddings, final norm,
output head and the critic's scalar head stay whole on every rank: they are called outside the
layers, and a large model is its layers. Their gradients are summed before each step.

Sums over the ranks, never means: the loss' denominators are the whole batch's already.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from online_sao.learner.ranks import Ranks


def shard(
    base: nn.Module | None,
    layers: nn.ModuleList,
    ranks: Ranks,
    *,
    trained: Iterable[nn.Parameter] = (),
    exact: nn.ModuleList | None = None,
) -> None:
    """Cut `layers` up, those with `trained` parameters as fp32 masters, their values `exact`'s.

    `base` is the module that runs the layers, if one does; its other parameters stay whole.
    """
    if ranks.size == 1:
        return
    wanted = {id(parameter) for parameter in trained}
    for place, layer in enumerate(layers):
        dtype = next(layer.parameters()).dtype
        moves = any(id(parameter) in wanted for parameter in layer.parameters())
        if moves:
            layer.float()  # in place: the parameters stay the ones that are to be trained
            if exact is not None:
                layer.load_state_dict(exact[place].state_dict())
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        _summing(fully_shard(layer, mp_policy=precision, reshard_after_forward=True))
    if base is None:
        return
    inside = {id(parameter) for parameter in layers.parameters()}
    outside = {parameter for parameter in base.parameters() if id(parameter) not in inside}
    _summing(fully_shard(base, ignored_params=outside))


def place(module: nn.Module, ranks: Ranks) -> None:
    """Bring what stays whole to the device of the shards."""
    if ranks.size > 1 and torch.cuda.is_available():
        module.to("cuda")


def _summing(module: Any) -> None:
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def renewed(
    parameters: Mapping[str, nn.Parameter], network: nn.Module, ranks: Ranks
) -> dict[str, nn.Parameter]:
    """The parameters of these names as they are now: sharding puts new ones in their places."""
    if ranks.size == 1:
        return dict(parameters)
    present = dict(network.named_parameters())
    return {name: present[name] for name in parameters}


def whole(tensor: Tensor) -> Tensor:
    """The tensor that a shard belongs to. Every rank must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, master: Tensor) -> Tensor:
    """`tensor`, which every rank has whole (or cut like `master`), cut like `master`."""
    if not isinstance(master, DTensor) or isinstance(tensor, DTensor):
        return tensor
    tensor = tensor.to(master.device)
    return distribute_tensor(tensor, master.device_mesh, master.placements, src_data_rank=None)


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float, ranks: Ranks) -> float:
    """Sum what stands whole on every rank, then clip the norm over all; returns what it was."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    shards = [g.to_local() for g in gradients if isinstance(g, DTensor)]
    replicas = [g for g in gradients if not isinstance(g, DTensor)]
    ranks.sum(*replicas)
    device = gradients[0].device if gradients else torch.device("cpu")
    of_shards = _square_sum(shards, device)
    ranks.sum(of_shards)
    norm = float((of_shards + _square_sum(replicas, device)).sqrt())
    if math.isfinite(norm) and norm > limit:
        for gradient in (*shards, *replicas):
            gradient.mul_(limit / (norm + 1e-6))  # torch's own guard, for equal steps
    return norm


def _square_sum(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    total = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in tensors:
        total += tensor.double().square().sum()
    return total
