"""The manifest of a version folder: what its bytes must be, and how to prove that they arrived.

Standard library only: the learner writes it, the publisher and the engines read it.

A version folder holds `config.json`, the tokenizer's files, `model.safetensors` (or several
`*.safetensors`) and `manifest.json`. It is written under a temporary name, fsynced, renamed.
Folders inside it (the learner's `adapter/`) are not served and not the manifest's business.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from online_sao.errors import VersionFolderError
from online_sao.types import ProbeTokens

MANIFEST_NAME = "manifest.json"
FORMAT = 1
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a version folder must hold."""

    files: Mapping[str, str]
    """SHA-256 (hex) of every `*.safetensors` file, by name."""
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    """Tensor name -> (dtype as safetensors writes it, shape)."""
    probes: ProbeTokens
    """Computed by the writer with these very weights."""

    @property
    def sha256(self) -> str:
        """One hash for the whole: SHA-256 over `name:hash` lines in the order of the names."""
        return combine_hashes(self.files)

    def to_json(self) -> str:
        """The text of `manifest.json`."""
        return json.dumps(
            {
                "format": FORMAT,
                "sha256": self.sha256,
                "files": dict(self.files),
                "tensors": {name: [dtype, *shape] for name, (dtype, shape) in self.tensors.items()},
                "probes": {
                    "token_ids": list(self.probes.token_ids),
                    "logprobs": list(self.probes.logprobs),
                },
            },
            indent=1,
        )

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of `folder`; VersionFolderError if there is none that can be read."""
        path = folder / MANIFEST_NAME
        try:
            data: dict[str, Any] = json.loads(path.read_text())
            if data["format"] != FORMAT:
                raise VersionFolderError(f"{path} has format {data['format']}, not {FORMAT}")
            manifest = cls(
                files=data["files"],
                tensors={name: (t[0], tuple(t[1:])) for name, t in data["tensors"].items()},
                probes=ProbeTokens(
                    tuple(data["probes"]["token_ids"]), tuple(data["probes"]["logprobs"])
                ),
            )
        except FileNotFoundError:
            raise VersionFolderError(f"{folder} has no {MANIFEST_NAME}: not whole") from None
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise VersionFolderError(f"{path} cannot be read: {error}") from error
        if manifest.sha256 != data["sha256"]:
            raise VersionFolderError(f"{path} contradicts itself: its hashes do not add up")
        return manifest

    @classmethod
    def describe(cls, folder: Path, probes: ProbeTokens) -> Manifest:
        """The manifest that `folder`'s present files deserve (reads and hashes them)."""
        paths = _weight_files(folder)
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        for path in paths:
            tensors.update(read_header(path))
        return cls({path.name: hash_file(path) for path in paths}, tensors, probes)

    def verify(self, folder: Path) -> None:
        """Raise VersionFolderError unless `folder` holds exactly what this manifest says."""
        actual = Manifest.describe(folder, self.probes)
        for name in sorted(set(self.files) | set(actual.files)):
            if self.files.get(name) != actual.files.get(name):
                raise VersionFolderError(f"{folder / name} is not the file its manifest names")
        if dict(actual.tensors) != dict(self.tensors):
            raise VersionFolderError(f"{folder}: tensors differ from the manifest's")


def combine_hashes(files: Mapping[str, str]) -> str:
    """One SHA-256 for a set of hashed files."""
    lines = "".join(f"{name}:{files[name]}\n" for name in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest()


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names, dtypes and shapes in a safetensors file, from its header alone."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > path.stat().st_size:
                raise VersionFolderError(f"{path} is cut short")
            header: dict[str, Any] = json.loads(file.read(length))
    except (struct.error, ValueError) as error:
        raise VersionFolderError(f"{path} is no safetensors file: {error}") from error
    header.pop("__metadata__", None)
    ends = [entry["data_offsets"][1] for entry in header.values()]
    if ends and 8 + length + max(ends) != path.stat().st_size:
        raise VersionFolderError(f"{path} is cut short")
    return {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}


def publish_folder(draft: Path, final: Path) -> None:
    """fsync all that is in `draft`, rename it to `final`, fsync the parent: whole or not at all."""
    for path in draft.rglob("*"):
        _fsync(path)
    _fsync(draft)
    os.rename(draft, final)
    _fsync(final.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _weight_files(folder: Path) -> list[Path]:
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise VersionFolderError(f"{folder} has no safetensors file")
    return paths
