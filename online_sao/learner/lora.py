"""Low-rank adapters on the policy's linear layers: what trains where `lora_rank` is set.

The layers and the file format are PEFT's. The base stays frozen in the compute dtype and is the
start policy whenever the adapters are off, so a KL term costs no second network. Served are merged
weights, W + (alpha / rank) B A, under the checkpoint's own names: any engine can take them. Beside
them a version keeps its adapter, in `adapter/`, for the learner that goes on from it.

In a mixture of experts attention alone gets adapters: the experts are fused parameters, and PEFT
takes a dense or shared MLP's names for those of experts that an older checkpoint stored one by one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from online_sao.config import LearnerSettings
from online_sao.errors import ModelError, VersionFolderError
from online_sao.learner.models import Decoder, attention_modules, first_trained, routers
from online_sao.learner.weights import TrainedWeights, save_tensors
from online_sao.manifest import Manifest

ADAPTER_FOLDER = "adapter"
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_ACTIVE = "default"
"""PEFT's name for the one adapter there is."""
_PEFT_PREFIX = "base_model.model."
"""Before every name in a PEFT file."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """The adapters of one model: B A beside W, for the linear layers of its trained layers."""

    config: Any
    """PEFT's own record of them."""
    layers: Mapping[str, Any]
    """PEFT's layer by the name of the linear layer that it stands for."""

    @classmethod
    def attach(cls, model: Any, decoder: Decoder, settings: LearnerSettings) -> Adapter:
        """Give `model` adapters on its top `policy_layers` layers (0: all), B = 0, A the same
        random numbers every time. Raises ModelError for a model without linear layers there.
        """
        # Imported here: it takes seconds, and a learner without adapters has no use for it.
        from peft import LoraConfig, inject_adapter_in_model

        names = _linear_names(model, decoder, first_trained(decoder, settings.policy_layers))
        if not names:
            raise ModelError(f"{type(model).__name__} has no linear layers; LoRA needs some")
        config = LoraConfig(
            r=settings.lora_rank,
            lora_alpha=settings.lora_alpha or 2 * settings.lora_rank,
            target_modules=names,
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)
            inject_adapter_in_model(config, model)
        config.target_modules = set(names)  # PEFT shortens the names to endings when they are many
        return cls(config, {name: model.get_submodule(name) for name in names})

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return float(self.config.lora_alpha / self.config.r)

    def parameters(self) -> dict[str, nn.Parameter]:
        """What trains: A (rank, in) and B (out, rank) of every layer, by their names in a file."""
        found = {}
        for name, layer in self.layers.items():
            found[_name(name, "A")] = layer.lora_A[_ACTIVE].weight
            found[_name(name, "B")] = layer.lora_B[_ACTIVE].weight
        return found

    @contextmanager
    def off(self) -> Iterator[None]:
        """The model is its base while the block runs."""
        for layer in self.layers.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self.layers.values():
                layer.enable_adapters(True)

    def weight_names(self) -> list[str]:
        """The checkpoint's tensors that the adapters change."""
        return [f"{name}.weight" for name in self.layers]

    def merged(self, name: str, base: Tensor, masters: Mapping[str, Tensor]) -> Tensor:
        """W + scale B A of the checkpoint's tensor `name`, computed in fp32, rounded once to
        `base`'s dtype; on the CPU.
        """
        module = name.removesuffix(".weight")
        b, a = masters[_name(module, "B")].detach(), masters[_name(module, "A")].detach()
        change = (b.float() @ a.float()).mul_(self.scale).to("cpu")
        return change.add_(base).to(base.dtype)

    # -- the adapter's own folder ----------------------------------------------------------

    def write(self, folder: Path, masters: Mapping[str, Tensor]) -> None:
        """PEFT's two files into the new folder `folder`. Raises LearnerError."""
        folder.mkdir()
        self.config.save_pretrained(folder)
        tensors = {name: t.detach().to("cpu", copy=True) for name, t in masters.items()}
        save_tensors(tensors, folder / WEIGHTS_FILE)

    def restore(self, weights: TrainedWeights, version: Path, start: Path) -> None:
        """Set `weights` to the adapter of the folder `version`; as they are for `start` itself.

        Raises ModelError for a version that these adapters on the base in `start` cannot be: one
        trained without, or with other ones.
        """
        try:
            base, served = Manifest.read(start), Manifest.read(version)
        except VersionFolderError as error:
            raise ModelError(f"{version} cannot be read: {error}") from error
        if dict(served.tensors) != dict(base.tensors):
            raise ModelError(f"{version} does not hold the tensors of {start}")
        missing = sorted(set(self.weight_names()) - base.tensors.keys())
        if missing:
            raise ModelError(f"{start} stores {missing[0]} under another name; LoRA cannot merge")
        if (version / ADAPTER_FOLDER).is_dir():
            masters = self._read(version / ADAPTER_FOLDER)
            weights.load_state({f"master.{name}": t for name, t in masters.items()}, 0)
            self._check_merged(masters, version, start)
        elif served.sha256 != base.sha256:
            raise ModelError(
                f"{version} was trained without adapters: with `lora_rank` set its weights would "
                "be lost. Set lora_rank = 0, or make it the start policy of a new data folder"
            )

    def _read(self, folder: Path) -> dict[str, Tensor]:
        try:
            said = json.loads((folder / CONFIG_FILE).read_text())
            theirs = (said["r"], said["lora_alpha"], set(said["target_modules"]))
            masters: dict[str, Tensor] = load_file(folder / WEIGHTS_FILE)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ModelError(f"{folder} is no adapter: {error}") from error
        if theirs != (self.config.r, self.config.lora_alpha, set(self.layers)):
            raise ModelError(
                f"{folder} has rank {theirs[0]}, alpha {theirs[1]} and {len(theirs[2])} adapters; "
                f"the settings say {self.config.r}, {self.config.lora_alpha} and "
                f"{len(self.layers)}: set lora_rank, lora_alpha and policy_layers as they were"
            )
        return masters

    def _check_merged(self, masters: Mapping[str, Tensor], version: Path, start: Path) -> None:
        """The adapter must be the one whose merged weights `version` serves."""
        names = self.weight_names()
        base, served = _tensors(start, names), _tensors(version, names)
        for name in names:
            want, found = self.merged(name, base[name], masters).float(), served[name].float()
            # Another device may add up in another order, and so round another way, once.
            loose = 2 * torch.finfo(served[name].dtype).eps
            if not torch.allclose(want, found, rtol=loose, atol=loose * float(found.abs().max())):
                raise ModelError(f"{version}: its adapter and its merged {name} disagree")


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is an adapter's."""
    return name.startswith(_PEFT_PREFIX)


def _name(module: str, half: str) -> str:
    return f"{_PEFT_PREFIX}{module}.lora_{half}.weight"


def _tensors(folder: Path, names: list[str]) -> dict[str, Tensor]:
    """The tensors `names` of a version folder. Raises ModelError."""
    wanted = set(names)
    found: dict[str, Tensor] = {}
    try:
        for path in folder.glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                found |= {name: file.get_tensor(name) for name in wanted & set(file.keys())}
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{folder} cannot be read: {error}") from error
    if found.keys() != wanted:
        raise ModelError(f"{folder} lacks {min(wanted - found.keys())}")
    return found


def _linear_names(model: Any, decoder: Decoder, first: int) -> list[str]:
    """The linear layers that get adapters; with experts in the model, those of attention alone."""
    places: list[nn.Module] = list(decoder.layers[first:])
    if any(routers(layer) for layer in decoder.layers):
        places = [module for layer in places for module in attention_modules(layer)]
    wanted = {id(m) for place in places for m in place.modules() if isinstance(m, nn.Linear)}
    return [name for name, module in model.named_modules() if id(module) in wanted]
