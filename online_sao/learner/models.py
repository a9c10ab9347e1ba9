"""Policy and critic as networks: loading, the parts of a decoder, what trains and what is frozen.

A network computes in `dtype` (bfloat16 where the hardware has it); what is trained has fp32
masters elsewhere (`weights.py`). Dropout is off always, also where the checkpoint's config has it:
with it on, log-probabilities would not be those of the policy that sampled.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from online_sao.config import LearnerSettings
from online_sao.errors import ModelError
from online_sao.learner.head import LogitChange
from online_sao.learner.ranks import Ranks
from online_sao.manifest import read_header

ATTENTION_NAMES = ("self_attn", "linear_attn", "attention", "attn")
ROUTER_NAMES = ("gate", "router")
EAGER_ATTENTION_TOKENS = 2048
"""On a CPU, eager attention is the faster backward up to here; beyond it its (T, T) matrices
cost more memory than that is worth."""
_DROPOUT = re.compile(r"dropout|pdrop")
_STORED = {torch.bfloat16: "BF16", torch.float32: "F32"}
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError)
"""What transformers raises on folders that hold no (whole) model."""


def pick_device() -> torch.device:
    """The GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pick_dtype(
    setting: Literal["auto", "bfloat16", "float32"], device: torch.device
) -> torch.dtype:
    """`auto` is bfloat16 where the hardware multiplies in it, else float32."""
    if setting != "auto":
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[setting]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    capabilities = torch.cpu.get_capabilities()
    fast = capabilities.get("amx_bf16") or capabilities.get("avx512_bf16")
    return torch.bfloat16 if fast else torch.float32


def pick_attention(device: torch.device, longest: int) -> str:
    """The attention implementation that was the fastest in measurements."""
    eager = device.type == "cpu" and longest <= EAGER_ATTENTION_TOKENS
    return "eager" if eager else "sdpa"


@dataclass(frozen=True, slots=True)
class Compute:
    """Where and how networks compute."""

    device: torch.device
    dtype: torch.dtype
    attention: str

    @classmethod
    def chosen(cls, settings: LearnerSettings) -> Compute:
        """The settings' choice on this machine."""
        device = pick_device()
        dtype = pick_dtype(settings.dtype, device)
        return cls(device, dtype, pick_attention(device, settings.max_train_tokens))

    def before_sharding(self, ranks: Ranks) -> Compute:
        """Where networks are loaded: on the CPU if they are to be cut up, a layer at a time."""
        return self if ranks.size == 1 else replace(self, device=torch.device("cpu"))

    def load(self, folder: Path) -> Any:
        """The causal language model of `folder`. Raises ModelError."""
        return load_causal_lm(folder, self.dtype, self.device, self.attention)

    def load_exact(self, folder: Path) -> Any | None:
        """The same in fp32 where `load` rounds what is stored; None where it does not."""
        if self.dtype == torch.float32 or stored_dtypes(folder) == {_STORED[self.dtype]}:
            return None
        return load_causal_lm(folder, torch.float32, self.device, self.attention)


def stored_dtypes(folder: Path) -> set[str]:
    """The dtypes of a folder's tensors, as safetensors writes them."""
    headers = [read_header(path) for path in folder.glob("*.safetensors")]
    return {dtype for header in headers for dtype, _ in header.values()}


def load_causal_lm(folder: Path, dtype: torch.dtype, device: torch.device, attention: str) -> Any:
    """The causal language model in `folder`: evaluation mode, no dropout, nothing trainable.

    `attention`: "sdpa" means eager for a family that has no such attention (sinks, soft caps).
    Raises ModelError when it is missing, unreadable, quantized, or its tensors are not the model's.
    """
    transformers_logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        for key, value in config.to_dict().items():
            if _DROPOUT.search(key) and isinstance(value, float):
                setattr(config, key, 0.0)
        if getattr(config, "quantization_config", None) is not None:
            raise ModelError(f"{folder} is quantized: training needs its 16 or 32 bit weights")
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=None if attention == "sdpa" else attention,  # None: sdpa if it can
            local_files_only=True,
            output_loading_info=True,
        )
    except _UNREADABLE as error:
        raise ModelError(f"{folder} cannot be loaded as a model: {error}") from error
    wrong = [*info["missing_keys"], *info["unexpected_keys"]]
    wrong += [str(key) for key in info["mismatched_keys"]]
    if wrong:
        raise ModelError(f"{folder}: tensors do not match the model: {', '.join(wrong[:5])}")
    model.requires_grad_(False)
    return model.to(device).eval()


