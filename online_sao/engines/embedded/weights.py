"""From a version folder to a model that can serve: whole or not at all, what was read hashed.

The bytes are read once, into the tensors that serve; the SHA-256 is of those very bytes. A new
version becomes a new module beside the old one: names, tied embeddings and
checkpoint conversions are transformers' business, and nothing that serves is touched.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from online_sao.errors import ModelError, VersionFolderError
from online_sao.manifest import Manifest, combine_hashes
from online_sao.numerics import ExactHead
from online_sao.types import ProbeTokens

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
PACK_ROWS = 32
"""Rows a packed matrix is laid out for; measured best between 16 and 64."""


@dataclass(slots=True)
class Weights:
    """One version in memory."""

    model: nn.Module
    version: int
    sha256: str
    """Of the bytes that were read, in the manifest's way."""
    probes: ProbeTokens
    shapes: Mapping[str, tuple[int, ...]]
    """Of every tensor in the folder, by name."""


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 where the hardware computes in it, else float32."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    fast = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def load_weights(
    folder: Path,
    version: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> Weights:
    """Read, hash, check and build. Raises VersionFolderError or ModelError, nothing changed.

    `shapes`: the names and shapes that are served already; other ones are refused.
    """
    manifest = Manifest.read(folder)
    tensors, sha256 = read_tensors(folder, manifest)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if shapes is not None:
        _check_shapes(folder, found, shapes)
    model = build_model(folder, tensors, dtype=dtype)
    tensors.clear()
    model.to(device)
    if device.type == "cpu":
        pack(model)
    return Weights(model, version, sha256, manifest.probes, found)


def _check_shapes(
    folder: Path, found: Mapping[str, tuple[int, ...]], served: Mapping[str, tuple[int, ...]]
) -> None:
    for name in sorted(found.keys() | served.keys()):
        if found.get(name) != served.get(name):
            raise VersionFolderError(
                f"{folder} does not fit the served model: its tensor {name} is "
                f"{found.get(name, 'missing')}, served is {served.get(name, 'none')}"
            )


def read_tensors(folder: Path, manifest: Manifest) -> tuple[dict[str, Tensor], str]:
    """All tensors of the folder and the combined SHA-256 of the bytes they came from."""
    tensors: dict[str, Tensor] = {}
    hashes: dict[str, str] = {}
    for name in sorted(manifest.files):
        path = folder / name
        try:
            found, hashes[name] = read_safetensors(path)
        except OSError as error:
            raise VersionFolderError(f"{path} cannot be read: {error}") from error
        except (struct.error, KeyError, TypeError, ValueError) as error:
            raise VersionFolderError(f"{path} is no safetensors file: {error}") from error
        if hashes[name] != manifest.files[name]:
            raise VersionFolderError(f"{path} is not the file its manifest names")
        tensors.update(found)
    return tensors, combine_hashes(hashes)


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], str]:
    """The file's tensors and its SHA-256, in one reading: what is hashed is what is used."""
    digest = hashlib.sha256()
    tensors = {}
    with path.open("rb", buffering=0) as file:
        start = _read(file, 8, digest)
        (length,) = struct.unpack("<Q", start)
        if length > path.stat().st_size:
            raise VersionFolderError(f"{path} is cut short")
        header: dict[str, Any] = json.loads(bytes(_read(file, length, digest)))
        header.pop("__metadata__", None)
        at = 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = entry["data_offsets"]
            dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
            if begin != at or end - begin != math.prod(shape) * dtype.itemsize:
                raise VersionFolderError(f"{path}: {name} has the wrong size")
            tensor = torch.empty(shape, dtype=dtype)
            if end > begin:
                raw: Any = tensor.view(-1).view(torch.uint8).numpy()
                _read_into(file, memoryview(raw), digest)
            tensors[name], at = tensor, end
        if file.read(1):
            raise VersionFolderError(f"{path} is longer than its header says")
    return tensors, digest.hexdigest()


def _read(file: Any, count: int, digest: Any) -> bytearray:
    data = bytearray(count)
    _read_into(file, memoryview(data), digest)
    return data


def _read_into(file: Any, view: memoryview, digest: Any) -> None:
    """Fill `view` and hash it. Raises VersionFolderError at the file's end."""
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])
        if not count:
            raise VersionFolderError(f"{file.name} is cut short")
        done += count
    digest.update(view)


def build_model(folder: Path, tensors: Mapping[str, Tensor], *, dtype: torch.dtype) -> nn.Module:
    """The folder's model with exactly these tensors. Raises ModelError naming what does not fit."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            kind = type(AutoModelForCausalLM.from_config(config))
        model, report = kind.from_pretrained(
            None,
            config=config,
            state_dict=dict(tensors),
            dtype=dtype,
            output_loading_info=True,
        )
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise ModelError(f"{folder} does not load: {_first_line(error)}") from error
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[problem]:
            names = sorted(map(str, report[problem]))
            raise ModelError(
                f"{folder}: {problem.replace('_', ' ')}: {', '.join(names[:3])}"
                + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            )
    result: nn.Module = model.eval()
    return result.requires_grad_(False)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


class PackedLinear(nn.Module):
    """A linear layer whose bfloat16 matrix lies as the CPU's matrix unit wants it.

    Without this, every call lays the matrix out anew.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), PACK_ROWS)
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        """x W' + b."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y


def can_pack() -> bool:
    """Whether this torch build and CPU have the packed product, and it computes the same."""
    if not (torch._C._has_mkldnn and torch.cpu._is_avx512_bf16_supported()):
        return False
    linear = nn.Linear(64, 96, dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    try:
        return bool(torch.allclose(PackedLinear(linear)(x), linear(x), atol=0.05))
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False


def unround_head(model: Any) -> None:
    """Have a bfloat16 model on the CPU give its logits in fp32, their sums unrounded."""
    head = model.get_output_embeddings()
    if (
        isinstance(head, nn.Linear)
        and head.weight.dtype == torch.bfloat16
        and head.weight.device.type == "cpu"
    ):
        model.set_output_embeddings(ExactHead(head))


def pack(model: nn.Module) -> None:
    """Pack the bfloat16 linear layers where that is possible; each one's own matrix is freed.

    The output head is not packed: its sums must not be rounded (see `online_sao.numerics`).
    """
    unround_head(model)
    if not can_pack():
        return
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    for name in names:
        linear = model.get_submodule(name)
        if isinstance(linear, nn.Linear) and linear.weight.dtype == torch.bfloat16:
            model.set_submodule(name, PackedLinear(linear))


def retire(model: nn.Module) -> None:
    """Free a model's tensors now, whatever still refers to its modules."""
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.packed = None
    for parameter in model.parameters():
        parameter.data = torch.empty(0, dtype=parameter.dtype)
