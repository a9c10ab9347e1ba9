"""What the trainer writes and reads: servable version folders, and its own full state."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from online_sao.algorithm import sao
from online_sao.errors import ModelError, VersionFolderError
from online_sao.learner.lora import ADAPTER_FOLDER, Adapter, is_adapter
from online_sao.learner.models import load_causal_lm
from online_sao.learner.weights import save_tensors
from online_sao.manifest import MANIFEST_NAME, Manifest
from online_sao.types import ProbeTokens

STATE_FILE = "state.json"
POLICY_FILE, CRITIC_FILE = "policy.safetensors", "critic.safetensors"
STATE_FORMAT = 1
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class VersionWriter:
    """Writes versions with exactly the tensors of the start policy's folder.

    What does not train is copied from the folder the policy was restored from (mapped into
    memory, so that the folder may be pruned meanwhile); file names, shards, config and tokenizer
    are the start folder's. Adapters are merged into the start folder's own tensors.
    """

    def __init__(self, start_folder: Path, policy_folder: Path) -> None:
        """Raises ModelError when a folder is not whole or the two do not hold the same tensors."""
        self._start_folder = start_folder
        try:
            self._base = Manifest.read(start_folder)
            present = Manifest.read(policy_folder)
            if dict(present.tensors) != dict(self._base.tensors):
                raise ModelError(f"{policy_folder} does not hold the tensors of {start_folder}")
            self._files = {name: load_file(policy_folder / name) for name in present.files}
        except (VersionFolderError, OSError, SafetensorError) as error:
            raise ModelError(f"{policy_folder} cannot be read: {error}") from error

    def stored(self, name: str, tensor: Tensor) -> Tensor:
        """`tensor` rounded as the folder stores the parameter `name`; an adapter's stays fp32."""
        if is_adapter(name):
            return tensor
        known = self._base.tensors.get(name) or next(iter(self._base.tensors.values()))
        return tensor.to(_DTYPES[known[0]])

    def write(
        self,
        folder: Path,
        model: Any,
        copies: Mapping[str, Tensor],
        masters: Mapping[str, Tensor],
        adapter: Adapter | None = None,
    ) -> None:
        """Make `folder` the version whose trained parameters, `copies` in the model, are `masters`,
        rounded; with an adapter merged, and itself in a folder below.

        Raises ModelError when what trains has no place in the start folder's files.
        """
        changed = self._changed(model, copies, masters) if adapter is None else {}
        folder.mkdir(parents=True)
        if adapter is not None:
            changed = self._merged(adapter, masters)
            adapter.write(folder / ADAPTER_FOLDER, masters)
        for path in self._start_folder.iterdir():
            if path.is_file() and path.suffix != ".safetensors" and path.name != MANIFEST_NAME:
                shutil.copyfile(path, folder / path.name)
        for file, tensors in self._files.items():
            merged = {name: changed.get(name, tensor) for name, tensor in tensors.items()}
            save_tensors(merged, folder / file)
        manifest = describe(folder, self._base.probes.token_ids)
        if dict(manifest.tensors) != dict(self._base.tensors):
            raise ModelError(f"{folder}: tensors differ from those of {self._start_folder}")
        (folder / MANIFEST_NAME).write_text(manifest.to_json())

    def _merged(self, adapter: Adapter, masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors that the adapters change."""
        base = {
            name: tensor for tensors in self._files.values() for name, tensor in tensors.items()
        }
        return {name: adapter.merged(name, base[name], masters) for name in adapter.weight_names()}

    def _changed(
        self, model: Any, copies: Mapping[str, Tensor], masters: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The trained tensors under their names in the checkpoint, in its dtypes."""
        by_copy = {id(copies[name]): master for name, master in masters.items()}
        named = {
            name: by_copy[id(parameter)].detach()
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if id(parameter) in by_copy
        }
        tied = {name for name in named if name not in masters}
        converted: dict[str, Tensor] = revert_weight_conversion(model, named)
        unknown = converted.keys() - self._base.tensors.keys() - tied
        if unknown:
            raise ModelError(
                f"{self._start_folder} has no tensors {', '.join(sorted(unknown)[:5])}"
            )
        return {
            name: tensor.to("cpu", _DTYPES[self._base.tensors[name][0]], copy=True).contiguous()
            for name, tensor in converted.items()
            if name in self._base.tensors
        }


def describe(folder: Path, probe_ids: tuple[int, ...]) -> Manifest:
    """The manifest of the weights in `folder`, not written; they are loaded for their probes."""
    return Manifest.describe(folder, ProbeTokens(probe_ids, probe_logprobs(folder, probe_ids)))


@torch.no_grad()
def probe_logprobs(folder: Path, token_ids: tuple[int, ...]) -> tuple[float, ...]:
    """log p of each probe token but the first, by the weights as they lie in `folder`, in fp32.

    Loading them is a check of its own: a version that does not load is never published.
    """
    if len(token_ids) < 2:
        return ()
    model = load_causal_lm(folder, torch.float32, torch.device("cpu"), "eager")
    ids = torch.tensor([token_ids])
    log_p = sao.log_policy(model(input_ids=ids, use_cache=False).logits[0, :-1], 1.0)
    return tuple(log_p.gather(1, ids[0, 1:, None]).squeeze(1).tolist())


@dataclass(frozen=True, slots=True)
class SavedState:
    """A trainer's full state, as it lies in a folder."""

    updates: int
    policy: Mapping[str, Tensor]
    policy_steps: int
    critic: Mapping[str, Tensor]
    """Empty where the variant has none."""
    critic_steps: int
    memory: Mapping[str, Any]
    """What the baseline has learned beside weights."""

    @classmethod
    def read(cls, folder: Path) -> SavedState:
        """Raises ModelError when the folder is not a whole state."""
        try:
            data = json.loads((folder / STATE_FILE).read_text())
            if data["format"] != STATE_FORMAT:
                raise ModelError(f"{folder} has format {data['format']}, not {STATE_FORMAT}")
            return cls(
                updates=data["updates"],
                policy=load_file(folder / POLICY_FILE),
                policy_steps=data["policy_steps"],
                critic=load_file(folder / CRITIC_FILE) if (folder / CRITIC_FILE).exists() else {},
                critic_steps=data["critic_steps"],
                memory=data.get("memory", {}),
            )
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ModelError(f"{folder} is no learner state: {error}") from error

    def write(self, folder: Path) -> None:
        """Into the new folder `folder` (no fsync). Raises LearnerError."""
        folder.mkdir(parents=True)
        save_tensors(dict(self.policy), folder / POLICY_FILE)
        if self.critic:
            save_tensors(dict(self.critic), folder / CRITIC_FILE)
        counters = {
            "format": STATE_FORMAT,
            "updates": self.updates,
            "policy_steps": self.policy_steps,
            "critic_steps": self.critic_steps,
            "memory": dict(self.memory),
        }
        (folder / STATE_FILE).write_text(json.dumps(counters))