@dataclass(frozen=True, slots=True)
class Decoder:
    """The parts of a causal language model, found by what they are."""

    base: Any
    """Everything but the output head: token ids -> final hidden states."""
    embeddings: nn.Module
    layers: nn.ModuleList
    norm: nn.Module
    """The norm after the last layer."""
    head: nn.Module
    change: LogitChange
    """What the model does to the head's output."""

    @classmethod
    def of(cls, model: Any) -> Decoder:
        """The parts of `model`. Raises ModelError for an architecture they cannot be told in."""
        base, name = model.base_model, type(model).__name__
        depth = getattr(model.config, "num_hidden_layers", None)
        stacks = [m for m in base.children() if isinstance(m, nn.ModuleList) and len(m) == depth]
        norms = [m for m in base.children() if type(m).__name__.endswith("Norm")]
        if base is model or len(stacks) != 1 or len(norms) != 1:
            raise ModelError(f"{name}: its layers and final norm cannot be named; not supported")
        embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
        decoder = cls(base, embeddings, stacks[0], norms[0], head, logit_change(model.config))
        decoder._check_head(model)
        return decoder

    @torch.no_grad()
    def _check_head(self, model: Any) -> None:
        """The head must read the final hidden states, and what happens to its output must be
        `change` and no more: seen on a head made to say logits from -64 to 64.
        """
        ids = torch.arange(4, device=next(self.embeddings.parameters()).device)[None]
        final = self.base(input_ids=ids, use_cache=False).last_hidden_state
        read: list[Tensor] = []
        said: list[Tensor] = []

        def say(_: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
            ramp = torch.linspace(-64.0, 64.0, out.numel(), device=out.device).view_as(out)
            read.append(args[0])
            said.append(ramp.to(out.dtype))
            return said[0]

        hook = self.head.register_forward_hook(say)
        try:
            whole = model(input_ids=ids, use_cache=False).logits.float()
        finally:
            hook.remove()
        loose = 1e-3 if final.dtype == torch.float32 else 2**-6  # its steps may each round
        if not (
            read
            and torch.allclose(read[0], final, rtol=loose, atol=1e-3)
            and torch.allclose(whole, self.change(said[0].float()), rtol=loose, atol=1e-3)
        ):
            raise ModelError(
                f"{type(model).__name__} changes its logits after the head, or its hidden states "
                "before it, in a way that is not known here; not supported"
            )


def logit_change(config: Any) -> LogitChange:
    """What a family's config says of its logits: Granite divides, Cohere multiplies, Gemma caps."""
    cap = getattr(config, "final_logit_softcapping", None)
    scale = getattr(config, "logit_scale", None) or 1.0
    scale /= getattr(config, "logits_scaling", None) or 1.0
    return LogitChange(scale, cap or None)


def first_trained(decoder: Decoder, top_layers: int) -> int:
    """The lowest layer of the top N; 0 when N is 0, which means all."""
    depth = len(decoder.layers)
    return 0 if top_layers == 0 else max(0, depth - top_layers)


def policy_parameters(model: Any, decoder: Decoder, top_layers: int) -> dict[str, nn.Parameter]:
    """What trains of the policy: its top N layers and the final norm; all of it for 0.

    Embedding and (tied) head are frozen unless all layers train.
    """
    first = first_trained(decoder, top_layers)
    if first == 0:
        return dict(model.named_parameters())
    trained = [*decoder.layers[first:].parameters(), *decoder.norm.parameters()]
    wanted = {id(parameter) for parameter in trained}
    return {name: p for name, p in model.named_parameters() if id(p) in wanted}


class CriticNetwork(nn.Module):
    """The first N layers of a policy, its final norm, and an fp32 scalar head that starts at 0."""

    def __init__(self, model: Any, decoder: Decoder, first_layers: int) -> None:
        super().__init__()
        depth = len(decoder.layers)
        keep = depth if first_layers == 0 else min(first_layers, depth)
        left_out = {id(layer): nn.Identity() for layer in decoder.layers[keep:]}
        self.backbone: Any = copy.deepcopy(decoder.base, left_out)
        del self.layers[keep:]
        self.backbone.config.num_hidden_layers = keep
        width = model.config.hidden_size
        self.head = nn.Linear(width, 1, dtype=torch.float32, device=model.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        return next(m for m in self.backbone.children() if isinstance(m, nn.ModuleList))

    def forward(self, token_ids: Tensor) -> Tensor:
        """V(s_t) before any squashing, (B, T) float32: the head's output at position t - 1.

        Position 0 has no state before it and gets 0.
        """
        hidden = self.backbone(input_ids=token_ids, use_cache=False).last_hidden_state
        outputs = self.head(hidden.float()).squeeze(-1)
        return nn.functional.pad(outputs[:, :-1], (1, 0))


def critic_parameters(
    critic: CriticNetwork, *, train_attention: bool = False, train_embeddings: bool = False
) -> dict[str, nn.Parameter]:
    """What trains of the critic: MLPs or experts, the norms outside attention, the head.

    Frozen, found by module: everything inside attention modules (unless `train_attention`), the
    token embeddings and MoE routers (unless `train_embeddings`). Raises ModelError for a layer
    whose attention or router is to be frozen and cannot be named.
    """
    frozen: set[int] = set()
    if not train_embeddings:
        frozen |= {id(p) for p in critic.backbone.get_input_embeddings().parameters()}
    for layer in critic.layers:
        frozen_modules = [] if train_attention else attention_modules(layer)
        frozen_modules += [] if train_embeddings else routers(layer)
        for module in frozen_modules:
            frozen |= {id(p) for p in module.parameters()}
    return {name: p for name, p in critic.named_parameters() if id(p) not in frozen}


def attention_modules(layer: nn.Module) -> list[nn.Module]:
    """The attention modules of a layer. Raises ModelError where they cannot be named."""
    found = [m for n, m in layer.named_modules() if n.split(".")[-1] in ATTENTION_NAMES]
    if not any(True for module in found for _ in module.parameters()):
        raise ModelError(f"{type(layer).__name__}: its attention cannot be named; not supported")
    return found


def routers(layer: nn.Module) -> list[nn.Module]:
    """The routers of a layer's expert blocks. Raises ModelError where they cannot be named."""
    found: list[nn.Module] = []
    for block in layer.modules():
        children = dict(block.named_children())
        if "experts" not in children:
            continue
        routers = [children[name] for name in ROUTER_NAMES if name in children]
        if not routers:
            raise ModelError(f"{type(block).__name__}: its router cannot be named; not supported")
        found += routers
    return found


def enable_recomputation(model: Any, layers: nn.ModuleList) -> None:
    """Activation checkpointing: the model's `layers` are run again in the backward pass."""
    model.activation_checkpointing_enable()
    for layer in layers:
        layer.training = True  # the layer's own flag alone: its dropout modules stay off


def exact_parameters(
    names: Mapping[str, nn.Parameter], model: nn.Module | None
) -> dict[str, Tensor] | None:
    """The parameters `names` as `model` (the same network in fp32, if there is one) has them."""
    if model is None:
        return None
    parameters = dict(model.named_parameters())
    return {name: parameters[name].detach() for name in names}
